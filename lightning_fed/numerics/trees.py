"""Nested arguments and outputs: tuples, lists, dictionaries and registered containers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree  # there is no public equivalent; torch.fx and torch.func use this module


def tree_leaves(tree: Any) -> list[Any]:
    """Lists the leaves in order."""
    leaves: list[Any] = _pytree.tree_leaves(tree)
    return leaves


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies a function to each leaf."""
    return _pytree.tree_map(function, tree)


def move_tensors(tree: Any, device: torch.device | None) -> Any:
    """Moves tensors to a device. With ``None`` tensors are not moved; other leaves are unchanged.

    Example:
        >>> move_tensors((torch.zeros(1), "c"), torch.device("meta"))
        (tensor(..., device='meta', size=(1,)), 'c')
    """
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def move_beside(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Moves each tensor, for example from a checkpoint, to the device of the state entry with the same name.

    Tensors without such an entry are not moved.
    """
    return {name: value.to(state[name].device) if name in state else value for name, value in tensors.items()}
