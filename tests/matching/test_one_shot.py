"""Merging whole networks at once: permuted copies are recovered, private neurons kept, PFNM by hand."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from lightning_fed.matching import PermutationGroups, match_neurons, match_states, resize_module
from tests.breadth import quick, slow
from tests.matching.networks import Characters, LeNet, Residual, build, group_norm, images, outputs, resnet18, tokens

CASES = {
    "LeNet": lambda: (LeNet(), images(28, 1)),
    "LSTM": lambda: (Characters(hidden=12), tokens()),
    "LSTM, 2 layers": lambda: (Characters(hidden=12, layers=2), tokens()),
}


def permuted(module, groups, count):
    state, copies = module.state_dict(), []
    for _ in range(count):
        orders = {}
        for group in groups:
            width = group.size // group.blocks
            blocks = torch.randperm(group.blocks).tolist()
            orders[group.name] = torch.cat([block * width + torch.randperm(width) for block in blocks])
        copies.append(groups.permute(state, orders))
    return copies


@pytest.mark.parametrize(
    ("name", "order"),
    quick(
        itertools.product(CASES, ["fedma", "pfnm"]),
        [("LSTM", "pfnm"), ("LSTM, 2 layers", "fedma")],
    ),
)
def test_permuted_copies_are_one_network(name, order):
    module, example = build(CASES[name])
    groups = PermutationGroups.of(module, example)
    states = permuted(module, groups, 3)
    merged = match_states(states, groups, np.random.default_rng(0), order)
    assert merged.groups.sizes == groups.sizes
    for state, assignment in zip(states, merged.assignments, strict=True):
        back = merged.groups.permute(merged.state, assignment)  # neuron i is at assignment[i]
        assert all(torch.equal(back[name], value) for name, value in state.items())
    assert merged.agreement == pytest.approx(dict.fromkeys(groups.names, 1.0))
    before = outputs(module, example)
    module.load_state_dict(merged.state)
    torch.testing.assert_close(outputs(module, example), before, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_permuted_copies_of_residual_networks_are_only_ordered():
    """A stage of blocks is one group, with GroupNorm's groups as blocks; no group can grow."""
    module, example = build(lambda: (resnet18(norm_layer=group_norm(8), weights=None), images(32)))
    groups = PermutationGroups.of(module, example)
    assert not any(group.is_growable for group in groups)
    merged = match_states(permuted(module, groups, 2), groups, np.random.default_rng(0))
    before = outputs(module, example)
    module.load_state_dict(merged.state)
    assert float((outputs(module, example) - before).abs().max()) < 1e-6 * float(before.abs().max())


def test_private_neurons_are_kept():
    torch.manual_seed(0)
    shared, private_sets = torch.randn(30, 40), [torch.randn(10, 40) for _ in range(2)]
    states = []
    for private in private_sets:
        order = torch.randperm(40)
        rows = torch.cat([shared, private])[order]
        states.append({"0.weight": rows, "0.bias": torch.zeros(40), "2.weight": torch.randn(3, 40)[:, order]})
    net = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3, bias=False))
    groups = PermutationGroups.of(net, torch.randn(2, 40))
    merged = match_states(states, groups, np.random.default_rng(0))
    assert merged.groups.sizes == {"0": 50}
    assert merged.state["0.weight"].shape == (50, 40)
    for state, assignment in zip(states, merged.assignments, strict=True):
        assert torch.equal(merged.state["0.weight"][assignment["0"]], state["0.weight"])
    resize_module(net, merged.state)
    limited = match_states(states, groups, np.random.default_rng(0), max_growth=1.1)
    assert limited.groups.sizes == {"0": 44}
    assert match_states(states, groups, np.random.default_rng(0), mode="permute").groups.sizes == {"0": 40}


