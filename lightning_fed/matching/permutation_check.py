"""Checks permutation groups by running the module with permuted neurons, or with additional neurons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fed.matching.permutation import PermutationGroup, grow_neurons, permute_neurons
from lightning_fed.model.entries import entry_tensors
from lightning_fed.model.resize import update_layer_sizes
from lightning_fed.numerics.precision import float64_device
from lightning_fed.numerics.trees import map_leaves, tree_leaves

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}  # tolerance relative to the largest output


class PermutationCheck:
    """Runs a module to check exchangeable neurons (permutation groups).

    Use inside :func:`restored_afterwards`. The module runs in evaluation mode, if possible in float64. Random numbers
    are added to parameters and inputs, because equal values could hide an effect of the exchange.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._module, self._generator = module, torch.Generator().manual_seed(0)
        self._tensors = entry_tensors(module)
        first = {id(tensor): name for name, tensor in reversed(self._tensors.items())}
        self._values = {name: self._perturbed(self._tensors[name], name) for name in first.values()}
        self._inputs = map_leaves(self._perturbed, (args, dict(kwargs)))
        self._device = next((tensor.device for tensor in self._tensors.values()), torch.device("cpu"))
        self._dtype = torch.float64 if float64_device(self._device) == self._device else torch.float32
        try:
            self._outputs = self._compute(self._values)
        except (RuntimeError, TypeError, ValueError):  # the network's code requires float32
            self._dtype = torch.float32
            self._outputs = self._compute(self._values)
        self._scale = max((float(output.abs().max()) for output in self._outputs if output.numel()), default=0.0)

    def find_not_invariant(self, groups: Sequence[PermutationGroup]) -> list[PermutationGroup]:
        """Finds groups in which a permutation changes the outputs; all groups if no output is finite."""
        if not 0 < self._scale < float("inf"):
            return list(groups)
        return _find_failing(list(groups), self._is_variant)

    def find_fixed_width(self, groups: Sequence[PermutationGroup]) -> list[PermutationGroup]:
        """Finds groups to which no neurons can be added, even with outgoing weights 0."""
        growable = [group for group in groups if group.is_growable]
        return _find_failing(growable, lambda growing: self._has_fixed_width(groups, growing))

    def _is_variant(self, groups: list[PermutationGroup]) -> bool:
        # Together, a cycle and a random order almost always generate all permutations.
        for draw in (self._cyclic_order, self._random_order):
            orders = []
            for group in groups:
                width = group.size // group.blocks
                blocks = [block * width + draw(width) for block in draw(group.blocks).tolist()]
                orders.append(torch.cat(blocks))
            if not self._is_same(permute_neurons(self._values, groups, orders)):
                return True
        return False

    def _has_fixed_width(self, groups: Sequence[PermutationGroup], growing: list[PermutationGroup]) -> bool:
        # New neurons have random incoming weights and zero outgoing weights.
        sizes = [group.size + (1 + index % 3 if group in growing else 0) for index, group in enumerate(groups)]
        assignments = [torch.arange(group.size) for group in groups]
        out_groups, in_groups = (
            [_only(group, roles) for group in groups] for roles in (("out", "vec"), ("in", "both"))
        )
        state = grow_neurons(self._values, out_groups, assignments, sizes)
        for name, value in state.items():
            if value.is_floating_point() and value.shape != self._values[name].shape:
                numbers = 0.5 + torch.rand(value.shape, generator=self._generator, dtype=value.dtype)
                state[name] = torch.where(value == 0, numbers, value)  # only new values are 0
        return not self._is_same(grow_neurons(state, in_groups, assignments, sizes))

    def _is_same(self, state: Mapping[str, Tensor]) -> bool:
        try:
            outputs = self._compute(state)
        except Exception:  # modules with fixed widths in their code may raise any exception
            return False
        if [output.shape for output in outputs] != [output.shape for output in self._outputs]:
            return False
        limit = _TOLERANCES[self._dtype] * self._scale
        pairs = zip(outputs, self._outputs, strict=True)
        return all(bool(((output - expected).abs() <= limit).all()) for output, expected in pairs)

    def _compute(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        for name, value in state.items():
            tensor = self._tensors[name]
            tensor.data = self._cast(value, tensor.device)
        update_layer_sizes(self._module)
        for buffer in self._module.buffers():  # buffers outside the state
            buffer.data = self._cast(buffer.data, buffer.device)
        args, kwargs = map_leaves(lambda leaf: self._cast(leaf, self._device), self._inputs)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            outputs = self._module(*args, **kwargs)
        return [leaf.to(self._dtype) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]

    def _cast(self, value: Any, device: torch.device) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, self._dtype if value.is_floating_point() else value.dtype)

    def _perturbed(self, value: Any, name: str = "") -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value.detach().cpu() if isinstance(value, Tensor) else value
        numbers = value.detach().to("cpu", torch.float64)
        if name.endswith("running_var"):
            return 0.5 + torch.rand(numbers.shape, generator=self._generator, dtype=torch.float64)
        spread = numbers.std(correction=0)
        noise = torch.randn(numbers.shape, generator=self._generator, dtype=torch.float64)
        return numbers + noise * (spread if spread > 1e-3 else 0.1)

    def _cyclic_order(self, count: int) -> Tensor:
        order = self._random_order(count)
        return torch.empty_like(order).index_copy_(0, order, order.roll(1))

    def _random_order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator)


def split_inputs(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Converts an example input to positional and named inputs."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


@contextmanager
def restored_afterwards(module: nn.Module) -> Iterator[None]:
    """Context for evaluation mode without gradients. Restores all tensors and attributes on exit."""
    tensors = [*module.parameters(), *module.buffers()]
    values = [tensor.data for tensor in tensors]
    layers = [(layer, layer.training, dict(vars(layer))) for layer in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data = value
        for layer, is_training, attributes in layers:
            layer.training = is_training
            vars(layer).update(attributes)


def _find_failing(
    groups: list[PermutationGroup], fails: Callable[[list[PermutationGroup]], bool]
) -> list[PermutationGroup]:
    """Finds groups to remove until ``fails`` is false, by testing halves of the list."""
    if not groups or not fails(groups):
        return []
    if len(groups) == 1:
        return groups
    half = len(groups) // 2
    failing = _find_failing(groups[:half], fails) + _find_failing(groups[half:], fails)
    if not failing:  # only both halves together fail
        return groups
    return failing + _find_failing([group for group in groups if group not in failing], fails)


def _only(group: PermutationGroup, roles: Sequence[str]) -> PermutationGroup:
    return replace(group, entries={axis: entry for axis, entry in group.entries.items() if entry.role in roles})
