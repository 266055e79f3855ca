"""Attributes of a module that pass from one visit to the next, beside the messages: found, and named in the log."""

from __future__ import annotations

import itertools
import logging
import random
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, MetricTracker

from lightning_fed.console import round_number
from lightning_fed.lightning.internals import lightning_attributes
from lightning_fed.model.layer_widths import layer_numbers

_log = logging.getLogger(__name__)

_METRICS = (Metric, MetricCollection, MetricTracker)  # which Lightning resets after every epoch
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, tuple, deque)
_VALUES = (bool, int, float, complex, str, bytes, np.generic)
_INTERNAL = frozenset(vars(nn.Module()))
_named: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def note_attributes(module: L.LightningModule) -> dict[str, Any]:
    """Fingerprints of a module's attributes that a visit may change and no message holds, by name.

    These are numbers, texts, tensors, arrays, random generators, containers of them, modules that are not registered,
    and objects with such attributes: of the module and of its submodules. Left out are metrics, layers of this package,
    what shares its memory with a parameter or a buffer, and tensors with a gradient's history, which are computed from
    the parameters. Only fingerprints are kept, of which that of a tensor on a device reads it once.

    Args:
        module: The module.

    Example:
        >>> module = L.LightningModule()
        >>> module.seen = [1, 2]
        >>> before = note_attributes(module)
        >>> module.seen.append(3)
        >>> changed_attributes(before, note_attributes(module))
        ['seen']

    """
    layers = dict(_layers(module))
    memory = {_address(entry) for entry in itertools.chain(module.parameters(), module.buffers())}
    return {
        f"{path}.{name}" if path else name: _attribute_fingerprint(value, memory)
        for path, layer in layers.items()
        if layer is module or not type(layer).__module__.startswith("lightning_fed.")
        for name, value in vars(layer).items()
        if name not in _INTERNAL and not (isinstance(layer, L.LightningModule) and name in lightning_attributes())
    }


def changed_attributes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of the attributes whose fingerprints differ, in order."""
    names = sorted(before.keys() | after.keys())
    return [name for name in names if [before.get(name)] != [after.get(name)]]  # in lists NaN is what it was


def warn_of_carried(module: L.LightningModule, before: dict[str, Any], round: int) -> None:
    """Names the attributes that a round's visits have changed in the log, each once.

    A list that is empty when a round begins is left out: it collects what is logged after the epoch. One that is never
    emptied is named in the second round.

    Args:
        module: The module, after the last visit.
        before: What :func:`note_attributes` found before the first.
        round: The round.

    """
    named = _named.setdefault(module, set())
    changed = changed_attributes(before, note_attributes(module))
    new = [name for name in changed if name not in named and before.get(name) not in ([], {})]
    names = [name for name in new if not _is_width(module, name)]
    if not names:
        return
    named.update(names)
    _log.warning(
        "Round %d: these attributes of %s changed in the visits: %s. They pass from client to client beside the"
        " messages: make what training uses a buffer, `register_buffer(name, tensor)`.",
        round_number(round),
        type(module).__name__,
        ", ".join(f"`{name}`" for name in names),
    )


def _is_width(module: nn.Module, name: str) -> bool:
    """Returns whether an attribute states the shape of its layer's tensors, which the messages hold."""
    path, _, attribute = name.rpartition(".")
    layer = dict(_layers(module)).get(path)
    try:
        return layer is not None and attribute in layer_numbers(layer)
    except Exception:  # a pruned LSTM has no weights of its own; and a fit does not end for a warning's sake
        return False


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A module and the modules in it, each once, by path; not those in metrics."""
    seen: set[int] = set()
    for path, layer in module.named_modules():
        if id(layer) not in seen:
            seen.add(id(layer))
            if isinstance(layer, _METRICS):
                seen.update(map(id, layer.modules()))
            else:
                yield path, layer


def _attribute_fingerprint(value: Any, memory: set[int]) -> Any:
    """Fingerprint of an attribute; ``None`` of one that cannot be read: without values, or that holds itself."""
    try:
        return _fingerprint(value, memory, is_attribute=True)
    except Exception:  # a fit does not end for a warning's sake
        return None


def _fingerprint(value: Any, memory: set[int], is_attribute: bool = False, around: tuple[int, ...] = ()) -> Any:
    """Fingerprint of a value: the same as long as the value is.

    Args:
        value: The value.
        memory: Addresses of parameters and buffers.
        is_attribute: Whether the value is an attribute of a layer; an object that is one is looked into.
        around: Identities of the containers that the value is in.

    Raises:
        ValueError: If the value is one of these.

    """
    if isinstance(value, _VALUES):
        return value
    if isinstance(value, Tensor):
        return _tensor_fingerprint(value.detach()) if _is_free(value, memory) else None
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype.str, zlib.crc32(np.ascontiguousarray(value).tobytes())
    if id(value) in around:  # not left to Python's limit of recursion, which 3.13.0 does not keep here
        raise ValueError("The value holds itself.")
    around = (*around, id(value))
    if type(value) in _MAPPINGS:
        return {key: _fingerprint(inside, memory, around=around) for key, inside in value.items()}
    if type(value) in _SEQUENCES:
        return [_fingerprint(inside, memory, around=around) for inside in value]
    if type(value) is set:
        return frozenset(value)
    if isinstance(value, torch.Generator):
        return _tensor_fingerprint(value.get_state())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, nn.Module):
        entries = () if isinstance(value, _METRICS) else (*value.parameters(), *value.buffers())
        return [_fingerprint(entry, memory) for entry in entries]
    is_users = not type(value).__module__.startswith(("lightning.", "torch.")) and not isinstance(value, type)
    if is_attribute and is_users and not callable(value) and hasattr(value, "__dict__"):
        return {name: _fingerprint(inside, memory, around=around) for name, inside in vars(value).items()}
    return None


def _is_free(value: Tensor, memory: set[int]) -> bool:
    return value.grad_fn is None and value.layout == torch.strided and _address(value) not in memory


def _address(value: Tensor) -> int:
    return value.untyped_storage().data_ptr() if value.layout == torch.strided else 0


def _tensor_fingerprint(value: Tensor) -> Any:
    numbers = value.resolve_conj().resolve_neg().contiguous().cpu().reshape(-1)
    return tuple(value.shape), value.dtype, zlib.crc32(numbers.view(torch.uint8).numpy().data)
