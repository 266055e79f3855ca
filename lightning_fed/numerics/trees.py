"""Nested containers (tuples, lists, dictionaries and registered containers) of tensors and other values."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree  # there is no public equivalent; torch.fx and torch.func use this module

_DICTIONARIES = (dict, OrderedDict, defaultdict, Counter)


def tree_leaves(tree: Any) -> list[Any]:
    """Lists the leaves of a nested container, in order."""
    leaves: list[Any] = _pytree.tree_leaves(tree)
    return leaves


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies a function to each leaf of a nested container. Returns a container with the same structure."""
    return _pytree.tree_map(function, tree)


def move_tensors(tree: Any, device: torch.device | None) -> Any:
    """Moves the tensors in a nested container to a device, unless ``None``. Other leaves are unchanged.

    Example:
        >>> move_tensors((torch.zeros(1), "c"), torch.device("meta"))
        (tensor(..., device='meta', size=(1,)), 'c')
    """
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def move_beside(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Moves each tensor to the device of the tensor with the same name in ``state``, if any."""
    return {name: value.to(state[name].device) if name in state else value for name, value in tensors.items()}


def copy_tree(value: Any, copied: dict[int, Any] | None = None) -> Any:
    """Copies the state of a scheduler or optimizer. Later steps do not change the copy.

    Optimizers, modules, functions and objects with a custom constructor are only referenced. Unlike ``copy.deepcopy``,
    the function runs no code of other classes: for a scheduler that forwards attributes, ``deepcopy`` may not end.
    """
    copied = {} if copied is None else copied
    result: Any
    if id(value) in copied:
        return copied[id(value)]
    if isinstance(value, Tensor | np.ndarray | np.random.Generator | torch.Generator):
        result = value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
    elif isinstance(value, dict) and type(value) in _DICTIONARIES:
        result = copied[id(value)] = copy.copy(value)
        for key, inside in value.items():
            result[key] = copy_tree(inside, copied)
    elif type(value) in (list, deque):
        result = copied[id(value)] = copy.copy(value)
        result.clear()
        result.extend(copy_tree(inside, copied) for inside in value)
    elif type(value) is tuple:
        result = tuple(copy_tree(inside, copied) for inside in value)
    elif type(value) is set:
        result = set(value)
    elif _is_plain_object(value):
        result = copied[id(value)] = object.__new__(type(value))
        vars(result).update({name: copy_tree(inside, copied) for name, inside in vars(value).items()})
    else:
        return value
    copied[id(value)] = result
    return result


def _is_plain_object(value: Any) -> bool:
    kind: Any = type(value)
    is_held = isinstance(value, Optimizer | nn.Module | type) or callable(value)
    return not is_held and kind.__new__ is object.__new__ and kind.__dictoffset__ != 0
