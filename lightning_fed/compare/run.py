"""Trains and evaluates one run of a comparison."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import lightning as L
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_fed.callbacks.evaluation.client_evaluation import has_own_models
from lightning_fed.callbacks.evaluation.data_pass import Stage
from lightning_fed.callbacks.evaluation.site_matrix import SiteMatrix
from lightning_fed.callbacks.federation import federation_of
from lightning_fed.compare.central import central_trainer
from lightning_fed.compare.method_options import MethodChoice
from lightning_fed.lightning.checkpoints import RoundCheckpoint
from lightning_fed.recipe import FederatedCLI
from lightning_fed.report.callback import Report

CHECKPOINT = "last.ckpt"
"""File name of a run's checkpoint after the last complete round."""

OnRound: TypeAlias = Callable[[int, int, dict[str, float]], None]

_NOT_KEPT = (
    Checkpoint,
    ModelSummary,
    ProgressBar,
    Report,
    SaveConfigCallback,
    SiteMatrix,
)  # dropped from a recipe's callbacks


@dataclass(frozen=True)
class Run:
    """Run of a comparison: one method, trained with one seed and one fraction of stragglers."""

    method: MethodChoice
    seed: int
    stragglers: float | None  # fraction; `None` for centralised training

    def __str__(self) -> str:
        stragglers = f", {self.stragglers:.0%} stragglers" if self.stragglers else ""
        return f"{self.method.label}, seed {self.seed}{stragglers}"

    @property
    def name(self) -> str:
        """Name of the run's folder, such as ``fedprox_mu=0.1_0.5_0`` for seed 0 and 50 % stragglers."""
        label = "".join(sign if sign.isalnum() or sign in "=.-" else "_" for sign in self.method.label)
        stragglers = "" if self.stragglers is None else f"_{self.stragglers:g}"
        return f"{label}{stragglers}_{self.seed}"


class RoundCurve(Callback):
    """Callback that records every round's values and duration, and stops the fit at the deadline."""

    def __init__(self, on_round: Callable[[int, dict[str, float]], None], deadline: float = math.inf) -> None:
        # `seconds` and `cpu_seconds` cover training and aggregation.
        self.rounds: list[dict[str, float]] = []
        self.is_out_of_time = False
        self._on_round, self._deadline = on_round, deadline
        self._longest, self._last_end = 0.0, time.monotonic()
        self._begin: tuple[float, float] | None = None
        self._seconds = [0.0, 0.0]

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin = (time.perf_counter(), time.process_time())

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.rounds.append(values | {"seconds": self._seconds[0], "cpu_seconds": self._seconds[1]})
        self._seconds = [0.0, 0.0]
        self._on_round(len(self.rounds), self.rounds[-1])
        now = time.monotonic()
        self._longest, self._last_end = max(self._longest, now - self._last_end), now
        # Another round may be as long as the longest.
        if now + self._longest > self._deadline and len(self.rounds) != trainer.max_epochs:
            self.is_out_of_time = trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": [dict(values) for values in self.rounds], "seconds": list(self._seconds)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rounds = [dict(values) for values in state_dict["rounds"]]
        self._seconds = list(state_dict["seconds"])

    def _stop(self) -> None:
        if self._begin is not None:
            self._seconds[0] += time.perf_counter() - self._begin[0]
            self._seconds[1] += time.process_time() - self._begin[1]
            self._begin = None


def train(
    cli: FederatedCLI,
    run: Run,
    folder: Path,
    logs: Path,
    on_round: OnRound,
    decision: str = "",
    deadline: float = math.inf,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any] | None:
    """Trains a run. Returns the results, or ``None`` if the deadline ended the run.

    ``folder`` holds the checkpoint for resuming, and ``logs`` the TensorBoard logs. ``on_round`` receives the round's
    number, the number of rounds, and the logged values. ``decision`` replaces ``batch_norm="auto"`` in the recipe.
    """
    trainer = _make_trainer(cli, run)
    federation = federation_of(trainer)
    if federation is not None:
        federation.preset_decision(decision)
    curve = RoundCurve(lambda number, values: on_round(number, trainer.max_epochs, values), deadline)
    report = [] if federation is None else [Report(folder / "report.html")]
    trainer.callbacks += [*callbacks, curve, *report, RoundCheckpoint(folder / CHECKPOINT)]
    if find_spec("tensorboard"):
        trainer.loggers = [TensorBoardLogger(logs, name="", version=folder.name)]
    last = folder / CHECKPOINT
    trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=last if last.exists() else None)
    if curve.is_out_of_time:
        return None
    return {
        "method": run.method.label,
        "seed": run.seed,
        "stragglers": run.stragglers,
        "has_own_models": federation is not None and has_own_models(trainer, federation),
        "batch_norm_decision": "" if federation is None else federation.batch_norm_decision,
        "rounds": curve.rounds,
        "test": {},
    }


def evaluate(
    cli: FederatedCLI, run: Run, folder: Path, stage: Stage = "test", callbacks: Sequence[Callback] = ()
) -> dict[str, float]:
    """Evaluates a finished run on the test or validation data. Returns the logged values."""
    trainer = _make_trainer(cli, run)
    trainer.callbacks += callbacks
    run_stage = trainer.test if stage == "test" else trainer.validate
    run_stage(cli.model, datamodule=cli.datamodule, ckpt_path=folder / CHECKPOINT, verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@contextmanager
def quiet() -> Iterator[None]:
    """Context without Lightning's logs and warnings. This package logs only warnings."""
    quiet_levels = {
        "lightning.pytorch": logging.ERROR,
        "lightning.fabric": logging.ERROR,
        "lightning_fed": logging.WARNING,
    }
    logs = [logging.getLogger(name) for name in quiet_levels]
    levels = [log.level for log in logs]
    for log, level in zip(logs, quiet_levels.values(), strict=True):
        log.setLevel(level)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(lightning|torch|jsonargparse)\.")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _make_trainer(cli: FederatedCLI, run: Run) -> Any:
    trainer: Any = cli.trainer
    if run.stragglers is None:
        trainer = central_trainer(cli)
    else:
        availability = replace(trainer.federation.options.availability, stragglers=run.stragglers)
        federation = run.method.federation(trainer.federation.replace(availability=availability))
        trainer.callbacks[trainer.callbacks.index(trainer.federation)] = federation
        trainer.federation = federation
    trainer.callbacks[:] = [callback for callback in trainer.callbacks if not isinstance(callback, _NOT_KEPT)]
    return trainer
