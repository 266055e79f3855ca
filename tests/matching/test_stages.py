"""Stages: cut between unconnected neurons, with every entry in one stage; given stages are checked."""

import functools

import pytest
import torch
import torchvision
from torch import nn

from lightning_fed.matching import PermutationGroups, find_stages
from tests.matching import networks


@functools.cache
def resnet_groups(blocks):
    net = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [blocks] * 4, 10)
    return net, PermutationGroups.of(net, networks.images(32))


def stages_of(net, example, choice="auto"):
    groups = PermutationGroups.of(net, example)
    return groups, find_stages(groups, list(net.state_dict()), choice)


def first_layers(stages):
    return [stage.entries[0].rpartition(".")[0] for stage in stages]


def check(net, groups, stages):
    names = [name for stage in stages for name in stage.entries]
    assert sorted(names) == sorted(net.state_dict())
    assert sorted(name for stage in stages for name in stage.groups) == sorted(groups.names)
    settled, stage_of = set(), {name: number for number, stage in enumerate(stages) for name in stage.entries}
    for number, stage in enumerate(stages):
        settled |= set(stage.groups)
        for group in groups:
            read = any(stage_of[name] == number for name, _ in group.entries)
            assert not read or group.name in settled
            is_made = any(stage_of[name] == number for (name, _), entry in group.entries.items() if entry.role != "in")
            assert not is_made or group.name in stage.groups


def test_a_chain_has_a_stage_for_each_layer_or_as_few_as_asked_for():
    net = networks.vgg9()
    groups, stages = stages_of(net, networks.images(32))
    check(net, groups, stages)
    assert len(stages) == 9
    assert [len(stage.groups) for stage in stages] == [1] * 8 + [0]
    assert all(len(stage.entries) == 2 for stage in stages)
    sizes, names, head = [], list(net.state_dict()), set(stages[-1].entries)
    for count, choice in ((9, 20), (5, 5), (2, 2), (1, 1)):  # neighbours merge, the output layer last
        stages = find_stages(groups, names, choice)
        check(net, groups, stages)
        assert len(stages) == count
        assert (set(stages[-1].entries) == head) == (count > 1)
        sizes.append([sum(groups[name].size for name in stage.groups) for stage in stages])
    assert sizes[0] == [32, 64, 128, 128, 256, 256, 512, 512, 0]
    assert sizes[1] == [352, 512, 512, 512, 0]  # always the smallest pair of neighbours


@pytest.mark.slow
def test_a_residual_network_has_a_stage_for_each_width():
    """The stem shares channels with the first blocks; layers inside a block join the block."""
    net, groups = resnet_groups(2)
    stages = find_stages(groups, list(net.state_dict()), "auto")
    check(net, groups, stages)
    inside = [f"layer{number}.0.conv{conv}" for number in (2, 3, 4) for conv in (1, 2)]
    assert first_layers(stages) == ["conv1", *inside, "fc"]
    assert [len(stage.groups) for stage in stages] == [3, 1, 2, 1, 2, 1, 2, 0]
    assert "layer1.1.bn2.running_var" in stages[0].entries
    assert "layer2.1.conv1.weight" in stages[2].entries  # between layers with common channels


@pytest.mark.slow
def test_a_segmentation_network():
    """For 21 groups 13 stages, or the requested number: neighbours merge, the output layer last."""
    net = networks.segmenter("DeepLabV3Plus")
    head = {"segmentation_head.0.weight", "segmentation_head.0.bias"}
    groups = PermutationGroups.of(net, networks.images(32))
    for count, choice in ((13, "auto"), (13, 20), (7, 7), (2, 2), (1, 1)):
        stages = find_stages(groups, list(net.state_dict()), choice)
        check(net, groups, stages)
        assert len(stages) == count
        assert (set(stages[-1].entries) == head) == (count > 1)
    sizes = [sum(groups[name].size for name in s.groups) for s in find_stages(groups, list(net.state_dict()), 7)]
    assert max(sizes[:-1]) < 0.6 * sum(sizes)


def test_a_recurrent_network():
    net = networks.Characters()
    groups, stages = stages_of(net, networks.tokens())
    check(net, groups, stages)
    assert len(stages) == 3


class Crossed(nn.Module):
    """Registered in another order than executed, with a pinned layer in the middle."""

    def __init__(self):
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(6, 2), nn.Linear(5, 3), nn.Linear(4, 5)
        self.late = nn.Linear(3, 6)

    def forward(self, inputs):
        hidden = self.middle(self.first(inputs).relu())
        return self.last(self.late(hidden.cumsum(1)).relu())


def test_stages_go_by_the_order_in_which_layers_run():
    net = Crossed()
    groups, stages = stages_of(net, torch.randn(2, 4))
    check(net, groups, stages)
    assert groups.names == ["first", "late"]
    assert [sorted({name.split(".")[0] for name in stage.entries}) for stage in stages] == [
        ["first"],
        ["late", "middle"],  # a pinned layer joins the following layer
        ["last"],
    ]


def test_one_stage_and_no_groups():
    net = networks.LeNet()
    groups, stages = stages_of(net, networks.images(28, 1), 1)
    check(net, groups, stages)
    assert len(stages) == 1
    bare = nn.Sequential(nn.Linear(2, 2))
    assert [stage.groups for stage in stages_of(bare, torch.zeros(2, 2))[1]] == [()]


def test_given_stages():
    net, groups = resnet_groups(1)
    choice = [["conv1.*", "bn1.*", "layer1.*", "layer2.*"], ["layer*"], ["*"]]
    stages = find_stages(groups, list(net.state_dict()), choice)
    check(net, groups, stages)
    assert [len(stage.groups) for stage in stages] == [4, 4, 0]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (0, "'auto', a positive integer"),
        ("all", "'auto', a positive integer"),
        ([["conv1.*"], ["bn1.*"]], "no pattern matches 'layer1.0.conv1.weight'"),
        ([["conv1.*"], ["*"]], r"neurons of 'conv1'.* but got stages \[0, 1\]"),
        ([["fc.*"], ["*"]], "neurons of"),
        ([["*"], ["fc.*"]], r"\['fc.\*'\] matches none"),
    ],
)
def test_stages_that_do_not_fit(choice, message):
    net, groups = resnet_groups(1)
    with pytest.raises(ValueError, match=message):
        find_stages(groups, list(net.state_dict()), choice)