def test_the_published_score_has_no_limit_of_the_width_unless_one_is_given():
    """The published rule gives each of 8 clients two neurons next to the first client's: 8 become 22, not 10."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(27, 8), nn.ReLU(), nn.Linear(8, 3))
    states = [{name: 0.1 * torch.randn_like(value) for name, value in net.state_dict().items()} for _ in range(8)]
    groups = PermutationGroups.of(net, torch.zeros(2, 27))
    widths = {}
    for score, gamma in (("published", 7.0), ("marginal", 1e30)):
        for name, options in (("default", {}), (1.25, {"max_growth": 1.25}), (None, {"max_growth": None})):
            merged = match_states(states, groups, np.random.default_rng(0), score=score, gamma=gamma, **options)
            widths[score, name] = merged.groups.sizes["0"]
    assert widths["published", "default"] == widths["published", None] == 8 + 14
    assert widths["published", 1.25] <= widths["marginal", 1.25] == widths["marginal", "default"] == 10
    assert widths["marginal", None] == 8 * 8


def test_sweeps_bring_networks_nearer():
    """A single pass orders every network by the preceding networks, so results depend on the order of networks."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3))
            for _ in range(3)]  # fmt: skip
    groups = PermutationGroups.of(nets[0], torch.zeros(2, 6))
    distances = {}
    for sweeps in (0, 1, 30):
        for chosen in itertools.permutations(range(3)):
            states = [nets[index].state_dict() for index in chosen]
            merged = match_states(states, groups, np.random.default_rng(0), mode="permute", sweeps=sweeps)
            squares = 0.0
            for state, assignment in zip(states, merged.assignments, strict=True):
                moved = groups.permute(state, {name: torch.argsort(indices) for name, indices in assignment.items()})
                squares += sum(float((moved[name] - mean).square().sum()) for name, mean in merged.state.items())
            distances.setdefault(sweeps, []).append(squares)
    assert all(after < before for before, after in zip(distances[0], distances[1], strict=True))
    assert all(after <= before for before, after in zip(distances[1], distances[30], strict=True))
    assert max(distances[30]) < 0.97 * min(distances[0])


@pytest.mark.parametrize(("mode", "is_expected"), [("permute", [False, True]), slow(("grow", [True, True]))])
def test_sweeps_order_a_residual_stage_by_all_that_its_neurons_have(mode, is_expected):
    """The networks only share the blocks' convolutions, and the inputs are unmatched at the stage.

    With growth, the estimated variances reduce the weight of unshared entries, even without sweeps.
    """
    torch.manual_seed(0)
    module, example = build(lambda: (Residual(), images(8)))
    groups = PermutationGroups.of(module, example)
    orders = {group.name: torch.randperm(group.size) for group in groups}
    state = module.state_dict()
    drawn = [name for name in state if name.startswith(("stem", "norm")) or ".3." in name]
    own_values = {name: torch.randn_like(state[name].float()).abs() / 5 for name in drawn}
    permuted_state = groups.permute({**state, **own_values}, orders)
    is_found = []
    for sweeps in (0, 30):
        merged = match_states(
            [module.state_dict(), permuted_state], groups, np.random.default_rng(0), mode=mode, sweeps=sweeps
        )
        first, second = merged.assignments
        is_found.append(all(torch.equal(first[name][order], second[name]) for name, order in orders.items()))
    assert is_found == is_expected


