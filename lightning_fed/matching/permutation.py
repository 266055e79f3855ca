r"""Permutes, selects and adds neurons in a network's state.

A network computes the same function if a layer's neurons are permuted in all related values: rows in incoming weights,
biases, normalization, and columns in outgoing weights. With weights :math:`W`, biases *b*, activation function
:math:`\sigma` and a permutation matrix :math:`\Pi`,

.. math:: W_2 \, \sigma(W_1 x + b_1) = (W_2 \Pi^\top) \, \sigma(\Pi W_1 x + \Pi b_1)

Wang et al., "Federated Learning with Matched Averaging" (FedMA), ICLR 2020; Ainsworth, Hayase and Srinivasa, "Git
Re-Basin", ICLR 2023 (permutations specified as data).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_fed.argument_checks import check_count, check_option

# Entry name and axis.
Axis: TypeAlias = tuple[str, int]

Role: TypeAlias = Literal["out", "in", "vec", "both"]


class GroupEntry(NamedTuple):
    """Positions of exchangeable neurons (a permutation group) on one axis of a parameter or buffer.

    Attributes:
        positions: Indices on the axis, int64, shape ``(neurons, copies)``. Usually, a neuron has one index. After
            ``nn.Flatten``, a channel has one index per pixel.
        role: ``"out"`` for outputs of a layer (rows of a weight), ``"in"`` for inputs (columns), ``"vec"`` for one
            value per neuron (bias, normalization), ``"both"`` for tied embeddings.
        length: Axis length. After a concatenation, the axis also contains neurons of other groups.
    """

    positions: Tensor
    role: Role
    length: int


@dataclass(frozen=True, eq=False)
class PermutationGroup:
    """Neurons or channels that can be permuted without changing the network's function.

    Attributes:
        name: Name of the layer with these neurons as outputs.
        size: Number of neurons.
        entries: Maps (name, dimension) of a parameter or buffer axis to the neurons' positions on this axis.
        blocks: Number of consecutive blocks with equal size, as in GroupNorm. Permutations do not split a block.
        is_growable: Whether neurons can be added.
    """

    name: str
    size: int
    entries: Mapping[Axis, GroupEntry]
    blocks: int = 1
    is_growable: bool = True

    @classmethod
    def over(cls, state: Mapping[str, Tensor], axes: Mapping[Axis, Role], size: int) -> PermutationGroup:
        """Creates a group from whole axes of parameters. The first axis gives the name.

        Args:
            state: The network's state dict.
            axes: Maps (name, dimension) of each axis to the role: ``"out"``, ``"in"``, ``"vec"`` or ``"both"``, see
                :class:`GroupEntry`. On an axis longer than ``size``, each neuron has several adjacent positions.
            size: Number of neurons.

        Example:
            >>> state = {"a.weight": torch.zeros(3, 2), "a.bias": torch.zeros(3), "b.weight": torch.zeros(5, 12)}
            >>> axes = {("a.weight", 0): "out", ("a.bias", 0): "vec", ("b.weight", 1): "in"}
            >>> PermutationGroup.over(state, axes, 3).entries["b.weight", 1].positions[1]
            tensor([4, 5, 6, 7])
        """
        entries = {}
        for (name, axis), role in axes.items():
            check_option("axes", role, Role)
            if name not in state or not 0 <= axis < state[name].ndim:
                raise ValueError(f"Expected `axes` to be axes of the state's entries, but got {axis} of {name!r}.")
            length = state[name].shape[axis]
            if size < 1 or length % size:
                raise ValueError(
                    f"Expected `size`, the number of neurons, to divide the length {length} of axis {axis} of "
                    f"{name!r}, but got {size}."
                )
            entries[name, axis] = GroupEntry(torch.arange(length).view(size, -1), role, length)
        return cls(next(iter(axes))[0].rpartition(".")[0], size, entries)


def resize_groups(groups: Sequence[PermutationGroup], sizes: Sequence[int]) -> list[PermutationGroup]:
    """Changes the number of neurons in permutation groups, but no tensors.

    New neurons follow the group's existing neurons. If groups share an axis, the positions of later groups shift.
    Groups with ``is_growable=False`` or several ``blocks`` have a fixed size.

    Raises:
        ValueError: If a fixed size would change, or the number of sizes is wrong.

    Example:
        >>> state = {"weight": torch.zeros(1, 2)}
        >>> group = PermutationGroup.over(state, {("weight", 1): "in"}, 2)
        >>> resize_groups([group], [4])[0].entries["weight", 1].positions.flatten()
        tensor([0, 1, 2, 3])
    """
    if len(groups) != len(sizes):
        raise ValueError(f"Expected one size per group, but got {len(sizes)} sizes for {len(groups)} groups.")
    runs: dict[Axis, list[_Run]] = {}
    for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        check_count("sizes", size)
        if size == group.size:
            continue
        for axis, entry in group.entries.items():
            group_runs = find_runs(entry.positions)
            if group_runs is None or not group.is_growable or group.blocks > 1:
                raise ValueError(f"Expected {group.name!r} to keep its {group.size} neurons, but got {size}.")
            runs.setdefault(axis, []).extend(_Run(number, *run) for run in group_runs)

    resized = []
    for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        entries = {}
        for axis, entry in group.entries.items():
            shifted, num_added = torch.arange(entry.length), 0
            columns: dict[int, Tensor] = {}
            for run in sorted(runs.get(axis, []), key=lambda run: run.start):
                if run.group == number:
                    columns[run.column] = run.start + num_added + torch.arange(size * run.repeat).view(size, -1)
                growth = (sizes[run.group] - groups[run.group].size) * run.repeat
                shifted[run.start + groups[run.group].size * run.repeat :] += growth
                num_added += growth
            positions = (
                torch.cat([columns[index] for index in sorted(columns)], 1) if columns else shifted[entry.positions]
            )
            entries[axis] = GroupEntry(positions, entry.role, entry.length + num_added)
        resized.append(replace(group, size=size, entries=entries))
    return resized


@torch.no_grad()
def permute_neurons(
    state: Mapping[str, Tensor], groups: Sequence[PermutationGroup], orders: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Permutes the neurons in a network's state dict.

    Args:
        state: State dict, also incomplete. Tensors outside the groups are returned unchanged.
        groups: Groups to permute.
        orders: For each group, the neuron's old index at each new position: int64, shape ``(neurons,)``.

    Raises:
        ValueError: If an order is not a permutation, or mixes neurons of several GroupNorm groups, or a shape is wrong.

    Example:
        >>> state = {"a.bias": torch.tensor([1.0, 2.0, 3.0]), "b.weight": torch.tensor([[4.0, 5.0, 6.0]])}
        >>> group = PermutationGroup.over(state, {("a.bias", 0): "vec", ("b.weight", 1): "in"}, 3)
        >>> permute_neurons(state, [group], [torch.tensor([2, 0, 1])])
        {'a.bias': tensor([3., 1., 2.]), 'b.weight': tensor([[6., 4., 5.]])}
    """
    for group, order in zip(groups, orders, strict=True):
        identity = torch.arange(group.size)
        if order.shape != identity.shape or not torch.equal(order.cpu().sort().values, identity):
            raise ValueError(f"Expected the order of {group.name!r} to have each of {group.size} neurons once.")
    return _rearranged(state, groups, groups, list(orders))


