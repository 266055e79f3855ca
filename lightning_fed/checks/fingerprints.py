"""Fingerprints of attribute values, to detect changes."""

from __future__ import annotations

import io
import itertools
import random
import zlib
from collections import deque
from collections.abc import Collection, Iterator
from functools import partial
from inspect import GEN_CREATED, getgeneratorlocals, getgeneratorstate
from types import FunctionType, GeneratorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset
from torchmetrics import Metric, MetricCollection, MetricTracker

METRICS = (Metric, MetricCollection, MetricTracker)
VALUES = (bool, int, float, complex, str, bytes, np.generic)
LIBRARIES = ("lightning", "pytorch_lightning", "lightning_fed", "torchmetrics")
_DEPTH = 5


def fingerprint(
    value: Any, memory: Collection[int] = (), skipped: frozenset[int] = frozenset(), depth: int = _DEPTH
) -> Any:
    """Returns a summary of a value, such as a hash, to detect changes.

    Equal values have equal summaries, except iterators. ``depth`` is the number of nested levels. Unsupported values
    give ``None``, and so do excluded values: tensors by storage address (``memory``) and objects by id (``skipped``).
    """
    try:
        if isinstance(value, np.generic):  # NumPy's numbers compare with lists like arrays
            return value.dtype.str, value.tobytes()
        if isinstance(value, VALUES):
            return value
        if id(value) in skipped or not depth or isinstance(value, Dataset | type | ModuleType):
            return None
        if isinstance(value, Tensor):
            return _tensor_fingerprint(value.detach()) if _is_free(value, memory) else None
        if isinstance(value, np.ndarray):
            return value.shape, value.dtype.str, zlib.crc32(np.ascontiguousarray(value).tobytes())
        if isinstance(value, torch.Generator):
            return _tensor_fingerprint(value.get_state())
        if isinstance(value, np.random.Generator):
            return repr(value.bit_generator.state)
        if isinstance(value, np.random.RandomState):
            state: Any = value.get_state()
            return state[1].tobytes(), *state[2:]
        if isinstance(value, random.Random):
            return hash(value.getstate())
        if isinstance(value, set | frozenset):
            return frozenset(value)
        inside = parts(value)
    except Exception:  # a warning must not end a fit
        return None
    skipped, depth = skipped | {id(value)}, depth - 1
    if isinstance(inside, dict):
        return {key: fingerprint(part, memory, skipped, depth) for key, part in inside.items()}
    return [fingerprint(part, memory, skipped, depth) for part in inside] if isinstance(inside, list) else inside


def parts(value: Any) -> Any:
    """Returns a container's elements or an object's attributes, or ``None`` for a value without parts."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | tuple | deque):
        return list(value)
    if isinstance(value, nn.Module):
        return [] if isinstance(value, METRICS) else [*value.parameters(), *value.buffers()]
    if isinstance(value, Optimizer):
        groups = [{name: part for name, part in group.items() if name != "params"} for group in value.param_groups]
        return [list(value.state.values()), groups]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or ()]
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, GeneratorType) and getgeneratorstate(value) == GEN_CREATED:
        return dict(getgeneratorlocals(value))  # a context manager used as a decorator never starts this generator
    if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
        return object()
    kind = type(value)
    if kind.__module__.startswith("torch."):
        return value.state_dict() if hasattr(kind, "state_dict") else None
    if kind.__module__.partition(".")[0] in LIBRARIES:
        return None
    slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ()) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})} or None


def _is_free(value: Tensor, memory: Collection[int]) -> bool:
    return value.grad_fn is None and value.layout == torch.strided and storage_address(value) not in memory


def storage_address(value: Tensor) -> int:
    """Returns the address of a tensor's storage; 0 for sparse tensors."""
    return value.untyped_storage().data_ptr() if value.layout == torch.strided else 0


def _tensor_fingerprint(value: Tensor) -> Any:
    numbers = value.resolve_conj().resolve_neg().contiguous().cpu().reshape(-1)
    return tuple(value.shape), value.dtype, zlib.crc32(numbers.view(torch.uint8).numpy().data)
