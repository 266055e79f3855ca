"""Files that are there as a whole or not at all, whenever the process is killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Checkpoint


@contextmanager
def atomic_write(path: Path, suffix: str = ".partial") -> Iterator[Path]:
    """Path to write a file to, which takes the place of another at the end, unless something was raised.

    Args:
        path: The file; its folder is made.
        suffix: In place of its own while it is written; one for each process, where several write the same file.

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
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Writes a text with :func:`atomic_write`."""
    with atomic_write(path) as partial:
        partial.write_text(text)


class RoundCheckpoint(Checkpoint):
    """Saves every round in the same file, which is never there half-written; after the other callbacks.

    ``ModelCheckpoint`` writes in the folder for temporary files first; where that is another file system, a process
    that is killed while the file is copied leaves half of it in the place of the last good one.

    Args:
        path: The file.

    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Saves the round."""
        with atomic_write(self._path) as partial:
            trainer.save_checkpoint(partial)
