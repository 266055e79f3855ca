"""Networks of one architecture merged at once: every group of neurons is matched, then all is averaged.

- Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (PFNM), ICML 2019: from the last
  layer to the first.
- Wang et al., "Federated Learning with Matched Averaging" (FedMA), ICLR 2020: from the first to the last; without the
  training in between, which is what makes FedMA good.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_fed.argument_checks import check_option
from lightning_fed.matching.alignment import align_networks, align_neurons
from lightning_fed.matching.groups import PermutationGroups
from lightning_fed.matching.matched_mean import matched_mean
from lightning_fed.matching.neuron_matching import match_neurons
from lightning_fed.matching.permutation import (
    Axis,
    PermutationGroup,
    Role,
    grow_neurons,
    neuron_features,
    resize_groups,
)

MatchMode: TypeAlias = Literal["grow", "permute", "none"]
MatchOrder: TypeAlias = Literal["fedma", "pfnm"]

_ROLES: dict[str, tuple[Role, ...]] = {"fedma": ("out", "vec"), "pfnm": ("out", "vec", "in")}


class StateMatch(NamedTuple):
    """Networks merged into one.

    Attributes:
        state: The merged state: the mean of every neuron over the networks that have it.
        groups: The merged network's groups; :func:`~lightning_fed.matching.resize_module` gives a module its widths.
        places: For every network and group the place of each of its neurons in the merged one, int64, shape
            ``(neurons,)``.
        seconds: Time that each group took to match, without sweeps.

    """

    state: dict[str, Tensor]
    groups: PermutationGroups
    places: list[dict[str, Tensor]]
    seconds: dict[str, float]

    @property
    def owners(self) -> dict[str, Tensor]:
        """For every group the number of networks that have each of its neurons, int64, shape ``(neurons,)``."""
        return {
            name: torch.bincount(torch.cat([own[name] for own in self.places]), minlength=size)
            for name, size in self.groups.sizes.items()
        }

    @property
    def matched(self) -> dict[str, float]:
        """For every group the share of the networks' neurons that another network has too."""
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
    max_growth: float | None = 1.25,
    sweeps: int = 0,
    **options: Any,
) -> StateMatch:
    """Matches the neurons of several networks, group by group, and averages.

    A group is matched by what its neurons have in common with neurons that are matched already, with inputs and with
    outputs: going from the first group to the last by incoming weights, biases and normalisation (``"fedma"``), or from
    the last to the first by outgoing weights and biases, and where the inputs are the network's own also by incoming
    ones (``"pfnm"``). Groups that are not growable are only ordered, like the networks before them.

    That is one pass, in which every network is ordered like those before it, and by a part of what its neurons have.
    With ``sweeps`` the networks are then brought nearer to each other, all groups jointly, until nothing changes
    (:func:`~lightning_fed.matching.align_networks`). With ``"grow"`` this comes first, and groups are then matched by
    all incoming weights (``"pfnm"``: all weights) of neurons, which now have a common order; in a chain of layers and
    with ``"fedma"`` these are the same as without.

    Prior means are 0, and variances are the same for all networks, unless ``options`` say otherwise; the programs of
    PFNM and FedMA have 0.1 for biases, and PFNM's a variance by class for the last layer's columns.

    BatchNorm's running statistics are averaged like all else; those of a merged network have to be measured anew.

    Args:
        states: One state per network, with the same entries.
        groups: Their groups.
        generator: Draws the order of the networks, and in sweeps of the groups.
        order: ``"fedma"`` or ``"pfnm"``.
        mode: ``"grow"``: there may be more neurons than a network has; ``"permute"``: they are only ordered;
            ``"none"``: every neuron stays where it is.
        weights: Weight of each network in the average, greater than 0, such as its number of examples; by default
            equal.
        max_growth: Most neurons of a group, as a multiple of those of a network; ``None`` for no limit.
        sweeps: Most sweeps over all networks and groups in which they are ordered anew; 0 for none.
        options: Passed to :func:`~lightning_fed.matching.match_neurons`, such as ``score``.

    Returns:
        The merged network.

    Raises:
        ValueError: If there is no network, ``order`` or ``mode`` is unknown, ``max_growth`` is below 1, or as the
            functions that this is made of.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
        >>> groups, state = PermutationGroups.of(net, torch.zeros(2, 2)), net.state_dict()
        >>> other = groups.permute(state, {"0": torch.tensor([2, 0, 1])})
        >>> merged = match_states([state, other], groups, np.random.default_rng(0))
        >>> merged.places[1], torch.equal(merged.state["2.weight"], state["2.weight"])
        ({'0': tensor([2, 0, 1])}, True)

    """
    check_option("order", order, get_args(MatchOrder))
    check_option("mode", mode, get_args(MatchMode))
    if not states:
        raise ValueError("Expected at least one of `states`, but got none.")
    if max_growth is not None and not max_growth >= 1:
        raise ValueError(f"Expected `max_growth` to be at least 1, but got {max_growth}.")
    aligned = None
    if mode == "grow" and sweeps:
        aligned = match_states(states, groups, generator, order, mode="permute", sweeps=sweeps)
        orders = [{name: torch.argsort(place) for name, place in own.items()} for own in aligned.places]
        states = [groups.permute(state, own) for state, own in zip(states, orders, strict=True)]
    places = [[torch.arange(group.size) for group in groups] for _ in states]
    sizes = [group.size for group in groups]
    waiting, seconds = [] if mode == "none" else list(range(len(groups))), dict.fromkeys(groups.names, 0.0)
    if order == "pfnm":
        waiting.reverse()
    while waiting:
        number, start = waiting.pop(0), time.perf_counter()
        group = groups.groups[number]
        if aligned is not None and not group.is_growable:
            continue
        unknown = [] if aligned is not None else [groups.groups[other] for other in waiting]
        chosen = _common(group, unknown, _ROLES[order])
        wide = resize_groups(groups.groups, sizes)[number]
        neurons, blocks = [], list[int]()
        for state, own in zip(states, places, strict=True):
            part = {name: state[name] for name, _ in chosen if name in state}
            features = neuron_features(grow_neurons(part, groups.groups, own, sizes), wide, _ROLES["pfnm"])
            parts = [value for axis, value in features.items() if axis in chosen]
            blocks = [value.shape[1] for value in parts]
            neurons.append(torch.cat(parts, 1) if parts else torch.zeros(group.size, 0))
        if not blocks:
            continue
        if mode == "grow" and group.is_growable:
            limit = None if max_growth is None else int(group.size * max_growth)
            match = match_neurons(neurons, generator, **{"blocks": blocks, "max_width": limit, **options})
            sizes[number], found = len(match.owners), match.assignments
        else:
            found = _ordered(neurons, group.blocks)
        for own, place in zip(places, found, strict=True):
            own[number] = place.cpu()
        seconds[group.name] = time.perf_counter() - start
    if mode == "permute" and sweeps:
        inverse = [[torch.argsort(place) for place in own] for own in places]
        inverse = align_networks(states, groups.groups, inverse, generator, sweeps)
        places = [[torch.argsort(own) for own in network] for network in inverse]
    state = matched_mean(states, groups.groups, places, sizes, [1.0] * len(states) if weights is None else weights)
    resized = groups.resized(dict(zip(groups.names, sizes, strict=True)))
    named = [dict(zip(groups.names, own, strict=True)) for own in places]
    if aligned is not None:
        named = [
            {name: own[name][place] for name, place in first.items()}
            for own, first in zip(named, aligned.places, strict=True)
        ]
        seconds = {name: seconds[name] + first for name, first in aligned.seconds.items()}
    return StateMatch(groups.tie(state), resized, named, seconds)


def _common(group: PermutationGroup, waiting: Sequence[PermutationGroup], roles: Sequence[Role]) -> set[Axis]:
    """What neurons of different networks can be compared by: no other axis has neurons that wait to be matched."""
    others = {axis for other in waiting for axis in other.entries}
    by_role = {axis for axis, entry in group.entries.items() if entry.role in (*roles, "both")}
    known = {(name, axis) for name, axis in by_role if not any(other == name and dim != axis for other, dim in others)}
    return known or by_role


def _ordered(neurons: Sequence[Tensor], blocks: int) -> list[Tensor]:
    """The place of each neuron, in the order in which they are nearest to the mean of the networks before."""
    mean, places = torch.zeros_like(neurons[0]), []
    for count, own in enumerate(neurons):
        order = align_neurons(mean, own, blocks) if count else torch.arange(len(own), device=own.device)
        mean = mean + (own[order] - mean) / (count + 1)
        places.append(torch.argsort(order))
    return places
