"""Site record: an append-only log of server messages and answers, secured by a hash chain.

Each line is ``DIGEST JSON``. ``DIGEST`` is the SHA-256 of the previous line's digest, a space and the JSON. The chain
reveals changed, removed, added and moved lines. A second file contains the head: number and digest of the last line.
The server receives the head with each update, and returns the head with the next train request. A record that
contradicts the head is an error. After archiving, the new record's first line contains the old record's head.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning_fed.atomic_files import atomic_write, sync_folder
from lightning_fed.backends.site.owned_files import check_owner, check_parents

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no fcntl
    fcntl = None  # type: ignore[assignment]

DAY = 24 * 3600.0  # seconds

START = hashlib.sha256(b"lightning-fed site record").hexdigest()
"""Previous digest for the first line."""


# The rest of a file after crashes: a truncated line, or several, if crashes also truncated the lines that follow.
_TORN = re.compile(rb"[^\n]+|[0-9a-f]{1,64}( [^\n]*)?(\n([0-9a-f]{1,64}( [^\n]*)?)?)+")


class RecordError(Exception):
    """Raised if a site's message log is altered, damaged or unwritable."""


@dataclass(frozen=True)
class Line:
    """One line of a site's message log: number (from 1), digest and JSON content."""

    number: int
    digest: str
    content: dict[str, Any]

    @property
    def time(self) -> float:
        return datetime.fromisoformat(self.content["time"]).timestamp() if self.content else 0.0


def read_lines(file: Iterable[bytes], head: str = START, number: int = 0) -> Iterator[Line]:
    """Reads and verifies lines of a site's message log.

    ``file`` is the complete log, or only the part after line ``number``. ``head`` is the digest of line ``number``.
    A crash may leave truncated lines. The next complete line contains their SHA-256 digest under the key ``"torn"``.

    Example:
        >>> first = write_line(START, {"round": 0})
        >>> second = write_line(first[:64].decode(), {"round": 1})
        >>> [line.content["round"] for line in read_lines([first, second])]
        [0, 1]
        >>> list(read_lines([first.replace(b"0}", b"7}"), second]))
        Traceback (most recent call last):
        ...
        lightning_fed.backends.site.record.RecordError: line 1 of the site's record (message log) was altered
    """
    torn: list[bytes] = []
    for raw in file:
        digest, _, text = raw.rstrip(b"\n").partition(b" ")
        if not raw.endswith(b"\n") or digest.decode(errors="replace") != _digest(head, text):
            torn.append(raw.rstrip(b"\n"))
            continue
        content = json.loads(text)
        if content.get("torn") != (hashlib.sha256(b"\n".join(torn)).hexdigest() if torn else None):
            raise RecordError(f"line {number + 1} of the site's record (message log) was altered")
        number = content["line"] if content.get("event") == ROTATION and not number else number
        head, number = digest.decode(), number + len(torn) + 1
        torn = []
        yield Line(number, head, content)
    if torn:
        is_cut = len(torn) == 1 and not raw.endswith(b"\n")
        raise RecordError(
            f"line {number + 1} of the site's record (message log) was {'truncated' if is_cut else 'altered'}"
        )


def read_record(path: Path) -> Iterator[Line]:
    """Reads a site's complete message log, and verifies all lines. Raises ``RecordError`` for a changed line."""
    with path.open("rb") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_SH)
        yield from read_lines(file)


def write_line(head: str, content: Mapping[str, Any]) -> bytes:
    """Encodes ``content`` as a line for a site's message log. ``head`` is the previous line's digest."""
    text = json.dumps(dict(content), sort_keys=True).encode()
    return f"{_digest(head, text)} ".encode() + text + b"\n"


def _digest(head: str, text: bytes) -> str:
    return hashlib.sha256(f"{head} ".encode() + text).hexdigest()


HEAD_FILE = "site_head.json"
"""File name for the head of a record."""

CLOCK = "clock"
"""Event of a line written by the operator to set the record's time."""


