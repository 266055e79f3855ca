"""Neuron ids: numbers that mark the same neuron on different parameter axes.

Each position on a parameter axis, such as a row of a weight, starts with a separate id. Tracing gives an id to each
element of an activation. If an operation combines elements, for example by addition, their ids are merged. In the end,
positions with equal ids belong to one neuron, and are permuted together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

# NEUTRAL marks constants with the same value everywhere; PINNED marks elements with fixed order (inputs, outputs).
NEUTRAL, PINNED = 0, 1

Constraint: TypeAlias = tuple[Literal["apart", "within", "block"], int]


class UnionFind:
    """Groups neuron ids into disjoint sets. All ids in a set belong to one neuron.

    A constraint (:meth:`constrain`) forbids additional neurons, and limits permutations. The kinds of constraint are:

    - ``"apart"``: Neurons only change places inside one part of a tensor, for example after ``split``.
    - ``"within"``: Neurons only change places inside one part of an operation, such as a mean or a convolution group.
    - ``"block"``: Neurons only change places inside one GroupNorm group. Whole groups can also change places.
    """

    def __init__(self) -> None:
        self._parents = [NEUTRAL, PINNED]
        self._constraints: dict[int, set[Constraint]] = defaultdict(set)
        self._num_constraints = 0

    def add(self, count: int) -> Tensor:
        first = len(self._parents)
        self._parents.extend(range(first, first + count))
        return torch.arange(first, first + count)

    def find(self, neuron_id: int) -> int:
        parents = self._parents
        while parents[neuron_id] != neuron_id:
            parents[neuron_id] = parents[parents[neuron_id]]
            neuron_id = parents[neuron_id]
        return neuron_id

    def find_all(self, ids: Tensor) -> Tensor:
        unique, inverse = torch.unique(ids, return_inverse=True)
        return torch.tensor([self.find(neuron_id) for neuron_id in unique.tolist()], dtype=torch.int64)[inverse]

    def unite(self, first: Tensor, second: Tensor) -> None:
        """Marks ids at equal positions of two tensors as one neuron. The tensors are broadcast."""
        expanded = first + torch.zeros_like(second), second + torch.zeros_like(first)
        pairs = torch.stack([ids.reshape(-1) for ids in expanded], 1)
        for left, right in torch.unique(pairs, dim=0).tolist():
            if left == NEUTRAL or right == NEUTRAL:
                continue
            left, right = self.find(left), self.find(right)
            if left != right:
                self._parents[max(left, right)] = min(left, right)  # ensures that PINNED is always a root

    def pin(self, ids: Tensor) -> None:
        self.unite(ids, torch.tensor(PINNED))

    def constrain(self, ids: Tensor, kind: Literal["apart", "within", "block"]) -> None:
        self._num_constraints += 1
        for neuron_id in torch.unique(ids).tolist():
            if neuron_id not in (NEUTRAL, PINNED):
                self._constraints[neuron_id].add((kind, self._num_constraints))

    def constraints(self) -> dict[int, frozenset[Constraint]]:
        united: dict[int, set[Constraint]] = defaultdict(set)
        for neuron_id, constraints in self._constraints.items():
            united[self.find(neuron_id)] |= constraints
        return {root: frozenset(constraints) for root, constraints in united.items()}


@dataclass(frozen=True, eq=False)
class TracedActivation:
    """Neuron number (id) of each element in an activation. Along an axis with equal ids, ``ids`` can have length 1."""

    ids: Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, ids: Tensor) -> TracedActivation:
        shape = tuple(ids.shape)
        for dim, length in enumerate(shape):
            if length > 1 and (ids.stride(dim) == 0 or bool((ids == ids.narrow(dim, 0, 1)).all())):
                ids = ids.narrow(dim, 0, 1)
        return cls(ids.contiguous(), shape)

    @classmethod
    def filled(cls, neuron_id: int, shape: Sequence[int]) -> TracedActivation:
        return cls(torch.full((1,) * len(shape), neuron_id), tuple(shape))

    @property
    def varying(self) -> set[int]:
        return {dim for dim, length in enumerate(self.ids.shape) if length > 1}

    def expanded(self) -> Tensor:
        return self.ids.expand(self.shape)


@dataclass(frozen=True, eq=False)
class ParameterView:
    """Parameter with permuted axes: axis ``dim`` of the view is axis ``axes[dim]`` of the parameter."""

    name: str
    lengths: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.lengths[axis] for axis in self.axes)
