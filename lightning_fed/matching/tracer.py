"""Finds permutable neurons: gives neurons ids, and follows the ids through a network's operations."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg
from torch.fx.operator_schemas import get_signature_for_torch_op

from lightning_fed.matching.neuron_ids import NEUTRAL, PINNED, ParameterView, TracedActivation, UnionFind
from lightning_fed.matching.permutation import Axis
from lightning_fed.numerics.trees import tree_leaves

_MOST_ELEMENTS = 200_000  # limit for tracing a parameter per element
_MOST_REGIONS = 4096  # limit for regions with separate constraints in one activation

Rule: TypeAlias = Callable[["Tracer", "Call"], Any]


@dataclass(frozen=True, eq=False)
class Call:
    """One operation in a traced network, with neuron ids instead of tensors.

    ``arguments`` contains all arguments by name. ``shapes`` contains the shape of each result, or ``None`` for results
    other than tensors.
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arguments: dict[str, Any]
    shapes: list[tuple[int, ...] | None]
    has_many: bool

    @property
    def shape(self) -> tuple[int, ...]:
        assert self.shapes[0] is not None
        return self.shapes[0]

    @property
    def tensors(self) -> list[TracedActivation | ParameterView]:
        leaves = tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, TracedActivation | ParameterView)]

    def alike(self, ids: Tensor) -> Any:
        return self.results(*[None if shape is None else TracedActivation(ids, shape) for shape in self.shapes])

    def pinned(self) -> Any:
        shapes = self.shapes
        return self.results(*[None if shape is None else TracedActivation.filled(PINNED, shape) for shape in shapes])

    def results(self, *activations: TracedActivation | None) -> Any:
        """Returns one activation, or a list if the operation has several results. ``None`` fills missing results."""
        filled = [*activations, *[None] * (len(self.shapes) - len(activations))]
        return filled if self.has_many else filled[0]


