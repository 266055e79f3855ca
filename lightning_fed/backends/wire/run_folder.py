"""Folder of a server's run: client names, last complete round, and a lock against a second server."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_fed.atomic_files import write_text_atomically
from lightning_fed.messages import Client

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no fcntl
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Locks the folder of a run. Raises ``RuntimeError`` if another process holds the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        if fcntl is not None:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RuntimeError(
                    f"Another server is training in {str(folder)!r}: stop that server, or use another folder."
                ) from error
        yield


def count_start(folder: Path) -> int:
    """Returns a number for this start of the server, larger than for all earlier starts.

    The number is at least the time in seconds, so that a folder restored from a backup also gets a larger number.
    """
    path = folder / "start"
    number = max(int(time.time()), int(path.read_text()) + 1 if path.exists() else 0)
    write_text_atomically(path, f"{number}")
    return number


def read_clients(clients: int | Sequence[Client], folder: Path) -> int | Sequence[Client]:
    """Returns ``clients``. If the run resumes and ``clients`` is the number of stored names, returns these names."""
    path = folder / "clients.json"
    if not (folder / "last.ckpt").exists() or not path.exists():
        return clients
    known: list[Client] = json.loads(path.read_text())
    if isinstance(clients, int) and clients == len(known):
        return known
    if isinstance(clients, int) or set(clients) != set(known):
        _log.warning("The run started with the clients %s but resumes with %s.", known, clients)
    return clients


def write_clients(clients: Sequence[Client], folder: Path) -> None:
    """Stores the client names for :func:`read_clients`."""
    write_text_atomically(folder / "clients.json", json.dumps(list(clients)))
