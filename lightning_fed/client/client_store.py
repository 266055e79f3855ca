"""Stores of the tensors that stay with a client between its visits: personal layers, optimizer state.

Entries are versioned by round, so that a run resumed from an earlier checkpoint does not see what later rounds wrote.
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
    """Store of per-client tensors that outlive a visit. Only the cohort's entries need to be in memory."""

    @abstractmethod
    def get(self, client: Client) -> State | None:
        """The client's newest tensors, or ``None`` if it has none; the caller may keep but not change them."""

    def clients(self) -> Collection[Client]:
        """The clients with tensors. As a fit ends, these clients measure BatchNorm statistics again."""
        return ()

    @abstractmethod
    def put(self, client: Client, round: int, state: State) -> None:
        """Replaces the client's tensors as of ``round``; an empty state forgets the client."""

    @abstractmethod
    def settle(self, round: int, clients: Collection[Client]) -> None:
        """Takes back what was put as of ``round``, but for these clients': those whose updates counted."""

    @abstractmethod
    def checkpoint(self, round: int) -> dict[str, Any]:
        """State for a training checkpoint, as of the end of round ``round - 1``: tensors and primitives."""

    @abstractmethod
    def restore(self, round: int, state: dict[str, Any]) -> None:
        """Restores the store as of that :meth:`checkpoint`; ``restore(0, {})`` empties it."""

    def start(self, process_group: ProcessGroup) -> None:  # noqa: B027 - optional
        """Prepares the store in every one of several processes, before the first round and after a restore."""

    def share(self, round: int) -> Any:
        """Changes of this store in ``round`` that the stores of the other processes must know.

        The result can be anything that can be pickled. A store that does not implement the method serves one process.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps what is the clients' for one process only.")

    def join(self, round: int, share: Any) -> None:  # noqa: B027 - optional
        """Takes over the changes that :meth:`share` of another process's store returned."""


def build_store(store: str | os.PathLike[str] | ClientStore | None) -> ClientStore:
    """Builds a store from an argument: a store itself, the path of a folder, or ``None`` for memory."""
    if store is None:
        return MemoryStore()
    return store if isinstance(store, ClientStore) else FolderStore(store)


class MemoryStore(ClientStore):
    """Store in memory, saved in every checkpoint: for up to some hundreds of clients with small entries.

    Example:
        >>> import torch
        >>> store = MemoryStore()
        >>> store.put("a", 0, {"head": torch.tensor([1.0])})
        >>> store.get("a"), store.get("b")
        ({'head': tensor([1.])}, None)

    """

    def __init__(self) -> None:
        self._states: dict[Client, State] = {}
        self._round = -1
        self._of_round: dict[Client, State] = {}  # separate, so that a checkpoint inside a round can leave them out

    def get(self, client: Client) -> State | None:
        """The client's tensors, or ``None``."""
        return self._of_round.get(client, self._states.get(client)) or None

    def clients(self) -> Collection[Client]:
        """The clients with tensors."""
        return [client for client, state in (self._states | self._of_round).items() if state]

    def put(self, client: Client, round: int, state: State) -> None:
        """Keeps a copy of the client's tensors."""
        if round != self._round:
            self._add_round(self._states)
            self._round, self._of_round = round, {}
        self._of_round[client] = copy_state(state)

    def settle(self, round: int, clients: Collection[Client]) -> None:
        """Takes back the tensors of the others."""
        if round == self._round:
            self._of_round = {client: state for client, state in self._of_round.items() if client in clients}

    def checkpoint(self, round: int) -> dict[str, Any]:
        """All clients' tensors as of the end of round ``round - 1``."""
        states = dict(self._states)
        if self._round < round:
            self._add_round(states)
        return {"clients": plain_keys(states), "states": [copy_state(state) for state in states.values()]}

    def restore(self, round: int, state: dict[str, Any]) -> None:
        """Restores all clients' tensors.

        Raises:
            ValueError: If the checkpoint was taken with a folder.

        """
        if "folder" in state:
            raise ValueError(
                f"The checkpoint's clients keep what is theirs in a folder: set store={state['folder']!r}."
            )
        self._states = dict(zip(state.get("clients", ()), state.get("states", ()), strict=True))
        self._round, self._of_round = -1, {}

    def share(self, round: int) -> Any:
        """The tensors of the round's clients."""
        return self._of_round if self._round == round else {}

    def join(self, round: int, share: Any) -> None:
        """Stores the other process's tensors too, because any process may train a client next."""
        for client, state in share.items():
            self.put(client, round, state)

    def _add_round(self, states: dict[Client, State]) -> None:
        """Adds the tensors of the round, and removes clients without any."""
        for client, state in self._of_round.items():
            states[client] = state
            if not state:
                del states[client]


