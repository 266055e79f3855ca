"""Logs clients, bytes and model distances in each round, and summarises a fit."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_fed.console import round_number
from lightning_fed.lightning.internals import hide_metrics, log_position, show_metrics
from lightning_fed.messages import State
from lightning_fed.model.entries import norm
from lightning_fed.server.schedule import Cohort
from lightning_fed.server.server import RoundReport

_log = logging.getLogger(__name__)

_MOST_METRICS = 64  # numbers per client and round
_MOST_NAMES = 256  # per fit
_UNITS = ["bytes", "kB", "MB", "GB", "TB"]
_OURS = ("fed/", "comm/", "client/", "clients/", "evaluation/")
_NAME = re.compile(r"[A-Za-z0-9._/-]{1,100}")


class RoundLog:
    """Writes a round's values to the Trainer's loggers and ``callback_metrics``.

    The logged step is the number of batches so far, and ``epoch`` is the round. The logging guide defines the values:
    ``fed/clients``, ``fed/stragglers``, ``fed/dropped``, ``fed/failed``, ``fed/num_samples``, ``fed/update_norm``,
    ``fed/global_update_norm``, ``fed/drift``, ``fed/batch_norm_shift``, ``comm/up_bytes``, ``comm/down_bytes``,
    ``comm/total_up_bytes`` and ``comm/total_down_bytes``.

    Clients can send more numbers in ``update.metrics``. The mean over the clients is logged as ``clients/<name>``. At
    most 64 names per client and round, and 256 names per fit, are logged. Values must be finite. Names must consist of
    at most 100 letters, digits and ``._-/`` characters. Other values and names are skipped.

    Attributes:
        totals: Sums over the finished rounds in this process, such as ``rounds``, ``failed`` and ``up_bytes``.
        total_up_bytes: Bytes in all updates since the first round.
        total_down_bytes: Bytes in all broadcasts since the first round.
    """

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()
        self.total_up_bytes = 0
        self.total_down_bytes = 0
        self._last: dict[str, float] = {}
        self._first_counts: dict[str, int | None] = {}
        self._passing: dict[str, list[str]] = {}  # names by kind, removed when the kind gets new names

    def state_dict(self) -> dict[str, Any]:
        return {
            "up_bytes": self.total_up_bytes,
            "down_bytes": self.total_down_bytes,
            "last": dict(self._last),
            "first_counts": dict(self._first_counts),
            "passing": dict(self._passing),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total_up_bytes, self.total_down_bytes = state["up_bytes"], state["down_bytes"]
        self._last, self._passing = dict(state["last"]), dict(state["passing"])
        self._first_counts = dict(state["first_counts"])

    def show(self, trainer: L.Trainer) -> None:
        show_metrics(trainer, {name: torch.tensor(value, dtype=torch.float64) for name, value in self._last.items()})

    def end_round(
        self,
        trainer: L.Trainer,
        report: RoundReport,
        cohort: Cohort,
        before: State,
        after: State,
        parameters: Sequence[str],
        measured: Mapping[str, float],
        is_private: bool = False,
    ) -> None:
        """Logs a round's client counts, bytes, norms and metrics.

        ``before`` and ``after`` are the shared tensors at the start and the end of the round. ``parameters`` contains
        the names of trained parameters, and ``measured`` the aggregation rule's metrics. If ``is_private``, only
        ``measured`` is logged.
        """
        totals = self.total_up_bytes + report.up_bytes, self.total_down_bytes + report.down_bytes
        if is_private:  # without totals, which the summary would publish
            self._last = {}
            self.put(trainer, report.round, measured)
            self.total_up_bytes, self.total_down_bytes = totals
            return
        counts = {
            "fed/clients": len(report.received),
            "fed/dropped": len(cohort.dropped),
            "fed/failed": len(report.failed),
            "comm/up_bytes": report.up_bytes,
            "comm/down_bytes": report.down_bytes,
        }
        self.totals.update(rounds=1, **{name.partition("/")[2]: count for name, count in counts.items()})
        values: dict[str, float] = {
            **counts,
            "fed/stragglers": sum(visit.is_straggler for visit in cohort.visits),
            "fed/num_samples": sum(report.received.values()),
            "comm/total_up_bytes": totals[0],
            "comm/total_down_bytes": totals[1],
        }
        weights = {client: report.counted[client] for client in report.norms if client in report.received}
        if weights:
            mean_norm = sum(weight * report.norms[client] for client, weight in weights.items()) / sum(weights.values())
            global_norm = float(norm(after[name] - before[name] for name in parameters))
            values["fed/update_norm"] = mean_norm
            values["fed/global_update_norm"] = global_norm
            values["fed/drift"] = 1 - global_norm / mean_norm if mean_norm else 0.0
        values |= self._mean_metrics(report)
        self.put(trainer, report.round, values | dict(measured), {"aggregator": measured})
        self.total_up_bytes, self.total_down_bytes = totals  # if a logger raises, the round is trained again

    def put(
        self, trainer: L.Trainer, round: int, values: Mapping[str, float], passing: Mapping[str, Iterable[str]] = {}
    ) -> None:
        """Logs ``values`` by name for a round.

        ``passing`` maps a source, such as ``"aggregator"``, to the names logged by this source in this round. These
        names replace the source's earlier names in ``callback_metrics``, unless the list is empty.
        """
        for kind, names in passing.items():
            self._replace(trainer, kind, names)
        if trainer.barebones or not values:
            return
        self._last |= {name: float(value) for name, value in values.items()}  # plain floats for checkpoints
        self.show(trainer)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            shown = self._curves(values) if isinstance(logger, TensorBoardLogger) else values
            logger.log_metrics({**shown, "epoch": round}, step=log_position(trainer))

    def _curves(self, values: Mapping[str, float]) -> dict[str, float]:
        """Converts values for TensorBoard: bytes to megabytes, without counts that never changed."""
        curves = {}
        for name, value in values.items():
            if not isinstance(value, int) or value != self._first_counts.setdefault(name, value):
                self._first_counts[name] = None  # unequal to all later counts
                curves[name.replace("_bytes", "_MB")] = value * (1e-6 if name.endswith("_bytes") else 1)
        return curves

    def _replace(self, trainer: L.Trainer, kind: str, names: Iterable[str]) -> None:
        if new := list(names):
            stale = set(self._passing.get(kind, ())).difference(new)
            self._last = {name: value for name, value in self._last.items() if name not in stale}
            hide_metrics(trainer, stale)
            self._passing[kind] = new

    def _mean_metrics(self, report: RoundReport) -> dict[str, float]:
        kept, sent = {}, dict[str, list[float]]()
        for client, metrics in report.metrics.items():
            good = [name for name, value in metrics.items() if _NAME.fullmatch(name) and math.isfinite(value)]
            kept[client] = dict.fromkeys(good[:_MOST_METRICS])
            for name in kept[client]:
                sent.setdefault(name, []).append(metrics[name])
        known = {name.removeprefix("clients/") for name in self._last if name.startswith("clients/")}
        by_count = sorted(sent.keys() - known, key=lambda name: (-len(sent[name]), name))
        taken = known.union(by_count[: max(0, _MOST_NAMES - len(known))])
        for client, metrics in report.metrics.items():
            left_out = [name for name in metrics if name not in kept[client] or name not in taken]
            if left_out and not self.totals["numbers"]:
                _log.warning(
                    "Round %d: %d values of client %r are not logged, starting with %.100r. The limits are %d "
                    "numbers per client and round, %d names per fit, finite values, and names of at most 100 "
                    "letters, digits and `._-/`. This warning appears once.",
                    round_number(report.round), len(left_out), client, left_out[0], _MOST_METRICS, _MOST_NAMES,
                )  # fmt: skip
            self.totals["numbers"] += len(left_out)
        return {f"clients/{name}": sum(values) / len(values) for name, values in sorted(sent.items()) if name in taken}


def format_bytes(number: float) -> str:
    """Formats a number of bytes in decimal units, such as ``4.0 kB``."""
    unit = min(len(_UNITS) - 1, int(math.log10(max(1, number)) / 3))
    return f"{number:.0f} bytes" if unit == 0 else f"{number / 1000**unit:.1f} {_UNITS[unit]}"


def describe_end(
    method: str,
    totals: Mapping[str, int],
    seconds: float,
    metrics: Mapping[str, float],
    files: Mapping[str, str] | None = None,
    recalibrates: bool = False,
) -> str:
    """Formats a fit's results as a table.

    ``totals`` contains sums over rounds, and ``metrics`` the last logged values. ``recalibrates`` adds a note that each
    new model is sent twice, for BatchNorm statistics.

    Example:
        >>> totals = {"rounds": 2, "clients": 5, "failed": 1, "dropped": 0, "down_bytes": 4000, "up_bytes": 3500}
        >>> metrics = {"val_acc": 0.8125, "fed/clients": 2.0, "evaluation/clients": 2.0}
        >>> print(describe_end("FedAvg", totals, 3.0, metrics))
        FedAvg:
          rounds            2, 1.5 s each, 3 s in total
          updates used      5
          clients excluded  1 failed, 0 dropped out
          sent to clients   4.0 kB
          sent back         3.5 kB
          val_acc           0.8125
    """
    rows = {
        "rounds": f"{totals['rounds']}, {seconds / max(1, totals['rounds']):.3g} s each, {seconds:.3g} s in total",
        "updates used": str(totals["clients"]),
        "clients excluded": f"{totals['failed']} failed, {totals['dropped']} dropped out",
        "sent to clients": format_bytes(totals["down_bytes"]) + recalibrates * ", new models sent twice (BatchNorm)",
        "sent back": format_bytes(totals["up_bytes"]),
    }
    if totals.get("numbers"):
        rows["values skipped"] = f"{totals['numbers']} values that clients sent for the log"
    rows |= {name: f"{value:.4g}" for name, value in metrics.items() if name != "step" and not name.startswith(_OURS)}
    rows |= files or {}
    width = max(map(len, rows))
    return "\n".join([f"{method}:", *(f"  {name.ljust(width)}  {value}" for name, value in rows.items())])


def files_of(trainer: L.Trainer) -> dict[str, str]:
    """Lists a fit's log folder and checkpoints, as table rows with title and path."""
    rows = {}
    for saver in trainer.checkpoint_callbacks:
        if isinstance(saver, ModelCheckpoint) and saver.best_model_score is not None:
            epoch = re.search(r"epoch=(\d+)", Path(saver.best_model_path).name)  # Lightning's default name
            after = f" after round {round_number(int(epoch[1]))}" if epoch else ""
            rows[f"best {saver.monitor}"] = f"{float(saver.best_model_score):.4g}{after}, {saver.best_model_path}"
    if newest := last_checkpoint(trainer):
        rows["newest checkpoint"] = newest
    if trainer.log_dir is not None and trainer.loggers:
        rows["logs"] = trainer.log_dir
    return rows


def last_checkpoint(trainer: L.Trainer) -> str | None:
    """Path of the latest checkpoint; ``None`` without a checkpoint."""
    savers = [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
    names = {name for saver in savers for name in (saver.last_model_path, saver.best_model_path, *saver.best_k_models)}
    written = [path for path in map(Path, names - {""}) if path.exists()]
    return str(max(written, key=lambda path: path.stat().st_mtime)) if written else None
