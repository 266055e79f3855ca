"""Groups of many networks: as many as there are to be found, each of them exact, alone and with all others."""

import copy

import pytest
import torch

from lightning_fed.matching import PermutationGroups, resize_module
from tests.matching.networks import QUICK, SLOW, build, outputs


def random_order(group):
    """Every neuron moves."""
    width = group.size // group.blocks
    return torch.cat([block * width + cycle(width) for block in cycle(group.blocks).tolist()])


def cycle(count):
    order = torch.randperm(count)
    return torch.empty_like(order).index_copy_(0, order, order.roll(1))


def assert_same(one, other, relative):
    assert float((one - other).abs().max()) <= relative * float(other.abs().max())


def check(make, num_groups, num_neurons, num_growable, head, most_alone):
    module, example = build(make)
    groups = PermutationGroups.of(module, example)
    assert (len(groups), sum(group.is_growable for group in groups)) == (num_groups, num_growable)
    assert sum(groups.sizes.values()) >= num_neurons
    assert len(set(groups.names)) == len(groups)
    assert not any((head, 0) in group.entries for group in groups)

    before, state = outputs(module, example), module.state_dict()
    assert before.abs().max() > 1e-6
    orders = {group.name: random_order(group) for group in groups}
    moved = copy.deepcopy(module)
    moved.load_state_dict(groups.permute(state, orders))
    for group in groups:
        for name, _ in group.entries:
            if state[name].is_floating_point():
                assert not torch.equal(moved.state_dict()[name], state[name]), name
    assert_same(outputs(moved, example), before, 1e-9)
    assert_same(outputs(moved, example, torch.float32), before.float(), 1e-4)
    for name in groups.names[:: 1 if len(groups) < most_alone else max(1, len(groups) // 3)]:
        moved.load_state_dict(groups.permute(state, {name: orders[name]}))
        assert_same(outputs(moved, example), before, 1e-9)

    sizes = {group.name: group.size + 2 for group in groups if group.is_growable}
    if sizes:
        wide = copy.deepcopy(module)
        resize_module(wide, groups.grow(state, sizes))
        assert_same(outputs(wide, example), before, 1e-9)
        assert sum(value.numel() for value in wide.parameters()) > sum(value.numel() for value in module.parameters())
        if len(groups) < 9:
            assert PermutationGroups.of(wide, example).sizes == groups.resized(sizes).sizes


# said by torch whenever such an LSTM runs on the CPU
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


@pytest.mark.parametrize("name", QUICK)
def test_groups_are_found_and_exact(name):
    check(*QUICK[name], most_alone=9)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_groups_are_found_and_exact_in_large_networks(name):
    check(*SLOW[name], most_alone=100)
