"""Atomic writes: a file is complete or absent, whenever the process is killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Checkpoint


@contextmanager
def atomic_write(path: Path, suffix: str = ".partial") -> Iterator[Path]:
    """Yields a temporary path to write to, and moves it to ``path`` at the end unless an exception was raised.

    An exception (a full disk, say) gets a note that names the file, which is as it was before.

    Args:
        path: The file; its folder is created.
        suffix: Suffix of the temporary file. Processes that write the same file need different ones.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "results" / "summary.csv"
        >>> with atomic_write(path) as partial:
        ...     _ = partial.write_text("round,accuracy")
        >>> path.read_text()
        'round,accuracy'

    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}{suffix}")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except Exception as error:
        error.add_note(f"This was raised while {str(path)!r} was written, which is as it was before.")
        raise
    finally:
        with suppress(OSError):  # of a disk that takes no changes, say: it would hide the reason
            partial.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Writes a text file with :func:`atomic_write`."""
    with atomic_write(path) as partial:
        partial.write_text(text)


class RoundCheckpoint(Checkpoint):
    """Checkpoint callback that overwrites one file after every round, atomically, after all other callbacks.

    ``ModelCheckpoint`` writes into the folder for temporary files first. Where that folder is on another file system, a
    process that is killed while the file is copied leaves half a file in place of the last complete one; and what it
    has written there stays. Here both are in a folder beside the file, which is emptied at the start.

    Args:
        path: The file.

    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = path.with_name(f"{path.stem}-partial")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Removes what a killed process has left."""
        if trainer.is_global_zero:
            shutil.rmtree(self._folder, ignore_errors=True)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves the round."""
        if trainer.is_global_zero:
            self._folder.mkdir(parents=True, exist_ok=True)
        before, tempfile.tempdir = tempfile.tempdir, str(self._folder)  # where Lightning writes first
        try:
            with atomic_write(self._path) as partial:
                trainer.save_checkpoint(partial)
        finally:
            tempfile.tempdir = before
        if trainer.is_global_zero:
            shutil.rmtree(self._folder, ignore_errors=True)