ROTATION = "rotation"
"""Event of a first line written by the operator, after the record was archived."""


class Record:
    """Append-only log for all messages at a site.

    ``last`` is the newest line, and ``recent`` contains the lines from the 24 hours before. A second file stores the
    newest line's number and digest. If only the second file exists, the class raises ``RecordError``.
    """

    def __init__(self, path: Path, head: Path) -> None:
        self._path, self._head = path, head
        self.recent: deque[Line] = deque()
        self._file, self._position = (-1, -1), 0
        self._descriptor, self._torn = -1, b""
        self._digests: dict[int, str] = {}  # of all lines, by number
        self.last = Line(0, START, {})

    @contextmanager
    def open(self) -> Iterator[None]:
        """Opens and locks the log. Raises ``RecordError`` if lines added since the last check are invalid."""
        is_new, head = not self._path.exists(), self._read_head()
        if is_new and head[0]:
            raise RecordError(f"the record is missing, but must have {head[0]} lines according to {str(self._head)!r}")
        check_parents(self._path)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # some systems do not define all flags
            flags |= getattr(os, name, 0)
        descriptor = os.open(self._path, flags, 0o600)
        try:
            if is_new:
                sync_folder(self._path.parent)
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            self._descriptor = descriptor
            self._catch_up(self._read_head())
            yield
        finally:
            os.close(descriptor)

    def append(self, content: Mapping[str, Any]) -> Line:
        end = b""
        if self._torn:
            content, end = {**content, "torn": hashlib.sha256(self._torn).hexdigest()}, b"\n"
        data = end + write_line(self.last.digest, content)
        if os.write(self._descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, "the record's last line is incomplete", str(self._path))
        os.fsync(self._descriptor)
        self._catch_up(None)
        with atomic_write(self._head, f"-{os.getpid()}.partial") as partial:
            partial.write_text(json.dumps({"line": self.last.number, "digest": self.last.digest}))
        return self.last

    def has_line(self, number: int, digest: str) -> bool:
        """True if the log contains this line, or starts at a later line. Lines in an archived log are not checked."""
        return number < next(iter(self._digests), 1) or self._digests.get(number) == digest

    def _read_head(self) -> tuple[int, str]:
        try:
            head = json.loads(self._head.read_text())
            return int(head["line"]), str(head["digest"])  # digest of the last line
        except FileNotFoundError:
            return 0, START
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RecordError(f"{str(self._head)!r}, with the last line's digest, cannot be read: {error}") from error

    def _catch_up(self, head: tuple[int, str] | None) -> None:
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise RecordError("the record is not a regular file")
        check_owner(status)
        if self._file != (status.st_dev, status.st_ino):
            self._file, self._position, self.last = (status.st_dev, status.st_ino), 0, Line(0, START, {})
            self.recent.clear()
            self._digests.clear()
        if status.st_size < self._position:
            raise RecordError("the record is shorter than before")
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            file.seek(self._position)
            data = file.read()
        end, lines = 0, io.BytesIO(data)
        try:
            for line in read_lines(lines, self.last.digest, self.last.number):
                self.last, end = line, lines.tell()
                self._digests[line.number] = line.digest
                if line.content.get("event") == CLOCK:
                    self.recent.clear()
                self.recent.append(line)
                while self.recent[0].time <= line.time - DAY:
                    self.recent.popleft()
        except RecordError:
            if not _TORN.fullmatch(data, end):
                raise
        self._torn = data[end:]
        self._position += end
        if head is None:
            return
        if head[0] and not self.has_line(*head):
            raise RecordError(
                f"the record's line {head[0]} is missing, or the line's digest differs from the digest in "
                f"{str(self._head)!r}"
            )
        if not head[0] and len(self._digests) > 1:  # a crash after the first line leaves no head file
            raise RecordError(
                f"the site's record (message log) has {self.last.number} lines, but the file of the last line's digest "
                f"is missing: restore {str(self._head)!r}, or start a new record with `lightning-fed audit --rotate`"
            )
