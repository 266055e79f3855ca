"""Checkpoints of models whose layers have got other widths: read, compared, and loaded into a module."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import lightning as L
import torch
from torch import nn

from lightning_fed.resize import fit_widths

Checkpoint: TypeAlias = str | Path | Mapping[str, Any]
"""A file, a Lightning checkpoint, or the state of a module."""

M = TypeVar("M", bound=nn.Module)

_OF_ONE_RUN = ("callbacks", "loops", "lr_schedulers", "optimizer_states")


def load_matched(module: M, checkpoint: Checkpoint) -> M:
    """Loads a checkpoint of a model whose layers have got other widths, as they do in matched averaging.

    ``load_from_checkpoint`` makes a module as it is written in the code and then finds that tensors have other shapes.
    Here the layers get the widths of the checkpoint first (:func:`~lightning_fed.matching.resize_module`). Where widths
    are equal it is ``load_state_dict``. Files are loaded with ``weights_only=True``, which runs no code of theirs.

    Args:
        module: A module of the same architecture, changed in place. Of a LightningModule ``on_load_checkpoint`` is
            called, as in ``load_from_checkpoint``.
        checkpoint: Path of a checkpoint, its content, or a state.

    Returns:
        The same module.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is no checkpoint, entries are missing or there are others, or one has another number of
            axes. The module is as it was then.

    Example:
        >>> wide = nn.Sequential(nn.Linear(2, 9), nn.ReLU(), nn.Linear(9, 1))
        >>> net = load_matched(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), wide.state_dict())
        >>> net[0].out_features, torch.equal(net(torch.ones(4, 2)), wide(torch.ones(4, 2)))
        (9, True)

    """
    content = read_checkpoint(checkpoint)
    if "state_dict" in content and isinstance(module, L.LightningModule):
        module.on_load_checkpoint(content)
    state = state_of(content)
    check_entries(module.state_dict(), state, "the checkpoint")
    fit_widths(module, state)
    module.load_state_dict(state)
    return module


def read_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """The content of a checkpoint on the CPU; a copy, but for the tensors.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file has something else than tensors and primitives.

    """
    if isinstance(checkpoint, Mapping):
        content = dict(checkpoint)
    else:
        try:
            content = torch.load(checkpoint, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ValueError(
                f"Expected {checkpoint} to be a checkpoint with nothing but tensors and primitives, but got:"
                f" {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from error
        if not isinstance(content, dict):
            raise ValueError(f"Expected {checkpoint} to be a checkpoint, but got {type(content).__name__}.")
    if isinstance(content.get("state_dict"), Mapping):
        content["state_dict"] = dict(content["state_dict"])
    return content


def state_of(content: dict[str, Any]) -> dict[str, Any]:
    """The state in a checkpoint, or that it is."""
    state: dict[str, Any] = content.get("state_dict", content)
    return state


def check_entries(own: Iterable[str], state: Iterable[str], label: str) -> None:
    """Compares the names of a state with a module's.

    Raises:
        ValueError: If they differ.

    """
    expected, given = set(own), set(state)
    faults = [
        f"{words} {sorted(names)[:5]}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for words, names in (("lacks", expected - given), ("has besides", given - expected))
        if names
    ]
    if faults:
        raise ValueError(f"Expected {label} to have the module's entries, but it {' and '.join(faults)}.")


def with_state(content: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint with another state, and without what belongs to the run that wrote it."""
    if "state_dict" not in content:
        return dict(state)
    return {name: value for name, value in content.items() if name not in _OF_ONE_RUN} | {"state_dict": dict(state)}
