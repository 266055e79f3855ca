"""Neuron alignment, against an exhaustive search."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from lightning_fed.matching import PermutationGroups, align_networks, align_neurons
from tests.breadth import slow
from tests.matching.networks import Characters, Residual, group_norm, images, randomised, tokens


def orders(size, blocks):
    """All orders without moves between blocks."""
    width = size // blocks
    for pairs in itertools.permutations(range(blocks)):
        for inner in itertools.product(itertools.permutations(range(width)), repeat=blocks):
            yield [
                pair * width + index for pair, permutation in zip(pairs, inner, strict=True) for index in permutation
            ]


@pytest.mark.parametrize(("size", "blocks"), [(6, 1), (6, 2), (6, 3), (4, 4), (1, 1)])
def test_no_order_is_nearer(size, blocks):
    for _ in range(5):
        reference, neurons = torch.randn(2, size, 3, dtype=torch.float64)
        ours = align_neurons(reference, neurons, blocks)
        distances = {tuple(order): float((reference - neurons[order]).square().sum()) for order in orders(size, blocks)}
        assert distances[tuple(ours.tolist())] == pytest.approx(min(distances.values()))
        if blocks < size > 1:
            assert max(distances.values()) > 1.01 * min(distances.values())


@pytest.mark.parametrize("blocks", [1, 4])
def test_an_order_is_found_again(blocks):
    reference = torch.randn(32, 9)
    order = torch.cat([block * 8 + torch.randperm(8) for block in torch.randperm(4)])
    noisy = (reference + 0.1 * torch.randn(32, 9))[torch.argsort(order)]
    assert torch.equal(align_neurons(reference, noisy, blocks), order)
    assert torch.equal(align_neurons(reference.half(), noisy.half(), blocks), order)


# --- Networks ---------------------------------------------------------------------------------------------------------

NETWORKS = {
    "chain": lambda: (nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)),
                      torch.zeros(2, 6)),
    "LSTM": lambda: (Characters(hidden=9), tokens()),
    "GroupNorm": lambda: (Residual(group_norm(4)), images(8)),
}  # fmt: skip


def drawn(name, count):
    """Unrelated networks with groups and identity orders."""
    groups, states = None, []
    for seed in range(count):
        torch.manual_seed(seed)
        module, example = NETWORKS[name]()
        module = randomised(module).eval()
        groups = groups or PermutationGroups.of(module, example)
        states.append(module.state_dict())
    return states, groups, [[torch.arange(group.size) for group in groups] for _ in states]


def distance(states, groups, orders):
    moved = [
        groups.permute(state, dict(zip(groups.names, network_orders, strict=True)))
        for state, network_orders in zip(states, orders, strict=True)
    ]
    total = 0.0
    for name, value in moved[0].items():
        if value.is_floating_point():
            stacked = torch.stack([state[name].double() for state in moved])
            total += float((stacked - stacked.mean(0)).square().sum())
    return total


@pytest.mark.parametrize(
    ("name", "count", "sweeps"), [("chain", 4, (1, 2, 8)), slow(("LSTM", 3, (1, 2, 8))), ("GroupNorm", 3, (1, 2, 8))]
)
def test_sweeps_never_move_networks_apart(name, count, sweeps):
    states, groups, start = drawn(name, count)
    distances = [distance(states, groups, start)]
    for most in sweeps:
        orders = align_networks(states, groups.groups, start, np.random.default_rng(0), most)
        distances.append(distance(states, groups, orders))
    assert distances[1] < 0.999 * distances[0]
    assert all(after <= before + 1e-9 * before for before, after in itertools.pairwise(distances))
    assert all(
        torch.equal(order, torch.arange(len(order))) for network in start for order in network
    )  # in the given order


def test_where_sweeps_end_no_exchange_of_two_neurons_helps():
    states, groups, start = drawn("chain", 3)
    orders = align_networks(states, groups.groups, start, np.random.default_rng(1))
    again = align_networks(states, groups.groups, orders, np.random.default_rng(2))
    assert all(torch.equal(a, b) for one, two in zip(orders, again, strict=True) for a, b in zip(one, two, strict=True))
    least = distance(states, groups, orders)
    for network, number in itertools.product(range(3), range(len(groups))):
        for first, second in itertools.combinations(range(groups.groups[number].size), 2):
            exchanged = [list(network_orders) for network_orders in orders]
            swapped = torch.arange(len(orders[network][number]))
            swapped[[first, second]] = swapped[[second, first]]
            exchanged[network][number] = orders[network][number][swapped]
            assert distance(states, groups, exchanged) > least - 1e-5


def test_near_networks_stay_as_they_are():
    (state,), groups, (order,) = drawn("GroupNorm", 1)
    near = [{name: value + 0.01 * torch.randn_like(value) for name, value in state.items()} for _ in range(3)]
    for states in ([state] * 3, near, near[:1]):
        orders = align_networks(states, groups.groups, [order] * len(states), np.random.default_rng(0))
        assert all(
            torch.equal(aligned, start)
            for network_orders in orders
            for aligned, start in zip(network_orders, order, strict=True)
        )


def test_refusals():
    for neurons in (torch.zeros(4, 2), torch.zeros(6, 3), torch.zeros(6)):
        with pytest.raises(ValueError, match=r"`reference` and `neurons` to have the same shape \(L, D\), but got"):
            align_neurons(torch.zeros(6, 2), neurons)
    with pytest.raises(ValueError, match="`blocks` to divide the 6 neurons, but got 4"):
        align_neurons(torch.zeros(6, 2), torch.zeros(6, 2), 4)
    with pytest.raises(ValueError, match="to be finite, but got NaN"):
        align_neurons(torch.zeros(2, 2), torch.full((2, 2), torch.nan))
    with pytest.raises(ValueError, match="`sweeps` to be at least 0, but got -1"):
        align_networks([{}], [], [[]], np.random.default_rng(0), -1)
