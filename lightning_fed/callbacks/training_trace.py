"""Trial run of a module's ``training_step``, to find the trained layers and the learned classes."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info
from torch import Tensor, nn
from torchmetrics import MetricCollection

from lightning_fed.callbacks.class_losses import BatchPath, ClassLoss, ClassLosses
from lightning_fed.callbacks.example_input import training_batch
from lightning_fed.callbacks.federation import federation_of
from lightning_fed.callbacks.pictures import Color
from lightning_fed.data.loader_clients import isolated_generators
from lightning_fed.data.population import seeded_generators
from lightning_fed.errors import describe
from lightning_fed.features.batches import BatchKey
from lightning_fed.features.isolated_pass import find_metrics, isolated_pass, loss_in, prepare_batch, run_prepared
from lightning_fed.features.label_maps import VoidLabel
from lightning_fed.features.layers import (
    LogitsLayer,
    count_classes,
    find_classifier,
    trained_layers,
    without_compiled_code,
)
from lightning_fed.lightning.internals import datamodule_of, is_overridden
from lightning_fed.numerics.trees import map_leaves, tree_leaves

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


_MOST_CLIENTS = 5  # number of clients tried one after another
_MOST_BATCHES = 5  # number of batches tried one after another, because a step may skip batches


class TrainingTrace(NamedTuple):
    """Layers found in a trial run of ``training_step``.

    ``calls`` has the arguments of each layer's first call, by the layer's path. ``trained`` has the layers with trained
    parameters and an effect on the loss.
    """

    calls: Mapping[str, Call]
    outermost: Collection[str]
    trained: Collection[str]
    batch: Any
    class_losses: Collection[ClassLoss]


@dataclass(frozen=True)
class ClassTask:
    """Classification task of a module, found in a trial run of ``training_step``.

    ``layer`` is the classifier's path. ``target`` reads the labels from a batch; ``None`` if the labels are not one
    tensor in the batch. With ``is_multilabel``, an example can have several classes.
    """

    layer: str
    num_classes: int
    ignore_index: int | None = None
    target: Callable[[Any], Tensor] | None = None
    is_multilabel: bool = False


class LabelDescription(NamedTuple):
    """Settings to draw labels: the labels' position in a batch, the ignored label, class names and class colours."""

    target: BatchKey
    void: VoidLabel
    class_names: tuple[str, ...] = ()
    class_colors: tuple[Color, ...] = ()

    def is_known(self, callback: str) -> bool:
        """True if the labels' position is known. Otherwise logs that the callback draws no pictures before a fit."""
        if self.target is None:
            rank_zero_info(
                f"{callback} draws no pictures before a fit, because labels are unknown: pass `{callback}` a `target`."
            )
        return self.target is not None


def find_class_task(
    trainer: L.Trainer,
    module: L.LightningModule,
    remedy: str,
    needs_target: bool = False,
    allows_multilabel: bool = False,
) -> ClassTask:
    """Finds a module's classifier, classes and labels by running the training step on one batch.

    A server without data uses :func:`~lightning_fed.modules.find_classifier` instead. With ``needs_target``, the labels
    must be one tensor in the batch. ``allows_multilabel`` permits several classes per example. Error messages end with
    ``remedy``.
    """
    federation = federation_of(trainer)
    is_remote = federation is not None and federation.is_remote
    expected = _guess(module, optimized_parameters(trainer)) if is_remote else None
    if is_remote and expected is None:
        raise MisconfigurationException(
            f"Expected {type(module).__name__} to have a layer that computes logits, but found none: {remedy}."
        )
    if expected is not None and federation is not None and federation.has_server:
        return expected
    try:
        task = _task_in(module, _trace(trainer, module))
    except _Unproven as fault:
        raise MisconfigurationException(
            f"Expected `training_step` of {type(module).__name__} to compare the outputs of one layer with class "
            f"labels in a cross-entropy, binary cross-entropy or Dice loss, but {fault}: {remedy}."
        ) from fault.__cause__
    if needs_target and (task.target is None or (task.is_multilabel and not allows_multilabel)):
        raise MisconfigurationException(
            f"Expected the labels in the loss of {type(module).__name__} to be one tensor from the batch, with one "
            f"class for each example or pixel, but a trial step found no such tensor: {remedy}."
        )
    if expected is not None and (
        not has_same_parameters(module, task.layer, expected.layer) or task.num_classes != expected.num_classes
    ):
        raise MisconfigurationException(
            f"Expected training to use the same classifier as the server, {expected.layer!r} with "
            f"{expected.num_classes} classes, but got {task.layer!r} with {task.num_classes}: on both sides, {remedy}."
        )
    return task


