"""Kept rounds: updates and models in a folder with bounded size, to repeat a round and to certify a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lightning_fed.argument_checks import check_count
from lightning_fed.atomic_files import atomic_write
from lightning_fed.backends.kept_rounds.certificate import digest_files, write_json
from lightning_fed.callbacks.federation import Federation, find_federation
from lightning_fed.errors import OptionError
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.messages import Client, ClientUpdate, State
from lightning_fed.model.entries import copy_state, live_entries, parameter_entries
from lightning_fed.rule import RoundInfo
from lightning_fed.server.server import Server

_ROUND = "round.ckpt"
_TENSORS = "start", "model", "chain"  # in this file


class KeepRounds(FederatedCallback):
    """Stores every round's updates and models on the server, for `lightning-fed replay` and `lightning-fed certify`.

    The folder contains the updates of all clients, which may reveal private data: protect the folder like the data.

    Args:
        folder: The folder.
        max_bytes: Maximum size of the folder in bytes. After each round, the oldest rounds are deleted if necessary.

    Example:
        >>> import tempfile
        >>> callback = KeepRounds(tempfile.mkdtemp(), max_bytes=10**9)  # an argument in `callbacks` of the server
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int) -> None:
        self._folder, self._max_bytes = Path(folder), check_count("max_bytes", max_bytes)
        self._start: State = {}
        self._count = 0

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Stores the global model, and deletes the files of an interrupted round."""
        policies = find_federation(trainer).policies
        entries = live_entries(module)
        self._start, self._count = (
            copy_state({name: entries[name] for name in entries if policies[name] == "shared"}),
            0,
        )
        shutil.rmtree(self._path(trainer.current_epoch), ignore_errors=True)

    def on_server_receive(self, trainer: L.Trainer, module: L.LightningModule, update: ClientUpdate) -> None:
        """Stores an update, before the server's checks."""
        content = {name: value for name, value in vars(update).items() if name in ("client", "num_samples", "metrics")}
        tensors = {"state": copy_state(update.state), "extras": copy_state(update.extras)}
        self._save(trainer.current_epoch, f"{self._count:06d}.ckpt", content | tensors)
        self._count += 1

    def on_server_round_end(self, trainer: L.Trainer, module: L.LightningModule, is_new: bool) -> None:
        """Stores the new global model, and deletes the oldest rounds while the folder is larger than ``max_bytes``."""
        federation, entries = find_federation(trainer), live_entries(module)
        report = federation.server.report
        content = {
            "round": trainer.current_epoch,
            "is_new": is_new,
            "method": federation.method.name,
            "steps": federation.server.chain.describe(),
            "seed": federation.seed,
            "clients": list(federation.population.clients),
            "received": list(report.received),
            "failed": [[client, reason] for client, reason in report.failed.items()],
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "heads": {str(client): list(head) for client, head in getattr(federation.store, "heads", {}).items()},
            "trainable": [name for value, name in parameter_entries(module).items() if value.requires_grad],
            "chain": federation.server.state_before,
            "start": self._start,
            "model": copy_state({name: entries[name] for name in self._start}),
        }
        self._save(trainer.current_epoch, _ROUND, content)
        rounds = sorted(self._folder.glob("round-*"))
        sizes = [sum(file.stat().st_size for file in path.iterdir()) for path in rounds]
        while sum(sizes) > self._max_bytes:
            shutil.rmtree(rounds.pop(0))
            sizes.pop(0)

    def _path(self, round: int) -> Path:
        return self._folder / f"round-{round:06d}"

    def _save(self, round: int, name: str, content: dict[str, Any]) -> None:
        with atomic_write(self._path(round) / name) as partial:
            torch.save(content, partial)


def load_round(folder: Path, round: int) -> tuple[dict[str, Any], list[ClientUpdate]]:
    """Loads a kept round, with all received updates, without executing code from the files."""
    path = folder / f"round-{round:06d}"
    if not (path / _ROUND).exists():
        raise FileNotFoundError(f"Expected a complete round in {str(path)!r}: `KeepRounds` keeps rounds on the server.")
    files = sorted(file for file in path.glob("*.ckpt") if file.name != _ROUND)
    return torch.load(path / _ROUND), [ClientUpdate(**torch.load(file)) for file in files]


def replay_round(
    folder: Path, round: int, federation: Federation, without: Collection[Client] = ()
) -> tuple[State, State]:
    """Repeats a round's aggregation, without the clients in ``without``. Returns the stored and the repeated model.

    ``federation`` must have the run's update steps. If the aggregation rule differs from the run's rule, the new rule
    starts without state. Refuses secure sums, because the server stores no single updates, and noise, because the
    server draws new noise.
    """
    content, updates = load_round(folder, round)
    chain = federation.server.chain
    if chain.describe() != content["steps"] or chain.reveals != "update":
        raise OptionError(
            f"Expected a federation with the update steps {content['steps']}, without sums and noise, but got "
            f"{chain.describe()}: give the run's recipe."
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


def write_certificate(folder: Path, key: Ed25519PrivateKey) -> str:
    """Returns signed JSON text about all stored rounds: clients, method, update steps, versions, metrics, file digests.

    Metrics include epsilon and evaluations. ``heads`` has the digest of the last line in each site's record file.
    """
    rounds = [torch.load(path) for path in sorted(folder.glob(f"round-*/{_ROUND}"))]
    certificate = {
        "versions": {name: version(name) for name in ("lightning-fed", "lightning", "torch")},
        "rounds": [{name: value for name, value in one.items() if name not in _TENSORS} for one in rounds],
        "files": digest_files(folder),
    }
    return write_json(certificate | {"signature": key.sign(write_json(certificate).encode()).hex()})
