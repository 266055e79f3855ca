"""Stores received model tensors on a client's machine, so the server need not send unchanged tensors again."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from safetensors.torch import load_file, save_file

from lightning_fed.atomic_files import atomic_write
from lightning_fed.errors import describe
from lightning_fed.messages import State
from lightning_fed.model.entries import copy_state

_log = logging.getLogger(__name__)


class HeldFile:
    """File with model tensors sent only once by the server. All clients on a machine share the file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "held.safetensors"  # a file, because each message may be handled by a new process

    def read(self) -> State:
        try:
            return dict(load_file(self._path))
        except Exception:  # the client will request the entries again
            return {}

    def store(self, state: State) -> None:
        # Copies, because safetensors refuses tensors that share memory.
        whole = self.read() | copy_state(state)
        try:
            with atomic_write(self._path, f"-{os.getpid()}.partial") as partial:
                save_file({name: value.contiguous().cpu() for name, value in whole.items()}, partial)
        except Exception as error:  # a full disk, or a dtype unknown to safetensors
            _log.warning(
                "Cannot store model entries, so the client will request the entries again: %s.", describe(error)
            )
