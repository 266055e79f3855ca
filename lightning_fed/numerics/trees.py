"""Helpers for nested containers with tensors, and fast operations on lists.

:func:`copies` places tensors next to each other in memory. :func:`join` then views them as one flat tensor, so that an
operation on a whole model needs only one call.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree  # there is no public equivalent; torch.fx and torch.func use this module

from lightning_fed.numerics.precision import at_least_float32, to_float64

_DICTIONARIES = (dict, OrderedDict, defaultdict, Counter)

_CACHED_ELEMENTS = 1 << 15  # of one chunk

# Elements in a buffer, before the last tensor. A CPU's larger allocations return to the system, and page faults cost
# more than the copy.
_BUFFER_ELEMENTS = 1 << 21

_NORMED = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def elements(container: Any, mapping: type[Mapping[Any, Any]] = Mapping) -> Iterable[Any]:
    """Returns the elements of a container, or ``()`` for other objects.

    Containers are lists, tuples, sets, and mappings of the type ``mapping``. A mapping's elements are the values.
    """
    if isinstance(container, mapping):
        return container.values()
    return container if isinstance(container, list | tuple | set) else ()


def like_sequence(sequence: Any, values: Sequence[Any]) -> Any:
    """Creates a list, tuple or named tuple with the type of ``sequence`` from ``values``."""
    kind = type(sequence)
    return kind(*values) if hasattr(sequence, "_fields") else kind(values)


def tree_leaves(tree: Any) -> list[Any]:
    """Lists the leaves in a nested container, in order."""
    leaves: list[Any] = _pytree.tree_leaves(tree)
    return leaves


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies a function to each leaf of a nested container, and returns a container with the results."""
    return _pytree.tree_map(function, tree)


