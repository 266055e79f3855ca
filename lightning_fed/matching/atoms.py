"""What must move together: atoms in disjoint sets, and shadows, which say which atom every element of a tensor has.

Every position of a parameter's axis has an atom of its own. Following an activation through a network, two atoms are
joined where the same element would have both. What is joined in the end is one neuron.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

NEUTRAL, PINNED = 0, 1
"""Atoms of what is equal everywhere (a constant of one value), and of what does not move (inputs, outputs)."""

Mark: TypeAlias = tuple[Literal["apart", "within", "block"], int]


class Atoms:
    """Disjoint sets of atoms, and marks on them: only neurons with the same marks may change places.

    - ``"apart"``: they went through the same slice of a tensor.
    - ``"within"``: they were reduced together (a mean, a norm, a product of attention), so that what comes out knows
      their number.
    - ``"block"``: the same for the groups of a group normalisation, which may change places as wholes.
    """

    def __init__(self) -> None:
        self._parents = [NEUTRAL, PINNED]
        self._marks: dict[int, set[Mark]] = defaultdict(set)
        self._num_marks = 0

    def fresh(self, count: int) -> Tensor:
        """New atoms, int64, shape ``(count,)``."""
        first = len(self._parents)
        self._parents.extend(range(first, first + count))
        return torch.arange(first, first + count)

    def root(self, atom: int) -> int:
        """The atom that stands for all that are joined with this one."""
        parents = self._parents
        while parents[atom] != atom:
            parents[atom] = parents[parents[atom]]
            atom = parents[atom]
        return atom

    def roots(self, atoms: Tensor) -> Tensor:
        """The same of many, in their shape."""
        unique, inverse = torch.unique(atoms, return_inverse=True)
        return torch.tensor([self.root(atom) for atom in unique.tolist()], dtype=torch.int64)[inverse]

    def join(self, first: Tensor, second: Tensor) -> None:
        """Joins atoms at the same places of two tensors that broadcast; neutral ones join nothing."""
        whole = first + torch.zeros_like(second), second + torch.zeros_like(first)
        pairs = torch.stack([atoms.reshape(-1) for atoms in whole], 1)
        for one, other in torch.unique(pairs, dim=0).tolist():
            if one == NEUTRAL or other == NEUTRAL:
                continue
            one, other = self.root(one), self.root(other)
            if one != other:
                self._parents[max(one, other)] = min(one, other)  # so that PINNED stays a root

    def pin(self, atoms: Tensor) -> None:
        """Makes atoms immovable."""
        self.join(atoms, torch.tensor(PINNED))

    def mark(self, atoms: Tensor, kind: Literal["apart", "within", "block"]) -> None:
        """Puts a new mark on atoms."""
        self._num_marks += 1
        for atom in torch.unique(atoms).tolist():
            if atom not in (NEUTRAL, PINNED):
                self._marks[atom].add((kind, self._num_marks))

    def marks(self) -> dict[int, frozenset[Mark]]:
        """All marks, by the root of the atoms that have them."""
        joined: dict[int, set[Mark]] = defaultdict(set)
        for atom, marks in self._marks.items():
            joined[self.root(atom)] |= marks
        return {root: frozenset(marks) for root, marks in joined.items()}


@dataclass(frozen=True, eq=False)
class Shadow:
    """The atoms of an activation's elements.

    Attributes:
        atoms: Of length 1 along dimensions on which all elements have the same atom.
        shape: The activation's shape.

    """

    atoms: Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, atoms: Tensor) -> Shadow:
        """The shadow with these atoms, one for each element."""
        shape = tuple(atoms.shape)
        for dim, length in enumerate(shape):
            if length > 1 and (atoms.stride(dim) == 0 or bool((atoms == atoms.narrow(dim, 0, 1)).all())):
                atoms = atoms.narrow(dim, 0, 1)
        return cls(atoms.contiguous(), shape)

    @classmethod
    def filled(cls, atom: int, shape: Sequence[int]) -> Shadow:
        """The shadow with one atom everywhere."""
        return cls(torch.full((1,) * len(shape), atom), tuple(shape))

    @property
    def varying(self) -> set[int]:
        """The dimensions along which atoms differ."""
        return {dim for dim, length in enumerate(self.atoms.shape) if length > 1}

    def expanded(self) -> Tensor:
        """One atom for each element, in the activation's shape; the memory is shared."""
        return self.atoms.expand(self.shape)


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