class FolderStore(ClientStore):
    """Store in safetensors files of a folder: ``<folder>/run-0/<client>/<round>.safetensors``.

    A fit that starts anew begins the folder's next run, and leaves the runs before it as they are; one that is resumed
    goes on with the run of its checkpoint. Files and folders of other names are nobody's and are left alone.

    Every file has a checksum of its tensors. A client whose folder is gone, or whose file cannot be read or has other
    bytes than were written, is left out of the round by name: it does not go on as if it had never taken part.

    Files are written atomically, so a killed run leaves no half-written one. A training checkpoint holds no tensors of
    the store. So that a run can be resumed from either of the last two checkpoints, versions
    are kept from the newest that the previous checkpoint saw; older ones are deleted when a checkpoint is taken, and
    resuming from a checkpoint that would need them is an error. With ``keep_all`` nothing is deleted, for resuming from
    the best checkpoint, say.

    Args:
        folder: Folder of the files; created if it does not exist. Several processes need one that all of them see.
        keep_all: Whether every version is kept: every visit's, for as long as the run trains.

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
        self._run = self._last_run()  # `None` until this run's first `put`
        self._resumed_at: int | None = None
        self._written: set[Client] = set()  # by this run: other clients' versions from `_resumed_at` on are older runs'
        self._prunable: set[Client] = set()
        self._last_checkpoint = 0
        self._rank = 0  # of several processes, of which the first deletes
        self._of_round: tuple[int, list[Client]] = (-1, [])
        self._kept: set[Client] = set()  # clients that must have a version

    def get(self, client: Client) -> State | None:
        """Reads the client's newest tensors.

        Raises:
            ClientFault: If they are not there any more, or not as they were written.

        """
        versions = self._versions(client)
        if not versions:
            if client in self._kept:
                _log.error("What client %r has kept is not there any more: %s is gone.", client, self._folder(client))
                raise ClientFault("what it has kept is not there any more")
            return None
        path = versions[-1][1]
        try:
            state, known = load_file(path), _read_digest(path)
        except Exception as error:
            _log.error("What client %r has kept cannot be read: %s: %s.", client, path, describe(error))
            raise ClientFault("what it has kept cannot be read") from error
        if known is not None and known != digest(state):  # files of earlier releases have none
            _log.error("What client %r has kept has changed since it was written: %s.", client, path)
            raise ClientFault("what it has kept has changed since it was written")
        return state or None

    def clients(self) -> Collection[Client]:
        """The clients with a file."""
        return self._kept

    def put(self, client: Client, round: int, state: State) -> None:
        """Writes the client's tensors as of ``round``."""
        if self._run is None:
            last = self._last_run()
            self._run = 0 if last is None else last + 1
        folder = self._folder(client)
        versions = self._versions(client)
        run_paths = {path for _, path in versions}
        path = folder / f"{round:08d}.safetensors"
        with atomic_write(path, f"-{self._rank}.partial") as partial:  # all processes write when a client is forgotten
            # Copies, because safetensors refuses tensors that share memory.
            copies = {name: value.contiguous().cpu() for name, value in copy_state(state).items()}
            save_file(copies, partial, metadata={_DIGEST: digest(copies)})
        for stale in folder.glob("*.safetensors"):
            # Of a run that this one, resumed from an earlier round, replaces.
            if stale not in run_paths and stale != path and _is_number(stale.stem):
                stale.unlink(missing_ok=True)
        # No checkpoint, also of times to come, needs those between the last one and the newest before this one.
        between = [old for version, old in versions if self._last_checkpoint <= version < round]
        for old in () if self.keep_all else between[:-1]:
            old.unlink(missing_ok=True)
        self._written.add(client)
        self._kept.add(client)
        self._prunable.add(client)
        if self._of_round[0] != round:
            self._of_round = round, []
        self._of_round[1].append(client)

    def settle(self, round: int, clients: Collection[Client]) -> None:
        """Deletes the others' versions of the round."""
        if self._of_round[0] != round:
            return
        refused = [client for client in self._of_round[1] if client not in clients]
        self._of_round = round, [client for client in self._of_round[1] if client in clients]
        for client in refused:
            (self._folder(client) / f"{round:08d}.safetensors").unlink(missing_ok=True)
            if not self._versions(client):
                self._kept.discard(client)

    def checkpoint(self, round: int) -> dict[str, Any]:
        """Deletes the versions that neither this checkpoint nor the one before it needs."""
        if round > self._last_checkpoint:
            obsolete: list[Path] = []
            for client in () if self.keep_all else list(self._prunable):
                versions = self._versions(client)
                obsolete += [path for version, path in versions if version < self._last_checkpoint][:-1]
                if not versions or versions[-1][0] < self._last_checkpoint:
                    self._prunable.discard(client)
            if self._rank:
                obsolete = []
            if obsolete:
                write_text_atomically(self._oldest, str(self._last_checkpoint))
            for path in obsolete:
                path.unlink(missing_ok=True)
            self._last_checkpoint = round
        return {"folder": str(self.folder), "run": self._run, "kept": plain_keys(self._kept_until(round))}

    def restore(self, round: int, state: dict[str, Any]) -> None:
        """Restores the store: only versions of rounds before ``round``, and later ones of this run, exist for it.

        Raises:
            ValueError: If the clients' tensors of that time were deleted, or were not kept in a folder.

        """
        if state.get("clients"):
            raise ValueError("The checkpoint holds what is the clients' itself: set store=None.")
        self._run = state.get("run")
        if self._run is not None and (type(self._run) is not int or self._run < 0):
            raise ValueError(f"The checkpoint names {self._run!r} as the store's run, which is no number.")
        if self._run is not None and self._oldest.exists() and round < int(self._oldest.read_text()):
            raise ValueError(
                f"The folder {str(self.folder)!r} does not hold any more what the clients had after {round} rounds: it"
                f" keeps what the last two checkpoints need, from {self._oldest.read_text()} rounds on. Resume from"
                " one of them, or restore a copy of the folder from that time. For runs to come,"
                f" store=FolderStore({str(self.folder)!r}, keep_all=True) deletes nothing."
            )
        self._resumed_at = self._last_checkpoint = round
        self._kept = set(state.get("kept", ()))
        self._written.clear()
        self._prunable.clear()

    def newest(self, client: Client) -> int:
        """Index of the round of the version that :meth:`get` reads; -1 if there is none."""
        return max((version for version, _ in self._versions(client)), default=-1)

    def prune(self, client: Client, round: int) -> None:
        """Deletes the client's versions that are older than its newest one of a round before ``round``."""
        for _, path in [version for version in self._versions(client) if version[0] < round][:-1]:
            path.unlink()

    def start(self, process_group: ProcessGroup) -> None:
        """Makes all processes write to the run of the first one; only the first one deletes files."""
        if process_group.size > 1:
            last = self._last_run()
            self._run = process_group.broadcast((0 if last is None else last + 1) if self._run is None else self._run)
        self._rank = process_group.rank

    def share(self, round: int) -> Any:
        """The clients that have new versions."""
        return self._of_round[1] if self._of_round[0] == round else []

    def join(self, round: int, share: Any) -> None:
        """Notes that the versions of these clients are this run's."""
        self._of_round = round, [*self.share(round), *share]
        self._written.update(share)
        self._kept.update(share)
        self._prunable.update(share)

    @property
    def _oldest(self) -> Path:
        """File with the number of rounds from which on the run's folder is complete."""
        return self.folder / f"run-{self._run}" / "oldest"

    def _last_run(self) -> int | None:
        names = (path.name.removeprefix("run-") for path in self.folder.glob("run-*"))
        return max((int(name) for name in names if _is_number(name)), default=None)

    def _kept_until(self, round: int) -> list[Client]:
        """Clients that must have a version of a round before ``round``."""
        if self._of_round[0] < round:
            return list(self._kept)
        return [
            client for client in self._kept
            if client not in self._of_round[1] or any(version < round for version, _ in self._versions(client))
        ]  # fmt: skip

    def _folder(self, client: Client) -> Path:
        kind = "s" if isinstance(client, str) else "i"
        name = urllib.parse.quote(str(client), safe="", errors="surrogatepass")
        if len(name) > _LONGEST_NAME:  # file systems take 255 bytes
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


def _read_digest(path: Path) -> str | None:
    with safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get(_DIGEST)
