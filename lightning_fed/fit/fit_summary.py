"""Summaries of a fit for the log: a line at the start and a table at the end."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fed.console import round_number
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.lightning.internals import callbacks_of
from lightning_fed.messages import tensor_bytes
from lightning_fed.model.entries import batch_norm_layers, live_entries, parameter_entries
from lightning_fed.process_group import process_group_of

_UNITS = ["bytes", "kB", "MB", "GB", "TB"]
_LOCAL = ("personal", "frozen")
_OURS = ("fed/", "comm/", "client/", "clients/", "evaluation/")


def format_bytes(number: float) -> str:
    """Formats a number of bytes in decimal units, such as ``4.0 kB``."""
    unit = 0
    while number >= 1000 and unit < len(_UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.0f} bytes" if unit == 0 else f"{number:.1f} {_UNITS[unit]}"


def describe_start(fit: FederatedFit, method: str, at_once: int) -> str:
    """Describes a fit at the start in one line: clients, shared entries, and kind of visits."""
    clients, trainer = len(fit.population.clients), fit.trainer
    counts = Counter[str](fit.policies.values())
    entries = live_entries(fit.module)
    untrained = {name for value, name in parameter_entries(fit.module).items() if not value.requires_grad}
    shared = {name: entries[name] for name, policy in fit.policies.items() if policy == "shared"}
    following = {name: shared.pop(name) for name in untrained & shared.keys()}
    first, last = trainer.current_epoch, trainer.max_epochs
    rounds = "rounds without end" if last in (None, -1) else f"rounds {round_number(first)} to {last}"
    secret = fit.schedule.secret
    size = f"{'about ' if secret is not None and secret.is_poisson else ''}{fit.schedule.cohort_size(clients)}"
    kept = " and ".join(f"{counts[policy]} {policy}" for policy in _LOCAL if counts[policy])
    text = [
        f"{method}: {rounds}, {size} of {clients} clients per round, {_execution(fit, at_once)}.",
        f"{format_bytes(tensor_bytes(shared))} each way per client ({len(shared)} "
        f"tensors{f'; not sent: {kept}' if kept else ''}).",
    ]
    if following:
        text.append(
            f"{format_bytes(tensor_bytes(following))} more ({len(following)} tensors without gradient) if the module "
            "writes to them, as with a teacher."
        )
    if counts["sliced"]:
        text.append(f"{counts['sliced']} more tensors, of which clients receive only requested rows.")
    if batch_norm_layers(fit.module):
        again = ", and clients also receive each new model to measure statistics" if fit.reports_statistics else ""
        text.append(f"BatchNorm: {fit.batch_norm!r}{again}.")
    return " ".join([*text, f"Seed {fit.schedule.seed}."])


def _execution(fit: FederatedFit, at_once: int) -> str:
    if fit.is_remote:
        return "on other machines"
    number = process_group_of(fit.trainer).size
    if number > 1:
        return f"in {number} processes"
    return f"up to {at_once} at once" if at_once > 1 else "one after another"


def describe_end(
    method: str,
    totals: Mapping[str, int],
    seconds: float,
    metrics: Mapping[str, float],
    files: Mapping[str, str] | None = None,
    recalibrates: bool = False,
) -> str:
    """Formats a fit's results as a table: ``totals`` (:attr:`RoundLog.totals`), duration, and last logged values.

    If ``recalibrates``, clients receive each new model twice, to measure BatchNorm's statistics.

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
    """Maps titles to paths of a fit's logs and checkpoints. The best checkpoint's title contains score and round."""
    rows = {}
    for saver in trainer.checkpoint_callbacks:
        if isinstance(saver, ModelCheckpoint) and saver.best_model_score is not None:
            epoch = re.search(r"epoch=(\d+)", Path(saver.best_model_path).name)  # Lightning's default name
            after = f" after round {round_number(int(epoch[1]))}" if epoch else ""
            rows[f"best {saver.monitor}"] = f"{float(saver.best_model_score):.4g}{after}, {saver.best_model_path}"
    newest = last_checkpoint(trainer)
    if newest is not None:
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


def monitored_names(fit: FederatedFit) -> list[str]:
    """Returns the names of logged values that the Trainer's callbacks monitor, such as ``val_loss``."""
    monitors = (getattr(callback, "monitor", None) for callback in callbacks_of(fit.trainer))
    return list(dict.fromkeys(name for name in monitors if isinstance(name, str)))


def statistics_of_monitored(fit: FederatedFit) -> dict[str, str]:
    """Maps monitored names to the BatchNorm statistics used: ``own``, ``batch``, ``data``, ``pooled`` or ``model``."""
    of_global = fit.unseen or ("pooled" if fit.reports_statistics else "model")
    return {
        name: "own" if fit.has_own_statistics and name.startswith(("fed/", "client/")) else of_global
        for name in monitored_names(fit)
    }