def describe_labels(
    trainer: L.Trainer, module: L.LightningModule, callback: str, target: BatchKey, void: VoidLabel
) -> LabelDescription:
    """Describes a module's labels and classes for a callback.

    ``target`` is the labels' position in a batch, and ``void`` the ignored label. A trial training step finds both, if
    the user has not given them. Error messages name ``callback``.
    """
    try:
        task = find_class_task(trainer, module, f"pass `{callback}` a `target`", target is None, allows_multilabel=True)
    except MisconfigurationException:
        if target is None:
            raise
        return LabelDescription(target, void)
    if void == "auto" and task.ignore_index is not None:
        void = task.ignore_index
    target = task.target if target is None else target
    return LabelDescription(target, void, *declared_classes(trainer, module, task.num_classes))


def declared_classes(
    trainer: L.Trainer, module: L.LightningModule, count: int
) -> tuple[tuple[str, ...], tuple[Color, ...]]:
    """Reads class names and class colours from the module or the datamodule.

    The attributes are ``class_names`` or ``classes``, and ``class_colors``. ``count`` is the number of classes. Lists
    of another length are ignored.
    """

    def find(names: Sequence[str], accepts: Callable[[Any], bool]) -> tuple[Any, ...]:
        owners = (module, module.hparams, datamodule_of(trainer))
        values = (getattr(owner, name, None) for owner in owners for name in names)
        lists = (tuple(value) for value in values if isinstance(value, list | tuple) and len(value) == count)
        return next((value for value in lists if all(map(accepts, value))), ())

    return find(("class_names", "classes"), lambda name: isinstance(name, str)), find(("class_colors",), _is_color)


def _is_color(value: Any) -> bool:
    is_triple = isinstance(value, list | tuple) and len(value) == 3
    return is_triple and all(isinstance(part, Integral) and 0 <= part <= 255 for part in value)  # type: ignore[operator]


def has_same_parameters(module: nn.Module, name: str, other: str) -> bool:
    """True if two layers, given by their paths, share all parameters."""
    one, two = ({id(value) for value in module.get_submodule(path).parameters()} for path in (name, other))
    return one == two


def trace_training(trainer: L.Trainer, module: L.LightningModule) -> TrainingTrace | None:
    """Runs ``training_step`` once on a client's batch, and restores all state afterwards.

    Returns ``None`` if the run fails or returns no loss, and for manual optimization.
    """
    try:
        return _trace(trainer, module)
    except _Unproven:  # the caller works without a trace
        return None


class _Unproven(Exception):
    """Raised if a trial run of ``training_step`` fails, or finds no classification task (:class:`ClassTask`)."""


def _trace(trainer: L.Trainer, module: L.LightningModule) -> TrainingTrace:
    if not module.automatic_optimization:
        raise _Unproven("manual optimization does not allow a trial step")
    error: Exception | None = None
    for read_batch in _batch_readers(trainer):
        try:
            for index in range(_MOST_BATCHES):
                trace = _trace_batch(trainer, module, partial(read_batch, index))
                if trace is not None:
                    return trace
            raise ValueError(f"the step returns no loss for {_MOST_BATCHES} batches")
        except Exception as fault:  # data and steps may raise any exception outside a fit
            error = error or fault
    assert error is not None
    raise _Unproven(f"a trial of the training step failed ({describe(error)})") from error


def _trace_batch(trainer: L.Trainer, module: L.LightningModule, read_batch: Callable[[], Any]) -> TrainingTrace | None:
    calls: dict[str, Call] = {}
    outputs: dict[str, list[Any]] = {}
    outermost: dict[str, None] = {}
    with seeded_generators(0), without_compiled_code():
        batch = read_batch()
        with isolated_pass(module, gradients=True, is_training=True):
            batch = move_data_to_device(prepare_batch(trainer, module, batch), module.device)
            losses, containers = ClassLosses(batch), map_leaves(lambda leaf: leaf, batch)  # the step may change both
            with _watched(module, calls, outputs, outermost, losses), losses.following():
                loss = loss_in(run_prepared(trainer, module, "training_step", batch, 0))
            if loss is None:
                return None
            nodes = _training_nodes(loss.grad_fn, optimized_parameters(trainer) or set(map(id, module.parameters())))
    trained = [name for name, made in outputs.items() if any(node in nodes for node in made)]
    class_losses = [class_loss for class_loss in losses.find_losses(loss) if class_loss.layer in trained]
    return TrainingTrace(calls, tuple(outermost), trained, containers, class_losses)


