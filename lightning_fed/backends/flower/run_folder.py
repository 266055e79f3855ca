"""The folder of a server's run: who its clients are, its last complete round, and that one server alone is at it."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_fed.files import write_text_atomically
from lightning_fed.messages import Client

try:
    import fcntl
except ImportError:  # pragma: no cover - there is none on Windows
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """While it is open, no other process can be here.

    Raises:
        RuntimeError: If another one is.

    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        if fcntl is not None:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RuntimeError(
                    f"Another server trains in {str(folder)!r}: end it (`flwr stop`), or take another folder."
                ) from error
        yield


def recall_clients(clients: int | Sequence[Client], folder: Path) -> int | Sequence[Client]:
    """Who the clients of the run in a folder are, where only their number is said."""
    path = folder / "clients.json"
    if not (folder / "last.ckpt").exists() or not path.exists():
        return clients
    known: list[Client] = json.loads(path.read_text())
    if isinstance(clients, int) and clients == len(known):
        return known
    if isinstance(clients, int) or set(clients) != set(known):
        _log.warning("Expected the clients of the run, %s, but it is to go on with %s.", known, clients)
    return clients


def note_clients(clients: Sequence[Client], folder: Path) -> None:
    """Notes for :func:`recall_clients` whose run it is."""
    write_text_atomically(folder / "clients.json", json.dumps(list(clients)))
