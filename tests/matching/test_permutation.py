"""Neurons in states: permuted as by matrices, removed, added, averaged over owners."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_fed.matching import (
    PermutationGroup,
    grow_neurons,
    matched_mean,
    neuron_features,
    permute_neurons,
    resize_groups,
    slice_neurons,
)
from tests.references_matching import matched_layer_reference


class Net(nn.Module):
    """Two parallel convolutions, flattened into an LSTM; a linear layer reads the last step."""

    def __init__(self, widths=(3, 4, 5)):
        super().__init__()
        first, second, hidden = widths
        self.first = nn.Conv2d(2, first, 3, padding=1)
        self.second = nn.Conv2d(2, second, 1)
        self.norm = nn.BatchNorm2d(first)
        self.lstm = nn.LSTM((first + second) * 4, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 2)

    def forward(self, inputs):
        both = torch.cat([self.norm(self.first(inputs)).tanh(), self.second(inputs)], 1)
        return self.head(self.lstm(F.max_pool2d(both, 2).flatten(1)[:, None])[0][:, -1])


def net(seed=0):
    torch.manual_seed(seed)
    module = Net().double().eval()
    module.norm.running_mean.normal_()
    module.norm.running_var.uniform_(0.5, 2)
    return module


def run(state, widths=(3, 4, 5)):
    module = Net(widths).double().eval()
    module.load_state_dict(state)
    torch.manual_seed(9)
    return module(torch.randn(6, 2, 4, 4, dtype=torch.float64)).detach()


def positions(start, size, copies):
    return start + torch.arange(size * copies).view(size, copies)


@pytest.fixture
def groups():
    """By hand: the LSTM reads the pixels of three channels, then of four."""
    state = net().state_dict()
    norm = {(f"norm.{name}", 0): "vec" for name in ("weight", "bias", "running_mean", "running_var")}
    first = PermutationGroup.over(state, {("first.weight", 0): "out", ("first.bias", 0): "vec", **norm}, 3)
    second = PermutationGroup.over(state, {("second.weight", 0): "out", ("second.bias", 0): "vec"}, 4)
    read = PermutationGroup.over(state, {("lstm.weight_ih_l0", 1): "in"}, 7).entries["lstm.weight_ih_l0", 1]
    first.entries["lstm.weight_ih_l0", 1] = read._replace(positions=positions(0, 3, 4))
    second.entries["lstm.weight_ih_l0", 1] = read._replace(positions=positions(12, 4, 4))
    gates = {("lstm.weight_ih_l0", 0): "out", ("lstm.weight_hh_l0", 0): "out"}
    gates |= {(f"lstm.bias_{kind}_l0", 0): "vec" for kind in ("ih", "hh")}
    lstm = PermutationGroup.over(state, gates, 20)
    rows = torch.arange(20).view(4, 5).T
    entries = {axis: entry._replace(positions=rows) for axis, entry in lstm.entries.items()}
    reads = PermutationGroup.over(state, {("lstm.weight_hh_l0", 1): "in", ("head.weight", 1): "in"}, 5)
    return [first, second, PermutationGroup("lstm", 5, entries | dict(reads.entries))]


def matrix(order):
    return torch.eye(len(order), dtype=torch.float64)[order]


# --- Permutation ------------------------------------------------------------------------------------------------------


def test_permuting_is_multiplying_by_permutation_matrices(groups):
    state = net().state_dict()
    orders = [torch.arange(group.size).roll(1) for group in groups]
    ours = permute_neurons(state, groups, orders)
    first, second, hidden = map(matrix, orders)
    pixels = torch.eye(4, dtype=torch.float64)
    columns = torch.block_diag(torch.kron(first, pixels), torch.kron(second, pixels))
    gates = torch.kron(torch.eye(4, dtype=torch.float64), hidden)
    expected = {
        "first.weight": torch.einsum("ij,jklm->iklm", first, state["first.weight"]),
        "norm.running_var": first @ state["norm.running_var"],
        "second.bias": second @ state["second.bias"],
        "lstm.weight_ih_l0": gates @ state["lstm.weight_ih_l0"] @ columns.T,
        "lstm.weight_hh_l0": gates @ state["lstm.weight_hh_l0"] @ hidden.T,
        "lstm.bias_hh_l0": gates @ state["lstm.bias_hh_l0"],
        "head.weight": state["head.weight"] @ hidden.T,
        "head.bias": state["head.bias"],
    }
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name
        assert name == "head.bias" or not torch.equal(ours[name], state[name])
    assert ours["head.bias"] is state["head.bias"]
    torch.testing.assert_close(run(ours), run(state), rtol=1e-12, atol=1e-12)


def test_there_and_back(groups):
    state = net().state_dict()
    before = copy.deepcopy(state)
    orders = [torch.randperm(group.size) for group in groups]
    there = permute_neurons(state, groups, orders)
    back = permute_neurons(there, groups, [torch.argsort(order) for order in orders])
    assert all(torch.equal(back[name], value) for name, value in state.items())
    assert all(torch.equal(before[name], value) for name, value in state.items())  # not in place
    part = permute_neurons({"head.weight": state["head.weight"]}, groups, orders)
    assert torch.equal(part["head.weight"], there["head.weight"])
    assert list(part) == ["head.weight"]


def test_blocks_stay_together():
    state = {"weight": torch.arange(6.0)}
    group = PermutationGroup("layer", 6, PermutationGroup.over(state, {("weight", 0): "vec"}, 6).entries, blocks=3)
    order = torch.tensor([5, 4, 0, 1, 2, 3])
    assert permute_neurons(state, [group], [order])["weight"].tolist() == order.tolist()
    with pytest.raises(ValueError, match=r"keeps 3 blocks .* in 'layer' together"):
        permute_neurons(state, [group], [torch.tensor([1, 2, 0, 3, 4, 5])])
    with pytest.raises(ValueError, match="'layer' to keep its 6 neurons, but got 8"):
        resize_groups([group], [8])


# --- Other widths -----------------------------------------------------------------------------------------------------


def test_new_neurons_change_nothing(groups):
    state = net().state_dict()
    sizes, assignments = (
        [5, 4, 9],
        [torch.randperm(size)[: group.size] for group, size in zip(groups, (5, 4, 9), strict=True)],
    )
    wide = grow_neurons(state, groups, assignments, sizes)
    assert wide["lstm.weight_ih_l0"].shape == (36, 36)
    torch.testing.assert_close(run(wide, sizes), run(state), rtol=1e-12, atol=1e-12)
    # even if new neurons have random numbers
    changed = {name: value.clone() for name, value in wide.items()}
    new = [index for index in range(5) if index not in assignments[0]]
    for name in ("first.weight", "first.bias", "norm.weight", "norm.bias", "norm.running_mean"):
        assert (changed[name][new] == 0).all()
        changed[name][new] = 3.0
    torch.testing.assert_close(run(changed, sizes), run(state), rtol=1e-12, atol=1e-12)
    assert (wide["norm.running_mean"] != 0).sum() == 3


def test_slicing_takes_out_what_growing_put_in(groups):
    state = net().state_dict()
    for seed in range(5):
        torch.manual_seed(seed)
        sizes = [group.size + int(torch.randint(4, ())) for group in groups]
        assignments = [torch.randperm(size)[: group.size] for group, size in zip(groups, sizes, strict=True)]
        wide = grow_neurons(state, groups, assignments, sizes)
        back = slice_neurons(wide, resize_groups(groups, sizes), assignments)
        assert all(torch.equal(back[name], value) for name, value in state.items())
        again = resize_groups(resize_groups(groups, sizes), [group.size for group in groups])
        for group, resized in zip(groups, again, strict=True):
            for axis, entry in group.entries.items():
                assert torch.equal(entry.positions, resized.entries[axis].positions)
                assert entry.length == resized.entries[axis].length


def test_slicing_is_a_smaller_network(groups):
    """By hand: without some channels and LSTM units, which are set to 0 in the full network."""
    state = net().state_dict()
    kept = [torch.tensor([2, 0]), torch.arange(4), torch.tensor([1, 3, 4, 0])]
    small = slice_neurons(state, groups, kept)
    whole = {name: value.clone() for name, value in state.items()}
    whole["norm.weight"][1] = whole["norm.bias"][1] = 0  # tanh(0) = 0, and the maximum of zeros is 0
    whole["lstm.weight_hh_l0"][:, 2] = whole["head.weight"][:, 2] = 0
    torch.testing.assert_close(run(small, (2, 4, 4)), run(whole), rtol=1e-12, atol=1e-12)


def test_only_side_by_side_is_growable():
    state = {"weight": torch.zeros(6)}
    entry = PermutationGroup.over(state, {("weight", 0): "vec"}, 3).entries["weight", 0]
    mixed = PermutationGroup("a", 3, {("weight", 0): entry._replace(positions=torch.tensor([[0, 3], [2, 1], [4, 5]]))})
    with pytest.raises(ValueError, match="'a' to keep its 3 neurons, but got 4"):
        resize_groups([mixed], [4])
    assert resize_groups([mixed], [3])[0].entries["weight", 0].positions.tolist() == [[0, 3], [2, 1], [4, 5]]
    fixed = PermutationGroup("b", 3, {("weight", 0): entry}, is_growable=False)
    with pytest.raises(ValueError, match="'b' to keep its 3 neurons, but got 2"):
        slice_neurons(state, [fixed], [torch.tensor([0, 1])])


# --- Features ---------------------------------------------------------------------------------------------------------


def test_features_are_what_neurons_are_made_of(groups):
    state = net().state_dict()
    features = neuron_features(state, groups[0])
    assert list(features) == [("first.weight", 0), ("first.bias", 0), ("norm.weight", 0), ("norm.bias", 0)]
    assert torch.equal(features["first.weight", 0], state["first.weight"].flatten(1))
    lstm = neuron_features(state, groups[2])
    assert list(lstm) == [("lstm.weight_ih_l0", 0), ("lstm.bias_ih_l0", 0), ("lstm.bias_hh_l0", 0)]
    gates = state["lstm.weight_ih_l0"].view(4, 5, 28)
    assert torch.equal(lstm["lstm.weight_ih_l0", 0], gates.transpose(0, 1).reshape(5, -1))
    outgoing = neuron_features(state, groups[0], ("in",))
    assert list(outgoing) == [("lstm.weight_ih_l0", 1)]
    columns = state["lstm.weight_ih_l0"][:, :12].T.reshape(3, 4, 20)
    assert torch.equal(outgoing["lstm.weight_ih_l0", 1], columns.flatten(1))


def test_features_move_with_the_neurons(groups):
    state = net().state_dict()
    for index, group in enumerate(groups):
        order = torch.randperm(group.size)
        moved = neuron_features(permute_neurons(state, [group], [order]), group, ("out", "vec", "in"))
        for axis, value in neuron_features(state, groups[index], ("out", "vec", "in")).items():
            assert torch.equal(moved[axis], value[order])


# --- Means ------------------------------------------------------------------------------------------------------------


def test_the_mean_is_over_the_owners(groups):
    states = [net(seed).state_dict() for seed in range(3)]
    for rank, state in enumerate(states):
        state["norm.num_batches_tracked"].fill_(10 * rank)
    sizes, weights = [5, 4, 7], [3, 20, 6]
    assignments = [
        [torch.randperm(size)[: group.size] for group, size in zip(groups, sizes, strict=True)] for _ in states
    ]
    for assignment in assignments:  # so that every index has an owner
        assignment[0][:2] = torch.tensor([0, 1])
    for client, last in enumerate((2, 3, 4)):
        assignments[client][0][2] = last
    mean = matched_mean(states, groups, assignments, sizes, weights)

    lists = [[indices.tolist() for indices in assignment] for assignment in assignments]
    everything = [list(range(2))] * 3
    expected = matched_layer_reference(
        [state["head.weight"].numpy() for state in states],
        everything,
        [assignment[2] for assignment in lists],
        2,
        7,
        weights,
    )
    np.testing.assert_allclose(mean["head.weight"], expected, rtol=1e-12)
    rows = [[gate * 7 + index for gate in range(4) for index in assignment[2]] for assignment in lists]
    pixels = [
        [
            channel * 4 + pixel
            for channel in [*assignment[0], *(5 + index for index in assignment[1])]
            for pixel in range(4)
        ]
        for assignment in lists
    ]
    for name, columns in (
        ("lstm.weight_ih_l0", pixels),
        ("lstm.weight_hh_l0", [assignment[2] for assignment in lists]),
    ):
        layers = [state[name].numpy() for state in states]
        width = 36 if name == "lstm.weight_ih_l0" else 7
        with np.errstate(invalid="ignore"):  # rows without an owner
            expected = matched_layer_reference(layers, rows, columns, 28, width, weights)
        missing = [
            row for row in range(28) if row % 7 not in {index for assignment in lists for index in assignment[2]}
        ]
        np.testing.assert_allclose(mean[name], np.nan_to_num(expected), rtol=1e-12)
        assert not mean[name][missing].any()
    expected = matched_layer_reference(
        [state["norm.running_var"].numpy()[:, None] for state in states], [assignment[0] for assignment in lists],
        [[0]] * 3, 5, 1, weights,
    )  # fmt: skip
    np.testing.assert_allclose(mean["norm.running_var"], expected[:, 0], rtol=1e-12)
    assert int(mean["norm.num_batches_tracked"]) == 10
    for client, last in enumerate((2, 3, 4)):  # a neuron with a single owner keeps the owner's value
        assert torch.equal(mean["first.weight"][last], states[client]["first.weight"][2])


def test_the_mean_of_identical_clients_is_that_client(groups):
    state = {name: value.float() if value.is_floating_point() else value for name, value in net().state_dict().items()}
    assignment = [torch.arange(group.size) for group in groups]
    mean = matched_mean([state] * 3, groups, [assignment] * 3, [group.size for group in groups], [1, 7, 3])
    assert list(mean) == list(state)
    assert all(torch.equal(mean[name], value) and mean[name].dtype == value.dtype for name, value in state.items())


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_refusals(groups):
    state = net().state_dict()
    first = groups[0]
    with pytest.raises(ValueError, match="order of 'first' to have each of 3 neurons once"):
        permute_neurons(state, [first], [torch.tensor([0, 0, 2])])
    with pytest.raises(ValueError, match=r"axis 0 of 'first\.weight' to have length 3, but the shape is"):
        permute_neurons({"first.weight": torch.zeros(4, 2, 3, 3)}, [first], [torch.tensor([2, 1, 0])])
    with pytest.raises(ValueError, match="distinct neurons of 'first' from 0 to 2, but got"):
        slice_neurons(state, [first], [torch.tensor([0, 3])])
    with pytest.raises(ValueError, match="distinct neurons of 'first' from 0 to 4, but got"):
        grow_neurons(state, [first], [torch.tensor([0, 3, 3])], [5])
    with pytest.raises(ValueError, match="index for each of 3 neurons of 'first', but got 2"):
        grow_neurons(state, [first], [torch.tensor([0, 3])], [5])
    with pytest.raises(ValueError, match="one size per group, but got 1 sizes for 3 groups"):
        resize_groups(groups, [4])
    with pytest.raises(ValueError, match="`sizes` to be at least 1, but got 0"):
        resize_groups([first], [0])
    with pytest.raises(ValueError, match="`roles` to be one of"):
        neuron_features(state, first, ("rows",))
    with pytest.raises(ValueError, match=r"`axes` to be axes of the state's entries, but got 1 of 'first\.bias'"):
        PermutationGroup.over(state, {("first.bias", 1): "vec"}, 3)
    with pytest.raises(ValueError, match=r"`size`, .*, to divide the length 3 of axis 0 of 'first\.bias', but got 2"):
        PermutationGroup.over(state, {("first.bias", 0): "vec"}, 2)
    with pytest.raises(ValueError, match="have one element per client, at least one, but got 0, 0 and 0"):
        matched_mean([], [first], [], [3], [])
    with pytest.raises(ValueError, match=r"`weights` to be greater than 0 and finite, but got \[0\]"):
        matched_mean([state], [first], [[torch.arange(3)]], [3], [0])