def _batch_readers(trainer: L.Trainer) -> Iterator[Callable[[int], Any]]:
    federation = federation_of(trainer)
    if federation is None:
        yield partial(_plain_batch, trainer)
        return
    for client in itertools.islice(federation.find_population().clients, _MOST_CLIENTS):
        yield partial(training_batch, federation, client)


def _plain_batch(trainer: L.Trainer, index: int) -> Any:
    loader: Any = trainer.train_dataloader
    if any(
        isinstance(data, Iterator) for part in tree_leaves(loader) for data in (part, getattr(part, "dataset", None))
    ):
        raise ValueError("the loader is an iterator, so a trial run of `training_step` would use up a batch of the fit")
    with isolated_generators(loader, 0):
        for batch, *_ in itertools.islice(CombinedLoader(loader, "min_size"), index, None):
            return batch
    raise ValueError(f"the training dataloader has no batch {index}, and no earlier trial step returned a loss")


def _task_in(module: nn.Module, trace: TrainingTrace) -> ClassTask:
    layers = list(dict.fromkeys(loss.layer for loss in trace.class_losses))
    declared = [name for name, layer in trained_layers(module) if isinstance(layer, LogitsLayer)]
    if not layers and len(declared) == 1:  # the layer may compute the loss
        return ClassTask(declared[0], count_classes(module) or 0)
    if len(layers) != 1:
        raise _Unproven(f"the layers {layers} do" if layers else "no layer does")
    losses = [loss for loss in trace.class_losses if loss.layer == layers[0]]
    voids = frozenset[int]().union(*(loss.voids for loss in losses))
    if len(voids) > 1:
        raise _Unproven(f"the losses for the layer {layers[0]!r} have several ignored labels, {sorted(voids)}")
    paths = frozenset[BatchPath]().union(*(loss.labels for loss in losses))
    has_labels = all(loss.has_labels for loss in losses)
    target = _reader(next(iter(paths)), trace.batch) if has_labels and len(paths) == 1 else None
    is_multilabel = any(loss.kind == "multilabel" for loss in losses)
    return ClassTask(layers[0], losses[0].num_classes, next(iter(voids), None), target, is_multilabel)


def _reader(path: BatchPath, traced: Any) -> Callable[[Any], Tensor]:
    expected = _structure(traced, path)

    def read(batch: Any) -> Tensor:
        found = _structure(batch, path)
        if found is None or expected is None or found[1:] != expected[1:]:
            place = "".join(f"[{key!r}]" for key in path)
            raise MisconfigurationException(
                f"Expected the labels in `batch{place}`, as in the traced training step, but got a "
                f"{type(batch).__name__} with another structure: select the labels with `target`."
            )
        return found[0]

    return read


def _structure(batch: Any, path: BatchPath) -> tuple[Tensor, int, bool, list[int]] | None:
    lengths: list[int] = []
    try:
        for key in path:
            lengths.append(len(batch) if isinstance(batch, list | tuple) else -1)
            batch = batch[key] if isinstance(batch, Mapping | list | tuple) else getattr(batch, key)
        return batch, batch.ndim, batch.is_floating_point(), lengths
    except (LookupError, TypeError, AttributeError):
        return None


def _guess(module: nn.Module, optimized: Collection[int]) -> ClassTask | None:
    name, count = find_classifier(module, optimized), count_classes(module, optimized)
    return None if name is None or count is None else ClassTask(name, count)


