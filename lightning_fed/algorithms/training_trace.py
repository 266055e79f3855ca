"""One run of a module's ``training_step``: the layers that it calls, and those that the loss trains through."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

import lightning as L
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_fed.algorithms.example_input import first_batch
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.data.population import seeded_generators
from lightning_fed.lightning.internals import is_overridden
from lightning_fed.lightning.isolated_pass import isolated_pass, loss_in, prepare_batch, run_prepared
from lightning_fed.model.features import without_compiled_code
from lightning_fed.numerics.trees import map_leaves, tree_leaves

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments."""


class TrainingTrace(NamedTuple):
    """Record of a ``training_step``.

    Attributes:
        calls: Arguments of the first call of the module, under "", and of each layer, by its name.
        outermost: Names of the layers that the module itself has called.
        trained: Names of the layers through whose outputs the loss reaches parameters that train.

    """

    calls: Mapping[str, Call]
    outermost: Collection[str]
    trained: Collection[str]


def trace_training(trainer: L.Trainer, module: L.LightningModule) -> TrainingTrace | None:
    """Runs ``training_step`` once on a batch of the first client, in evaluation mode; leaves no trace.

    Parameters that train are those of the Trainer's optimizers; before there are any, those that require gradients.

    Args:
        trainer: The Trainer, which has a federation.
        module: The module.

    Returns:
        The trace; ``None`` if the step fails outside of the training, has no loss, or the module optimizes by hand.

    """
    if not module.automatic_optimization:
        return None
    calls: dict[str, Call] = {}
    outputs: dict[str, list[Any]] = {}
    outermost: dict[str, None] = {}
    with seeded_generators(0), _watched(module, calls, outputs, outermost), without_compiled_code():
        try:
            batch = first_batch(find_federation(trainer))
            with isolated_pass(module, gradients=True):
                batch = move_data_to_device(prepare_batch(trainer, module, batch), module.device)
                output = run_prepared(trainer, module, "training_step", batch, 0)
                loss = loss_in(output)
                nodes = _training_nodes(
                    loss.grad_fn, optimized_parameters(trainer) or set(map(id, module.parameters()))
                )
        except Exception:  # whatever the step raises outside of a fit: its caller knows what to do without a trace
            return None
    layers = [name for name, made in outputs.items() if any(node in nodes for node in made)]
    return TrainingTrace(calls, tuple(outermost), layers)


def trained_layer_names(trainer: L.Trainer, module: L.LightningModule) -> Collection[str] | None:
    """Layers that take part in the training, for a module of several networks; ``None`` where it has one.

    Where no training step can be followed, as on a server without data, they are those with parameters that an
    optimizer has; ``None`` before there are any.

    Args:
        trainer: The Trainer.
        module: The module.

    """
    if sum(any(True for _ in child.parameters()) for child in module.children()) < 2:
        return None
    trace = trace_training(trainer, module)
    if trace is not None:
        return trace.trained
    optimized, layers = optimized_parameters(trainer), module.named_modules()
    return [name for name, layer in layers if any(id(one) in optimized for one in layer.parameters())] or None


def optimized_parameters(trainer: L.Trainer) -> set[int]:
    """Ids of the parameters that the Trainer's optimizers have; empty before there are any."""
    return {
        id(parameter)
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def has_forward(module: L.LightningModule) -> bool:
    """True if the module has a ``forward`` of its own."""
    return is_overridden("forward", module)


@contextmanager
def forward_of_training(trainer: L.Trainer, module: L.LightningModule) -> Iterator[Any]:
    """Context in which a module without ``forward`` has that of the one network that its ``training_step`` trains.

    Args:
        trainer: The Trainer, which has a federation.
        module: The module.

    Yields:
        What the network was called with: a tuple of positional inputs or a dictionary of named ones, cut to two
        examples where they are tensors of one length.

    Raises:
        MisconfigurationException: If the step does not train one network.

    """
    trace = trace_training(trainer, module)
    networks = [] if trace is None else [name for name in trace.outermost if name in trace.trained]
    if trace is None or len(networks) != 1:
        fault = "cannot be run beside the training" if trace is None else f"trains {networks or 'no network'}"
        raise MisconfigurationException(
            f"Expected {type(module).__name__} to have a `forward`, whose operations are followed, or a `training_step`"
            f" that trains one network, but it has no `forward`, and its `training_step` {fault}: write a `forward`"
            " that computes what the loss is made of."
        )
    network = module.get_submodule(networks[0])
    vars(module)["forward"] = network.__call__
    try:
        yield _two_examples(inspect.signature(network.forward), *trace.calls[networks[0]])
    finally:
        del vars(module)["forward"]


@contextmanager
def _watched(
    module: nn.Module, calls: dict[str, Call], outputs: dict[str, list[Any]], outermost: dict[str, None]
) -> Iterator[None]:
    """Context in which calls of the module's layers are noted."""
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
                if depth == 0:
                    outermost[name] = None
                depth += 1

            def leave(layer: nn.Module, args: Any, output: Any, name: str = path) -> None:
                nonlocal depth
                depth -= 1
                made = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn]
                outputs.setdefault(name, []).extend(made)

            hooks.callback(child.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(child.register_forward_hook(leave, always_call=True).remove)
        yield


def _training_nodes(loss: Any, trained: set[int]) -> set[Any]:
    """Nodes of autograd's graph between a loss and parameters, given by their ids."""
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
    for node in order:  # inputs before what is computed from them
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
