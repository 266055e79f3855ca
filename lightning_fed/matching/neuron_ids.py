"""Ids of neurons: union-find over the positions of parameters' axes, and activations with the id of every element.

Every position of a parameter's axis starts with an id of its own. While an activation is followed through a network,
two ids are united where one element would have both. Positions whose ids are one in the end are coupled: they belong to
one neuron.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

NEUTRAL, PINNED = 0, 1
"""Ids of constants of one value, which are equal everywhere, and of elements that do not move (inputs, outputs)."""

Constraint: TypeAlias = tuple[Literal["apart", "within", "block"], int]


class UnionFind:
    """Disjoint sets of ids, with constraints: only neurons with the same constraints may be exchanged.

    - ``"apart"``: they went through the same slice of a tensor.
    - ``"within"``: they were reduced together (a mean, a norm, a product of attention), so that the result depends on
      their number.
    - ``"block"``: the same for the groups of a group normalisation, which may be exchanged as wholes.
    """

    def __init__(self) -> None:
        self._parents = [NEUTRAL, PINNED]
        self._constraints: dict[int, set[Constraint]] = defaultdict(set)
        self._num_constraints = 0

    def add(self, count: int) -> Tensor:
        """New ids, int64, shape ``(count,)``."""
        first = len(self._parents)
        self._parents.extend(range(first, first + count))
        return torch.arange(first, first + count)

    def find(self, neuron_id: int) -> int:
        """The smallest of the ids that are united with this one."""
        parents = self._parents
        while parents[neuron_id] != neuron_id:
            parents[neuron_id] = parents[parents[neuron_id]]
            neuron_id = parents[neuron_id]
        return neuron_id

    def find_all(self, ids: Tensor) -> Tensor:
        """The result of :meth:`find` for every element of a tensor, in its shape."""
        unique, inverse = torch.unique(ids, return_inverse=True)
        return torch.tensor([self.find(neuron_id) for neuron_id in unique.tolist()], dtype=torch.int64)[inverse]

    def unite(self, first: Tensor, second: Tensor) -> None:
        """Unites the ids at the same positions of two tensors that broadcast, except for neutral ones."""
        expanded = first + torch.zeros_like(second), second + torch.zeros_like(first)
        pairs = torch.stack([ids.reshape(-1) for ids in expanded], 1)
        for left, right in torch.unique(pairs, dim=0).tolist():
            if left == NEUTRAL or right == NEUTRAL:
                continue
            left, right = self.find(left), self.find(right)
            if left != right:
                self._parents[max(left, right)] = min(left, right)  # so that PINNED stays a root

    def pin(self, ids: Tensor) -> None:
        """Makes ids immovable."""
        self.unite(ids, torch.tensor(PINNED))

    def constrain(self, ids: Tensor, kind: Literal["apart", "within", "block"]) -> None:
        """Puts a new constraint on ids."""
        self._num_constraints += 1
        for neuron_id in torch.unique(ids).tolist():
            if neuron_id not in (NEUTRAL, PINNED):
                self._constraints[neuron_id].add((kind, self._num_constraints))

    def constraints(self) -> dict[int, frozenset[Constraint]]:
        """All constraints, by the united ids that have them."""
        united: dict[int, set[Constraint]] = defaultdict(set)
        for neuron_id, constraints in self._constraints.items():
            united[self.find(neuron_id)] |= constraints
        return {root: frozenset(constraints) for root, constraints in united.items()}


@dataclass(frozen=True, eq=False)
class TracedActivation:
    """An activation as its elements' neurons.

    Attributes:
        ids: Ids of the elements' neurons, of length 1 along dimensions on which all elements have the same id.
        shape: The activation's shape.

    """

    ids: Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, ids: Tensor) -> TracedActivation:
        """The activation with these ids, one for each element."""
        shape = tuple(ids.shape)
        for dim, length in enumerate(shape):
            if length > 1 and (ids.stride(dim) == 0 or bool((ids == ids.narrow(dim, 0, 1)).all())):
                ids = ids.narrow(dim, 0, 1)
        return cls(ids.contiguous(), shape)

    @classmethod
    def filled(cls, neuron_id: int, shape: Sequence[int]) -> TracedActivation:
        """The activation with one id everywhere."""
        return cls(torch.full((1,) * len(shape), neuron_id), tuple(shape))

    @property
    def varying(self) -> set[int]:
        """The dimensions along which ids differ."""
        return {dim for dim, length in enumerate(self.ids.shape) if length > 1}

    def expanded(self) -> Tensor:
        """One id for each element, in the activation's shape; the memory is shared."""
        return self.ids.expand(self.shape)


@dataclass(frozen=True, eq=False)
class ParameterView:
    """An entry of the state, maybe with its axes in another order.

    Attributes:
        name: Name of the entry.
        lengths: Lengths of its axes.
        axes: The axis that each dimension is.

    """

    name: str
    lengths: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the dimensions."""
        return tuple(self.lengths[axis] for axis in self.axes)
