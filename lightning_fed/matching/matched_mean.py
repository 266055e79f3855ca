"""Averages networks after neuron matching.

Wang et al., "Federated Learning with Matched Averaging" (FedMA), ICLR 2020, Algorithm 1. Unlike in the paper, a neuron
is averaged only over the clients with this neuron, instead of all clients.
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
    r"""Averages client networks after their neurons were matched.

    Each neuron is averaged over the clients with this neuron. The mean incoming weights and bias of neuron *i* are

    .. math:: \bar w_i = \frac{\sum_k a_k \tilde w_{k,i}}{b \bar a + \sum_{k:\, i \in S_k} a_k}

    or 0 if no client has the neuron. :math:`\tilde w_{k,i}` contains the values in client *k*, or zeros if the client
    lacks neuron *i*. A weight from an input neuron that the client lacks also counts as 0. :math:`a_k` is the client's
    weight, :math:`\bar a` the mean weight, :math:`S_k` the set of the client's neurons, and *b* the weight of a prior.
    If all clients have all neurons and *b* is 0, the result equals :class:`WeightedMean`.

    Args:
        states: State dict of each client, with equal names.
        groups: Permutation groups (exchangeable neurons) of the network, equal for all clients.
        assignments: For each client and group, the neurons' indices in the mean network: int64, shape ``(neurons,)``.
        sizes: Number of neurons per group in the mean network.
        weights: Client weights, greater than 0. Integer tensors are copied from the client with the largest weight.
        prior_weight: Weight *b* of a prior with mean 0, relative to the mean client weight. The program for FedMA uses
            1 for convolutional networks.

    Raises:
        ValueError: If lengths differ, a weight is out of range, or :func:`grow_neurons` raises an error.

    Example:
        >>> states = [{"bias": torch.tensor([2.0, 7.0])}, {"bias": torch.tensor([5.0, 4.0])}]
        >>> group = PermutationGroup.over(states[0], {("bias", 0): "vec"}, 2)
        >>> matched_mean(states, [group], [[torch.tensor([0, 1])], [torch.tensor([2, 0])]], [3], [1, 3])
        {'bias': tensor([3.5000, 7.0000, 5.0000])}
    """
    if not len(states) == len(assignments) == len(weights) > 0:
        raise ValueError(
            "Expected `states`, `assignments` and `weights` to have one element per client, at least one, but got "
            f"{len(states)}, {len(assignments)} and {len(weights)}."
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
        rank = sum(smaller <= weight for smaller in weights)  # integer entries follow the highest rank
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
    r"""Measures how similar the averaged neurons were, for each permutation group (exchangeable neurons).

    The result is the neurons' squared norm after averaging, divided by the squared norm before:

    .. math:: \frac{\sum_k a_k \sum_j \lVert \bar w_{S_k(j)} \rVert^2}{\sum_k a_k \sum_j \lVert w_{k,j} \rVert^2}

    Client *k* has weight :math:`a_k`. Neuron *j* has incoming weights :math:`w_{k,j}`, and is matched with global
    neuron :math:`S_k(j)` with mean :math:`\bar w`. With ``prior_weight=0`` in :func:`matched_mean`, the result is 1 for
    equal or unmatched neurons, and about 1/n for n unrelated neurons matched together. Biases count only in groups
    without incoming weights. If the norm before averaging is 0, the result is NaN.
    """
    shares = []
    for number, (group, resized) in enumerate(zip(groups, resize_groups(groups, sizes), strict=True)):
        mean_norms, total, preserved = _squared_lengths(mean, resized), 0.0, 0.0
        for state, assignment, weight in zip(states, assignments, weights, strict=True):
            total += weight * float(_squared_lengths(state, group).sum())
            preserved += weight * float(mean_norms[assignment[number].cpu()].sum())
        shares.append(min(1.0, preserved / total) if total else float("nan"))
    return shares


def _squared_lengths(state: Mapping[str, Tensor], group: PermutationGroup) -> Tensor:
    lengths = torch.zeros(group.size, dtype=torch.float64)
    for value in (neuron_features(state, group, ("out",)) or neuron_features(state, group, ("vec",))).values():
        lengths += to_float64(value).square().sum(1).cpu()
    return lengths


def _out_axes(group: PermutationGroup) -> PermutationGroup:
    return replace(group, entries={axis: entry for axis, entry in group.entries.items() if entry.role != "in"})


def _ones(value: Tensor, name: str, out_groups: Sequence[PermutationGroup]) -> Tensor:
    # ones along axes with role "out"; the other axes have length 1
    axes = {axis for group in out_groups for entry_name, axis in group.entries if entry_name == name}
    return to_float64(value.new_zeros(())).new_ones([n if axis in axes else 1 for axis, n in enumerate(value.shape)])
