r"""Neurons of a state that may be permuted, sliced, and put into a wider network.

A network computes the same when the neurons of a layer are permuted with all that belongs to them: rows of
the weights that make them, biases, normalisation, and columns of the weights that read them.

.. math:: W_2 \, \sigma(W_1 x + b_1) = (W_2 \Pi^\top) \, \sigma(\Pi W_1 x + \Pi b_1)

A :class:`PermutationGroup` has their positions, for any layer: a flattened channel has one column per pixel, an LSTM's
neuron a row in each of four gates, a residual stage's channel a row in every block.

Wang et al., "Federated Learning with Matched Averaging" (FedMA), ICLR 2020; Ainsworth, Hayase and Srinivasa, "Git
Re-Basin", ICLR 2023 (the specification of permutations as data).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_fed.argument_checks import check_count, check_option

Axis: TypeAlias = tuple[str, int]
"""Name of an entry, and one of its axes."""

Role: TypeAlias = Literal["out", "in", "vec", "both"]


class GroupEntry(NamedTuple):
    """Positions of neurons on one axis of an entry.

    Attributes:
        positions: Indices on the axis, int64, shape ``(neurons, copies)``.
        role: ``"out"`` where the axis makes the neurons (rows of a weight), ``"in"`` where it reads them (columns),
            ``"vec"`` where it has one number of each (bias, normalisation), ``"both"`` where it makes and reads them (a
            tied embedding).
        length: Length of the axis, with positions of other groups.

    """

    positions: Tensor
    role: Role
    length: int


@dataclass(frozen=True, eq=False)
class PermutationGroup:
    """Neurons or channels that may be permuted without changing the function of a network.

    Attributes:
        name: The layer that makes them.
        size: Their number.
        entries: Their positions, by entry and axis.
        blocks: Number of blocks of equal size, one after the other (groups of a group normalisation): neurons are
            permuted within their block only, and blocks as wholes.
        is_growable: There may be more of them.

    """

    name: str
    size: int
    entries: Mapping[Axis, GroupEntry]
    blocks: int = 1
    is_growable: bool = True

    @classmethod
    def over(cls, state: Mapping[str, Tensor], axes: Mapping[Axis, Role], size: int) -> PermutationGroup:
        """A group written by hand: the whole axes of some entries.

        Args:
            state: The entries.
            axes: The axes and their roles. Where one is longer than ``size``, every neuron has several positions side
                by side (a flattened channel's pixels).
            size: Number of neurons.

        Returns:
            The group, with the name of its first entry's layer.

        Raises:
            ValueError: If there is no such entry or axis, its length is no multiple of ``size``, or a role is unknown.

        Example:
            >>> state = {"a.weight": torch.zeros(3, 2), "a.bias": torch.zeros(3), "b.weight": torch.zeros(5, 12)}
            >>> axes = {("a.weight", 0): "out", ("a.bias", 0): "vec", ("b.weight", 1): "in"}
            >>> PermutationGroup.over(state, axes, 3).entries["b.weight", 1].positions
            tensor([[ 0,  1,  2,  3],
                    [ 4,  5,  6,  7],
                    [ 8,  9, 10, 11]])

        """
        entries = {}
        for (name, axis), role in axes.items():
            check_option("axes", role, Role)
            if name not in state or not 0 <= axis < state[name].ndim:
                raise ValueError(f"Expected `axes` to be axes of entries of the state, but got {axis} of {name!r}.")
            length = state[name].shape[axis]
            if size < 1 or length % size:
                raise ValueError(
                    f"Expected `size` to divide the length {length} of axis {axis} of {name!r}, but got {size}."
                )
            entries[name, axis] = GroupEntry(torch.arange(length).view(size, -1), role, length)
        return cls(next(iter(axes))[0].rpartition(".")[0], size, entries)


def resize_groups(groups: Sequence[PermutationGroup], sizes: Sequence[int]) -> list[PermutationGroup]:
    """The groups of a network in which they have other numbers of neurons.

    New neurons come after those of their group, wherever these are: a group beside others on an axis (a concatenation)
    moves them.

    Args:
        groups: All groups of the network.
        sizes: Number of neurons of each.

    Returns:
        The groups in the same order, with blocks only where the size stays.

    Raises:
        ValueError: If a group that is not growable is to have another size, or the numbers differ.

    Example:
        >>> state = {"weight": torch.zeros(1, 2)}
        >>> group = PermutationGroup.over(state, {("weight", 1): "in"}, 2)
        >>> resize_groups([group], [4])[0].entries["weight", 1]
        GroupEntry(positions=tensor([[0],
                [1],
                [2],
                [3]]), role='in', length=4)

    """
    if len(groups) != len(sizes):
        raise ValueError(f"Expected one of `sizes` per group, but got {len(sizes)} for {len(groups)}.")
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
            moved, added = torch.arange(entry.length), 0
            columns: dict[int, Tensor] = {}
            for run in sorted(runs.get(axis, []), key=lambda run: run.start):
                if run.group == number:
                    columns[run.column] = run.start + added + torch.arange(size * run.repeat).view(size, -1)
                more = (sizes[run.group] - groups[run.group].size) * run.repeat
                moved[run.start + groups[run.group].size * run.repeat :] += more
                added += more
            positions = (
                torch.cat([columns[index] for index in sorted(columns)], 1) if columns else moved[entry.positions]
            )
            entries[axis] = GroupEntry(positions, entry.role, entry.length + added)
        resized.append(replace(group, size=size, entries=entries))
    return resized


@torch.no_grad()
def permute_neurons(
    state: Mapping[str, Tensor], groups: Sequence[PermutationGroup], orders: Sequence[Tensor]
) -> dict[str, Tensor]:
    """A state with permuted neurons.

    Args:
        state: Any of the network's entries; entries outside the groups stay as they are.
        groups: Some of its groups.
        orders: For each of them the index of the neuron that comes to each position, int64, shape ``(neurons,)``.

    Returns:
        The same entries; those that no group has are the same tensors.

    Raises:
        ValueError: If an order does not have every neuron once, or takes a block apart, or an entry's shape is another.

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
    """The state of the network that has some of the neurons only.

    Args:
        state: Any of the network's entries.
        groups: All its groups.
        kept: For each of them the indices of the neurons, in their new order, each at most once; int64, shape
            ``(kept,)``.

    Returns:
        The same entries; those that no group has are the same tensors.

    Raises:
        ValueError: If neurons are out of range or repeated, a group that is not growable is to have fewer, or an
            entry's shape is another.

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
    """The state of a wider network in which the neurons have given indices, and new neurons are 0.

    :func:`slice_neurons` with the same indices takes them out again. The outgoing weights of new neurons are 0, so
    that the network computes the same.

    Args:
        state: Any of the network's entries.
        groups: All its groups.
        assignments: For each of them the new index of each of its neurons, all different; int64, shape ``(neurons,)``.
        sizes: Number of neurons of each in the wider network.

    Returns:
        The same entries; those that no group has are the same tensors.

    Raises:
        ValueError: If indices are out of range or equal, a group that is not growable is to grow, or an entry's shape
            is another.

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
                f"Expected a place for each of {group.size} neurons of {group.name!r}, but got {len(indices)}."
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
    """Vectors of the neurons of a group in a state, by which they are matched.

    Entries that have the group on two axes (an LSTM's hidden-to-hidden weights) are left out: their values
    depend on the order of the neurons. So are entries that are not of a floating-point type, and running statistics,
    which say more of the data than of the neuron.

    Args:
        state: The network's entries, with all other groups in the order that clients agree on.
        group: The group.
        roles: Roles of the entries that count: incoming weights and what is one number per neuron (as in FedMA), or
            with ``"in"`` also the outgoing weights (as in PFNM).

    Returns:
        For each entry and axis the numbers of each neuron, shape ``(neurons, numbers)``; concatenated they are the
        input of :func:`~lightning_fed.matching.match_neurons`, and their widths are its blocks.

    Raises:
        ValueError: If a role is unknown, or an entry's shape is another.

    Example:
        >>> state = {"a.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "a.bias": torch.tensor([5.0, 6.0])}
        >>> group = PermutationGroup.over(state, {("a.weight", 0): "out", ("a.bias", 0): "vec"}, 2)
        >>> torch.cat(list(neuron_features(state, group).values()), 1)
        tensor([[1., 2., 5.],
                [3., 4., 6.]])

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
    """Returns whether neurons are compared by an entry: not by integers, nor by running statistics."""
    return value.is_floating_point() and name.rpartition(".")[2] not in ("running_mean", "running_var")


class _Run(NamedTuple):
    """Neurons side by side on an axis: neuron i is at ``start + i * repeat + [0, repeat)``."""

    group: int
    column: int
    start: int
    repeat: int


def find_runs(positions: Tensor) -> list[tuple[int, int, int]] | None:
    """The runs of neurons side by side that positions consist of, as (first column, start, repeat), if they do."""
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
    """A state with other neurons: ``sources`` has the old index of each neuron of every group, -1 for a new one."""
    for group, source in zip(before, sources, strict=True):
        if group.blocks == 1:
            continue
        blocks = source.cpu().view(group.blocks, -1) // (group.size // group.blocks)
        if not bool((blocks == blocks[:, :1]).all()):
            raise ValueError(f"Expected the neurons of {group.name!r} to stay in their {group.blocks} blocks.")
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
    """For every position of an axis after a change its position before, or -1."""
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
            f"Expected axis {axis} of {name!r} to have the length {entry.length}, but its shape is"
            f" {tuple(value.shape)}: are these the groups of this network?"
        )


def _check_indices(name: str, indices: Tensor, size: int) -> None:
    indices = indices.cpu()
    is_repeated = indices.ndim != 1 or len(torch.unique(indices)) != len(indices)
    if is_repeated or not bool(((indices >= 0) & (indices < size)).all()):
        raise ValueError(f"Expected different neurons of {name!r} from 0 to {size - 1}, but got {indices.tolist()}.")
