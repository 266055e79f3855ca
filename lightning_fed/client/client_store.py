"""Stores for client state between rounds, such as personal entries and optimizer state.

Each round writes a new version, so a run resumed from an earlier checkpoint reads no later tensors.
"""

from __future__ import annotations

import hashlib
import logging
import os
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lightning_fed.atomic_files import atomic_write, write_text_atomically
from lightning_fed.errors import ClientFault, describe
from lightning_fed.messages import Client, State, digest, plain_keys
from lightning_fed.model.entries import copy_state
from lightning_fed.process_group import ProcessGroup

_log = logging.getLogger(__name__)

_LONGEST_NAME = 200
_DIGEST = "sha256"


class ClientStore(ABC):
    """Base class of stores for each client's tensors between rounds."""

    @abstractmethod
    def get(self, client: Client) -> State | None:
        """Returns a client's latest tensors, or ``None`` if nothing is stored. The caller must not change them."""

    def clients(self) -> Collection[Client]:
        """Returns the clients with stored tensors."""
        return ()

    @abstractmethod
    def put(self, client: Client, round: int, state: State) -> None:
        """Stores a client's tensors after training in ``round``. An empty ``state`` deletes the client's tensors."""

    @abstractmethod
    def commit(self, round: int, clients: Collection[Client]) -> None:
        """Deletes the tensors stored in ``round``, except those from ``clients``."""

    @abstractmethod
    def checkpoint(self, round: int) -> dict[str, Any]:
        """Returns the store's state before ``round``, for a checkpoint: tensors, numbers, texts and containers."""

    @abstractmethod
    def restore(self, round: int, state: dict[str, Any]) -> None:
        """Restores the state from :meth:`checkpoint`. ``restore(0, {})`` removes all clients' state."""

    def start(self, process_group: ProcessGroup) -> None:  # noqa: B027 - optional
        """Prepares the store in each process, before the first round and again after :meth:`restore`."""

    def share(self, round: int) -> Any:
        """Returns the tensors that this process stored in ``round``, for :meth:`join` in other processes."""
        raise NotImplementedError(f"{type(self).__name__} supports client state only in one process.")

    def join(self, round: int, share: Any) -> None:  # noqa: B027 - optional
        """Adds tensors stored by another process. ``share`` is the other process's result of :meth:`share`."""


def build_store(store: str | os.PathLike[str] | ClientStore | None) -> ClientStore:
    """Returns a given store, a :class:`FolderStore` for a path, or a store in memory for ``None``."""
    if store is None:
        return MemoryStore()
    return store if isinstance(store, ClientStore) else FolderStore(store)


class MemoryStore(ClientStore):
    """Store in memory and in checkpoints, for up to hundreds of clients with small state."""

    def __init__(self) -> None:
        self._states: dict[Client, State] = {}
        self._round = -1
        self._of_round: dict[Client, State] = {}  # separate, because a checkpoint inside a round excludes these changes

    def get(self, client: Client) -> State | None:
        return self._of_round.get(client, self._states.get(client)) or None

    def clients(self) -> Collection[Client]:
        return self._latest()

    def put(self, client: Client, round: int, state: State) -> None:
        if round != self._round:
            self._states, self._round, self._of_round = self._latest(), round, {}
        self._of_round[client] = copy_state(state)

    def commit(self, round: int, clients: Collection[Client]) -> None:
        if round == self._round:
            self._of_round = {client: state for client, state in self._of_round.items() if client in clients}

    def checkpoint(self, round: int) -> dict[str, Any]:
        states = self._latest() if self._round < round else self._states
        return {"clients": plain_keys(states), "states": [copy_state(state) for state in states.values()]}

    def restore(self, round: int, state: dict[str, Any]) -> None:
        if "folder" in state:
            raise ValueError(f"The checkpoint's client state is in a folder: set store={state['folder']!r}.")
        self._states = dict(zip(state.get("clients", ()), state.get("states", ()), strict=True))
        self._round, self._of_round = -1, {}

    def share(self, round: int) -> Any:
        return self._of_round if self._round == round else {}

    def join(self, round: int, share: Any) -> None:
        for client, state in share.items():
            self.put(client, round, state)

    def _latest(self) -> dict[Client, State]:
        return {client: state for client, state in (self._states | self._of_round).items() if state}