def move_tensors(tree: Any, device: torch.device | None) -> Any:
    """Moves the tensors in a nested container to ``device``. If ``device`` is ``None``, no tensor is moved.

    Example:
        >>> move_tensors((torch.zeros(1), "c"), torch.device("meta"))
        (tensor(..., device='meta', size=(1,)), 'c')
    """
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def move_beside(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Moves each tensor to the device of the equally named tensor in ``state``. Other tensors stay unchanged."""
    return {name: value.to(state[name].device) if name in state else value for name, value in tensors.items()}


def copy_tree(value: Any, copied: dict[int, Any] | None = None) -> Any:
    """Copies a scheduler's or optimizer's state. Later steps do not change the copy.

    Optimizers, modules, functions and objects with a custom ``__new__`` are referenced instead of copied.
    """
    # `copy.deepcopy` may not terminate for a scheduler with `__getattr__`.
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


# Lists


@torch.no_grad()
def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors. Copies with equal dtype and device are adjacent in memory if the tensors are contiguous."""
    groups, counts = dict[Any, list[int]](), Counter[Any]()
    for position, value in enumerate(tensors):
        kind = (value.dtype, value.device) if value.is_contiguous() else position
        groups.setdefault((kind, counts[kind] // _BUFFER_ELEMENTS), []).append(position)
        counts[kind] += value.numel()
    results = list(tensors)
    for group in groups.values():
        members = [tensors[at] for at in group]
        count = sum(value.numel() for value in members)
        flat = torch.empty_like(members[0]) if len(members) == 1 else members[0].new_empty(count)
        for at, value in zip(group, _split(flat, members), strict=True):
            results[at] = value
    copy_into(results, tensors)
    return results


def map_runs(function: Callable[[Tensor, int], Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Applies an elementwise function, with one call per group of tensors adjacent in memory.

    ``function`` receives the group as one flat tensor, and the index of the group's first tensor in ``tensors``.
    """
    results = list(tensors)
    for run in find_runs(tensors):
        members = [tensors[at] for at in run]
        for at, value in zip(run, _split(function(_view_flat(members), run[0]), members), strict=True):
            results[at] = value
    return results


def find_runs(*lists: Sequence[Tensor]) -> list[list[int]]:
    """Returns groups of list indices. Within a group, each list's tensors have one dtype and are adjacent in memory."""
    runs: list[list[int]] = []
    open_runs: dict[Any, tuple[list[int] | None, list[int]]] = {}  # runs and ends of storages, by next addresses
    for position, group in enumerate(zip(*lists, strict=True)):
        if not group[0].numel() or not all([value.is_contiguous() for value in group]):
            runs.append([position])
            continue
        starts, kinds = [value.data_ptr() for value in group], [value.dtype for value in group]
        nexts = [start + value.nbytes for start, value in zip(starts, group, strict=True)]
        run, limits = open_runs.pop((*starts, *kinds), (None, []))
        if run is None or any(map(operator.gt, nexts, limits)):
            run, storages = [], [value.untyped_storage() for value in group]
            runs.append(run)
            limits = [storage.data_ptr() + storage.nbytes() for storage in storages]
        run.append(position)
        open_runs[(*nexts, *kinds)] = run, limits
    return runs


def join(*lists: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Joins adjacent tensors to flat views. Returns a tuple per group (:func:`find_runs`), with one view per list."""
    # A single tensor keeps its shape.
    return [tuple(_view_flat([values[at] for at in run]) for values in lists) for run in find_runs(*lists)]


def _view_flat(members: Sequence[Tensor]) -> Tensor:
    if len(members) == 1:
        return members[0]
    return members[0].as_strided((sum(value.numel() for value in members),), (1,))


def _split(flat: Tensor, members: Sequence[Tensor]) -> list[Tensor]:
    if len(members) == 1:
        return [flat]
    parts = torch.split(flat, [value.numel() for value in members])
    return [part.view(value.shape) for part, value in zip(parts, members, strict=True)]


@torch.no_grad()
def copy_into(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies each value into the target at the same index, like ``Tensor.copy_``."""
    pairs = list(zip(targets, values, strict=True))
    for dtype in {target.dtype for target in targets}:  # a fused kernel serves one dtype
        group = [(target, value) for target, value in pairs if target.dtype == dtype]
        # `torch._foreach_*` is documented as beta, and used in all PyTorch optimizers.
        torch._foreach_copy_([target for target, _ in group], [value for _, value in group])


@torch.no_grad()
def add_in_float64(sums: Sequence[Tensor], values: Sequence[Tensor], weight: float) -> None:
    """Adds each value (of any dtype) times ``weight`` to the sum (float64 or complex128) at the same index."""
    for total, value in join(sums, values):
        for part, addend in zip(cache_chunks(total), cache_chunks(value), strict=True):
            part.add_(to_float64(addend), alpha=weight)  # a separate cast makes the addition faster


def differences(new: Sequence[Tensor], old: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields the differences ``new - old`` of tensor pairs. On the CPU large tensors are split into chunks.

    The memory layout does not change the chunks, so a sum over chunks is reproducible.
    """
    for pair in zip(new, old, strict=True):
        for values in zip(*map(cache_chunks, pair), strict=True):
            yield torch.sub(*values)


def are_equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[bool]:
    """Compares pairs of tensors. Returns ``True`` for each pair with equal values."""
    if all(value.is_cpu for value in left):
        return [torch.equal(one, other) for one, other in zip(left, right, strict=True)]
    flags = [(one == other).all() for one, other in zip(left, right, strict=True)]
    return [bool(flag) for flag in torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()]


def norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns the Euclidean norm of each tensor, shape ``()``: float64 for 64-bit tensors, else float32."""
    wide = (value if value.dtype in _NORMED else value.float() for value in tensors)
    return [at_least_float32(torch.linalg.vector_norm(value)) for value in wide]


def cache_chunks(value: Tensor) -> tuple[Tensor, ...]:
    """Flattens a tensor, and splits the result into chunks for the CPU cache.

    On other devices the result is a single chunk. If ``value`` is contiguous, the chunks share memory with ``value``.
    """
    flat = value.reshape(-1)
    if value.device.type != "cpu" or len(flat) <= _CACHED_ELEMENTS:
        return (flat,)
    return torch.split(flat, _CACHED_ELEMENTS)
