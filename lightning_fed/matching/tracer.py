"""Following atoms through a network, operation by operation."""

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
from torch.utils._pytree import tree_leaves

from lightning_fed.matching.atoms import NEUTRAL, PINNED, Atoms, ParameterView, Shadow
from lightning_fed.matching.permutation import Axis

_MOST_ELEMENTS = 200_000  # of a parameter that is followed element by element
_MOST_REGIONS = 4096  # of an activation, in each of which neurons stay

Rule: TypeAlias = Callable[["Tracer", "Call"], Any]


@dataclass(frozen=True, eq=False)
class Call:
    """One operation of a network, with shadows in the place of tensors.

    Attributes:
        name: Its name, such as ``"conv2d"``.
        target: The operation.
        args: Positional arguments, as they were given.
        kwargs: Keyword arguments, as they were given.
        arguments: All arguments by name, with defaults.
        shapes: Shapes of the results; ``None`` for what is no tensor.
        has_many: Whether there are several results.

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
        """Shape of the first result."""
        assert self.shapes[0] is not None
        return self.shapes[0]

    @property
    def tensors(self) -> list[Shadow | ParameterView]:
        """All tensors among the arguments."""
        leaves = tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Shadow | ParameterView)]

    def results(self, *shadows: Shadow | None) -> Any:
        """Results in the form that the operation has them; those that are missing are not used."""
        filled = [*shadows, *[None] * (len(self.shapes) - len(shadows))]
        return filled if self.has_many else filled[0]


class Tracer:
    """Joins and pins the atoms of a state's axes while it goes through a network's operations.

    Attributes:
        atoms: The sets of atoms.
        axes: Atoms of the axes that were met, in the order of the network.
        roles: What those axes do.
        elements: Atoms of entries that are followed element by element.
        unknown: Operations without a rule, by how often they were met: all that they touch is pinned.
        constant_atom: The atom of constants of one value.

    """

    def __init__(self, state: Mapping[str, Tensor], rules: Mapping[str, Rule]) -> None:
        self.state, self.rules = state, rules
        self.atoms = Atoms()
        self.axes: dict[Axis, Tensor] = {}
        self.roles: dict[Axis, set[str]] = {}
        self.elements: dict[str, Tensor] = {}
        self.unknown: Counter[str] = Counter()
        self.constant_atom = NEUTRAL

    def run(self, program: ExportedProgram, names: Mapping[str, str], constants: Mapping[str, Tensor]) -> None:
        """Goes through a network.

        Args:
            program: The network.
            names: Names of the state's entries by those that the network has for them.
            constants: Buffers that are no entries of the state, by the network's names.

        """
        signature = program.graph_signature
        held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        held |= getattr(signature, "inputs_to_lifted_tensor_constants", {})
        values: dict[Node, Any] = {}
        calls = [node for node in program.graph.nodes if node.op == "call_function"]
        if any(_op_name(node).endswith("_") and self._rule(node) is None for node in calls):
            self.constant_atom = PINNED  # values may be written into it
        for node in program.graph.nodes:
            if node.op == "placeholder":
                own = held.get(node.name)
                if own is not None and own in names:
                    lengths = tuple(self.state[names[own]].shape)
                    values[node] = ParameterView(names[own], lengths, tuple(range(len(lengths))))
                elif own is not None:
                    values[node] = self._constant(constants[own] if own in constants else program.constants[own])
                else:
                    values[node] = _pinned(node.meta.get("val"))
            elif node.op == "get_attr":
                value = operator.attrgetter(node.target)(program.graph_module)
                values[node] = self._constant(value) if isinstance(value, Tensor) else value
            elif node.op == "output":
                for other in node.all_input_nodes:
                    if other.name in signature.user_outputs:  # not new values of buffers
                        self.pin(values[other])
            else:
                args, kwargs = (map_arg(part, lambda other: values[other]) for part in (node.args, node.kwargs))
                values[node] = self._call(node, args, kwargs)
                if _op_name(node).endswith("_") and isinstance(node.args[0], Node):
                    values[node.args[0]] = values[node]

    # --- parameters ---------------------------------------------------------------------------------------------------

    def axis(self, view: ParameterView, dim: int, role: str) -> Tensor:
        """Atoms of an entry's axis, which has this role here."""
        key = view.name, view.axes[dim]
        if key not in self.axes:
            self.axes[key] = self.atoms.fresh(view.shape[dim])
            self.roles[key] = set()
            if view.name in self.elements:
                self.atoms.pin(self.elements[view.name])
                self.atoms.pin(self.axes[key])
        self.roles[key].add(role)
        return self.axes[key]

    def shadow(self, value: Shadow | ParameterView) -> Shadow:
        """The shadow of a tensor; of a parameter that is used as an activation is, too."""
        if isinstance(value, Shadow):
            return value
        long = [dim for dim, length in enumerate(value.shape) if length > 1]
        if not long:
            return Shadow.filled(PINNED, value.shape)
        if len(long) == 1:
            atoms = self.axis(value, long[0], "vec")
            return Shadow(atoms.view([-1 if dim in long else 1 for dim in range(len(value.shape))]), value.shape)
        count = torch.Size(value.lengths).numel()
        if count > _MOST_ELEMENTS or any((value.name, value.axes[dim]) in self.axes for dim in long):
            self.pin(value)
            return Shadow.filled(PINNED, value.shape)
        if value.name not in self.elements:
            self.elements[value.name] = self.atoms.fresh(count).view(value.lengths)
        return Shadow(self.elements[value.name].permute(value.axes), value.shape)

    def pin(self, value: Any) -> None:
        """Makes all neurons of a tensor immovable."""
        if isinstance(value, Shadow):
            self.atoms.pin(value.atoms)
        elif isinstance(value, ParameterView):
            for dim in range(len(value.shape)):
                self.atoms.pin(self.axis(value, dim, "vec"))
            if value.name in self.elements:
                self.atoms.pin(self.elements[value.name])

    # --- what rules are made of ---------------------------------------------------------------------------------------

    def along(self, value: Shadow | ParameterView, dim: int) -> Tensor:
        """Atoms along one dimension, joined over all others; shape ``(length,)``."""
        shadow = self.shadow(value)
        dim %= len(shadow.shape)
        joined = self.joined(shadow, [other for other in range(len(shadow.shape)) if other != dim])
        return joined.atoms.reshape(-1).expand(shadow.shape[dim])

    def joined(self, shadow: Shadow, dims: Iterable[int]) -> Shadow:
        """The shadow with the atoms along some dimensions joined."""
        atoms = shadow.atoms
        for dim in dims:
            if atoms.shape[dim] > 1:
                one = atoms.amax(dim, keepdim=True)  # not a neutral one where there are others
                self.atoms.join(one, atoms)
                atoms = one
        return Shadow(atoms, shadow.shape)

    def read(self, view: ParameterView, dim: int, atoms: Tensor) -> None:
        """A parameter's axis reads what has these atoms; what is no neuron's is not to move."""
        own = self.axis(view, dim, "in")
        self.atoms.join(own, torch.where(atoms == NEUTRAL, PINNED, atoms))

    def belong(self, values: Iterable[Any], atoms: Tensor) -> None:
        """Vectors with one number per neuron (bias, normalisation); what is missing is left out."""
        for value in values:
            if isinstance(value, Shadow | ParameterView):
                own = self.shadow(value)
                self.atoms.join(own.atoms.reshape(-1), torch.where(atoms == NEUTRAL, PINNED, atoms))

    def pointwise(self, values: Sequence[Shadow | ParameterView], shape: Sequence[int]) -> Shadow:
        """Element by element: what meets in one element moves together."""
        rank = len(shape)
        result, result_broad = Shadow.filled(NEUTRAL, shape), set(range(rank))
        for value in values:
            shadow = self.shadow(value)
            missing = rank - len(shadow.shape)
            lengths = (1,) * missing + shadow.shape
            broad = {dim for dim in range(rank) if lengths[dim] == 1}
            atoms = shadow.atoms.reshape((1,) * missing + tuple(shadow.atoms.shape))
            result = self._meet(result, result_broad, Shadow(atoms, tuple(shape)), broad)
            result_broad &= broad
        return result

    def reduced(self, shadow: Shadow, dims: set[int]) -> Shadow:
        """What is computed of all elements along some dimensions, which keep the length 1: their order is not seen."""
        inner, outer = shadow.varying & dims, shadow.varying - dims
        if inner and outer:  # a sum of branches: their neurons are one
            shadow, inner = self.joined(shadow, dims), set()
        shape = tuple(1 if dim in dims else length for dim, length in enumerate(shadow.shape))
        if not inner:
            return Shadow(shadow.atoms, shape)
        self.atoms.mark(shadow.atoms, "within")
        return Shadow.filled(PINNED, shape)

    def keep_within(self, shadow: Shadow, dims: set[int]) -> None:
        """Neurons may change places only with those at the same place along some dimensions."""
        ordered = [*sorted(dims), *sorted(set(range(shadow.atoms.ndim)) - dims)]
        count = torch.Size([shadow.atoms.shape[dim] for dim in dims]).numel()
        if shadow.varying <= dims or count > _MOST_REGIONS:
            self.pin(shadow)
            return
        for region in shadow.atoms.permute(ordered).reshape(count, -1):
            self.atoms.mark(region, "within")

    def fixed(self, shadow: Shadow) -> bool:
        """Whether nothing of it moves."""
        return bool((self.atoms.roots(shadow.atoms) == PINNED).all())

    def unknown_result(self, call: Call) -> Any:
        """Pins all that an operation touches."""
        self.unknown[call.name] += 1
        for value in call.tensors:
            self.pin(value)
        return call.results(*[None if shape is None else Shadow.filled(PINNED, shape) for shape in call.shapes])

    # ------------------------------------------------------------------------------------------------------------------

    def _meet(self, first: Shadow, first_broad: set[int], second: Shadow, second_broad: set[int]) -> Shadow:
        """Two operands of one shape. Along its ``broad`` dimensions an operand is repeated, not only of equal atoms."""
        for one, other in ((first, second), (second, first)):
            if bool((one.atoms == NEUTRAL).all()):
                return other
        is_outer = first.varying <= second_broad and second.varying <= first_broad  # as in an outer product
        if is_outer and (first.varying or second.varying):
            if first.varying and second.varying:
                self.pin(second)
            return first if first.varying else second
        for one, other, broad in ((first, second, second_broad), (second, first, first_broad)):
            if self.fixed(other) and not self.fixed(one):
                if one.varying - broad:
                    self.keep_within(one, one.varying - broad)
                return one
        self.atoms.join(first.atoms, second.atoms)
        return Shadow(torch.where(first.atoms != NEUTRAL, first.atoms, second.atoms), first.shape)

    def _constant(self, value: Tensor) -> Shadow:
        is_one = value.numel() > 0 and bool((value == value.reshape(-1)[0]).all())
        return Shadow.filled(self.constant_atom if is_one else PINNED, value.shape)

    def _call(self, node: Node, args: Any, kwargs: Any) -> Any:
        if node.target is operator.getitem:
            return args[0][args[1]]
        value = node.meta.get("val")
        has_many = isinstance(value, list | tuple)
        values: list[Any] = [*value] if isinstance(value, list | tuple) else [value]
        shapes = [tuple(one.shape) if isinstance(one, Tensor) else None for one in values]
        name = _op_name(node)
        call = Call(name, node.target, args, kwargs, _bound(node.target, args, kwargs), shapes, has_many)
        rule = self._rule(node)
        if rule is None and not call.tensors:
            return call.results(*[None if shape is None else Shadow.filled(PINNED, shape) for shape in shapes])
        if rule is None:
            return self.unknown_result(call)
        try:
            return rule(self, call)
        except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return self.unknown_result(call)  # a form of the operation that the rule does not know

    def _rule(self, node: Node) -> Rule | None:
        rule = self.rules.get(_op_name(node).removesuffix("_"))
        if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
            rule = self.rules["pointwise"]
        return rule


def _op_name(node: Node) -> str:
    """``"conv2d"`` of ``aten.conv2d.default``."""
    parts = str(node.target).split(".")
    return parts[1] if len(parts) == 3 else str(node.target)


def _bound(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by name, with defaults; none where the operation does not say what it takes."""
    signatures = get_signature_for_torch_op(target)
    if not signatures:
        return {}
    bound = signatures[0].bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _pinned(value: Any) -> Any:
    return Shadow.filled(PINNED, value.shape) if isinstance(value, Tensor) else value