class Tracer:
    """Finds the rows and columns of parameters that belong to the same neuron.

    Each row or column has a neuron id. Ids of the same neuron are merged. Neurons with a fixed order are pinned.

    Attributes:
        axes: For each parameter axis, the neuron id at each position.
        roles: For each parameter axis, whether neurons are outputs (``"out"``), inputs (``"in"``), or have one value
            each (``"vec"``).
        elements: Neuron id of each element, for parameters used like activations, such as position embeddings.
        unknown: Number of calls of each unsupported operation. Neurons in such operations are pinned.
    """

    def __init__(self, state: Mapping[str, Tensor], rules: Mapping[str, Rule]) -> None:
        self.state, self.rules = state, rules
        self.union_find = UnionFind()
        self.axes: dict[Axis, Tensor] = {}
        self.roles: dict[Axis, set[str]] = {}
        self.elements: dict[str, Tensor] = {}
        self.unknown: Counter[str] = Counter()
        self.constant_id = NEUTRAL

    def run(self, program: ExportedProgram, names: Mapping[str, str], constants: Mapping[str, Tensor]) -> None:
        """Finds the neurons in an exported program."""
        # Both arguments are by tensor path: names in the state dict, and tensors outside the state dict.
        signature = program.graph_signature
        targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        targets |= getattr(signature, "inputs_to_lifted_tensor_constants", {})
        values: dict[Node, Any] = {}
        calls = [node for node in program.graph.nodes if node.op == "call_function"]
        if any(_op_name(node).endswith("_") and self._rule(node) is None for node in calls):
            self.constant_id = PINNED  # in-place operations may change constants
        for node in program.graph.nodes:
            if node.op == "placeholder":
                target = targets.get(node.name)
                if target is not None and target in names:
                    lengths = tuple(self.state[names[target]].shape)
                    values[node] = ParameterView(names[target], lengths, tuple(range(len(lengths))))
                elif target is not None:
                    constant = constants[target] if target in constants else program.constants[target]
                    values[node] = self._constant(constant)
                else:
                    values[node] = _pinned(node.meta.get("val"))
            elif node.op == "get_attr":
                value = operator.attrgetter(node.target)(program.graph_module)
                values[node] = self._constant(value) if isinstance(value, Tensor) else value
            elif node.op == "output":
                for output in node.all_input_nodes:
                    if output.name in signature.user_outputs:  # excludes buffer updates
                        self.pin(values[output])
            else:
                args, kwargs = (map_arg(part, lambda operand: values[operand]) for part in (node.args, node.kwargs))
                values[node] = self._call(node, args, kwargs)
                if _op_name(node).endswith("_") and isinstance(node.args[0], Node):
                    values[node.args[0]] = values[node]

    # --- parameters ---------------------------------------------------------------------------------------------------

    def axis(self, view: ParameterView, dim: int, role: str) -> Tensor:
        """Returns the neuron ids on a parameter axis. Adds ``role``, such as ``"out"``, to the axis's ``roles``."""
        key = view.name, view.axes[dim]
        if key not in self.axes:
            self.axes[key] = self.union_find.add(view.shape[dim])
            self.roles[key] = set()
            if view.name in self.elements:
                self.union_find.pin(self.elements[view.name])
                self.union_find.pin(self.axes[key])
        self.roles[key].add(role)
        return self.axes[key]

    def activation(self, value: TracedActivation | ParameterView) -> TracedActivation:
        if isinstance(value, TracedActivation):
            return value
        long = [dim for dim, length in enumerate(value.shape) if length > 1]
        if not long:
            return TracedActivation.filled(PINNED, value.shape)
        if len(long) == 1:
            ids = self.axis(value, long[0], "vec")
            return TracedActivation(
                ids.view([-1 if dim in long else 1 for dim in range(len(value.shape))]), value.shape
            )
        count = torch.Size(value.lengths).numel()
        if count > _MOST_ELEMENTS or any((value.name, value.axes[dim]) in self.axes for dim in long):
            self.pin(value)
            return TracedActivation.filled(PINNED, value.shape)
        if value.name not in self.elements:
            self.elements[value.name] = self.union_find.add(count).view(value.lengths)
        return TracedActivation(self.elements[value.name].permute(value.axes), value.shape)

    def pin(self, value: Any) -> None:
        if isinstance(value, TracedActivation):
            self.union_find.pin(value.ids)
        elif isinstance(value, ParameterView):
            for dim in range(len(value.shape)):
                self.union_find.pin(self.axis(value, dim, "vec"))
            if value.name in self.elements:
                self.union_find.pin(self.elements[value.name])

    # --- helpers for rules -----------------------------------------------------------------------------------------

    def along(self, value: TracedActivation | ParameterView, dim: int) -> Tensor:
        """Marks all elements with the same index along ``dim`` as one neuron. Returns the neuron id for each index."""
        activation = self.activation(value)
        dim %= len(activation.shape)
        remaining_dims = [index for index in range(len(activation.shape)) if index != dim]
        return self.coupled(activation, remaining_dims).ids.reshape(-1).expand(activation.shape[dim])

    def coupled(self, activation: TracedActivation, dims: Iterable[int]) -> TracedActivation:
        ids = activation.ids
        for dim in dims:
            if ids.shape[dim] > 1:
                largest = ids.amax(dim, keepdim=True)  # neutral only if all ids are neutral
                self.union_find.unite(largest, ids)
                ids = largest
        return TracedActivation(ids, activation.shape)

    def read(self, view: ParameterView, dim: int, ids: Tensor) -> None:
        axis_ids = self.axis(view, dim, "in")
        self.union_find.unite(axis_ids, torch.where(ids == NEUTRAL, PINNED, ids))

    def couple_vectors(self, values: Iterable[Any], ids: Tensor) -> None:
        """Assigns element *i* of each vector, such as a bias, to neuron ``ids[i]``. Skips ``None``."""
        for value in values:
            if isinstance(value, TracedActivation | ParameterView):
                vector = self.activation(value)
                self.union_find.unite(vector.ids.reshape(-1), torch.where(ids == NEUTRAL, PINNED, ids))

    def pointwise(self, values: Sequence[TracedActivation | ParameterView], shape: Sequence[int]) -> TracedActivation:
        rank = len(shape)
        result, result_broad = TracedActivation.filled(NEUTRAL, shape), set(range(rank))
        for value in values:
            activation = self.activation(value)
            missing = rank - len(activation.shape)
            lengths = (1,) * missing + activation.shape
            broad = {dim for dim in range(rank) if lengths[dim] == 1}
            ids = activation.ids.reshape((1,) * missing + tuple(activation.ids.shape))
            result = self._combine(result, result_broad, TracedActivation(ids, tuple(shape)), broad)
            result_broad &= broad
        return result

    def reduced(self, activation: TracedActivation, dims: set[int]) -> TracedActivation:
        """Returns the activation after a reduction over ``dims``, which keep length 1."""
        inner, outer = activation.varying & dims, activation.varying - dims
        if inner and outer:  # sum over branches with common neurons
            activation, inner = self.coupled(activation, dims), set()
        shape = tuple(1 if dim in dims else length for dim, length in enumerate(activation.shape))
        if not inner:
            return TracedActivation(activation.ids, shape)
        self.union_find.constrain(activation.ids, "within")
        return TracedActivation.filled(PINNED, shape)

    def keep_within(self, activation: TracedActivation, dims: set[int]) -> None:
        """Forbids neurons to move between slices of an activation. A slice has one index per dimension in ``dims``."""
        ordered = [*sorted(dims), *sorted(set(range(activation.ids.ndim)) - dims)]
        count = torch.Size([activation.ids.shape[dim] for dim in dims]).numel()
        if activation.varying <= dims or count > _MOST_REGIONS:
            self.pin(activation)
            return
        for region in activation.ids.permute(ordered).reshape(count, -1):
            self.union_find.constrain(region, "within")

    def is_pinned(self, activation: TracedActivation) -> bool:
        return bool((self.union_find.find_all(activation.ids) == PINNED).all())

    def unknown_result(self, call: Call) -> Any:
        self.unknown[call.name] += 1
        for value in call.tensors:
            self.pin(value)
        return call.pinned()

    # ------------------------------------------------------------------------------------------------------------------

    def _combine(
        self, first: TracedActivation, first_broad: set[int], second: TracedActivation, second_broad: set[int]
    ) -> TracedActivation:
        """Merges neurons at equal indices of an elementwise operation's operands. ``*_broad``: axes to broadcast."""
        for operand, partner in ((first, second), (second, first)):
            if bool((operand.ids == NEUTRAL).all()):
                return partner
        is_outer = first.varying <= second_broad and second.varying <= first_broad  # outer product
        if is_outer and (first.varying or second.varying):
            if first.varying and second.varying:
                self.pin(second)
            return first if first.varying else second
        for operand, partner, broad in ((first, second, second_broad), (second, first, first_broad)):
            if self.is_pinned(partner) and not self.is_pinned(operand):
                if operand.varying - broad:
                    self.keep_within(operand, operand.varying - broad)
                return operand
        self.union_find.unite(first.ids, second.ids)
        return TracedActivation(torch.where(first.ids != NEUTRAL, first.ids, second.ids), first.shape)

    def _constant(self, value: Tensor) -> TracedActivation:
        is_one = value.numel() > 0 and bool((value == value.reshape(-1)[0]).all())
        return TracedActivation.filled(self.constant_id if is_one else PINNED, value.shape)

    def _call(self, node: Node, args: Any, kwargs: Any) -> Any:
        if node.target is operator.getitem:
            return args[0][args[1]]
        value = node.meta.get("val")
        has_many = isinstance(value, list | tuple)
        values: list[Any] = [*value] if isinstance(value, list | tuple) else [value]
        shapes = [tuple(result.shape) if isinstance(result, Tensor) else None for result in values]
        name = _op_name(node)
        call = Call(name, node.target, args, kwargs, _bound(node.target, args, kwargs), shapes, has_many)
        rule = self._rule(node)
        if rule is None and not call.tensors:
            return call.pinned()
        if rule is None:
            return self.unknown_result(call)
        try:
            return rule(self, call)
        except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return self.unknown_result(call)  # unsupported arguments

    def _rule(self, node: Node) -> Rule | None:
        rule = self.rules.get(_op_name(node).removesuffix("_"))
        if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
            rule = self.rules["pointwise"]
        return rule


def _op_name(node: Node) -> str:
    # "conv2d" for aten.conv2d.default
    parts = str(node.target).split(".")
    return parts[1] if len(parts) == 3 else str(node.target)


def _bound(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    signatures = get_signature_for_torch_op(target)
    # operations without a schema
    if not signatures:
        return {}
    bound = signatures[0].bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _pinned(value: Any) -> Any:
    return TracedActivation.filled(PINNED, value.shape) if isinstance(value, Tensor) else value