class FolderStore(ClientStore):
    """Stores clients' tensors in safetensors files, ``<folder>/run-0/<client>/<round>.safetensors``.

    A new fit starts the next run in the folder. A resumed fit continues the checkpoint's run. A client with a missing
    or damaged file is excluded from the round.

    A training checkpoint does not contain the stored tensors. Only the files for the last two checkpoints are kept, so
    training cannot resume from older ones. Set ``keep_all`` to keep all files.

    Args:
        folder: Folder for the files. Several processes need a shared file system.
        keep_all: Whether to keep all files, for example to resume from the best checkpoint.

    Example:
        >>> import tempfile, torch
        >>> store = FolderStore(tempfile.mkdtemp())
        >>> store.put("a", 0, {"head": torch.tensor([1.0])})
        >>> store.get("a")
        {'head': tensor([1.])}
    """

    def __init__(self, folder: str | os.PathLike[str], keep_all: bool = False) -> None:
        self.folder = Path(folder)
        self.keep_all = keep_all
        self._run = self._last_run()  # `None` until the first `put` in this run
        self._resumed_at: int | None = None
        self._written: set[Client] = set()  # in this run; other versions after `_resumed_at` belong to older runs
        self._prunable: set[Client] = set()
        self._last_checkpoint = 0
        self._rank = 0  # only the first process deletes old versions
        self._of_round: tuple[int, list[Client]] = (-1, [])
        self._kept: set[Client] = set()  # clients with a required version

    def get(self, client: Client) -> State | None:
        """Returns the client's latest tensors, if any. A missing, unreadable or changed file raises ``ClientFault``."""
        versions = self._versions(client)
        if not versions:
            if client in self._kept:
                _log.error("The state of client %r is missing: %s does not exist.", client, self._folder(client))
                raise ClientFault("the client's stored state is missing")
            return None
        path = versions[-1][1]
        try:
            state = load_file(path)
            with safe_open(path, framework="pt") as file:
                known = (file.metadata() or {}).get(_DIGEST)
        except Exception as error:
            _log.error("The state of client %r cannot be read: %s: %s.", client, path, describe(error))
            raise ClientFault("the client's stored state cannot be read") from error
        if known != digest(state):
            _log.error("The state of client %r has changed in the file: %s.", client, path)
            raise ClientFault("the client's stored state has changed in the file since the last write: wrong checksum")
        return state or None

    def clients(self) -> Collection[Client]:
        return self._kept

    def put(self, client: Client, round: int, state: State) -> None:
        if self._run is None:
            last = self._last_run()
            self._run = 0 if last is None else last + 1
        folder = self._folder(client)
        versions = self._versions(client)
        run_paths = {path for _, path in versions}
        path = folder / f"{round:08d}.safetensors"
        for stale in folder.glob("*.safetensors"):
            # Version from the run before this run resumed at an earlier round. The deletion comes before the write:
            # otherwise each kill between write and deletion would add a file.
            if stale not in run_paths and stale != path and _is_number(stale.stem):
                stale.unlink(missing_ok=True)
        with atomic_write(path, f"-{self._rank}.partial") as partial:  # every process deletes callback memories
            # Copies, because safetensors refuses tensors that share memory.
            copies = {name: value.contiguous().cpu() for name, value in copy_state(state).items()}
            save_file(copies, partial, metadata={_DIGEST: digest(copies)})
        # No checkpoint needs the versions between the last checkpoint and the previous version.
        between = [old for version, old in versions if self._last_checkpoint <= version < round]
        for old in () if self.keep_all else between[:-1]:
            old.unlink(missing_ok=True)
        self._written.add(client)
        self._kept.add(client)
        self._prunable.add(client)
        if self._of_round[0] != round:
            self._of_round = round, []
        self._of_round[1].append(client)

    def commit(self, round: int, clients: Collection[Client]) -> None:
        if self._of_round[0] != round:
            return
        refused = [client for client in self._of_round[1] if client not in clients]
        self._of_round = round, [client for client in self._of_round[1] if client in clients]
        for client in refused:
            (self._folder(client) / f"{round:08d}.safetensors").unlink(missing_ok=True)
            if not self._versions(client):
                self._kept.discard(client)

    def checkpoint(self, round: int) -> dict[str, Any]:
        """Returns the state for a checkpoint. Deletes files unused by this and the previous checkpoint."""
        if round > self._last_checkpoint:
            obsolete: list[Path] = []
            for client in () if self.keep_all or self._rank else list(self._prunable):
                versions = self._versions(client)
                obsolete += [path for version, path in versions if version < self._last_checkpoint][:-1]
                if not versions or versions[-1][0] < self._last_checkpoint:
                    self._prunable.discard(client)
            if obsolete:
                write_text_atomically(self._oldest, str(self._last_checkpoint))
            for path in obsolete:
                path.unlink(missing_ok=True)
            self._last_checkpoint = round
        return {"folder": str(self.folder), "run": self._run, "kept": plain_keys(self._kept_until(round))}

    def restore(self, round: int, state: dict[str, Any]) -> None:
        """Restores the clients' tensors from before ``round``, using the files of the checkpoint's run.

        Raises an error if these files were deleted when later checkpoints were saved. Also raises an error if the
        checkpoint's fit used a :class:`MemoryStore`.
        """
        if state.get("clients"):
            raise ValueError(
                "The checkpoint itself contains the clients' stored tensors, because its fit had no folder as `store`, "
                "but this fit has a folder: set store=None."
            )
        self._run = state.get("run")
        if self._run is not None and (type(self._run) is not int or self._run < 0):
            raise ValueError(
                f"Expected `run` to be an integer >= 0, but the checkpoint has {self._run!r}: use another checkpoint."
            )
        if self._run is not None and self._oldest.exists() and round < int(self._oldest.read_text()):
            raise ValueError(
                f"The folder {str(self.folder)!r} no longer contains the client state after {round} rounds, only "
                f"states from {self._oldest.read_text()} rounds on. Resume from one of the last two checkpoints, "
                "or restore a copy of the folder. To keep all files in future runs, set "
                f"store=FolderStore({str(self.folder)!r}, keep_all=True)."
            )
        self._resumed_at = self._last_checkpoint = round
        self._kept = set(state.get("kept", ()))
        self._written.clear()
        self._prunable.clear()

    def newest(self, client: Client) -> int:
        """Returns the round of a client's latest tensors, or -1 if nothing is stored."""
        return max((version for version, _ in self._versions(client)), default=-1)

    def prune(self, client: Client, round: int) -> None:
        """Deletes a client's files from rounds before ``round``, except the newest of these files."""
        for _, path in [version for version in self._versions(client) if version[0] < round][:-1]:
            path.unlink()

    def start(self, process_group: ProcessGroup) -> None:
        if process_group.size > 1:
            last = self._last_run()
            self._run = process_group.broadcast((0 if last is None else last + 1) if self._run is None else self._run)
        self._rank = process_group.rank

    def share(self, round: int) -> Any:
        return self._of_round[1] if self._of_round[0] == round else []

    def join(self, round: int, share: Any) -> None:
        self._of_round = round, [*self.share(round), *share]
        self._written.update(share)
        self._kept.update(share)
        self._prunable.update(share)

    @property
    def _oldest(self) -> Path:
        # Contains the number of rounds of the oldest complete state.
        return self.folder / f"run-{self._run}" / "oldest"

    def _last_run(self) -> int | None:
        names = (path.name.removeprefix("run-") for path in self.folder.glob("run-*"))
        return max((int(name) for name in names if _is_number(name)), default=None)

    def _kept_until(self, round: int) -> list[Client]:
        if self._of_round[0] < round:
            return list(self._kept)
        return [
            client for client in self._kept
            if client not in self._of_round[1] or any(version < round for version, _ in self._versions(client))
        ]  # fmt: skip

    def _folder(self, client: Client) -> Path:
        kind = "s" if isinstance(client, str) else "i"
        name = urllib.parse.quote(str(client), safe="", errors="surrogatepass")
        if len(name) > _LONGEST_NAME:  # file systems limit names to 255 bytes
            name = f"{name[:100]}-{hashlib.sha256(name.encode()).hexdigest()}"
        return self.folder / f"run-{self._run}" / f"{kind}-{name}"

    def _versions(self, client: Client) -> list[tuple[int, Path]]:
        if self._run is None:
            return []
        paths = sorted(path for path in self._folder(client).glob("*.safetensors") if _is_number(path.stem))
        end = None if client in self._written else self._resumed_at
        return [(int(path.stem), path) for path in paths if end is None or int(path.stem) < end]


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()
