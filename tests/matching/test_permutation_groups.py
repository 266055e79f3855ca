"""Permutation groups against manual tables, and operations on groups."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_fed.matching import PermutationGroup, PermutationGroups, resize_module
from tests import models
from tests.breadth import quick
from tests.matching.networks import Characters, HardLeNet, LeNet, Tied, build, images, outputs, tokens, vgg9


def axes_of(group):
    return {axis: (tuple(entry.positions.shape), entry.role) for axis, entry in group.entries.items()}


# --- Manual tables ----------------------------------------------------------------------------------------------------


def test_the_groups_of_lenet():
    groups = PermutationGroups.of(*build(lambda: (LeNet(), images(28, 1))))
    assert groups.names == ["conv1", "conv2", "fc1"]
    assert groups.sizes == {"conv1": 20, "conv2": 50, "fc1": 500}
    one = {"conv1": ((20, 1), "conv2"), "conv2": ((50, 1), "fc1"), "fc1": ((500, 1), "fc2")}
    for name, (shape, reader) in one.items():
        copies = (50, 16) if name == "conv2" else shape  # 4 x 4 pixels in every channel
        assert axes_of(groups[name]) == {
            (f"{name}.weight", 0): (shape, "out"),
            (f"{name}.bias", 0): (shape, "vec"),
            (f"{reader}.weight", 1): (copies, "in"),
        }
    assert torch.equal(groups["conv2"].entries["fc1.weight", 1].positions, torch.arange(800).view(50, 16))
    assert groups["conv2"].entries["fc1.weight", 1].length == 800
    assert (groups.unknown, groups.tied) == ({}, {})


def test_the_groups_of_an_lstm():
    groups = PermutationGroups.of(*build(lambda: (Characters(hidden=6, layers=2), tokens())))
    gates = torch.arange(24).view(4, 6).T
    for layer, name in enumerate(("rnn.weight_ih_l0", "rnn.weight_ih_l1")):
        rows = {(f"rnn.{kind}_l{layer}", 0): ((6, 4), "out") for kind in ("weight_ih", "weight_hh")}
        rows |= {(f"rnn.{kind}_l{layer}", 0): ((6, 4), "vec") for kind in ("bias_ih", "bias_hh")}
        reader = ("rnn.weight_ih_l1", 1) if layer == 0 else ("decoder.weight", 1)
        columns = {(f"rnn.weight_hh_l{layer}", 1): ((6, 1), "in"), reader: ((6, 1), "in")}
        assert axes_of(groups[name]) == rows | columns
        assert torch.equal(groups[name].entries[f"rnn.weight_hh_l{layer}", 0].positions, gates)


def test_a_stage_of_residual_blocks_is_one_group():
    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.first, self.second = nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
            self.norm, self.gate = nn.GroupNorm(2, 4), nn.Sequential(nn.Conv2d(4, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 1))
            self.head = nn.Linear(4, 3)

        def forward(self, inputs):
            features = self.stem(inputs)
            features = features + self.first(features).relu()
            features = features + self.norm(self.second(features))
            return self.head((features * self.gate(features.mean((2, 3), keepdim=True)).sigmoid()).mean((2, 3)))

    groups = PermutationGroups.of(*build(lambda: (Stage(), images(4, 1))))
    assert groups.sizes == {"stem": 4, "gate.0": 2}
    out_axes = {(f"{name}.weight", 0) for name in ("stem", "first", "second", "gate.2")}
    in_axes = {(f"{name}.weight", 1) for name in ("first", "second", "gate.0", "head")}
    vectors = {(f"{name}.bias", 0) for name in ("stem", "first", "second", "gate.2")}
    vectors |= {("norm.weight", 0), ("norm.bias", 0)}
    group = groups["stem"]
    for role, expected in (("out", out_axes), ("in", in_axes), ("vec", vectors)):
        assert {axis for axis, entry in group.entries.items() if entry.role == role} == expected
    assert (group.blocks, group.is_growable) == (2, False)


def test_depthwise_concatenated_and_batch_normalised():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Conv2d(1, 3, 1), nn.Conv2d(1, 5, 1)
            self.depthwise, self.norm = nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8)
            self.head = nn.Conv2d(8, 2, 1)

        def forward(self, inputs):
            return self.head(self.norm(self.depthwise(torch.cat([self.left(inputs), self.right(inputs)], 1))))

    groups = PermutationGroups.of(*build(lambda: (Net(), images(6, 1))))
    assert groups.sizes == {"left": 3, "right": 5}
    shared = {(f"norm.{name}", 0) for name in ("weight", "bias", "running_mean", "running_var")}
    shared |= {("depthwise.weight", 0), ("depthwise.bias", 0), ("head.weight", 1)}
    for name, start in (("left", 0), ("right", 3)):
        assert set(groups[name].entries) == shared | {(f"{name}.weight", 0), (f"{name}.bias", 0)}
        for axis in shared:
            positions = groups[name].entries[axis].positions[:, 0].tolist()
            assert positions == list(range(start, start + groups.sizes[name]))


def test_tied_entries_go_together():
    module, example = build(lambda: (Tied(), tokens(7, 20)))
    groups = PermutationGroups.of(module, example)
    assert groups.tied == {"output.weight": "embedding.weight"}
    assert groups["embedding"].entries["embedding.weight", 1].role == "both"
    order = torch.arange(6).roll(1)
    for state in (module.state_dict(), {k: v for k, v in module.state_dict().items() if k != "output.weight"}):
        moved = groups.permute(state, {"embedding": order})
        assert list(moved) == list(state)
        assert torch.equal(moved["embedding.weight"], module.embedding.weight[:, order])
        assert torch.equal(moved.get("output.weight", moved["embedding.weight"]), moved["embedding.weight"])


# --- Pinned neurons, and neurons outside groups -----------------------------------------------------------------------


def test_pinned_neurons_stay():
    module, example = build(lambda: (LeNet(), images(28, 1)))
    assert PermutationGroups.of(module, example, pin=["conv2.*"]).names == ["fc1"]
    assert PermutationGroups.of(module, example, pin=["fc2.weight", "conv1.bias"]).names == ["conv2"]
    tied, example = build(lambda: (Tied(), tokens(7, 20)))
    assert "embedding" not in PermutationGroups.of(tied, example, pin=["output.*"]).names


def test_what_has_no_rule_stays():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 2)

        def forward(self, inputs):
            return self.head(self.second(self.first(inputs).cumsum(1)).relu())

    groups = PermutationGroups.of(*build(lambda: (Net(), torch.randn(3, 5))))
    assert (groups.names, groups.unknown) == (["second"], {"cumsum": 1})


def test_numbers_that_do_not_come_from_neurons_pin_what_reads_them():
    """An integer input, a spatial map, a constant ramp: the neurons of layers that read them are pinned."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.counts, self.map, self.conv = nn.Linear(6, 4), nn.Linear(16, 4), nn.Conv2d(1, 6, 1)
            self.scale, self.ramp = nn.Linear(6, 4), nn.Linear(4, 4)
            self.register_buffer("weights", torch.linspace(1, 2, 4), persistent=False)
            self.head = nn.Linear(4, 3)

        def forward(self, inputs):
            counts = self.counts((inputs.flatten(1)[:, :6] > 0).long().float())
            space = self.map(self.conv(inputs).mean(1).flatten(1))
            return self.head(counts + space + self.ramp(self.scale(inputs.flatten(1)[:, :6]) * self.weights))

    groups = PermutationGroups.of(*build(lambda: (Net(), images(4, 1))))
    assert groups.sizes == {"counts": 4, "conv": 6}
    assert set(groups["conv"].entries) == {("conv.weight", 0), ("conv.bias", 0)}
    assert ("scale.weight", 0) not in groups["counts"].entries