@torch.no_grad()
def slice_neurons(
    state: Mapping[str, Tensor], groups: Sequence[PermutationGroup], kept: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Selects neurons from a network's state dict, for a narrower network.

    Args:
        state: State dict, also incomplete. Tensors outside the groups are returned unchanged.
        groups: All groups in the network.
        kept: For each group, the selected neurons' indices in their new order: int64, shape ``(kept,)``.

    Raises:
        ValueError: If an index is out of range or repeated, a group with fixed width changes, or a shape is wrong.

    Example:
        >>> state = {"a.bias": torch.tensor([1.0, 2.0, 3.0]), "b.weight": torch.tensor([[4.0, 5.0, 6.0]])}
        >>> group = PermutationGroup.over(state, {("a.bias", 0): "vec", ("b.weight", 1): "in"}, 3)
        >>> slice_neurons(state, [group], [torch.tensor([2, 0])])
        {'a.bias': tensor([3., 1.]), 'b.weight': tensor([[6., 4.]])}
    """
    for group, indices in zip(groups, kept, strict=True):
        _check_indices(group.name, indices, group.size)
    return _rearranged(state, groups, resize_groups(groups, [len(indices) for indices in kept]), list(kept))


@torch.no_grad()
def grow_neurons(
    state: Mapping[str, Tensor], groups: Sequence[PermutationGroup], assignments: Sequence[Tensor], sizes: Sequence[int]
) -> dict[str, Tensor]:
    """Expands a network's state dict to a wider network that computes the same function.

    Existing neurons move to new indices, and added neurons are 0. :func:`slice_neurons` with the same indices reverts
    this.

    Args:
        state: State dict, also incomplete. Tensors outside the groups are returned unchanged.
        groups: All groups in the network.
        assignments: For each group, each neuron's new index: int64, shape ``(neurons,)``.
        sizes: Number of neurons per group in the wider network.

    Raises:
        ValueError: If an index is out of range or repeated, a group with fixed width changes, or a shape is wrong.

    Example:
        >>> state = {"a.bias": torch.tensor([1.0, 2.0]), "b.weight": torch.tensor([[4.0, 5.0]])}
        >>> group = PermutationGroup.over(state, {("a.bias", 0): "vec", ("b.weight", 1): "in"}, 2)
        >>> grow_neurons(state, [group], [torch.tensor([2, 0])], [4])
        {'a.bias': tensor([2., 0., 1., 0.]), 'b.weight': tensor([[5., 0., 4., 0.]])}
    """
    sources = []
    for group, indices, size in zip(groups, assignments, sizes, strict=True):
        if len(indices) != group.size:
            raise ValueError(
                f"Expected an index for each of {group.size} neurons of {group.name!r}, but got {len(indices)}."
            )
        _check_indices(group.name, indices, size)
        source = torch.full((size,), -1)
        source[indices.cpu()] = torch.arange(group.size)
        sources.append(source)
    return _rearranged(state, groups, resize_groups(groups, sizes), sources)


@torch.no_grad()
def neuron_features(
    state: Mapping[str, Tensor], group: PermutationGroup, roles: Sequence[Role] = ("out", "vec")
) -> dict[Axis, Tensor]:
    """Returns the weights of a group's neurons, as a matrix for each parameter axis.

    Matrices have shape ``(neurons, features)``. Integer tensors, running statistics, and recurrent weights between
    neurons in the group are excluded. For :func:`~lightning_fed.matching.match_neurons`, concatenate the matrices along
    dimension 1, and pass the numbers of columns as ``blocks``.

    Args:
        state: The network's state dict. To compare networks, first permute all other groups to a common order.
        group: Permutation group.
        roles: Weights to include: ``"out"`` for incoming weights (rows), ``"vec"`` for biases and normalization,
            ``"in"`` for outgoing weights (columns). The default fits FedMA; PFNM needs all three.

    Raises:
        ValueError: If a role is unknown or a shape is wrong.

    Example:
        >>> state = {"a.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "a.bias": torch.tensor([5.0, 6.0])}
        >>> group = PermutationGroup.over(state, {("a.weight", 0): "out", ("a.bias", 0): "vec"}, 2)
        >>> torch.cat(list(neuron_features(state, group).values()), 1).tolist()
        [[1.0, 2.0, 5.0], [3.0, 4.0, 6.0]]
    """
    for role in roles:
        check_option("roles", role, Role)
    names = [name for name, _ in group.entries]
    features = {}
    for (name, axis), entry in group.entries.items():
        is_chosen = entry.role in roles or (entry.role == "both" and bool({"out", "in"} & set(roles)))
        if not is_chosen or name not in state or names.count(name) > 1 or not is_compared(name, state[name]):
            continue
        _check_length(name, axis, entry, state[name])
        value = state[name].movedim(axis, 0)
        features[name, axis] = value[entry.positions.to(value.device)].flatten(1)
    return features


def is_compared(name: str, value: Tensor) -> bool:
    """True for entries used to compare neurons: floating-point tensors, except running statistics."""
    return value.is_floating_point() and name.rpartition(".")[2] not in ("running_mean", "running_var")


class _Run(NamedTuple):
    group: int
    column: int
    start: int
    repeat: int


def find_runs(positions: Tensor) -> list[tuple[int, int, int]] | None:
    """Splits a matrix into blocks of adjacent columns. Read row by row, each block contains consecutive numbers.

    Returns each block's first column, first number and number of columns, or ``None`` without such blocks. For
    ``[[0, 1, 6], [2, 3, 7]]``, the blocks are ``[[0, 1], [2, 3]]`` and ``[[6], [7]]``, so the result is
    ``[(0, 0, 2), (2, 6, 1)]``.
    """
    count, copies = positions.shape
    runs, column = [], 0
    while column < copies:
        for repeat in range(copies - column, 0, -1):
            part = positions[:, column : column + repeat].reshape(-1)
            if torch.equal(part, part[0] + torch.arange(count * repeat)):
                runs.append((column, int(part[0]), repeat))
                column += repeat
                break
        else:
            return None
    return runs


def _rearranged(
    state: Mapping[str, Tensor],
    before: Sequence[PermutationGroup],
    after: Sequence[PermutationGroup],
    sources: Sequence[Tensor],
) -> dict[str, Tensor]:
    """Reorders, inserts and removes neurons in a state dict.

    For each group, ``sources`` lists the old index of each new neuron; -1 adds a neuron with zeros.
    """
    for group, source in zip(before, sources, strict=True):
        if group.blocks == 1:
            continue
        blocks = source.cpu().view(group.blocks, -1) // (group.size // group.blocks)
        if not bool((blocks == blocks[:, :1]).all()):
            raise ValueError(
                f"Expected a permutation that keeps {group.blocks} blocks (for a group normalization) of neurons in "
                f"{group.name!r} together, but blocks are mixed: permute neurons within a block, or whole blocks."
            )
    parts: dict[Axis, list[tuple[GroupEntry, GroupEntry, Tensor]]] = {}
    for old, new, source in zip(before, after, sources, strict=True):
        for axis, entry in old.entries.items():
            parts.setdefault(axis, []).append((entry, new.entries[axis], source.cpu()))
    result = dict(state)
    for (name, dim), pieces in parts.items():
        if name in result:
            _check_length(name, dim, pieces[0][0], result[name])
            index = _axis_index(pieces).to(result[name].device)
            if not torch.equal(index, torch.arange(result[name].shape[dim], device=index.device)):
                value = result[name].index_select(dim, index.clamp(min=0))
                result[name] = value.index_fill_(dim, (index < 0).nonzero()[:, 0], 0)
    return result


def _axis_index(pieces: list[tuple[GroupEntry, GroupEntry, Tensor]]) -> Tensor:
    """Returns for each new position on an axis the old position, or -1 for an added neuron."""
    length, new_length = pieces[0][0].length, pieces[0][1].length
    is_other, is_new_other = torch.ones(length, dtype=torch.bool), torch.ones(new_length, dtype=torch.bool)
    index = torch.full((new_length,), -1)
    for old, new, source in pieces:
        is_other[old.positions] = False
        is_new_other[new.positions] = False
        index[new.positions] = torch.where(source[:, None] < 0, -1, old.positions[source])
    index[is_new_other] = is_other.nonzero()[:, 0]
    return index


def _check_length(name: str, axis: int, entry: GroupEntry, value: Tensor) -> None:
    if axis >= value.ndim or value.shape[axis] != entry.length:
        raise ValueError(
            f"Expected axis {axis} of {name!r} to have length {entry.length}, but the shape is {tuple(value.shape)}: "
            "pass permutation groups found in this network."
        )


def _check_indices(name: str, indices: Tensor, size: int) -> None:
    indices = indices.cpu()
    is_repeated = indices.ndim != 1 or len(torch.unique(indices)) != len(indices)
    if is_repeated or not bool(((indices >= 0) & (indices < size)).all()):
        raise ValueError(f"Expected distinct neurons of {name!r} from 0 to {size - 1}, but got {indices.tolist()}.")