def test_in_a_chain_growth_is_the_same_with_sweeps():
    """With incoming weights from first to last layer all information is available without sweeps."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3))
            for _ in range(2)]  # fmt: skip
    groups, states = PermutationGroups.of(nets[0], torch.zeros(2, 6)), [net.state_dict() for net in nets]
    without, swept = (match_states(states, groups, np.random.default_rng(0), sweeps=sweeps) for sweeps in (0, 30))
    assert without.groups.sizes == swept.groups.sizes
    for name, size in swept.groups.sizes.items():
        pairs = [[torch.full((size,), -1).index_copy_(0, assignment[name], torch.arange(len(assignment[name])))
                  for assignment in one.assignments]
                 for one in (without, swept)]  # fmt: skip
        assert {*zip(*(indices.tolist() for indices in pairs[0]), strict=True)} == {
            *zip(*(indices.tolist() for indices in pairs[1]), strict=True)
        }


def test_pfnm_of_one_hidden_layer_by_hand():
    """A neuron consists of incoming weights, bias and outgoing weights, matched once."""
    states = []
    for seed in range(3):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 4))
        states.append({name: 3 * value for name, value in net.state_dict().items()})
    groups = PermutationGroups.of(net, torch.randn(2, 5))
    options = {"score": "published", "gamma": 1.0, "max_growth": None}
    merged = match_states(states, groups, np.random.default_rng(4), "pfnm", **options)
    neurons = [torch.cat([state["0.weight"], state["0.bias"][:, None], state["2.weight"].T], 1) for state in states]
    match = match_neurons(neurons, np.random.default_rng(4), "published", gamma=1.0)
    assert len(match.owners) > 9
    assert all(
        torch.equal(assignment["0"], indices)
        for assignment, indices in zip(merged.assignments, match.assignments, strict=True)
    )
    torch.testing.assert_close(merged.state["0.weight"], match.means[:, :5])
    torch.testing.assert_close(merged.state["0.bias"], match.means[:, 5])
    columns = match.means[:, 6:] * match.owners[:, None] / 3  # a client without the neuron does not read it
    torch.testing.assert_close(merged.state["2.weight"], columns.T)


def test_pfnm_goes_from_the_last_layer_to_the_first():
    """By hand: the second layer by outgoing weights and bias, then the first by all weights."""
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 4))
        states.append({name: 2 * value for name, value in net.state_dict().items()})
    groups = PermutationGroups.of(net, torch.randn(2, 5))
    options = {"score": "published", "gamma": 0.5}
    merged = match_states(states, groups, np.random.default_rng(1), "pfnm", max_growth=None, **options)
    generator = np.random.default_rng(1)
    second = match_neurons(
        [torch.cat([state["2.bias"][:, None], state["4.weight"].T], 1) for state in states], generator, **options
    )
    first = []
    for state, assignment in zip(states, second.assignments, strict=True):
        read = torch.zeros(len(second.owners), 6).index_copy_(0, assignment, state["2.weight"])
        first.append(torch.cat([state["0.weight"], state["0.bias"][:, None], read.T], 1))
    first = match_neurons(first, generator, **options)
    for assignment, one, two in zip(merged.assignments, first.assignments, second.assignments, strict=True):
        assert torch.equal(assignment["0"], one)
        assert torch.equal(assignment["2"], two)


def test_one_network_is_returned():
    module, example = build(CASES["LSTM"])
    groups = PermutationGroups.of(module, example)
    merged = match_states([module.state_dict()], groups, np.random.default_rng(0), weights=[7])
    assert all(torch.equal(merged.state[name], value) for name, value in module.state_dict().items())


def test_refusals():
    module, example = build(CASES["LSTM"])
    groups, state = PermutationGroups.of(module, example), module.state_dict()
    for change, words in (
        ({"states": []}, "at least one state"),
        ({"order": "last"}, "`order` to be one of"),
        ({"max_growth": 0.5}, "`max_growth` to be at least 1 and finite, 'auto' or None, but got 0.5"),
        ({"weights": [1, 2]}, "one element per client"),
    ):
        with pytest.raises(ValueError, match=words):
            match_states(**{"states": [state], "groups": groups, "generator": np.random.default_rng(0), **change})


@pytest.mark.parametrize("mode", ["grow", "permute", "none"])
def test_who_has_a_neuron_is_counted(mode):
    """Three networks, two of them equal up to order: by hand from the assignments."""
    torch.manual_seed(8)
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    groups = PermutationGroups.of(module, torch.zeros(2, 4))
    states = [*permuted(module, groups, 2), {n: torch.randn_like(v) for n, v in module.state_dict().items()}]
    merged = match_states(states, groups, np.random.default_rng(0), mode=mode, score="published", max_growth=None)
    width = merged.groups.sizes["0"]
    counts = [sum(index in assignment["0"].tolist() for assignment in merged.assignments) for index in range(width)]
    assert merged.owners["0"].tolist() == counts
    assert merged.matched["0"] == sum(count for count in counts if count > 1) / 18
    assert (width > 6) == (mode == "grow")
    if mode == "none":
        plain = {name: torch.stack([state[name] for state in states]).double().mean(0) for name in states[0]}
        # float64 means from two formulas may round to neighbouring float32 numbers.
        torch.testing.assert_close(merged.state, {name: plain[name].float() for name in merged.state})
        assert [assignment["0"].tolist() for assignment in merged.assignments] == [list(range(6))] * 3


@pytest.mark.parametrize("mode", ["grow", "permute", "none"])
def test_what_a_mean_keeps_of_its_neurons(mode):
    """Squared lengths by hand, for unequally weighted networks with partly matched neurons."""
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    groups, weights = PermutationGroups.of(module, torch.zeros(2, 4).double()), [3.0, 1.0, 2.0]
    states = [*permuted(module, groups, 2), {n: torch.randn_like(v) for n, v in module.state_dict().items()}]
    merged = match_states(
        states, groups, np.random.default_rng(0), mode=mode, weights=weights, score="published", max_growth=None
    )
    for name in groups.names:
        kept = before = 0.0
        for state, assignment, weight in zip(states, merged.assignments, weights, strict=True):
            for neuron, place in enumerate(assignment[name].tolist()):
                before += weight * float((state[f"{name}.weight"][neuron] ** 2).sum())
                kept += weight * float((merged.state[f"{name}.weight"][place] ** 2).sum())
        assert merged.agreement[name] == pytest.approx(kept / before, rel=1e-9)
        assert merged.agreement[name] < 0.99


def test_the_mean_of_unrelated_neurons_keeps_one_part_of_their_number():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(200, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 2))
    groups, start = PermutationGroups.of(module, torch.zeros(2, 200)), module.state_dict()
    states = [{**start, "0.weight": torch.randn(300, 200), "0.bias": torch.randn(300)} for _ in range(8)]
    merged = match_states(states, groups, np.random.default_rng(0), mode="none")
    assert merged.agreement["0"] == pytest.approx(1 / 8, rel=0.05)