def test_what_reads_constants_stays():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 8), nn.Linear(12, 3)

        def forward(self, inputs):
            hidden = self.first(inputs)
            return self.second(torch.cat([hidden.new_zeros(len(hidden), 4), hidden], 1))

    groups = PermutationGroups.of(*build(lambda: (Net(), torch.randn(3, 5))))
    assert groups.sizes == {"first": 8}
    assert groups["first"].entries["second.weight", 1].positions[:, 0].tolist() == list(range(4, 12))


def test_group_norms_of_different_groups_leave_the_finer_ones():
    """Four blocks of two in two groups of four: neurons may move within blocks, but blocks may not."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)
            self.coarse, self.fine = nn.GroupNorm(2, 8), nn.GroupNorm(4, 8)

        def forward(self, inputs):
            hidden = self.first(inputs)
            return self.second(self.coarse(hidden) + self.fine(hidden))

    groups = PermutationGroups.of(*build(lambda: (Net(), torch.randn(3, 5))))
    assert groups.sizes == {f"first[{start}]": 2 for start in (0, 2, 4, 6)}
    assert {(group.blocks, group.is_growable) for group in groups} == {(1, False)}


def test_slices_tell_neurons_apart():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, inputs):
            left, right = self.first(inputs).chunk(2, 1)
            return self.second(torch.cat([left.relu(), right.tanh()], 1))

    groups = PermutationGroups.of(*build(lambda: (Net(), torch.randn(3, 5))))
    assert groups.sizes == {"first[0]": 4, "first[4]": 4}


def test_a_written_width_is_not_growable():
    groups = PermutationGroups.of(*build(lambda: (HardLeNet(), images(28, 1))))
    assert {group.name: group.is_growable for group in groups} == {"conv1": True, "conv2": False, "fc1": True}


def test_a_module_that_depends_on_its_data_has_the_groups_that_it_is_given():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, inputs):
            hidden = self.first(inputs)
            return self.second(hidden.relu() if float(hidden.sum()) > 0 else hidden.tanh())

    module, example = build(lambda: (Net(), torch.randn(3, 5)))
    axes = {("first.weight", 0): "out", ("first.bias", 0): "vec", ("second.weight", 1): "in"}
    group = PermutationGroup.over(module.state_dict(), axes, 8)
    with pytest.warns(UserWarning, match="Tracing the module failed"):
        groups = PermutationGroups.of(module, example, extra_groups=[group])
    assert groups.sizes == {"first": 8}
    with pytest.warns(UserWarning, match="Tracing the module failed"):
        assert len(PermutationGroups.of(module, example)) == 0


def test_layers_of_training_are_followed():
    class Net(nn.Module):
        def __init__(self, uses=True):
            super().__init__()
            self.first, self.norm, self.head = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
            self.aux = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 3))
            self.uses = uses

        def forward(self, inputs):
            hidden = self.norm(self.first(inputs)).relu()
            return (self.head(hidden), self.aux(hidden)) if self.training and self.uses else self.head(hidden)

    groups = PermutationGroups.of(*build(lambda: (Net(), torch.randn(3, 5))))
    assert {("head.weight", 1), ("aux.1.weight", 1), ("norm.running_mean", 0)} <= set(groups["first"].entries)
    with pytest.warns(UserWarning, match=r"so their inputs are unknown: 'aux'\."):
        PermutationGroups.of(*build(lambda: (Net(uses=False), torch.randn(3, 5))))
    # unused layers inside a child are allowed: encoders in smp may only run the first stages
    assert len(PermutationGroups.of(*build(lambda: (nn.Sequential(Net(uses=False)), torch.randn(3, 5))))) == 1


# --- Purpose ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", quick(["norm_mlp", "unet"], ["norm_mlp"]))
def test_training_does_not_see_the_order(which):
    """SGD steps before or after a permutation, with batch statistics in float64."""
    torch.manual_seed(0)
    if which == "unet":
        module, example, target = (
            models.unet(),
            torch.randn(2, 3, 32, 32),
            torch.randint(models.CLASSES, (2, 32, 32)),
        )
    else:
        module, example, target = models.norm_mlp(), torch.randn(8, 6), torch.randint(models.CLASSES, (8,))
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0
    groups = PermutationGroups.of(module, example)
    orders = {group.name: torch.randperm(group.size) for group in groups}

    def trained(state):
        trained = copy.deepcopy(module).double().train()
        trained.load_state_dict(state)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(trained(example.double()), target).backward()
            optimizer.step()
        return trained.state_dict()

    state = {
        name: value.double() if value.is_floating_point() else value for name, value in module.state_dict().items()
    }
    first, last = trained(groups.permute(state, orders)), groups.permute(trained(state), orders)
    assert all(torch.allclose(first[name], last[name], rtol=1e-6, atol=1e-9) for name in first)
    assert not any(torch.allclose(first[name], state[name]) for name, _ in groups.groups[0].entries)


@pytest.mark.slow
def test_the_papers_networks_have_the_papers_sizes():
    """Numbers of parameters, and growth factors for 14 and 15 additional neurons in every layer of VGG-9."""
    sizes = {}
    for name, make in (("LeNet", lambda: (LeNet(), images(28, 1))), ("LSTM", lambda: (Characters(), tokens()))):
        sizes[name] = sum(value.numel() for value in build(make)[0].parameters())
    module, example = build(lambda: (vgg9(), images(32)))
    groups, state = PermutationGroups.of(module, example), module.state_dict()
    sizes["VGG-9"] = sum(value.numel() for value in state.values())
    assert sizes == {"LeNet": 431_080, "LSTM": 293_584, "VGG-9": 3_491_530}
    for more, factor in ((14, 1.109), (15, 1.117)):
        wide = groups.grow(state, {name: size + more for name, size in groups.sizes.items()})
        assert sum(value.numel() for value in wide.values()) / sizes["VGG-9"] == pytest.approx(factor, abs=0.0005)


def test_slice_grow_and_features_by_name():
    module, example = build(lambda: (LeNet(), images(28, 1)))
    groups, state = PermutationGroups.of(module, example), module.state_dict()
    assignments = {"conv1": torch.randperm(25)[:20], "fc1": torch.randperm(510)[:500]}
    sizes = {"conv1": 25, "fc1": 510}
    wide, resized = groups.grow(state, sizes, assignments), groups.resized(sizes)
    assert resized.sizes == {"conv1": 25, "conv2": 50, "fc1": 510}
    back = resized.slice(wide, assignments)
    assert all(torch.equal(back[name], value) for name, value in state.items())
    features = groups.features(state, "conv2")
    assert {axis: value.shape for axis, value in features.items()} == {
        ("conv2.weight", 0): (50, 500),
        ("conv2.bias", 0): (50, 1),
    }
    wide_module = copy.deepcopy(module)
    resize_module(wide_module, wide)
    torch.testing.assert_close(outputs(wide_module, example), outputs(module, example), rtol=1e-12, atol=1e-12)


def test_refusals():
    module, example = build(lambda: (LeNet(), images(28, 1)))
    with pytest.raises(ValueError, match=r"`pin` to match entries of the module, but 'conv3\.\*' matches none"):
        PermutationGroups.of(module, example, pin=["conv3.*"])
    alien = PermutationGroup.over({"other": torch.zeros(3)}, {("other", 0): "vec"}, 3)
    with pytest.raises(ValueError, match=r"`extra_groups` to contain entries of the module, but got \['other'\]"):
        PermutationGroups.of(module, example, extra_groups=[alien])
    groups, state = PermutationGroups.of(module, example), module.state_dict()
    for call in (
        lambda: groups["conv9"],
        lambda: groups.permute(state, {"conv9": torch.arange(3)}),
        lambda: groups.slice(state, {"conv9": torch.arange(3)}),
        lambda: groups.grow(state, {"conv9": 3}),
        lambda: groups.resized({"conv9": 3}),
        lambda: groups.features(state, "conv9"),
    ):
        with pytest.raises(ValueError, match=r"group name from \['conv1', 'conv2', 'fc1'\], but got 'conv9'"):
            call()
