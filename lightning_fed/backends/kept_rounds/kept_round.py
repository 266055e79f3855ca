"""Stores updates and models in a folder with bounded size, to repeat a round and to certify a run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightning_fed.argument_checks import check_count
from lightning_fed.atomic_files import atomic_write, write_text_atomically
from lightning_fed.backends.kept_rounds.certificate import RECORD, write_json
from lightning_fed.callbacks.federation import Federation, find_federation
from lightning_fed.errors import OptionError
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.messages import Client, ClientUpdate, State, digest
from lightning_fed.model.entries import copy_state, live_entries, parameter_entries
from lightning_fed.rule import RoundInfo
from lightning_fed.server.server import Server
from lightning_fed.steps.chain import describe_options

_ROUND = "round.ckpt"
_PACKAGES = "lightning-fed", "lightning", "torch"


class KeepRounds(FederatedCallback):
    """Stores every round's updates and models on the server, for `lightning-fed replay` and `lightning-fed certify`.

    The updates of single clients may reveal private data: protect the folder like the data. Each round also has a JSON
    file with metrics and digests, kept after the deletion of updates and models.

    Args:
        folder: The folder.
        max_bytes: Maximum size of updates and models in bytes. If necessary, the oldest are deleted after a round.

    Example:
        >>> import tempfile
        >>> callback = KeepRounds(tempfile.mkdtemp(), max_bytes=10**9)  # an argument in `callbacks` of the server
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        self._folder, self._max_bytes = Path(folder), check_count("max_bytes", max_bytes)
        self._start: State = {}
        self._answers: list[tuple[Client, str]] = []
        self._record: dict[str, Any] = {}
        self._last_validation: int | None = None

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Stores the global model. Deletes files for this and later rounds, left by an earlier run."""
        policies = find_federation(trainer).policies
        entries = live_entries(module)
        self._start = copy_state({name: entries[name] for name in entries if policies[name] == "shared"})
        self._answers, self._record = [], {}
        for path in self._folder.glob("round-*"):
            if path >= self._path(trainer.current_epoch):
                shutil.rmtree(path)

    def on_server_receive(self, trainer: L.Trainer, module: L.LightningModule, update: ClientUpdate) -> None:
        content = {name: value for name, value in vars(update).items() if name in ("client", "num_samples", "metrics")}
        tensors = {"state": copy_state(update.state), "extras": copy_state(update.extras)}
        self._save(trainer.current_epoch, f"{len(self._answers):06d}.ckpt", content | tensors)
        parts = {f"{kind}:{name}": value for kind, state in tensors.items() for name, value in state.items()}
        self._answers.append((update.client, digest(parts)))

    def on_server_round_end(self, trainer: L.Trainer, module: L.LightningModule, is_new: bool) -> None:
        federation, entries = find_federation(trainer), live_entries(module)
        server, model = federation.server, copy_state({name: entries[name] for name in self._start})
        tensors = {
            "clients": list(federation.population.clients),
            "trainable": [name for value, name in parameter_entries(module).items() if value.requires_grad],
            "chain": server.state_before,
            "start": self._start,
            "model": model,
        }
        self._save(trainer.current_epoch, _ROUND, tensors)
        self._record = {
            "round": trainer.current_epoch,
            "is_new": is_new,
            "method": federation.method.name,
            "rule": describe_options(server.rule),
            "callbacks": list(map(describe_options, federation.method.callbacks)),
            "steps": server.chain.describe(),
            "seed": federation.seed,
            "versions": {name: version(name) for name in _PACKAGES},
            "received": list(server.report.received),
            "failed": list(server.report.failed.items()),
            "answers": self._answers,
            "heads": list(getattr(federation.store, "heads", {}).items()),
            "digests": {"start": digest(self._start), "model": digest(model)},
        }

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last_validation = trainer.current_epoch

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Writes a file with the round's clients, metrics and digests.

        Deletes the oldest updates and models if their size is above ``max_bytes``.
        """
        if not self._record:
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        record = self._record | {"metrics": metrics, "last_validation": self._last_validation}
        write_text_atomically(self._path(trainer.current_epoch) / RECORD, write_json(record))
        rounds = [list(path.glob("*.ckpt")) for path in sorted(self._folder.glob("round-*"))]
        sizes = [sum(file.stat().st_size for file in files) for files in rounds]
        while sum(sizes) > self._max_bytes:
            sizes.pop(0)
            for file in rounds.pop(0):
                file.unlink()

    def _path(self, round: int) -> Path:
        return self._folder / f"round-{round:06d}"

    def _save(self, round: int, name: str, content: dict[str, Any]) -> None:
        with atomic_write(self._path(round) / name) as partial:
            torch.save(content, partial)


def load_round(folder: Path, round: int) -> tuple[dict[str, Any], list[ClientUpdate]]:
    """Loads a round from the files of :class:`KeepRounds`: models and all received updates. Executes no stored code."""
    path = folder / f"round-{round:06d}"
    if not (path / _ROUND).exists() or not (path / RECORD).exists():
        raise FileNotFoundError(f"Expected a complete round, stored by `KeepRounds`, but {str(path)!r} lacks files.")
    files = sorted(file for file in path.glob("*.ckpt") if file.name != _ROUND)
    content = json.loads((path / RECORD).read_text()) | torch.load(path / _ROUND)
    return content, [ClientUpdate(**torch.load(file)) for file in files]


def replay_round(
    folder: Path, round: int, federation: Federation, without: Collection[Client] = ()
) -> tuple[State, State]:
    """Repeats a stored round's aggregation without the clients in ``without``.

    Returns the stored and the new model. ``federation`` must have the run's update steps. If the method differs, the
    run's server state (such as momentum) is not loaded. Rounds with a secure sum or noise cannot be repeated.
    """
    content, updates = load_round(folder, round)
    chain = federation.server.chain
    # With a secure sum no single update is stored, and noise would be drawn anew.
    if chain.describe() != content["steps"] or chain.reveals != "update":
        raise OptionError(
            f"Expected the update steps (`steps`) of the stored run, {content['steps']}, but got {chain.describe()}: "
            "use the run's recipe. If the run itself has a secure sum (`SecureSum`) or noise on the server "
            "(`CentralDP`), no round can be repeated."
        )
    if federation.method.name == content["method"]:
        chain.load_state_dict(content["chain"])
    server = Server(chain, federation.server.min_clients)
    trainable = frozenset(content["trainable"]) & content["start"].keys()
    server.start_round(RoundInfo(round, content["clients"], trainable, seed=content["seed"]), content["start"])
    for update in updates:
        if update.client not in content["received"] or update.client in without:
            continue
        server.sent(update.client, server.prepare(update.client))
        if server.count(update):
            server.accept(update)
    return content["model"], server.finish_round() or content["start"]
