"""The same training with several methods: one recipe, the same clients, rounds and initial weights, and a table.

Every run is one method with one seed and one fraction of stragglers. The clients' data, who takes part in which round,
who straggles and the initial weights depend on the seed alone, so that methods are compared on equal rounds.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import yaml  # type: ignore[import-untyped]
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_fed.aggregators import AGGREGATORS
from lightning_fed.callbacks import FedBN, Federation, FedPer
from lightning_fed.data.federated import split_loader

_log = logging.getLogger(__name__)

PRESETS: dict[str, Callable[..., Federation]] = {"fedbn": FedBN, "fedper": FedPer}
"""Methods that are presets of a federation, by name; all others are aggregators."""

CENTRAL = "central"
"""Name of training on the pooled data of all clients, without federation."""


@dataclass(frozen=True)
class Method:
    """A method with its options.

    Args:
        label: As it was written: ``"fedprox:mu=0.1"``.
        name: Its name: ``"fedprox"``.
        options: Its options, arguments of the aggregator or preset, or of ``Federation``.

    """

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Method:
        """A method as it is written on the command line: ``name[:option=value[:option=value...]]``.

        Raises:
            ValueError: If the method or an option is unknown, or an option's value is missing.

        Example:
            >>> Method.parse("fedbn:clients_per_round=5").options
            {'clients_per_round': 5}

        """
        name, *pairs = text.strip().split(":")
        known = [CENTRAL, *sorted({*AGGREGATORS, *PRESETS})]
        if name.lower() not in known:
            raise ValueError(f"Expected a method of {known}, but got {name!r}.")
        options = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals:
                raise ValueError(f"Expected options as `option=value`, but got {pair!r} in {text!r}.")
            options[key] = yaml.safe_load(value)
        method = cls(text.strip(), name.lower(), options)
        method.federation(Federation())
        return method

    def federation(self, recipe: Federation) -> Federation:
        """The recipe's federation with this method in it.

        Raises:
            ValueError: If an option is unknown or wrong.

        """
        if self.name == CENTRAL:
            if self.options:
                raise ValueError(f"Expected no options of {CENTRAL!r}, but got {sorted(self.options)}.")
            return recipe
        general = inspect.signature(Federation).parameters
        given = {name: value for name, value in recipe.arguments.items() if value != general[name].default}
        make: Callable[..., Any] = PRESETS.get(self.name) or AGGREGATORS[self.name]
        own = [name for name in inspect.signature(make).parameters if name != "options"]
        unknown = [name for name in self.options if name not in (*own, *general)]
        if unknown:
            raise ValueError(f"Expected options of {self.name!r} to be of {[*own, *general]}, but got {unknown}.")
        of_method = {name: value for name, value in self.options.items() if name in own}
        changes = {name: value for name, value in self.options.items() if name not in own}
        try:
            if self.name in PRESETS:
                given.pop("aggregator", None)
                preset: Federation = make(**of_method, **{**given, **changes})
                return preset
            return recipe.replace(aggregator=make(**of_method), **changes)
        except TypeError as error:
            raise ValueError(f"{self.label!r}: {error}") from error


@dataclass(frozen=True)
class Plan:
    """What is compared.

    Args:
        recipe: The recipe's path.
        methods: The methods.
        seeds: The seeds.
        stragglers: Fractions of stragglers.
        out: Folder of the results.
        monitor: Name of the metric that is compared; ``None`` takes that of the recipe's ``ModelCheckpoint``.
        mode: ``"max"`` where higher is better, or ``"min"``.
        test: Whether every finished model is evaluated on the test data.
        overrides: Further arguments of ``lightning-fed fit``, for all runs.

    """

    recipe: Path
    methods: Sequence[Method]
    seeds: Sequence[int] = (0,)
    stragglers: Sequence[float] = (0.0,)
    out: Path = Path("runs/compare")
    monitor: str | None = None
    mode: str = "max"
    test: bool = False
    overrides: Sequence[str] = ()


class RoundCurve(Callback):
    """Every logged number of every round, with the seconds of its training; survives a resume.

    Attributes:
        rounds: One dictionary per round.

    """

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []
        self._begin = (0.0, 0.0)
        self._seconds: tuple[float, float] | None = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts the clocks."""
        self._begin, self._seconds = (time.perf_counter(), time.process_time()), None

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stops the clocks: validation is not counted."""
        if not trainer.sanity_checking:
            self._stop()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Notes the round."""
        self._stop()
        assert self._seconds is not None
        values = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "step"}
        self.rounds.append(values | {"seconds": self._seconds[0], "cpu_seconds": self._seconds[1]})

    def state_dict(self) -> dict[str, Any]:
        """The rounds so far."""
        return {"rounds": [dict(values) for values in self.rounds]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on after them."""
        self.rounds = [dict(values) for values in state_dict["rounds"]]

    def _stop(self) -> None:
        if self._seconds is None:
            begin = self._begin
            self._seconds = (time.perf_counter() - begin[0], time.process_time() - begin[1])


def run_comparison(plan: Plan, say: Callable[[str], None] = _log.info) -> list[dict[str, Any]]:
    """Trains what is not trained yet, one run after another; every finished run is a file.

    A run that was interrupted goes on after its last complete round.

    Args:
        plan: What is compared.
        say: Called with a line of progress.

    Returns:
        The results of all runs: ``method``, ``seed``, ``stragglers``, ``monitor``, ``mode``, ``rounds`` (every round's
        numbers) and ``test``.

    Raises:
        ValueError: If the folder holds results of another recipe, or the metric is not logged.

    """
    results = []
    runs = [(method, seed, part) for seed in plan.seeds for part in plan.stragglers for method in plan.methods]
    for number, (method, seed, part) in enumerate(runs, start=1):
        if method.name == CENTRAL and part != plan.stragglers[0]:
            continue  # it has no stragglers
        folder = plan.out / "runs" / _run_name(method, seed, part)
        result = _load(folder / "result.json")
        identity = _identity(plan, method)
        if result is not None and result["identity"] != identity:
            raise ValueError(
                f"Expected {folder} to hold results of this recipe and these options, but they are of others: choose"
                " another `--out`, or delete the folder."
            )
        if result is None or (plan.test and not result["test"]):
            say(f"{number}/{len(runs)} {method.label}, seed {seed}, stragglers {part:g}")
            result = _run(plan, method, seed, part, folder) | {"identity": identity}
            _save(folder / "result.json", result)
        results.append(result)
    return results


def _run(plan: Plan, method: Method, seed: int, stragglers: float, folder: Path) -> dict[str, Any]:
    from lightning_fed.cli import FederatedCLI  # the command line is one floor up, and only its parser is needed

    cli = FederatedCLI(
        ["--config", str(plan.recipe), *plan.overrides, "--seed_everything", str(seed), "--trainer.logger", "false"],
        run=False,
    )
    monitor, mode = _metric(plan, cli.trainer)
    curve = RoundCurve()
    checkpoint = ModelCheckpoint(folder, "resume", save_top_k=1, enable_version_counter=False)
    trainer: Any
    if method.name == CENTRAL:
        trainer = _central_trainer(cli)
    else:
        trainer = cli.trainer
        _replace_federation(trainer, method.federation(trainer.federation.replace(stragglers=stragglers)))
    callbacks: list[Callback] = trainer.callbacks
    callbacks[:] = [one for one in callbacks if not isinstance(one, Checkpoint | ProgressBar)]
    callbacks += [curve, checkpoint]
    trainer.loggers = [TensorBoardLogger(plan.out, name="tensorboard", version=folder.name)]
    resume = folder / "resume.ckpt"
    trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=resume if resume.exists() else None)
    if not curve.rounds or monitor not in curve.rounds[-1]:
        names = sorted(curve.rounds[-1]) if curve.rounds else []
        raise ValueError(f"Expected `monitor` to be logged, but {monitor!r} is not one of {names}.")
    test = {}
    if plan.test:
        found = trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
        test = {name: float(value) for values in found for name, value in values.items()}
    resume.unlink(missing_ok=True)
    return {
        "method": method.label,
        "seed": seed,
        "stragglers": stragglers,
        "monitor": monitor,
        "mode": mode,
        "rounds": curve.rounds,
        "test": test,
    }


def _replace_federation(trainer: Any, federation: Federation) -> None:
    callbacks: list[Callback] = trainer.callbacks
    callbacks[callbacks.index(trainer.federation)] = federation
    trainer.federation = federation


def _central_trainer(cli: Any) -> L.Trainer:
    """A plain Trainer with the recipe's options, for as many examples as the federation sees."""
    federation = cli.trainer.federation
    if federation.schedule.local_steps is not None:
        raise ValueError(
            f"Expected a recipe with `local_epochs` for {CENTRAL!r}, because steps are no part of the data."
        )
    share = federation.schedule.clients_per_round
    if isinstance(share, int):
        share /= _count_clients(cli.datamodule, federation)
    epochs = math.ceil(cli.trainer.max_epochs * federation.schedule.local_epochs * share)
    given = cli.config_init.get("trainer")
    known = set(inspect.signature(L.Trainer).parameters) - {"max_epochs", "callbacks", "logger", "enable_progress_bar"}
    options = {name: value for name, value in vars(given).items() if name in known}
    others = [one for one in cli.trainer.callbacks if not isinstance(one, Federation | Checkpoint | ProgressBar)]
    return L.Trainer(max_epochs=epochs, callbacks=others, logger=False, enable_progress_bar=False, **options)


def _count_clients(datamodule: L.LightningDataModule, federation: Federation) -> int:
    datamodule.prepare_data()
    datamodule.setup("fit")
    if federation.partition is None:
        return len(datamodule.population().clients)  # type: ignore[attr-defined] # a FederatedDataModule
    return len(split_loader(datamodule.train_dataloader(), federation.partition, federation.schedule.seed).clients)


def _metric(plan: Plan, trainer: L.Trainer) -> tuple[str, str]:
    if plan.monitor is not None:
        return plan.monitor, plan.mode
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
            return callback.monitor, callback.mode
    raise ValueError("Expected `monitor`, because the recipe has no ModelCheckpoint with one.")


def _run_name(method: Method, seed: int, stragglers: float) -> str:
    label = "".join(sign if sign.isalnum() or sign in "=.-" else "_" for sign in method.label)
    return f"{label}_{stragglers:g}_{seed}"


def _identity(plan: Plan, method: Method) -> str:
    """What a result depends on beside its own method, seed and stragglers."""
    parts = [plan.recipe.read_text(), *plan.overrides, method.label, plan.monitor or "", plan.mode]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def write_whole(path: Path, text: str) -> None:
    """Writes a file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


def _save(path: Path, result: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(result))


def _load(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
