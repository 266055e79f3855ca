"""The mean of networks whose neurons have been matched.

Wang et al., "Federated Learning with Matched Averaging" (FedMA), ICLR 2020, Algorithm 1. The published mean of a layer
is over all clients; here every neuron's is over the clients that have it. That of the program is drawn to 0, which
``prior_weight=1`` does too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_fed.argument_checks import check_nonnegative
from lightning_fed.matching.permutation import PermutationGroup, grow_neurons, neuron_features, resize_groups
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.numerics.weighted_mean import WeightedMean


@torch.no_grad()
def matched_mean(
    states: Sequence[Mapping[str, Tensor]],
    groups: Sequence[PermutationGroup],
    assignments: Sequence[Sequence[Tensor]],
    sizes: Sequence[int],
    weights: Sequence[float],
    prior_weight: float = 0.0,
) -> dict[str, Tensor]:
    r"""The mean of clients whose neurons have been matched: every neuron's over the clients that have it.

    With :math:`S_k` the assignments of client *k*'s neurons and :math:`\tilde w_k` its state in the wide network, with
    zeros for the neurons that it does not have, row *i* of an entry is

    .. math:: \bar w_i = \frac{\sum_k a_k \tilde w_{k,i}}{b \bar a + \sum_{k:\, i \in S_k} a_k}

    and 0 if nobody has it, with :math:`\bar a` the mean weight and *b* that of a prior. Columns that a client does not
    have count as 0, so that the mean is one of pre-activations.
    It is that of :class:`WeightedMean` where all clients have all neurons.

    Args:
        states: One state per client, with the same names.
        groups: All groups of the network; the same for all clients.
        assignments: For each client and group the index of each neuron in the mean, int64, shape ``(neurons,)``.
        sizes: Number of neurons that each group has in the mean.
        weights: Weight of each client, greater than 0: its number of examples. Integer entries are those of the client
            with the largest.
        prior_weight: Clients, *b*, that a prior with mean 0 counts for, 0 or more: with 1 and equal weights the mean of
            *n* owners is multiplied by n/(n+1), as in the authors' program for convolutional networks.

    Returns:
        The wide network's state.

    Raises:
        ValueError: If the numbers differ, a weight is not greater than 0, ``prior_weight`` is negative or not finite,
            or as :func:`grow_neurons`.

    Example:
        >>> states = [{"bias": torch.tensor([2.0, 7.0])}, {"bias": torch.tensor([5.0, 4.0])}]
        >>> group = PermutationGroup.over(states[0], {("bias", 0): "vec"}, 2)
        >>> matched_mean(states, [group], [[torch.tensor([0, 1])], [torch.tensor([2, 0])]], [3], [1, 3])
        {'bias': tensor([3.5000, 7.0000, 5.0000])}

    """
    if not len(states) == len(assignments) == len(weights) > 0:
        raise ValueError(
            "Expected `states`, `assignments` and `weights` to be of the same clients, at least one, but got"
            f" {len(states)}, {len(assignments)} and {len(weights)}."
        )
    if not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(f"Expected `weights` to be greater than 0 and finite, but got {list(weights)}.")
    check_nonnegative("prior_weight", prior_weight)
    prior = prior_weight * sum(weights) / len(weights)
    out_groups = [_out_axes(group) for group in groups]
    names = {name for group in out_groups for name, _ in group.entries if states[0][name].is_floating_point()}
    ungrouped, sums, owned = WeightedMean(), dict[str, Tensor](), dict[str, Tensor]()
    for state, assignment, weight in zip(states, assignments, weights, strict=True):
        grown = grow_neurons(state, groups, assignment, sizes)
        rank = sum(smaller <= weight for smaller in weights)  # by which integer entries are chosen
        ungrouped.add({name: value for name, value in grown.items() if name not in names}, weight, rank)
        rows = grow_neurons(
            {name: _ones(state[name], name, out_groups) for name in names}, out_groups, assignment, sizes
        )
        for name in names:
            value = to_float64(grown[name]) * weight
            sums[name] = sums[name].add_(value) if name in sums else value
            owned[name] = owned[name].add_(rows[name], alpha=weight) if name in owned else rows[name] * weight
    owned = {name: weight.where(weight > 0, 1) for name, weight in owned.items()}
    means = ungrouped.mean() | {name: cast_back(sums[name] / (owned[name] + prior), states[0][name]) for name in names}
    return {name: means[name] for name in states[0]}


@torch.no_grad()
def agreement(
    mean: Mapping[str, Tensor],
    states: Sequence[Mapping[str, Tensor]],
    groups: Sequence[PermutationGroup],
    assignments: Sequence[Sequence[Tensor]],
    sizes: Sequence[int],
    weights: Sequence[float],
) -> list[float]:
    r"""Share of the squared length of the clients' neurons that their mean keeps, for every group.

    With :math:`w_{k,j}` the incoming weights of neuron *j* of client *k*, and :math:`\bar w` the mean of those that it
    is matched with,

    .. math:: \frac{\sum_k a_k \sum_j \lVert \bar w_{S_k(j)} \rVert^2}{\sum_k a_k \sum_j \lVert w_{k,j} \rVert^2}

    It is 1 where the neurons that were matched are the same, or are in no other client, and about 1/n where they are n
    unrelated ones. Their means are short then, and without a normalisation behind the layer its outputs are small.

    Left out are biases and normalisation (but for a group that has nothing else), running statistics, complex entries,
    and weights from a group to itself, as in recurrent layers.

    Args:
        mean: What :func:`matched_mean` made of the rest.
        states: One state per client, with the same names.
        groups: All groups of the network; the same for all clients.
        assignments: For each client and group the index of each neuron in the mean, int64, shape ``(neurons,)``.
        sizes: Number of neurons that each group has in the mean.
        weights: Weight of each client.

    Returns:
        The shares, from 0 to 1; NaN where there is nothing to compare.

    Example:
        >>> states = [{"bias": torch.tensor([2.0, 7.0])}, {"bias": torch.tensor([7.0, 2.0])}]
        >>> group = PermutationGroup.over(states[0], {("bias", 0): "vec"}, 2)
        >>> places = [[torch.tensor([0, 1])], [torch.tensor([0, 1])]]
        >>> round(agreement({"bias": torch.tensor([4.5, 4.5])}, states, [group], places, [2], [1, 1])[0], 3)
        0.764

    """
    shares = []
    for number, (group, resized) in enumerate(zip(groups, resize_groups(groups, sizes), strict=True)):
        kept, before, after = _squared_lengths(mean, resized), 0.0, 0.0
        for state, assignment, weight in zip(states, assignments, weights, strict=True):
            before += weight * float(_squared_lengths(state, group).sum())
            after += weight * float(kept[assignment[number].cpu()].sum())
        shares.append(min(1.0, after / before) if before else float("nan"))
    return shares


def _squared_lengths(state: Mapping[str, Tensor], group: PermutationGroup) -> Tensor:
    """The squared length of each neuron's incoming weights, or of its numbers if it has none, float64, on the CPU."""
    lengths = torch.zeros(group.size, dtype=torch.float64)
    for value in (neuron_features(state, group, ("out",)) or neuron_features(state, group, ("vec",))).values():
        lengths += to_float64(value).square().sum(1).cpu()
    return lengths


def _out_axes(group: PermutationGroup) -> PermutationGroup:
    """The group with the axes only that make its neurons."""
    return replace(group, entries={axis: entry for axis, entry in group.entries.items() if entry.role != "in"})


def _ones(value: Tensor, name: str, out_groups: Sequence[PermutationGroup]) -> Tensor:
    """Ones along the axes that make neurons, float64; along the others of length 1."""
    axes = {axis for group in out_groups for entry_name, axis in group.entries if entry_name == name}
    return to_float64(value.new_zeros(())).new_ones([n if axis in axes else 1 for axis, n in enumerate(value.shape)])
