"""Groups of many networks: the expected number, each exact, separately and together."""

import copy

import pytest
import torch

from lightning_fed.matching import PermutationGroups, resize_module
from tests.breadth import quick
from tests.matching.networks import QUICK, SLOW, build, compute, outputs


def random_order(group):
    width = group.size // group.blocks
    return torch.cat([block * width + cycle(width) for block in cycle(group.blocks).tolist()])


def cycle(count):
    order = torch.randperm(count)
    return torch.empty_like(order).index_copy_(0, order, order.roll(1))


def assert_same(output, expected, relative):
    assert float((output - expected).abs().max()) <= relative * float(expected.abs().max())


def check(make, num_groups, num_neurons, num_growable, head):
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
    one = example[:1]
    check_alone(copy.deepcopy(module).double(), one.double() if one.is_floating_point() else one, groups)

    sizes = {group.name: group.size + 2 for group in groups if group.is_growable}
    if sizes:
        wide = copy.deepcopy(module)
        resize_module(wide, groups.grow(state, sizes))
        assert_same(outputs(wide, example), before, 1e-9)
        assert sum(value.numel() for value in wide.parameters()) > sum(value.numel() for value in module.parameters())
        if len(groups) < 9:
            assert PermutationGroups.of(wide, example).sizes == groups.resized(sizes).sizes


@torch.no_grad()
def check_alone(module, example, groups):
    """Permutes every group separately; only the entries in the group are written and restored."""
    before, state = compute(module, example), module.state_dict()
    for group in groups:
        entries = {name: state[name].clone() for name, _ in group.entries}
        for name, value in groups.permute(entries, {group.name: random_order(group)}).items():
            state[name].copy_(value)
        assert_same(compute(module, example), before, 1e-9)
        for name, value in entries.items():
            state[name].copy_(value)
    assert torch.equal(compute(module, example), before)


# a torch warning for every such LSTM on the CPU
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


@pytest.mark.parametrize("name", quick(QUICK, ["LSTM, both ways", "ViT", "mixed"]))
def test_groups_are_found_and_exact(name):
    check(*QUICK[name])


@pytest.mark.slow
@pytest.mark.timeout(1800)  # one run per group: hundreds
@pytest.mark.parametrize("name", SLOW)
def test_groups_are_found_and_exact_in_large_networks(name):
    check(*SLOW[name])
