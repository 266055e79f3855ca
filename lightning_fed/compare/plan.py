"""Plan of a comparison between methods, and execution of the runs.

The clients' data, the rounds' clients, the stragglers and the initial weights depend only on the run's seed.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fed.atomic_files import write_text_atomically
from lightning_fed.callbacks.evaluation.data_pass import Stage
from lightning_fed.callbacks.evaluation.results import is_score
from lightning_fed.compare.central import check_central
from lightning_fed.compare.method_options import CENTRAL, MethodChoice
from lightning_fed.compare.run import Run, evaluate, quiet, train
from lightning_fed.data.federated import FederatedDataModule
from lightning_fed.method import Method
from lightning_fed.model.entries import entry_policies
from lightning_fed.recipe import FederatedCLI
from lightning_fed.study.site_scores import SITES, SiteScores, check_sites


@dataclass(frozen=True)
class Plan:
    """Plan of a comparison between methods on one recipe.

    Args:
        recipe: The recipe's path.
        methods: Compared methods.
        seeds: Random seeds. Each method trains once per seed.
        stragglers: Fractions of slow clients to compare. By default the recipe's fraction.
        out: Folder for the results.
        monitor: Name of the compared metric. By default from the recipe's ``ModelCheckpoint``.
        mode: ``"max"`` or ``"min"``. By default from the recipe's ``ModelCheckpoint``, or else from the metric's name.
        test: Whether to evaluate the finished models on the test data.
        overrides: Further arguments of ``lightning-fed fit`` for all runs. ``{seed}`` stands for the run's seed.
        minutes: Time limit for the comparison, by default none.
        sites: ``"validation"`` or ``"test"``: lists a score of each example in the results, by client. By default none.
        patient: Key of the patient names in a batch, see :class:`~lightning_fed.study.SiteScores`.

    Raises:
        ValueError: If methods or seeds are empty or have duplicates, or a number is out of range.
    """

    recipe: Path
    methods: Sequence[MethodChoice]
    seeds: Sequence[int] = (0,)
    stragglers: Sequence[float] | None = None
    out: Path = Path("runs/compare")
    monitor: str | None = None
    mode: str | None = None
    test: bool = False
    overrides: Sequence[str] = ()
    minutes: float | None = None
    sites: Stage | None = None
    patient: str | None = None

    def __post_init__(self) -> None:
        labels, parts = [method.label for method in self.methods], self.stragglers
        for name, values in (("methods", labels), ("seeds", self.seeds), ("stragglers", parts)):
            if values is not None and (not values or len(set(values)) < len(values)):
                raise ValueError(
                    f"Expected `{name}` to have at least one value and no duplicates, but got {list(values)}."
                )
        if parts is not None and not all(0 <= part < 1 for part in parts):
            raise ValueError(f"Expected `stragglers` to be in [0, 1), but got {list(parts)}.")
        if self.mode not in (None, "max", "min"):
            raise ValueError(f"Expected `mode` to be 'max' or 'min', but got {self.mode!r}.")

    def build(self, seed: int) -> FederatedCLI:
        overrides = [text.replace("{seed}", str(seed)) for text in self.overrides]
        own = ["--seed_everything", str(seed), "--trainer.logger", "false"]
        return FederatedCLI(["--config", str(self.recipe), *overrides, *own], run=False)


class Progress:
    """Prints one line per training run, with the run's name, progress and result."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._begin = ""

    def start(self, text: str) -> None:
        self._begin = text
        self._write(text)

    def update(self, text: str) -> None:
        if self._stream.isatty():
            self._write(f"\r\x1b[K{self._begin}: {text}")

    def end(self, text: str) -> None:
        again = f"\r\x1b[K{self._begin}" if self._stream.isatty() else ""
        self._write(f"{again}: {text}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def run_comparison(plan: Plan, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Trains the unfinished runs of a comparison, one after another.

    A run trains one method with one seed, in a folder in ``<out>/runs``. An interrupted run continues after the last
    complete round. With ``batch_norm="auto"``, all runs treat BatchNorm in the same way.

    Args:
        plan: The methods, seeds and data.
        progress: Object that prints a line per run, by default to the standard output.

    Returns:
        A dictionary per finished run, with ``method``, ``seed``, ``stragglers``, ``monitor`` and ``mode``. ``rounds``
        has the values of every round, ``test`` the values on the test data, and ``sites`` the scores by client.
        ``has_own_models`` is true if clients have personal models.

    Raises:
        MisconfigurationException: If a method does not fit the recipe, a folder contains a different run, or the
            metric is not logged.
    """
    progress = progress or Progress()
    runs, target, treatment = _prepare(plan)
    folders = {run: plan.out / "runs" / run.name for run in runs}
    unfinished = [run for run, folder in folders.items() if not (folder / "result.json").exists()]
    if len(unfinished) < len(runs):
        progress.start(f"{len(runs) - len(unfinished)} of {len(runs)} runs")
        progress.end("done before")
    results, has_worked = list[dict[str, Any]](), False
    deadline = math.inf if plan.minutes is None else time.monotonic() + 60 * plan.minutes
    for number, (run, folder) in enumerate(folders.items(), start=1):
        if has_worked and time.monotonic() > deadline:
            break
        if run in unfinished:
            has_worked = True
            progress.start(f"{number}/{len(runs)} {run}")
            begin = time.perf_counter()
            try:
                decision = treatment or _decision_of(folders.values())
                rounds = _run(plan, run, folder, target[0], progress, decision, deadline)
            except BaseException:
                progress.end("interrupted")
                raise
            if rounds is None:
                break
            progress.end(f"{_value_of(rounds[-1] if rounds else {}, target[0])}, {time.perf_counter() - begin:.0f} s")
        result = _load(folder, target)
        if plan.test and not result["test"]:
            with quiet():
                result["test"] = evaluate(plan.build(run.seed), run, folder)
            write_text_atomically(folder / "result.json", json.dumps(result))
        for scores in _site_scores(plan, target[0]):
            if not scores.load(folder / SITES):
                with quiet():
                    evaluate(plan.build(run.seed), run, folder, scores.stage, [scores])
                scores.save(folder / SITES)
            result["sites"] = scores.state()
        results.append(result)
    if len(results) < len(runs):
        progress.start(f"{len(results)} of {len(runs)} runs are finished")
        progress.end(f"time limit of {plan.minutes:g} minutes reached; the same command continues")
    return results


def _site_scores(plan: Plan, monitor: str) -> list[SiteScores]:
    return [] if plan.sites is None else [SiteScores.of(monitor, plan.sites, plan.patient)]


def load_results(plan: Plan) -> list[dict[str, Any]]:
    """Loads the results of all finished runs, in the form returned by :func:`run_comparison`."""
    runs, target, _ = _prepare(plan)
    folders = [plan.out / "runs" / run.name for run in runs]
    return [_load(folder, target) for folder in folders if (folder / "result.json").exists()]


def _decision_of(folders: Iterable[Path]) -> str:
    for path in (folder / "result.json" for folder in folders):
        # empty without a decision, and for centralised training
        decision: str = json.loads(path.read_text()).get("batch_norm_decision", "") if path.exists() else ""
        if decision:
            return decision
    return ""


def _run(
    plan: Plan, run: Run, folder: Path, monitor: str, progress: Progress, decision: str, deadline: float
) -> list[dict[str, float]] | None:
    def show(number: int, count: int, values: Mapping[str, float]) -> None:
        progress.update(f"round {number}/{count}, {_value_of(values, monitor)}")

    write_text_atomically(folder / "plan.json", json.dumps(_identity(plan, run)))
    with quiet():
        logs, callbacks = plan.out / "tensorboard", _site_scores(plan, monitor)
        result = train(plan.build(run.seed), run, folder, logs, show, decision, deadline, callbacks)
    if result is None:
        progress.end("not finished")
        return None
    write_text_atomically(folder / "result.json", json.dumps(result))
    gc.collect()  # Trainers are in reference cycles, so data from many runs would fill the memory
    rounds: list[dict[str, float]] = result["rounds"]
    return rounds


def _prepare(plan: Plan) -> tuple[list[Run], tuple[str, str], str]:
    """Checks a plan, and lists the runs.

    Returns:
        The runs, the compared metric's name and mode, and the BatchNorm option for all runs. The option is ``"own"`` if
        a method needs separate statistics for each client, otherwise empty.
    """
    with quiet():
        cli = plan.build(plan.seeds[0])
        trainer: Any = cli.trainer
        for method in plan.methods:
            _check_method(method, cli)
            if plan.sites is not None:
                check_sites(trainer, method.federation(trainer.federation))
    decisive = next((method.label for method in plan.methods if _needs_own_statistics(method, cli)), "")
    parts = plan.stragglers or [trainer.federation.options.availability.stragglers]
    all_runs = [
        Run(method, seed, None if method.name == CENTRAL else part)
        for seed in plan.seeds
        for part in parts
        for method in plan.methods
    ]
    runs = list(dict.fromkeys(all_runs))  # a centralised run is compared with all fractions of stragglers
    for run in runs:
        _check_folder(plan, run)
    if decisive and _decision_of(plan.out / "runs" / run.name for run in runs) == "pooled":
        raise MisconfigurationException(
            f"Expected runs in {plan.out} with separate BatchNorm statistics for each client, because the method "
            f"{decisive!r} needs separate statistics, but finished runs have pooled statistics: choose another `--out`."
        )
    return runs, _metric(plan, trainer), "own" if decisive else ""


def _needs_own_statistics(method: MethodChoice, cli: FederatedCLI) -> bool:
    trainer: Any = cli.trainer
    return method.name != CENTRAL and method.federation(trainer.federation).needs_own_statistics(cli.model)


def _check_method(method: MethodChoice, cli: FederatedCLI) -> None:
    trainer: Any = cli.trainer
    if settings := trainer.federation.method.settings:  # other methods would train with different settings
        raise MisconfigurationException(
            f"Expected a recipe whose `method` sets no other options, but {trainer.federation.method.name} sets "
            f"{sorted(settings)}, which would apply to all compared methods: put another method, such as 'fedavg', "
            "into the recipe."
        )
    if trainer.federation.partition is None and not isinstance(cli.datamodule, FederatedDataModule):
        raise MisconfigurationException(
            "Expected a `partition` of the training data, or a FederatedDataModule, but got neither."
        )
    if method.name == CENTRAL:
        check_central(cli)
    try:
        federation = method.federation(trainer.federation)
        entry_policies(cli.model, federation.options.personal, federation.options.frozen)
    except ValueError as error:
        raise MisconfigurationException(str(error)) from error
    if method.name == CENTRAL:
        return
    replaceable = () if method.options else Method(federation.method.aggregator).callbacks  # the rule's callbacks
    for added in federation.method.callbacks:
        in_recipe = any(isinstance(callback, type(added)) for callback in trainer.callbacks)
        if in_recipe and type(added) not in map(type, replaceable):
            raise MisconfigurationException(
                f"Expected a recipe without `{type(added).__name__}`, because the method {method.label!r} adds this "
                "callback: remove it from the recipe."
            )


def _metric(plan: Plan, trainer: Any) -> tuple[str, str]:
    saved = {
        callback.monitor: callback.mode
        for callback in trainer.callbacks
        if isinstance(callback, ModelCheckpoint) and callback.monitor
    }
    if plan.monitor is None and not saved:
        raise MisconfigurationException(
            "Expected `monitor`, because no ModelCheckpoint in the recipe monitors a metric: add `--monitor val_loss`."
        )
    monitor = plan.monitor or next(iter(saved))
    return monitor, plan.mode or saved.get(monitor, "max" if is_score(monitor) else "min")


def _identity(plan: Plan, run: Run) -> dict[str, Any]:
    # Seed and stragglers are part of the folder's name.
    return {"recipe": plan.recipe.read_text(), "overrides": list(plan.overrides), "method": run.method.label}


def _check_folder(plan: Plan, run: Run) -> None:
    folder = plan.out / "runs" / run.name
    path, now = folder / "plan.json", _identity(plan, run)
    before = json.loads(path.read_text()) if path.exists() else now
    different = [name for name, value in now.items() if value != before[name]]
    if different:
        raise MisconfigurationException(
            f"Expected {folder} to contain a run of the same recipe, overrides and method, but its run has different "
            f"{' and '.join(different)}: choose another `--out`, or delete the folder."
        )


def _load(folder: Path, target: tuple[str, str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    result["monitor"], result["mode"] = target
    names = {name for values in result["rounds"] for name in values}
    if target[0] not in names:
        hint = " (`fed/<metric>/mean` needs validation data for every client)" if target[0].startswith("fed/") else ""
        shown = sorted(name for name in names if not name.startswith("client/"))
        raise MisconfigurationException(
            f"Expected the metric `monitor` to be logged{hint}, but {target[0]!r} is not one of {shown}."
        )
    return result


def _value_of(values: Mapping[str, float], monitor: str) -> str:
    return f"{monitor} {values[monitor]:.4f}" if monitor in values else f"no {monitor}"
