"""Finds attributes of modules, callbacks and optimizers that carry values from one client's training to another."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_fed.checks.fingerprints import LIBRARIES, METRICS, VALUES, fingerprint, parts, storage_address
from lightning_fed.console import round_number
from lightning_fed.lightning.internals import (
    BATCH_HOOKS,
    OverriddenMethod,
    callbacks_of,
    is_compiled,
    is_overridden,
    lightning_attributes,
    tensor_version,
)
from lightning_fed.model.resize import layer_numbers
from lightning_fed.numerics.trees import elements, norms

_log = logging.getLogger(__name__)

_INTERNAL = frozenset(vars(nn.Module()))
# `state_dict` contains the first two; schedulers write the last ones.
_OPTIMIZER_INTERNAL = frozenset(vars(torch.optim.SGD([torch.zeros(1)], 0.1))) | {"_opt_called", "_step_count", "step"}
_EXCLUDED: dict[type, Set[str]] = {nn.Module: _INTERNAL, Optimizer: _OPTIMIZER_INTERNAL, L.Callback: frozenset()}
_MISSING = object()
_ADVICE: dict[type, str] = {
    nn.Module: "store values used in training in a buffer, `register_buffer(name, tensor)`",
    Optimizer: "store optimizer state in `self.state[parameter]` or `param_groups`, so that `optimizer_state` "
    "applies to it",
    L.Callback: "reset the state in `on_client_start` of a `FederatedCallback`",
    object: "include every number of a scheduler in `state_dict`",
}
_OPTIMIZER = "return optimizers from `configure_optimizers`, so that `optimizer_state` applies to their state"
_METRIC = "reset metrics that are used in training in `on_client_start` of a `FederatedCallback`"


@dataclass
class _Known:
    suspects: dict[str, ref[Any]] = field(default_factory=dict)  # owners; a second fit has other optimizers
    named: set[str] = field(default_factory=set)
    num_looks: int = 0
    training_callbacks: list[ref[L.Callback]] = field(default_factory=list)  # callbacks that change the training


_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


class CarriedAttributes:
    """Finds attributes through which one client's training affects the next client's training.

    The search covers the module, the callbacks, the optimizers and the per-step schedulers. Reports name:

    - attributes changed by one client's training, if a later client's training reads the new value;
    - class attributes, variables in closures of methods, and global numbers, if training changes the values;
    - metrics, if ``compute`` covers calls to ``update`` from several clients.

    Other global variables and objects nested deeper than five levels are not searched.

    A report is usually a warning, but an error if two clients' training changes an attribute of an optimizer, scheduler
    or training callback. A training callback changes parameters, gradients or optimizer options.

    Args:
        module: The module.
        trainer: The Trainer, for its callbacks and optimizers.
        is_shared: Whether several clients train the module.
        is_reset: Whether each client's training starts with new optimizers.
    """

    def __init__(
        self, module: L.LightningModule, trainer: L.Trainer, is_shared: bool = True, is_reset: bool = True
    ) -> None:
        self._module, self._trainer, self._is_shared, self._is_reset = module, trainer, is_shared, is_reset
        self._optimizers: list[Optimizer] = []  # in attributes
        self._known = _known.setdefault(module, _Known())
        self._places: dict[str, tuple[Any, str]] = {}  # owner and attribute by name
        self._before: dict[str, Any] = {}
        self._at_second: dict[str, Any] = {}
        self._num_visits = 0
        self._is_seen: set[str] = set()  # attributes read or written in the current visit
        self._read_first: set[str] = set()
        self._watched: dict[tuple[int, str], str] = {}  # names by the owner's id and the attribute
        self._watched_types: set[type] = set()
        self._changes = ExitStack()
        self._metric_owners: list[Metric] = []
        self._num_forwards = 0  # depth of nested metric calls
        self._updated: set[int] = set()  # metrics with updates from an earlier visit
        self._read_metrics: set[str] = set()

    def start_round(self) -> None:
        """Records the values of all attributes before the round's first local training."""
        if self._is_reset:
            self._optimizers = list(self._find_optimizers())
        self._before = self._fingerprints()
        for name, metric in () if is_compiled(self._module) else self._metrics():
            self._metric_owners.append(metric)
            for attribute in ("forward", "compute", "reset"):
                self._override(metric, attribute, partial(self._call_metric, name))
        for callback in self._callbacks():
            for hook in () if self._is_training(callback) else BATCH_HOOKS:
                if is_overridden(hook, callback):
                    self._override(callback, hook, self._call_hook)
        self._watch()

    def start_visit(self) -> None:
        """Prepares to detect attributes with values from earlier clients. Clears states of optimizers in attributes."""
        self._clear_optimizers()
        self._num_visits += 1
        self._is_seen.clear()
        self._updated = {id(metric) for metric in self._metric_owners if metric.update_count}
        # A list is empty only before the first round. Later changes are detected at the end of a round.
        if self._num_visits == 2 and self._known.num_looks < 2:
            self._known.num_looks += 1
            self._at_second = self._fingerprints()
            self._suspect(self._differences(self._before, self._at_second))
            self._watch()

    def _differences(self, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
        return [
            name
            for name in sorted(before.keys() | after.keys())
            if [before.get(name, _MISSING)] != [after.get(name, _MISSING)]  # NaN equals the same NaN inside a list
            and self._is_included(*self._places[name], before.get(name, _MISSING))
        ]

    def _is_included(self, owner: Any, attribute: str, before: Any) -> bool:
        if isinstance(owner, nn.Module | L.Callback) and before in ([], {}):  # collects an epoch's outputs
            return False
        if isinstance(owner, L.Callback) and not self._is_training(owner):
            return _holds_tensors(vars(owner).get(attribute))
        return not (isinstance(owner, nn.Module) and _is_width(owner, attribute))

    def end_round(self, round: int) -> None:
        """Reports attributes with values from another client's training, by a warning or an error."""
        self._clear_optimizers()
        known, after = self._known, self._fingerprints()
        changed = self._differences(self._before, after)
        suspects = self._suspects()
        blind = suspects.intersection(changed).difference(self._watched.values())
        self.stop()
        self._suspect(changed)
        found = self._suspects() & self._read_first
        # A constant created in the first visit does not change again.
        again = found.intersection(self._differences(self._at_second or self._before, after))
        refused = sorted(name for name in again if self._is_shared and self._is_training(self._places[name][0]))
        if refused:
            raise MisconfigurationException(
                "Expected each client to start from the state at the round's start, but in the training of "
                f"{type(self._module).__name__} values pass from client to client: one client's training changed "
                f"{_listed(refused)}, and a later client's training read the new values: {self._advise(refused)}."
            )
        names = sorted((found | blind | self._read_metrics) - known.named)
        if names:
            known.named.update(names)
            _log.warning(
                "Round %d: visits changed these attributes of %s: %s. Their values pass from client to client, "
                "although the federation does not send the values. To prevent this, %s.",
                round_number(round),
                type(self._module).__name__,
                _listed(names),
                self._advise(names),
            )

    def _find_optimizers(self) -> Iterator[Optimizer]:
        for owner in self._owners().values():
            for value in vars(owner).values():
                for part in (value, *elements(value, dict)):
                    if isinstance(part, Optimizer) and not part.state and part not in self._trainer.optimizers:
                        yield part

    def _clear_optimizers(self) -> None:
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def _suspect(self, names: list[str]) -> None:
        self._known.suspects |= {name: ref(self._places[name][0]) for name in names}

    def _suspects(self) -> set[str]:
        suspects, places = self._known.suspects, self._places
        return {name for name, owner in suspects.items() if name in places and owner() is places[name][0]}

    def _is_training(self, owner: Any) -> bool:
        if isinstance(owner, L.Callback):
            return any(callback() is owner for callback in self._known.training_callbacks)
        return not isinstance(owner, nn.Module)

    def _advise(self, names: list[str]) -> str:
        advice = list[str]()
        for name in names:
            if name in self._read_metrics:
                advice.append(_METRIC)
                continue
            owner, attribute = self._places[name]
            advice.append(next(_ADVICE[kind] for kind in _ADVICE if isinstance(owner, kind)))
            if isinstance(getattr(owner, attribute, None), Optimizer):
                advice.append(_OPTIMIZER)
        return "; ".join(dict.fromkeys(advice))

    def stop(self) -> None:
        self._changes.close()
        self._watched.clear()
        self._watched_types.clear()
        self._metric_owners.clear()

    def _watch(self) -> None:
        is_fixed = is_compiled(self._module)
        for name in self._suspects().difference(self._watched.values()):
            owner, attribute = self._places[name]
            # A compiled module reads attributes at compile time. A write to a class attribute calls no method.
            is_closed = isinstance(owner, nn.Module) and (is_fixed or name in self._known.named)
            is_immutable = not type(owner).__flags__ & 1 << 9  # a class in C
            if is_closed or is_immutable or attribute not in getattr(owner, "__dict__", ()):
                continue
            if type(owner) not in self._watched_types:
                self._watched_types.add(type(owner))
                self._watch_type(type(owner))
            self._watched[id(owner), attribute] = name

    def _watch_type(self, owner_type: type) -> None:
        for method, is_read in (("__getattribute__", True), ("__setattr__", False)):
            original, own = getattr(owner_type, method), vars(owner_type).get(method)

            # Arguments instead of a closure, because the search includes closures of methods.
            def access(*args: Any, original: Any = original, is_read: bool = is_read, note: Any = self._note) -> Any:
                note(*args[:2], is_read)
                return original(*args)

            setattr(owner_type, method, access)
            restore = partial(delattr, owner_type, method) if own is None else partial(setattr, owner_type, method, own)
            self._changes.callback(restore)

    def _note(self, owner: Any, attribute: str, is_read: bool) -> None:
        name = self._watched.get((id(owner), attribute))
        if name is not None and self._num_visits and name not in self._is_seen:
            self._is_seen.add(name)
            if is_read:
                self._read_first.add(name)

    def _override(self, owner: Any, attribute: str, call: Callable[..., Any]) -> None:
        method = OverriddenMethod(owner, attribute, call)
        method.replacement = partial(call, method)
        self._changes.callback(method.restore)

    def _call_metric(self, name: str, method: OverriddenMethod, *args: Any, **kwargs: Any) -> Any:
        is_forward = method.name == "forward"
        if not self._num_forwards and id(method.owner) in self._updated:
            if method.name == "compute" and self._num_visits:
                self._read_metrics.add(name)
            if method.name == "reset":
                self._updated.discard(id(method.owner))
        self._num_forwards += is_forward
        try:
            return method.original(*args, **kwargs)
        finally:
            self._num_forwards -= is_forward

    def _metrics(self) -> Iterator[tuple[str, Metric]]:
        seen: set[int] = set()
        for path, layer in self._module.named_modules():
            values = {path: layer}
            if not isinstance(layer, METRICS):
                for name, value in vars(layer).items():
                    if name not in _INTERNAL:
                        prefix = f"{path}.{name}" if path else name
                        values |= {f"{prefix}[{place}]": part for place, part in enumerate(elements(value, dict))}
            for name, value in values.items():
                if isinstance(value, Metric) and id(value) not in seen:
                    seen.update(map(id, value.modules()))
                    yield name, value

    def _call_hook(self, method: OverriddenMethod, *args: Any, **kwargs: Any) -> Any:
        if self._num_visits > 2:
            return method.original(*args, **kwargs)
        before = self._training_state()
        result = method.original(*args, **kwargs)
        if self._training_state() != before:
            self._known.training_callbacks.append(ref(method.owner))
        return result

    def _training_state(self) -> str:
        pairs = ((tensor.detach(), tensor.grad) for tensor in self._module.parameters())
        tensors = [each for pair in pairs for each in pair if each is not None]
        groups = [group for optimizer in self._trainer.optimizers for group in optimizer.param_groups]
        state = (
            [tensor_version(tensor) for tensor in tensors],
            [float(length) for length in norms(filter(_has_norm, tensors))],
            [{name: value for name, value in group.items() if isinstance(value, VALUES)} for group in groups],
        )
        return repr(state)

    def _callbacks(self) -> list[L.Callback]:
        return [
            each for each in callbacks_of(self._trainer) if type(each).__module__.partition(".")[0] not in LIBRARIES
        ]

    def _owners(self) -> dict[str, Any]:
        owners: dict[str, Any] = {
            f"{path}." if path else "": layer
            for path, layer in _layers(self._module)
            if layer is self._module or not type(layer).__module__.startswith("lightning_fed.")
        }
        # The Trainer steps other schedulers after the visits.
        is_manual = not self._module.automatic_optimization
        configs = self._trainer.lr_scheduler_configs
        schedulers = [config.scheduler for config in configs if is_manual or config.interval == "step"]
        values: list[Any] = [*self._callbacks(), *self._trainer.optimizers, *schedulers]
        for value in values:
            name = type(value).__name__
            places = (f"{name}{number}." for number in itertools.count(2))
            owners[next(prefix for prefix in itertools.chain([f"{name}."], places) if prefix not in owners)] = value
        return owners

    def _fingerprints(self) -> dict[str, Any]:
        saved = itertools.chain(self._module.parameters(), self._module.buffers())
        memory = {storage_address(tensor) for tensor in saved}
        schedulers = (config.scheduler for config in self._trainer.lr_scheduler_configs)
        skipped = frozenset(map(id, (self._module, self._trainer, *self._trainer.optimizers, *schedulers)))
        found = {}
        for prefix, owner in self._owners().items():
            excluded = next((names for kind, names in _EXCLUDED.items() if isinstance(owner, kind)), None)
            if excluded is None:
                excluded = {"optimizer", *owner.state_dict()}
            excluded = excluded | lightning_attributes() if isinstance(owner, L.LightningModule) else excluded
            is_torch = type(owner).__module__.startswith("torch.")  # private values, such as the weights of an LSTM
            for name, value in {**_class_values(type(owner)), **vars(owner)}.items():
                is_private = is_torch and name.startswith("_")
                if not is_private and name not in excluded and not isinstance(value, OverriddenMethod):
                    self._places[prefix + name] = owner, name
                    found[prefix + name] = fingerprint(value, memory, skipped)
        return found


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _class_values(owner_type: type) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for base in reversed(owner_type.__mro__):
        if base.__module__.partition(".")[0] in (*LIBRARIES, "torch", "builtins", "abc"):
            continue
        for name, value in vars(base).items():
            if isinstance(value, FunctionType):
                with suppress(ValueError):  # a variable without a value yet
                    outside = inspect.getclosurevars(value)
                    numbers = {key: part for key, part in outside.globals.items() if isinstance(part, VALUES)}
                    values |= {f"{name}.{key}": part for key, part in {**numbers, **outside.nonlocals}.items()}
            elif not name.startswith("__") and not callable(value) and not hasattr(value, "__get__"):
                values[name] = value
    return values


def _has_norm(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and (tensor.is_floating_point() or tensor.is_complex())


def _is_width(layer: nn.Module, attribute: str) -> bool:
    # Messages contain the tensors, so changed widths are sent.
    try:
        return attribute in layer_numbers(layer)
    except Exception:  # a pruned LSTM has no weights; a warning must not end a fit
        return False


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    # Submodules of metrics are excluded.
    seen: set[int] = set()
    for path, layer in module.named_modules():
        if id(layer) not in seen:
            seen.add(id(layer))
            if isinstance(layer, METRICS):
                seen.update(map(id, layer.modules()))
            else:
                yield path, layer


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    if isinstance(value, Tensor | nn.Module | Optimizer | np.ndarray):
        return not isinstance(value, L.LightningModule | Metric)
    return any(_holds_tensors(part, depth - 1) for part in elements(parts(value) if depth else ()))
