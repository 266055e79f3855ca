"""Runs a user's module outside the Trainer's loop, without changing the module's state."""

from __future__ import annotations

import copy
import inspect
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, MetricTracker
from torchmetrics.wrappers import MinMaxMetric

from lightning_fed.lightning.internals import (
    OverriddenMethod,
    datamodule_of,
    is_overridden,
    lightning_attributes,
)

_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (*_MAPPINGS, list, tuple, set, deque)  # subclasses may have other constructors
_INTERNAL = frozenset(vars(nn.Module()))


@contextmanager
def isolated_pass(
    module: L.LightningModule,
    log: Callable[..., None] | None = None,
    gradients: bool = False,
    is_reloaded: bool = False,
    is_alone: bool = True,
    is_muted: bool = True,
    is_training: bool = False,
) -> Iterator[None]:
    """Context manager to run a user's module without effects on logged values and metrics.

    Metrics are reset inside the context. Afterwards the context restores metrics, parameters, buffers, training modes
    and simple attributes.

    Args:
        module: The user's module.
        log: Function that replaces ``module.log``. By default, logged values are ignored.
        gradients: Whether to compute gradients.
        is_reloaded: Whether the caller restores parameters and buffers, instead of the context.
        is_alone: Whether metrics use only values from this process.
        is_muted: Whether to disable the loggers.
        is_training: Whether layers keep their training mode. By default, all are in evaluation mode.
    """
    metrics = find_metrics(module)
    stand_in = OverriddenMethod(module, "log", log or _ignore)
    try:
        with ExitStack() as stack:
            if not is_reloaded:
                stack.enter_context(_restored_values(module))
            for layer in {id(layer): layer for layer in (*module.modules(), *metrics)}.values():
                left_out = lightning_attributes() if isinstance(layer, L.LightningModule) else frozenset()
                stack.enter_context(_restored_attributes(layer, left_out))
                stack.enter_context(_restored_generators(layer))
            for metric in metrics:
                if isinstance(metric, Metric):
                    metric.reset()
                if isinstance(metric, MinMaxMetric):  # `reset` does not restore the bounds
                    metric.min_val, metric.max_val = torch.tensor(math.inf), torch.tensor(-math.inf)
            if is_alone:
                stack.enter_context(unsynchronized(metrics))
            if is_muted:
                stack.enter_context(_muted(module))
            modes = stack.enter_context(evaluating(module))
            for layer, mode in modes if is_training else ():
                layer.training = mode
            stack.enter_context(torch.set_grad_enabled(gradients))
            yield
    finally:
        stand_in.restore()


@contextmanager
def unsynchronized(metrics: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager in which ``metrics`` use only this process's data."""
    before = []
    for metric in metrics:
        if isinstance(metric, Metric):
            before.append((metric, metric.distributed_available_fn, metric.compute_with_cache))
            metric.distributed_available_fn, metric.compute_with_cache = _never, False
    try:
        yield
    finally:
        for metric, available, caches in before:
            metric.distributed_available_fn, metric.compute_with_cache = available, caches


def find_metrics(module: nn.Module) -> list[Metric | MetricCollection | MetricTracker]:
    """Finds the ``torchmetrics`` objects in a module, also in lists and dictionaries."""
    metrics: dict[int, Any] = {}
    waiting: list[Any] = [module]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Metric | MetricCollection | MetricTracker):
            metrics[id(value)] = value
        if isinstance(value, nn.Module):
            waiting += value.children()
            kept = (attribute for name, attribute in vars(value).items() if name not in _INTERNAL)
            waiting += (attribute for attribute in kept if type(attribute) in _CONTAINERS)
        else:
            inside = value.values() if type(value) in _MAPPINGS else value
            waiting += (element for element in inside if type(element) in _CONTAINERS or isinstance(element, nn.Module))
    return list(metrics.values())


def noted_attributes(module: L.LightningModule) -> dict[str, Any]:
    """Copies the attributes restored by :func:`isolated_pass`. The keys are paths."""
    paths = {id(layer): f"{path}." if path else "" for path, layer in module.named_modules()}
    noted: dict[str, Any] = {}
    for layer in {id(layer): layer for layer in (*module.modules(), *find_metrics(module))}.values():
        left_out = _INTERNAL | (lightning_attributes() if isinstance(layer, L.LightningModule) else frozenset())
        path = paths.get(id(layer), f"{type(layer).__name__}.")
        noted |= {f"{path}{name}": _copied(value) for name, value in _plain_attributes(layer, left_out).items()}
    return noted


