"""Matches and averages networks with equal architecture, without training.

Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (PFNM), ICML 2019; Wang et al.,
"Federated Learning with Matched Averaging" (FedMA), ICLR 2020, without the training between layers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_fed.argument_checks import check_option
from lightning_fed.matching.alignment import align_networks, align_neurons
from lightning_fed.matching.matched_mean import agreement, matched_mean
from lightning_fed.matching.neuron_matching import MatchScore, match_neurons
from lightning_fed.matching.permutation import (
    Axis,
    PermutationGroup,
    Role,
    grow_neurons,
    neuron_features,
    resize_groups,
)
from lightning_fed.matching.permutation_groups import PermutationGroups

MatchMode: TypeAlias = Literal["grow", "permute", "none"]
MatchOrder: TypeAlias = Literal["fedma", "pfnm"]
# Maximum group width, relative to a single network.
WidthLimit: TypeAlias = float | Literal["auto"] | None

_MARGINAL_LIMIT = 1.25  # limit used for "auto"

_ROLES: dict[str, tuple[Role, ...]] = {"fedma": ("out", "vec"), "pfnm": ("out", "vec", "in")}


class StateMatch(NamedTuple):
    """Result of merging several state dicts.

    Attributes:
        state: Merged state dict, with the means of matched neurons.
        groups: Permutation groups (exchangeable neurons) with the merged widths. To load ``state`` into a module, use
            :func:`~lightning_fed.matching.resize_module`.
        assignments: For each network and group, each neuron's index in the merged network: int64, shape ``(neurons,)``.
        agreement: For each group, the neurons' squared norm after averaging, divided by the squared norm before.
        seconds: Time for matching each group, excluding :func:`~lightning_fed.matching.align_networks`.
    """

    state: dict[str, Tensor]
    groups: PermutationGroups
    assignments: list[dict[str, Tensor]]
    agreement: dict[str, float]
    seconds: dict[str, float]

    @property
    def owners(self) -> dict[str, Tensor]:
        """Number of networks matched to each merged neuron, by group: int64, shape ``(neurons,)``."""
        return {
            name: torch.bincount(torch.cat([assignment[name] for assignment in self.assignments]), minlength=size)
            for name, size in self.groups.sizes.items()
        }

    @property
    def matched(self) -> dict[str, float]:
        return {name: float(owners[owners > 1].sum() / owners.sum()) for name, owners in self.owners.items()}


@torch.no_grad()
def match_states(
    states: Sequence[Mapping[str, Tensor]],
    groups: PermutationGroups,
    generator: np.random.Generator,
    order: MatchOrder = "fedma",
    *,
    mode: MatchMode = "grow",
    weights: Sequence[float] | None = None,
    score: MatchScore = "marginal",
    max_growth: WidthLimit = "auto",
    sweeps: int = 0,
    prior_weight: float = 0.0,
    **options: Any,
) -> StateMatch:
    """Matches the neurons in several networks, and averages the networks.

    One permutation group (a set of exchangeable neurons) is matched after another, in one of two orders:

    - ``"fedma"``: from the first layer on, by incoming weights, biases and normalization.
    - ``"pfnm"``: from the last layer back, by outgoing weights and biases, in the first layer also incoming weights.

    With ``sweeps`` above 0, the groups are first matched one to one, and
    :func:`~lightning_fed.matching.align_networks` improves these matches by all weights. In mode ``"grow"``, a further
    matching adds neurons. BatchNorm's running statistics are averaged. Measure these again with the merged network.

    Args:
        states: A state dict for each network, with equal names.
        groups: Permutation groups in the networks.
        generator: Draws the network order, and the group order in sweeps.
        order: Group order, ``"fedma"`` or ``"pfnm"``.
        mode: ``"grow"`` adds unmatched neurons, and treats groups with fixed width as ``"permute"`` does. ``"permute"``
            matches neurons one to one and preserves widths. ``"none"`` averages without matching.
        weights: Network weights, greater than 0; by default equal.
        score: Matching score, see :func:`~lightning_fed.matching.match_neurons`.
        max_growth: Maximum group width, as a multiple of a network's width; ``None`` for no limit. ``"auto"`` is 1.25
            with the marginal score, and no limit with the published score.
        sweeps: Maximum number of alignment passes over all networks and groups; 0 for no alignment.
        prior_weight: Weight for a prior, see :func:`~lightning_fed.matching.matched_mean`.
        options: Arguments for :func:`~lightning_fed.matching.match_neurons`, such as ``gamma``.

    Raises:
        ValueError: If ``states`` is empty, or an option is invalid.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> groups, state = PermutationGroups.of(net, torch.zeros(2, 2)), net.state_dict()
        >>> permuted = groups.permute(state, {"0": torch.tensor([2, 0, 1])})
        >>> merged = match_states([state, permuted], groups, np.random.default_rng(0))
        >>> merged.assignments[1], torch.equal(merged.state["2.weight"], state["2.weight"])
        ({'0': tensor([2, 0, 1])}, True)
    """
    check_option("order", order, MatchOrder)
    check_option("mode", mode, MatchMode)
    if not states:
        raise ValueError("Expected `states` to contain at least one state, but got none.")
    check_width_limit("max_growth", max_growth)
    if max_growth == "auto":
        max_growth = _MARGINAL_LIMIT if score == "marginal" else None
    aligned = None
    if mode == "grow" and sweeps:
        aligned = match_states(states, groups, generator, order, mode="permute", sweeps=sweeps)
        network_orders = [
            {name: torch.argsort(indices) for name, indices in assignment.items()} for assignment in aligned.assignments
        ]
        states = [groups.permute(state, orders) for state, orders in zip(states, network_orders, strict=True)]
    assignments = [[torch.arange(group.size) for group in groups] for _ in states]
    sizes = [group.size for group in groups]
    waiting, seconds = [] if mode == "none" else list(range(len(groups))), dict.fromkeys(groups.names, 0.0)
    if order == "pfnm":
        waiting.reverse()
    while waiting:
        number, start = waiting.pop(0), time.perf_counter()
        group = groups.groups[number]
        if aligned is not None and not group.is_growable:
            continue
        unknown = [] if aligned is not None else [groups.groups[later] for later in waiting]
        chosen = _common(group, unknown, _ROLES[order])
        resized_group = resize_groups(groups.groups, sizes)[number]
        neurons, blocks = [], list[int]()
        for state, assignment in zip(states, assignments, strict=True):
            part = {name: state[name] for name, _ in chosen if name in state}
            features = neuron_features(
                grow_neurons(part, groups.groups, assignment, sizes), resized_group, _ROLES["pfnm"]
            )
            parts = [value for axis, value in features.items() if axis in chosen]
            blocks = [value.shape[1] for value in parts]
            neurons.append(torch.cat(parts, 1) if parts else torch.zeros(group.size, 0))
        if not blocks:
            continue
        if mode == "grow" and group.is_growable:
            limit = None if max_growth is None else int(group.size * max_growth)
            settings = {"blocks": blocks, "max_width": limit, **options}
            match = match_neurons(neurons, generator, score, **settings)
            sizes[number], matched = len(match.owners), match.assignments
        else:
            matched = _ordered(neurons, group.blocks)
        for assignment, indices in zip(assignments, matched, strict=True):
            assignment[number] = indices.cpu()
        seconds[group.name] = time.perf_counter() - start
    if mode == "permute" and sweeps:
        inverse = [[torch.argsort(indices) for indices in assignment] for assignment in assignments]
        inverse = align_networks(states, groups.groups, inverse, generator, sweeps)
        assignments = [[torch.argsort(indices) for indices in network] for network in inverse]
    weights = [1.0] * len(states) if weights is None else weights
    state = matched_mean(states, groups.groups, assignments, sizes, weights, prior_weight)
    shares = agreement(state, states, groups.groups, assignments, sizes, weights)
    resized = groups.resized(dict(zip(groups.names, sizes, strict=True)))
    named = [dict(zip(groups.names, assignment, strict=True)) for assignment in assignments]
    if aligned is not None:
        named = [
            {name: assignment[name][indices] for name, indices in first.items()}
            for assignment, first in zip(named, aligned.assignments, strict=True)
        ]
        seconds = {name: seconds[name] + first for name, first in aligned.seconds.items()}
    return StateMatch(groups.tie(state), resized, named, dict(zip(groups.names, shares, strict=True)), seconds)


def check_width_limit(name: str, value: WidthLimit) -> WidthLimit:
    """Checks a limit for layer widths: ``None``, ``"auto"``, or a number of at least 1."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or value == "auto" or (is_number and 1 <= value < float("inf")):
        return value
    raise ValueError(f"Expected `{name}` to be at least 1 and finite, 'auto' or None, but got {value!r}.")


def _common(group: PermutationGroup, waiting: Sequence[PermutationGroup], roles: Sequence[Role]) -> set[Axis]:
    unmatched = {axis for later in waiting for axis in later.entries}
    by_role = {axis for axis, entry in group.entries.items() if entry.role in (*roles, "both")}
    comparable = {
        (name, axis) for name, axis in by_role if not any(entry == name and dim != axis for entry, dim in unmatched)
    }
    return comparable or by_role


def _ordered(neurons: Sequence[Tensor], blocks: int) -> list[Tensor]:
    mean, assignments = torch.zeros_like(neurons[0]), []
    for count, network in enumerate(neurons):
        order = align_neurons(mean, network, blocks) if count else torch.arange(len(network), device=network.device)
        mean = mean + (network[order] - mean) / (count + 1)
        assignments.append(torch.argsort(order))
    return assignments
