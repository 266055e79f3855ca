"""Callback that writes a report about a fit."""

from __future__ import annotations

import logging
import math
import os
import platform
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fed import __version__
from lightning_fed.atomic_files import write_text_atomically
from lightning_fed.callbacks.client_segmentations import ClientSegmentations, picture_path
from lightning_fed.callbacks.evaluation.client_evaluation import ClientEvaluation
from lightning_fed.callbacks.evaluation.results import monitored_name
from lightning_fed.callbacks.evaluation.tables import row_name
from lightning_fed.callbacks.federation import Federation, find_federation
from lightning_fed.console import round_number
from lightning_fed.fit.round_log import last_checkpoint
from lightning_fed.lightning.internals import find_callbacks
from lightning_fed.report.page import ClientRow, FitResults, Picture, render_page

_log = logging.getLogger(__name__)

_ROUND_NAMES = ("fed/", "comm/", "clients/", "privacy/", "evaluation/")  # logged when a round ends
_CLIENT_NAMES = ("client/", "evaluation/")  # logged by an evaluation on the clients
_MOST_PICTURES = 30
_KEY = "lightning_fed_report"  # in a checkpoint


class Report(L.Callback):
    """Writes an HTML report at the end of a fit. ``lightning-fed fit`` adds this callback.

    The report shows the logged values by round as curves and as a table. A second table shows scores and failures by
    client. :class:`~lightning_fed.callbacks.ClientSegmentations` adds IoU by class and pictures.

    After an exception the report shows the finished rounds. With ``CentralDP`` the report contains no values of single
    clients.

    Args:
        path: Path of the file; by default ``report.html`` next to the Trainer's logs.

    Raises:
        MisconfigurationException: In ``fit``, if the Trainer has no federation.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(max_rounds=10, callbacks=[Report()], logger=False)
    """

    supports_vectorize = True

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._file = self.path
        self._reset()

    def _reset(self) -> None:
        self._rounds: dict[int, dict[str, float]] = {}
        self._clients: dict[Any, dict[str, Any]] = {}
        self._higher_is_better: dict[str, bool] = {}
        self._validation_names: list[str] = []  # a round without validation still has earlier values in the Trainer
        self._names_before: set[str] = set()
        self._last_results: Any = None
        self._start = perf_counter()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            find_federation(trainer)
            if trainer.current_epoch == 0:  # false if the fit is resumed
                self._reset()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = trainer.log_dir or trainer.default_root_dir  # in all processes
        self._file = self.path or Path(folder) / "report.html"

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start = perf_counter()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._names_before = set(trainer.callback_metrics)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        new = set(trainer.callback_metrics) - self._names_before
        self._validation_names = sorted(new.union(self._validation_names))
        stale = ("client/",) if self._read_clients(trainer) else (*_CLIENT_NAMES, *self._summaries())
        self._record(trainer, lambda name: name.startswith(_ROUND_NAMES) or name in self._validation_names, stale)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stale = *_CLIENT_NAMES, *self._summaries()
        self._record(trainer, lambda name: name not in self._validation_names, stale)
        if (round := find_federation(trainer).rounds - 1) in self._rounds:
            self._rounds[round]["seconds"] = perf_counter() - self._start

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if trainer.state.fn == "fit":
            self._write(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        # Not in `state_dict`: `trainer.validate` without a report would warn of a missing callback.
        checkpoint[_KEY] = {
            "rounds": {round: dict(values) for round, values in self._rounds.items()},
            "clients": {client: dict(entry) for client, entry in self._clients.items()},
            "higher_is_better": dict(self._higher_is_better),
            "validation_names": list(self._validation_names),
        }

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._reset()
        if state := checkpoint.get(_KEY):
            self._rounds = {round: dict(values) for round, values in state["rounds"].items()}
            self._clients = {client: dict(entry) for client, entry in state["clients"].items()}
            self._higher_is_better = dict(state["higher_is_better"])
            self._validation_names = list(state["validation_names"])

    def _record(self, trainer: L.Trainer, is_wanted: Callable[[str], bool], stale: tuple[str, ...]) -> None:
        federation = find_federation(trainer)
        round = federation.rounds - 1
        if not federation.has_server or round != trainer.current_epoch:  # an interrupted round
            return
        if round not in self._rounds:
            self._rounds[round] = {}
            self._count_visits(federation)
        for name, value in trainer.callback_metrics.items():
            if is_wanted(name) and not name.startswith(stale) and math.isfinite(value):
                self._rounds[round][name] = float(value)

    def _summaries(self) -> tuple[str, ...]:
        return tuple(f"fed/{name}/" for name in self._higher_is_better)

    def _count_visits(self, federation: Federation) -> None:
        if federation.server.chain.reveals == "model":
            return
        report = federation.server.report
        for client in report.received:
            self._entry(client)["visits"] += 1
        for client, reason in report.failed.items():
            entry = self._entry(client)
            entry["failures"], entry["reason"] = entry["failures"] + 1, reason
        for client in federation.cohort.dropped:
            entry = self._entry(client)
            entry["failures"], entry["reason"] = entry["failures"] + 1, "no answer"

    def _entry(self, client: Any) -> dict[str, Any]:
        return self._clients.setdefault(
            client, {"visits": 0, "failures": 0, "reason": "", "examples": None, "first": {}, "last": {}}
        )

    def _read_clients(self, trainer: L.Trainer) -> bool:
        evaluation = _find(trainer, ClientEvaluation)
        results = None if evaluation is None else evaluation.results
        if results is None or results is self._last_results:
            return False
        self._last_results = results
        self._higher_is_better |= results.higher_is_better
        for client, count in results.num_samples.items():
            self._entry(client)["examples"] = count
        for name, values in results.values.items():
            for client, value in values.items():
                if math.isfinite(value):
                    entry, score = self._entry(client), (trainer.current_epoch, value)
                    entry["first"] = {name: score, **entry["first"]}
                    entry["last"] = {**entry["last"], name: score}
        return True

    def _write(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._file is None or not self._rounds or not trainer.is_global_zero:
            return  # without a file if the fit ends before training
        federation = find_federation(trainer)
        segmentations = _find(trainer, ClientSegmentations)
        rows = [] if segmentations is None else segmentations.rows
        last_round = max((row[0] for row in rows), default=0)
        results = FitResults(
            title=f"{federation.method.name} on {type(module).__name__}",
            facts=self._facts(trainer, federation, module),
            rounds=self._rounds,
            score=self._choose_score(trainer),
            higher_is_better=self._higher_is_better,
            clients=[ClientRow(row_name(client), **entry) for client, entry in self._clients.items()],
            iou={(row[1], row[2]): row[3] for row in rows if row[0] == last_round},
            classes=segmentations.class_order() if rows else (),
            pictures=[] if segmentations is None else _read_pictures(segmentations, trainer),
            scored_round=round_number(last_round) if rows else None,
        )
        write_text_atomically(self._file, render_page(results))
        _log.info("Report of the fit, for a browser: %s", self._file)

    def _choose_score(self, trainer: L.Trainer) -> str:
        names = list(self._higher_is_better)
        savers = [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
        monitored = [monitored_name(saver.monitor) for saver in savers if saver.monitor]
        scores = [name for name in names if self._higher_is_better[name]]
        return next((name for name in [*monitored, *scores, *names] if name in names), "")

    def _facts(self, trainer: L.Trainer, federation: Federation, module: L.LightningModule) -> dict[str, str]:
        clients = len(federation.population.clients)
        steps = [text if text.startswith(name) else f"{name}: {text}"
                 for name, text in federation.server.chain.describe().items()]  # fmt: skip
        last = self._rounds[max(self._rounds)]
        seconds = [values["seconds"] for values in self._rounds.values() if "seconds" in values]
        privacy = {name: f"{value:.4g}" for name, value in last.items() if name.startswith("privacy/")}
        checkpoint = last_checkpoint(trainer) or ""
        facts = {
            "method": federation.method.name,
            "update steps": "; ".join(steps) or "none",
            "rounds": f"{len(self._rounds)} of {trainer.max_epochs}",
            "clients": f"{clients}, {federation.schedule.cohort_size(clients)} in a round",
            "seed": str(federation.schedule.seed),
            **privacy,
            "seconds": f"{sum(seconds):.1f} in {len(seconds)} complete rounds, with evaluation",
            "sent to clients": _megabytes(last, "comm/total_down_bytes"),
            "sent by clients": _megabytes(last, "comm/total_up_bytes"),
            "parameters": f"{sum(parameter.numel() for parameter in module.parameters()):,}",
            "versions": f"lightning-fed {__version__}, Lightning {L.__version__}, torch {torch.__version__},"
            f" Python {platform.python_version()}",
            "checkpoint": checkpoint,
            "resume": checkpoint
            and f"fit(..., ckpt_path={checkpoint!r}), or the same command with --ckpt_path"
            f" {shlex.quote(checkpoint)} and more rounds",
        }
        return {name: value for name, value in facts.items() if value}


def _find(trainer: L.Trainer, kind: type[Any]) -> Any:
    return next(iter(find_callbacks(trainer, kind)), None)


def _megabytes(values: Mapping[str, float], name: str) -> str:
    return f"{values[name] / 1e6:.2f} MB" if name in values else ""


def _read_pictures(segmentations: ClientSegmentations, trainer: L.Trainer) -> list[Picture]:
    last = [row for row in segmentations.rows if row[0] == segmentations.rows[-1][0]]
    scores: dict[str, list[float]] = {}
    for row in last:
        scores.setdefault(row[1], []).append(row[3])
    worst_first = sorted(scores, key=lambda client: sum(scores[client]) / len(scores[client]))
    folder = segmentations.output_folder(trainer)
    paths = {client: picture_path(folder, client) for client in worst_first}
    existing = {client: path for client, path in paths.items() if path.exists()}
    return [Picture(client, path.read_bytes()) for client, path in list(existing.items())[:_MOST_PICTURES]]
