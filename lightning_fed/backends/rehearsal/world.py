"""Virtual time, machines and disks, for a deterministic simulation of a deployment in one thread."""

from __future__ import annotations

import errno
import heapq
import logging
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

from lightning_fed.backends.rehearsal.profiles import DAY, Profile
from lightning_fed.console import LOGGER

EPOCH = 1_800_000_000.0
"""Unix time at the start of every rehearsal."""

_WRITE_BACK = 30.0  # seconds until a system writes changed folders to the disk

_REPLACED = (  # modules that read a clock or draw names and keys
    *("backends.wire.transport.time", "backends.site.gate.time", "backends.site.signatures.time"),
    *("backends.wire.run_folder.time", "backends.wire.runner.time", "backends.wire.remote_client_store.uuid"),
    "privacy.central.secrets",
)

_OPERATIONS = ("open", "write", "fsync", "replace", "rename", "unlink")  # in `os`; each may fail


class Killed(BaseException):
    """Raised to end the process of a simulated machine. ``except Exception`` does not catch this class."""


@dataclass
class _Change:
    """Replaced, renamed or deleted file on a simulated machine, with the earlier content."""

    time: float
    folder: int
    path: Path
    earlier: bytes | None
    is_synced: bool = False


class Machine:
    """Simulated machine with a process, a disk, a clock and a connection.

    - ``starts``: number of starts of the process.
    - ``is_dead``: whether the process was killed and cannot change files.
    - ``lost``: for each file, the largest number of changes undone by one power failure.
    """

    def __init__(self, name: str, profile: Profile, folder: Path, world: World) -> None:
        self.name, self.profile, self.folder, self._world = name, profile, folder, world
        self.random = random.Random(f"{world.seed}/{name}")
        self.starts, self.is_up, self.skew = 1, True, profile.clock_skew
        self._began_at, self._ended_at = {1: world.now}, dict[int, float]()  # by start number
        self.synced: dict[int, int] = {}  # durable bytes by inode
        self.lost = Counter[Path]()
        self._changes: list[_Change] = []
        self.fuse: int | None = None  # file operations until a fault
        self.is_fuse_deadly = self.is_dead = False
        self.next_kill = self._draw(DAY / profile.restarts) if profile.restarts else math.inf
        never = (math.inf, math.inf)
        self._outages = [never if profile.availability == 1 else (-1.0, 0.0)]
        if profile.clock_jumps:
            world.at(self._draw(DAY / profile.clock_jumps), self._jump)

    def keep(self, path: Path) -> None:
        if path.exists():
            self.synced[path.stat().st_ino] = path.stat().st_size

    def is_online(self, time: float) -> bool:
        return self.is_up and all(not start <= time < end for start, end in self._plan_outages(time))

    def lost_since(self, start: int, now: float) -> float | None:
        outage = next((begin for begin, end in self._outages if begin <= now < end), None)
        ended = self._ended_at.get(start)
        if ended is None or ended > now:
            return outage
        return min([ended, *(begin for begin, end in self._outages if begin <= ended < end)])

    def online_since(self, now: float) -> float | None:
        if not self.is_online(now):
            return None
        return max([self._began_at[self.starts], *(end for _, end in self._outages if end <= now)])

    def transfer(self, time: float, num_bytes: float) -> float:
        left = self.profile.latency + 8e-6 * num_bytes / self.profile.bandwidth
        while True:
            start, end = next(outage for outage in self._plan_outages(time + left) if outage[1] > time)
            if time + left <= start:
                return time + left
            left, time = left - max(0.0, start - time), end

    def work(self, seconds: float) -> None:
        end = self._world.now + self._world.offset + seconds
        if end >= self.next_kill:
            self._world.offset = self.next_kill - self._world.now
            self.end("is killed")
        self._world.offset += seconds

    def end(self, reason: str) -> NoReturn:
        if reason:
            self._world.note(self.name, reason)
        self.is_dead, self.next_kill = True, self._world.now + self._world.offset
        raise Killed(self.name)

    def kill(self, restart: Callable[[], None] | None = None) -> float:
        self.is_up, self.is_dead, self.fuse = False, False, None
        is_power_lost = self.random.random() < 0.5
        if is_power_lost:
            with self._world.run_on(None):  # no process changes these files
                self._lose_bytes()
        now = self._ended_at[self.starts] = self._world.now
        start = now + self.random.expovariate(1 / self.profile.downtime)
        words = "without unsaved bytes" if is_power_lost else "with all files"
        self._world.note(self.name, f"will start again after {start - now:.0f} s, {words}")
        rate = self.profile.restarts
        self.next_kill = start + self.random.expovariate(rate / DAY) if rate else math.inf

        def begin() -> None:
            self.is_up, self.starts = True, self.starts + 1
            self._began_at[self.starts] = self._world.now
            self._world.note(self.name, "starts again")
            if restart is not None:
                restart()

        self._world.at(start, begin)
        return start

    def touch(self, name: str, operation: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Executes a file operation on this simulated machine, or simulates a fault (a crash, or a full disk)."""
        if self.is_dead:
            raise Killed(self.name)
        is_reading = name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if is_reading or (name == "write" and args[0] <= 2):
            return operation(*args, **options)
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                self._fail(name, operation, args, options)
        if self.profile.disk < math.inf and name in ("write", "fsync") and self._is_full():
            raise OSError(errno.ENOSPC, "No space left on device")
        if name == "fsync":
            status = os.fstat(args[0])
            self.synced[status.st_ino] = status.st_size
            for change in self._changes:
                change.is_synced = change.is_synced or change.folder == status.st_ino
            return None  # no rehearsal needs a durable file
        if name in ("replace", "rename", "unlink"):
            time = self._world.monotonic()
            self._changes = [change for change in self._changes if time - change.time < _WRITE_BACK]
            for path in () if options else map(Path, args):
                earlier = path.read_bytes() if path.is_file() else None
                if earlier is not None or name != "unlink":
                    self._changes.append(_Change(time, path.parent.stat().st_ino, path, earlier))
            with suppress(OSError):
                self.synced.pop(os.stat(args[-1], **options).st_ino, None)  # the file system may use the inode again
        return operation(*args, **options)

    def _fail(self, name: str, operation: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        words = "is killed" if self.is_fuse_deadly else "has a full disk"
        self._world.note(self.name, f"{words} at the file operation {name!r}")
        if name == "write":
            operation(args[0], args[1][: len(args[1]) // 2], **options)
        if not self.is_fuse_deadly:
            raise OSError(errno.ENOSPC, "No space left on device")
        if name in ("replace", "unlink") and self.random.random() < 0.5:
            with suppress(FileNotFoundError):
                operation(*args, **options)
        self.end("")

    def set_fuse(self, seconds: float) -> None:
        if self.fuse is None and self.random.random() < self.profile.disk_faults * seconds / DAY:
            self.fuse, self.is_fuse_deadly = self.random.randrange(40), self.random.random() < 0.5

    def _is_full(self) -> bool:
        used = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        return used * self._world.scale > self.profile.disk * 1e9

    def _lose_bytes(self) -> None:
        """Simulates a power failure: undoes recent changes to files, and shortens files that were not synchronised."""
        profile, undone = self.profile, Counter[Path]()
        is_cache_lost = profile.write_cache > 0 and self.random.random() < profile.write_cache
        for change in reversed(self._changes):
            is_lost = is_cache_lost or not change.is_synced
            if is_lost and self._world.now - change.time < _WRITE_BACK and change.path.parent.is_dir():
                change.path.unlink(missing_ok=True)
                if change.earlier is not None:
                    change.path.write_bytes(change.earlier)
                    self.keep(change.path)
                undone[change.path] += 1
        self._changes.clear()
        self.lost |= undone
        for path in self.folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                status = path.stat()
                durable = self.synced.get(status.st_ino, 0)
                if durable < status.st_size:
                    cut = status.st_size - self.random.randrange(1, 32)
                    os.truncate(path, max(durable, self.random.choice((durable, cut))))

    def _draw(self, mean: float) -> float:
        return self._world.now + self.random.expovariate(1 / mean)

    def _plan_outages(self, time: float) -> list[tuple[float, float]]:
        share, mean = self.profile.availability, self.profile.outage
        while share < 1 and self._outages[-1][0] <= time:
            start = self._outages[-1][1] + self.random.expovariate((1 - share) / (mean * share))
            end = start + self.random.expovariate(1 / mean)
            self._outages.append((start, end))
            self._world.at(start, lambda: self._world.note(self.name, "loses the connection"))
            self._world.at(end, lambda: self._world.note(self.name, "connects again"))
        return self._outages

    def _jump(self) -> None:
        self.skew += self.random.uniform(-3600, 3600)
        self._world.note(self.name, f"has a clock that is {self.skew:+.0f} s ahead")
        self._world.at(self._draw(DAY / self.profile.clock_jumps), self._jump)


class World:
    """Simulated clock with a queue of events.

    - ``now``: simulated time of the current event in seconds.
    - ``offset``: simulated seconds since ``now``, spent by the machine running in this event.
    - ``scale``: factor for message and file sizes, to simulate a larger model.
    - ``log``: events as (seconds, machine, text).
    """

    def __init__(self, seed: int, scale: float = 1.0) -> None:
        self.seed, self.scale = seed, scale
        self.now = self.offset = 0.0
        self.machine: Machine | None = None
        self.log: list[tuple[float, str, str]] = []
        self.folder = ""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._names = random.Random(f"{seed}/names")

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, action))

    def note(self, machine: str, text: str) -> None:
        self.log.append((self.now + self.offset, machine, text.replace(self.folder, "") if self.folder else text))

    def advance(self, time: float) -> None:
        while self._events and self._events[0][0] <= time:
            due, _, action = heapq.heappop(self._events)
            self.now = max(self.now, due)
            action()
        self.now = max(self.now, time)

    @contextmanager
    def run_on(self, machine: Machine | None) -> Iterator[None]:
        """Runs the code of a ``with`` block on a simulated machine; with ``None``, without simulated faults."""
        before = self.machine, self.offset
        self.machine, self.offset = machine, 0.0
        try:
            yield
        finally:
            self.machine, self.offset = before

    # Functions of the modules `time`, `uuid` and `secrets`

    def monotonic(self) -> float:
        return self.now + self.offset

    def time(self) -> float:
        skew = 0.0 if self.machine is None else self.machine.skew
        return EPOCH + self.now + self.offset + skew

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def sleep(self, seconds: float) -> None:
        machine, end = self.machine, self.now + seconds
        if machine is not None and machine.next_kill <= end:
            self.advance(machine.next_kill)
            machine.end("is killed")
        self.advance(end)

    def uuid4(self) -> SimpleNamespace:
        return SimpleNamespace(hex=f"{self._names.getrandbits(128):032x}")

    def randbits(self, count: int) -> int:
        return self._names.getrandbits(count)

    @contextmanager
    def replace_time(self, folder: Path) -> Iterator[None]:
        """Replaces clock, disks and log in server and client code by the simulation, in a ``with`` block."""
        self.folder = f"{folder}/"
        with ExitStack() as stack:
            for name in _REPLACED:
                stack.enter_context(patch(f"lightning_fed.{name}", self))
            for name in _OPERATIONS:
                stack.enter_context(patch.object(os, name, self._wrap(name, getattr(os, name))))
            for name, value in (("handlers", [_Handler(self)]), ("propagate", False)):
                stack.enter_context(patch.object(LOGGER, name, value))
            for logger, level in ((LOGGER, logging.INFO), (logging.getLogger("lightning.pytorch"), logging.ERROR)):
                stack.callback(logger.setLevel, logger.level)
                logger.setLevel(level)
            yield

    def _wrap(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            if self.machine is None:
                return operation(*args, **options)
            return self.machine.touch(name, operation, args, options)

        return run


class _Handler(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        machine = self._world.machine
        if "\n" not in record.getMessage():  # summaries have real times
            self._world.note("" if machine is None else machine.name, record.getMessage())