def optimized_parameters(trainer: L.Trainer) -> set[int]:
    """Ids of all parameters in the Trainer's optimizers; empty before ``configure_optimizers``."""
    return {
        id(parameter)
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def has_forward(module: L.LightningModule) -> bool:
    """True if the module overrides ``forward``."""
    return is_overridden("forward", module)


@contextmanager
def forward_of_training(trainer: L.Trainer, module: L.LightningModule) -> Iterator[Any]:
    """Context with a temporary ``forward``, for a module that computes only in ``training_step``.

    If ``training_step`` calls a single trained submodule, ``forward`` calls this submodule. Otherwise ``forward`` runs
    ``training_step`` and returns the loss. The context yields arguments for ``forward``, from a training batch.
    """
    advice = "write a `forward` from the inputs to the outputs used in the loss"
    try:
        trace = _trace(trainer, module)
    except _Unproven as fault:
        raise MisconfigurationException(
            f"Expected {type(module).__name__} to have a `forward`, or a `training_step` that calls a trained "
            f"submodule. The module has no `forward`, and {fault}: {advice}."
        ) from fault.__cause__
    networks = [name for name in trace.outermost if name in trace.trained]
    if not networks:
        raise MisconfigurationException(
            f"Expected {type(module).__name__} to have a `forward`, or a `training_step` that calls a trained "
            f"submodule. The module has no `forward`, and its `training_step` calls no trained submodule: {advice}."
        )
    with ExitStack() as stack:
        if len(networks) == 1:
            network = module.get_submodule(networks[0])
            forward: Callable[..., Any] = network.__call__
            example = _two_examples(inspect.signature(network.forward), *trace.calls[networks[0]])
        else:
            stack.enter_context(isolated_pass(module))
            stack.enter_context(_silent_metrics(module))
            forward = partial(_loss_of_step, trainer, module)
            example = _two_examples(inspect.signature(forward), (trace.batch,), {})
        vars(module)["forward"] = forward
        stack.callback(vars(module).pop, "forward", None)
        yield example


def _loss_of_step(trainer: L.Trainer, module: L.LightningModule, batch: Any) -> Any:
    return loss_in(run_prepared(trainer, module, "training_step", batch, 0))


@contextmanager
def _silent_metrics(module: nn.Module) -> Iterator[None]:
    """Context that disables torchmetrics metrics."""
    # A traced graph cannot contain reads of tensor values.
    replaced: list[tuple[nn.Module, dict[str, Any]]] = []
    for metric in find_metrics(module):
        nothing: Any = {} if isinstance(metric, MetricCollection) else torch.zeros(())
        stubs = dict.fromkeys(("forward", "update", "compute"), lambda *args, _value=nothing, **kwargs: _value)
        replaced.append((metric, {name: vars(metric)[name] for name in stubs if name in vars(metric)}))
        vars(metric).update(stubs)
    try:
        yield
    finally:
        for layer, before in replaced:
            for name in ("forward", "update", "compute"):
                vars(layer).pop(name, None)
            vars(layer).update(before)


@contextmanager
def _watched(
    module: nn.Module,
    calls: dict[str, Call],
    outputs: dict[str, list[Any]],
    outermost: dict[str, None],
    losses: ClassLosses,
) -> Iterator[None]:
    depth = 0
    with ExitStack() as hooks:
        root = module.register_forward_pre_hook(
            lambda module, args, kwargs: calls.setdefault("", (args, kwargs)) and None, with_kwargs=True
        )
        hooks.callback(root.remove)
        for path, child in [*module.named_modules()][1:]:

            def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = path) -> None:
                nonlocal depth
                calls.setdefault(name, (args, kwargs))
                losses.take_input(layer, (args, kwargs))
                if depth == 0:
                    outermost[name] = None
                depth += 1

            def leave(layer: nn.Module, args: Any, output: Any, name: str = path) -> None:
                nonlocal depth
                depth -= 1
                made = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn]
                outputs.setdefault(name, []).extend(made)
                losses.take_output(name, layer, output)

            hooks.callback(child.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(child.register_forward_hook(leave, always_call=True).remove)
        yield


def _training_nodes(loss: Any, trained: set[int]) -> set[Any]:
    order: list[Any] = []
    waiting, seen = [(loss, False)], set[Any]()
    while waiting:
        node, is_left = waiting.pop()
        if is_left:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(child, False) for child, _ in node.next_functions]
    nodes = set[Any]()
    for node in order:  # inputs first
        is_trained = id(getattr(node, "variable", None)) in trained
        if is_trained or any(child in nodes for child, _ in node.next_functions):
            nodes.add(node)
    return nodes


def _two_examples(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inputs: Any = signature.bind(*args, **kwargs).arguments if kwargs else args
    tensors = [value for value in tree_leaves(inputs) if isinstance(value, Tensor) and value.ndim]
    if len({len(value) for value in tensors}) != 1 or len(tensors) < len(inputs):
        return inputs
    return map_leaves(lambda value: value[:2] if isinstance(value, Tensor) and value.ndim else value, inputs)
