"""Running a user's steps beside the Trainer's own loop without leaving traces in its logs, metrics or modes."""

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
from lightning_fed.model.feature_extraction import evaluating

_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (*_MAPPINGS, list, tuple, set, deque)  # not their subclasses, which may be anything
_INTERNAL = frozenset(vars(nn.Module()))


@contextmanager
def isolated_pass(
    module: L.LightningModule,
    log: Callable[..., None] | None = None,
    gradients: bool = False,
    is_reloaded: bool = False,
    is_alone: bool = True,
    is_muted: bool = True,
) -> Iterator[None]:
    """Evaluation mode, in which logged values and metric updates do not reach the Trainer.

    Meanwhile ``self.log`` is ``log``, and the module's metrics start afresh: ``torchmetrics`` objects that are its
    submodules, or are in a list or dictionary of one. They stay the same objects and have their values back afterwards.
    So have parameters and buffers that a step writes (a running centre, a teacher that follows), and the attributes of
    the module and its submodules that are numbers, texts, tensors or plain containers, also where a step appends to
    them, or random generators; modes come back as they were. What a step does to any other object is not undone.

    Args:
        module: The user's module.
        log: Called instead of ``module.log``; by default nothing happens.
        gradients: Whether gradients can be asked for.
        is_reloaded: Whether the caller loads parameters and buffers afterwards: then they are not copied.
        is_alone: Whether metrics are this process's, also where there are others, which may be elsewhere.
        is_muted: Whether what is handed to loggers directly, such as pictures, goes nowhere: it is logged once, in
            training or in the evaluation of the global model.

    """
    metrics = find_metrics(module)
    stand_in = OverriddenMethod(module, "log", log or _ignore)
    try:
        with ExitStack() as stack:
            if not is_reloaded:
                stack.enter_context(_values_aside(module))
            for layer in {id(layer): layer for layer in (*module.modules(), *metrics)}.values():
                left_out = lightning_attributes() if isinstance(layer, L.LightningModule) else frozenset()
                stack.enter_context(_aside(layer, left_out))
                stack.enter_context(_generators_aside(layer))
            for metric in metrics:
                if isinstance(metric, Metric):
                    metric.reset()
                if isinstance(metric, MinMaxMetric):  # `reset` leaves the bounds
                    metric.min_val, metric.max_val = torch.tensor(math.inf), torch.tensor(-math.inf)
            if is_alone:
                stack.enter_context(unsynchronized(metrics))
            if is_muted:
                stack.enter_context(_muted(module))
            stack.enter_context(evaluating(module))
            stack.enter_context(torch.set_grad_enabled(gradients))
            yield
    finally:
        stand_in.restore()


@contextmanager
def unsynchronized(metrics: Iterable[nn.Module]) -> Iterator[None]:
    """Metrics meanwhile compute what this process has seen, without asking others, and remember no result of it.

    Args:
        metrics: Of :func:`find_metrics`; collections are passed over, for their metrics are among them.

    Example:
        >>> from torchmetrics import MeanMetric
        >>> metric = MeanMetric()
        >>> with unsynchronized([metric]):
        ...     metric.distributed_available_fn()
        False

    """
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
    """The ``torchmetrics`` objects among a module's submodules and in their attributes' containers, each once."""
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
    """Copies, by name, of the attributes of a module, its submodules and metrics that an isolated pass puts aside.

    Example:
        >>> module = L.LightningModule()
        >>> module.seen = [1, 2]
        >>> noted_attributes(module)
        {'seen': [1, 2]}

    """
    paths = {id(layer): f"{path}." if path else "" for path, layer in module.named_modules()}
    noted: dict[str, Any] = {}
    for layer in {id(layer): layer for layer in (*module.modules(), *find_metrics(module))}.values():
        left_out = _INTERNAL | (lightning_attributes() if isinstance(layer, L.LightningModule) else frozenset())
        path = paths.get(id(layer), f"{type(layer).__name__}.")
        noted |= {f"{path}{name}": _copied(value) for name, value in _plain_attributes(layer, left_out).items()}
    return noted


