"""Nested arguments and outputs of a module: tuples, lists, dictionaries, and what projects register beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree  # there is no public name for it; torch.fx and torch.func are built on it


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of a tree, in order.

    Example:
        >>> tree_leaves({"a": (1, [2]), "b": "c"})
        [1, 2, 'c']

    """
    leaves: list[Any] = _pytree.tree_leaves(tree)
    return leaves


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with every leaf replaced by what the function makes of it.

    Example:
        >>> map_leaves(lambda leaf: leaf + 1, {"a": (1, [2])})
        {'a': (2, [3])}

    """
    return _pytree.tree_map(function, tree)


def move_tensors(tree: Any, device: torch.device | None) -> Any:
    """The tree with its tensors on a device, or where they are for ``None``; other leaves stay as they are.

    Example:
        >>> move_tensors((torch.zeros(1), "c"), torch.device("meta"))
        (tensor(..., device='meta', size=(1,)), 'c')

    """
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def move_beside(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Moves each tensor to the device of the entry with its name; one without an entry stays where it is.

    A checkpoint's tensors are on the CPU.

    Example:
        >>> move_beside({"w": torch.ones(2)}, {"w": torch.zeros(3, device="meta")})["w"].device
        device(type='meta')

    """
    return {name: value.to(state[name].device) if name in state else value for name, value in tensors.items()}