def is_same(one: Any, other: Any) -> bool:
    """True if two values from :func:`noted_attributes` are equal."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if type(one) in _MAPPINGS:
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if type(one) in (list, tuple, deque):
        return len(one) == len(other) and all(map(is_same, one, other))
    return one is other or bool(one == other)


def prepare_batch(trainer: L.Trainer, module: L.LightningModule, batch: Any, dataloader_idx: int = 0) -> Any:
    """Moves a batch to the Trainer's device and precision. Calls Lightning's transfer hooks."""
    owner: Any = datamodule_of(trainer)
    if not is_overridden("on_before_batch_transfer", owner):  # works also without a datamodule
        owner = module
    batch = owner.on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), dataloader_idx)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)


def run_prepared(trainer: L.Trainer, module: L.LightningModule, name: str, batch: Any, *indices: int) -> Any:
    """Calls the module's method ``name`` with a batch from :func:`prepare_batch`, in the Trainer's precision.

    ``indices`` contains the batch index and, with several dataloaders, the dataloader's index.
    """
    step = getattr(module, name)
    wants_index = len(inspect.signature(step).parameters) > 1
    with trainer.precision_plugin.forward_context():
        return step(batch, *indices) if wants_index else step(batch)


def run_step(trainer: L.Trainer, module: L.LightningModule, name: str, batch: Any, batch_idx: int) -> Any:
    """Calls the step ``name`` of a module with a batch, on the Trainer's device and in the Trainer's precision."""
    with trainer.precision_plugin.forward_context():
        batch = prepare_batch(trainer, module, batch)
    return run_prepared(trainer, module, name, batch, batch_idx)


def loss_in(output: Any) -> Any:
    """Returns the loss in the output of ``training_step``, or ``None`` if the batch was skipped."""
    return output["loss"] if isinstance(output, Mapping) else output


def forward_step(module: L.LightningModule) -> str | None:
    """Name of a step for a forward pass: ``training_step``, or with manual optimization ``validation_step``, if any."""
    # With manual optimization, `training_step` would train.
    if module.automatic_optimization:
        return "training_step"
    return "validation_step" if is_overridden("validation_step", module) else None


def until_fault(batches: Iterable[Any], faults: list[Exception]) -> Generator[Any]:
    """Yields batches until loading fails. Then appends the exception to ``faults``."""
    try:
        yield from batches
    except Exception as error:
        faults.append(error)


@contextmanager
def _muted(module: L.LightningModule) -> Iterator[None]:
    loggers: Any = module.loggers
    if loggers:
        module.trainer.loggers = [DummyLogger()]
    try:
        yield
    finally:
        if loggers:
            module.trainer.loggers = loggers


@contextmanager
def _restored_values(module: nn.Module) -> Iterator[None]:
    before = [(entry, entry.detach().clone()) for entry in (*module.parameters(), *module.buffers())]
    try:
        yield
    finally:
        with torch.no_grad():
            for entry, value in before:
                entry.copy_(value)


@contextmanager
def _restored_attributes(owner: nn.Module, excluded: frozenset[str]) -> Iterator[None]:
    # The containers include the module's dictionaries of parameters and buffers.
    before = _plain_attributes(owner, excluded)
    names = set(vars(owner))
    vars(owner).update((name, _copied(value)) for name, value in before.items())
    try:
        yield
    finally:
        vars(owner).update(before)
        for name in vars(owner).keys() - names:
            del vars(owner)[name]


@contextmanager
def _restored_generators(owner: nn.Module) -> Iterator[None]:
    restores: list[Callable[[], Any]] = []
    for value in vars(owner).values():
        if isinstance(value, torch.Generator):
            restores.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            restores.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            state = value.bit_generator.state
            restores.append(partial(setattr, value.bit_generator, "state", state))
        elif isinstance(value, np.random.RandomState):
            restores.append(partial(value.set_state, value.get_state()))
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _plain_attributes(owner: nn.Module, excluded: frozenset[str]) -> dict[str, Any]:
    kinds = (int, float, str, Tensor)
    return {
        name: value
        for name, value in vars(owner).items()
        if name not in excluded and (isinstance(value, kinds) or type(value) in _CONTAINERS)
    }


def _copied(value: Any) -> Any:
    # Copies only tensors and containers.
    if isinstance(value, Tensor):
        return value.detach().clone()
    return _copied_container(value)


def _copied_container(value: Any) -> Any:
    if type(value) in _MAPPINGS:
        copied = copy.copy(value)
        for key, element in value.items():
            copied[key] = _copied_container(element)
        return copied
    if type(value) in (list, tuple):
        return type(value)(map(_copied_container, value))
    return copy.copy(value) if type(value) in _CONTAINERS else value


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


def _never() -> bool:
    return False


@contextmanager
def evaluating(model: nn.Module) -> Iterator[list[tuple[nn.Module, bool]]]:
    """Context manager for evaluation mode without gradients. Yields pairs of layer and earlier training mode."""
    modes = [(layer, layer.training) for layer in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield modes
    finally:
        for layer, mode in modes:
            layer.training = mode
