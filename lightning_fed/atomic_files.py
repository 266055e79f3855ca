"""Writes files atomically: after a kill, a file is complete or missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_write(path: Path, suffix: str = ".partial") -> Iterator[Path]:
    """Yields a temporary path for writing, and then moves the file to ``path``.

    If writing fails, the old file stays unchanged. Missing folders are created. Processes that write the same file need
    different suffixes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}{suffix}")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except Exception as error:
        error.add_note(f"Raised while writing {str(path)!r}: the file is unchanged.")
        raise
    finally:
        with suppress(OSError):  # an error here, for example on a read-only disk, would hide the original exception
            partial.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Writes a folder's directory entries to disk with ``fsync``, if the system supports ``fsync`` on folders."""
    with suppress(OSError):  # Windows and some network file systems
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_text_atomically(path: Path, text: str) -> None:
    """Writes a text file with :func:`atomic_write`."""
    with atomic_write(path) as partial:
        partial.write_text(text)
