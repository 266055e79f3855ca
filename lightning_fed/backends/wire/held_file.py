"""File of a client's node with the entries that the server does not send again."""

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
    """File with entries that the server will not send again; the clients of a node share it.

    It is written where their model does not begin with the server's values, or stops training in part: a process that
    answers one message has them from here.

    Args:
        folder: Folder of the fit.

    Example:
        >>> import tempfile, torch
        >>> held = HeldFile(Path(tempfile.mkdtemp()))
        >>> held.read()
        {}
        >>> held.keep({"w": torch.ones(1), "b": torch.ones(1)})
        >>> held.keep({"w": torch.zeros(1)})
        >>> held.read()["w"], held.read()["b"]
        (tensor([0.]), tensor([1.]))

    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "held.safetensors"

    def read(self) -> State:
        """The entries; empty where there are none, or none that can be read."""
        try:
            return dict(load_file(self._path))
        except Exception:  # the client asks for them again
            return {}

    def keep(self, state: State) -> None:
        """Adds entries, in the place of those with the same names; where they cannot be written, none are kept."""
        # Copies, because safetensors refuses tensors that share memory.
        whole = self.read() | copy_state(state)
        try:
            with atomic_write(self._path, f"-{os.getpid()}.partial") as partial:
                save_file({name: value.contiguous().cpu() for name, value in whole.items()}, partial)
        except Exception as error:  # a full disk, a type that safetensors does not know
            _log.warning("What the server sends once cannot be kept, and will be asked for again: %s.", describe(error))
