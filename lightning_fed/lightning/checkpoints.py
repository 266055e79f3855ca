"""Writes Lightning checkpoints atomically, and loads checkpoints without pickle."""

from __future__ import annotations

import logging
import pickle
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import Checkpoint

from lightning_fed.atomic_files import atomic_write

_log = logging.getLogger(__name__)


class RoundCheckpoint(Checkpoint):
    """Overwrites one checkpoint after each round, atomically and after all other callbacks."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with atomic_write(self._path) as partial:
            trainer.save_checkpoint(partial, weights_only=False)  # otherwise Lightning logs the default every round


class SafeCheckpointIO(TorchCheckpointIO):
    """Writes Lightning checkpoints atomically, and loads checkpoints without pickle.

    Pickle can execute code from a file. Atomic writes protect the last checkpoint if the disk is full.
    """

    def load_checkpoint(
        self, path: str | Path, map_location: Any = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a checkpoint. ``weights_only=False`` also allows pickled objects."""
        if weights_only is False:
            _log.warning("Loading %r with `weights_only=False`: pickled objects can execute code.", str(path))
        files = get_filesystem(path)
        if not files.exists(str(path)):
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        with files.open(str(path), "rb") as file:
            try:
                content: dict[str, Any] = torch.load(file, map_location, weights_only=weights_only is not False)
            except UnpicklingError as error:
                raise ValueError(
                    f"Expected tensors and primitives in the checkpoint {str(path)!r}, but got"
                    f" {describe_objects(path)}: store plain values instead. If you trust the file, load it with"
                    " `fit(..., weights_only=False)` (from Lightning 2.6), which executes code in the file."
                ) from error
        return content

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Writes a checkpoint atomically. If the write fails, an earlier file stays unchanged."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        file = Path(path)
        # The temporary folder has a different name, because Lightning searches file names for `last`.
        folder = file.with_name(f".{zlib.crc32(file.name.encode()):08x}.partial")
        shutil.rmtree(folder, ignore_errors=True)  # temporary files of a killed process
        # Lightning first writes to the folder for temporary files, which may be on another file system.
        default_folder = tempfile.tempdir
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.tempdir = str(folder)
            super().save_checkpoint(checkpoint, path, storage_options)
        except OSError as error:
            error.add_note(f"Raised while writing {str(file)!r}: the file is unchanged.")
            raise
        finally:
            tempfile.tempdir = default_folder
            shutil.rmtree(folder, ignore_errors=True)


def describe_objects(path: str | Path) -> str:
    """Lists the classes of pickled objects in a checkpoint, without executing code."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(_find_pickle(archive)) as file:
            classes = dict(_find_objects(_InertUnpickler(file).load(), ""))
        unsafe = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # a damaged or foreign file may have any content
        return "other objects"
    named = [f"an object of {origin!r} in {name!r}" for name, origin in classes.items() if origin in unsafe]
    return " and ".join(named[:3]) or f"objects of {sorted(unsafe)[:3]}"


class _Inert(dict[Any, Any]):
    origin = ""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None: ...

    def append(self, value: object) -> None: ...

    def extend(self, values: object) -> None: ...


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        return type(name, (_Inert,), {"origin": f"{module}.{name}"})

    def persistent_load(self, pid: Any, /) -> None: ...


def _find_pickle(archive: zipfile.ZipFile) -> str:
    return next(name for name in archive.namelist() if name.endswith("data.pkl"))


def _find_objects(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, _Inert):
        yield name, value.origin
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _find_objects(part, f"{name}.{key}".removeprefix("."))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _find_objects(part, name)


def protect_checkpoints(trainer: L.Trainer) -> None:
    """Installs :class:`SafeCheckpointIO` in a Trainer without a custom ``CheckpointIO``."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = SafeCheckpointIO()


def folders_of(trainer: L.Trainer) -> list[str]:
    """Lists the folders in which a Trainer writes checkpoints, logs and temporary files."""
    logs = [f"{logger.log_dir or logger.save_dir} ({type(logger).__name__})" for logger in trainer.loggers]
    checkpoints = [str(getattr(callback, "dirpath", None) or "") for callback in trainer.checkpoint_callbacks]
    folders = [trainer.default_root_dir, *checkpoints, *logs, f"{tempfile.gettempdir()} (temporary files)"]
    return [folder for folder in dict.fromkeys(folders) if folder]
