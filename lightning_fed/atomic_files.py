"""Atomic writes: a file is complete or absent, whenever the process is killed."""

from __future__ import annotations

import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins import TorchCheckpointIO
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


def write_private(path: Path, content: bytes) -> None:
    """Writes a new file that only this user can read.

    Raises:
        FileExistsError: If it is there already.

    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


class RoundCheckpoint(Checkpoint):
    """Checkpoint callback that overwrites one file after every round, atomically, after all other callbacks.

    Args:
        path: The file.

    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves the round."""
        with atomic_write(self._path) as partial:
            trainer.save_checkpoint(partial, weights_only=False)  # else Lightning logs its default, every round


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's own way to write checkpoints, with its temporary file beside the checkpoint.

    Lightning writes into the folder for temporary files first. Where that folder is on another file system, a full disk
    or a kill while the file is copied leaves a part of a file, or nothing, in place of the last complete one.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes a checkpoint; an exception gets a note that names the file, which is as it was before."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        file = Path(path)
        # Of another name than the file: Lightning looks for `last` among the names.
        folder = file.with_name(f".{zlib.crc32(file.name.encode()):08x}.partial")
        shutil.rmtree(folder, ignore_errors=True)  # what a killed process has left
        before = tempfile.tempdir
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.tempdir = str(folder)
            super().save_checkpoint(checkpoint, path, storage_options)
        except OSError as error:
            error.add_note(f"This was raised while {str(file)!r} was written, which is as it was before.")
            raise
        finally:
            tempfile.tempdir = before
            shutil.rmtree(folder, ignore_errors=True)


def write_checkpoints_atomically(trainer: L.Trainer) -> None:
    """Has a Trainer's checkpoints written whole or not at all, unless it has a ``CheckpointIO`` of the user's."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()


def folders_of(trainer: L.Trainer) -> list[str]:
    """Folders that a fit writes to: of its checkpoints, of every logger, and for temporary files."""
    logs = [f"{logger.log_dir or logger.save_dir} ({type(logger).__name__})" for logger in trainer.loggers]
    checkpoints = [str(getattr(callback, "dirpath", None) or "") for callback in trainer.checkpoint_callbacks]
    found = [trainer.default_root_dir, *checkpoints, *logs, f"{tempfile.gettempdir()} (temporary files)"]
    return [folder for folder in dict.fromkeys(found) if folder]