def is_same(one: Any, other: Any) -> bool:
    """Compares two values of :func:`noted_attributes`."""
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
    """The batch as a step gets it: in the Trainer's precision, on its device.

    The transfer hooks are those of the datamodule, or else of the module.
    """
    owner: Any = datamodule_of(trainer)
    if not is_overridden("on_before_batch_transfer", owner):  # nor if there is none
        owner = module
    batch = owner.on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), dataloader_idx)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)


def run_prepared(trainer: L.Trainer, module: L.LightningModule, name: str, batch: Any, *indices: int) -> Any:
    """Calls ``module.<name>`` with what :func:`prepare_batch` made, in the Trainer's precision.

    Args:
        trainer: The Trainer.
        module: Its module.
        name: The step's name.
        batch: The batch.
        indices: Index of the batch, which a step need not take, and of the loader, where there are several.

    """
    step = getattr(module, name)
    wants_index = len(inspect.signature(step).parameters) > 1
    with trainer.precision_plugin.forward_context():
        return step(batch, *indices) if wants_index else step(batch)


def run_step(trainer: L.Trainer, module: L.LightningModule, name: str, batch: Any, batch_idx: int) -> Any:
    """Calls ``module.<name>(batch[, batch_idx])`` with a batch as the loader gave it."""
    with trainer.precision_plugin.forward_context():
        batch = prepare_batch(trainer, module, batch)
    return run_prepared(trainer, module, name, batch, batch_idx)


def loss_in(output: Any) -> Any:
    """The loss in what a ``training_step`` returns: ``None`` where it skips the batch."""
    return output["loss"] if isinstance(output, Mapping) else output


def forward_step(module: L.LightningModule) -> str | None:
    """The step that runs the module's forward pass without stepping an optimizer; ``None`` if there is none."""
    if module.automatic_optimization:
        return "training_step"
    return "validation_step" if is_overridden("validation_step", module) else None


def until_fault(batches: Iterable[Any], faults: list[Exception]) -> Generator[Any]:
    """The batches up to the first that the data do not give; why they do not is added to ``faults``.

    What fails in the module is raised by the step that a batch is given to, and so is told apart from this.

    Example:
        >>> faults = []
        >>> list(until_fault((1 / number for number in (2, 0)), faults)), faults
        ([0.5], [ZeroDivisionError('division by zero')])

    """
    try:
        yield from batches
    except Exception as error:
        faults.append(error)


@contextmanager
def _muted(module: L.LightningModule) -> Iterator[None]:
    """The Trainer's loggers, where it has some, are one that does nothing."""
    loggers: Any = module.loggers
    if loggers:
        module.trainer.loggers = [DummyLogger()]
    try:
        yield
    finally:
        if loggers:
            module.trainer.loggers = loggers


@contextmanager
def _values_aside(module: nn.Module) -> Iterator[None]:
    """Parameters and buffers have their values back afterwards."""
    before = [(entry, entry.detach().clone()) for entry in (*module.parameters(), *module.buffers())]
    try:
        yield
    finally:
        with torch.no_grad():
            for entry, value in before:
                entry.copy_(value)


@contextmanager
def _aside(owner: nn.Module, but: frozenset[str]) -> Iterator[None]:
    """Numbers, texts, tensors and containers among an object's attributes are copies meanwhile.

    Among the containers are those in which a module has its parameters and buffers: what is put in their place is gone
    afterwards.
    """
    before = _plain_attributes(owner, but)
    names = set(vars(owner))
    vars(owner).update((name, _copied(value)) for name, value in before.items())
    try:
        yield
    finally:
        vars(owner).update(before)
        for name in vars(owner).keys() - names:
            del vars(owner)[name]


@contextmanager
def _generators_aside(owner: nn.Module) -> Iterator[None]:
    """Random generators among an object's attributes draw the same numbers again afterwards."""
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


def _plain_attributes(owner: nn.Module, but: frozenset[str]) -> dict[str, Any]:
    kinds = (int, float, str, Tensor)
    return {
        name: value
        for name, value in vars(owner).items()
        if name not in but and (isinstance(value, kinds) or type(value) in _CONTAINERS)
    }


def _copied(value: Any) -> Any:
    """A copy of a tensor, or of a container and the containers in it; anything else is left as it is."""
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
