"""Merging trained networks outside training: planted permutations, trained networks, BatchNorm, refusals."""

import copy

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_fed.matching import MatchedAverage, PermutationGroups, load_matched, matched_mean, resize_module
from lightning_fed.tasks import CharLSTM
from lightning_fed.tasks.networks import lenet
from tests import models
from tests.breadth import quick
from tests.matching.load_script import CASES, Depthwise, Normed, images
from tests.matching.networks import randomised


class Block(nn.Module):
    def __init__(self, before, width, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if before != width:
            self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, features):
        hidden = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(features)))))
        return F.relu(hidden + self.shortcut(features))


def resnet():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), Block(16, 16, 1), Block(16, 32, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def permuted(module, example, seed, groups=None):
    groups, generator = groups or PermutationGroups.of(module, example), torch.Generator().manual_seed(seed)
    orders = {group.name: torch.randperm(group.size, generator=generator) for group in groups}
    result = copy.deepcopy(module)
    result.load_state_dict(groups.permute(module.state_dict(), orders))
    return result


def perturbed(module, seed, size=0.05):
    generator, result = torch.Generator().manual_seed(seed), copy.deepcopy(module)
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.add_(size * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return result


def compute(module, example):
    with torch.no_grad():
        return module.eval()(example)


# --- Planted permutations ---------------------------------------------------------------------------------------------


WAYS = [("grow", "fedma"), ("permute", "fedma"), ("grow", "pfnm")]


@pytest.mark.parametrize(
    ("name", "mode", "order"),
    quick(
        [(name, *way) for name in CASES for way in WAYS],
        [("depthwise", *WAYS[0]), ("normed", *WAYS[1]), ("tied", *WAYS[2])],
    ),
)
def test_permuted_copies_are_one_network(name, mode, order):
    make, draw = CASES[name]
    torch.manual_seed(1)
    module, example = randomised(make()).eval(), draw()
    groups = PermutationGroups.of(module, example)
    copies = [module, *(permuted(module, example, seed, groups) for seed in (1, 2))]
    pairs = zip(copies[1].parameters(), module.parameters(), strict=True)
    assert any(not torch.equal(permuted_value, value) for permuted_value, value in pairs)
    merged = MatchedAverage(mode, order, batch_norm="average").merge(copies, example_input=example)
    assert all(group.before == group.width and group.matched == 1 for group in merged.groups)
    torch.testing.assert_close(compute(merged.module, example), compute(module, example), rtol=1e-5, atol=1e-6)
    assert merged.module is not module
    assert all(torch.equal(value, merged.state[name]) for name, value in merged.module.state_dict().items())


def test_the_mean_is_that_of_the_networks_before_they_were_permuted():
    """Networks perturbed and then permuted, with weights, against the mean without permutations."""
    torch.manual_seed(0)
    module = CharLSTM(20, 6, 12, 2)
    example = torch.randint(20, (4, 9))
    nets = [perturbed(module, seed) for seed in range(3)]
    mixed = [nets[0], *(permuted(net, example, seed) for seed, net in enumerate(nets[1:]))]
    merged = MatchedAverage("permute").merge(mixed, example_input=example, weights=[1, 2, 5])
    for name, value in merged.module.state_dict().items():
        states = [net.state_dict()[name].double() for net in nets]
        expected = (states[0] + 2 * states[1] + 5 * states[2]) / 8
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    assert [(group.name, group.before, group.width) for group in merged.groups] == [
        ("embedding", 6, 6), ("lstm.0", 12, 12), ("lstm.1", 12, 12),
    ]  # fmt: skip


def test_private_neurons_are_added_and_reported():
    torch.manual_seed(0)
    shared, private_sets = torch.randn(30, 40), [torch.randn(10, 40) for _ in range(2)]
    nets = []
    for private in private_sets:
        net = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3))
        with torch.no_grad():
            net[0].weight.copy_(torch.cat([shared, private])[torch.randperm(40)])
            net[0].bias.zero_()
        nets.append(net)
    merged = MatchedAverage().merge(nets, example_input=torch.zeros(2, 40))
    (group,) = merged.groups
    assert group[:4] == ("0", 40, 50, pytest.approx(60 / 80))
    assert 0 < group.seconds < 10
    assert (merged.module[0].out_features, merged.module[2].in_features) == (50, 50)
    for net, assignment in zip(nets, merged.assignments, strict=True):
        assert torch.equal(merged.state["0.weight"][assignment["0"]], net[0].weight)
    again = load_matched(nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)), merged.state)
    assert torch.equal(compute(again, torch.ones(2, 40)), compute(merged.module, torch.ones(2, 40)))
    permuted = MatchedAverage("permute").merge(nets, example_input=torch.zeros(2, 40))
    assert permuted.groups[0].width == 40


def test_a_network_without_neurons_that_can_change_places():
    nets = [nn.Linear(4, 3), nn.Linear(4, 3)]
    with pytest.raises(ValueError, match="permutable neurons, but found none"):
        MatchedAverage().merge(nets, example_input=torch.zeros(2, 4))


def test_one_network_is_itself():
    module = Depthwise()
    (batch,) = data = [images()]
    merged = MatchedAverage().merge([module], data=data, weights=[3.0])
    for name, value in merged.state.items():
        assert torch.equal(value, module.state_dict()[name]) or "running" in name
    assert torch.equal(compute(merged.module.train(), batch), compute(merged.module, batch))


def test_data_that_can_be_run_through_once_are_used_whole():
    torch.manual_seed(0)
    nets, data = [Normed(), Normed()], [images() for _ in range(3)]
    for mode in ("grow", "none"):
        states = [MatchedAverage(mode).merge(nets, data=batches).state for batches in (data, iter(data), data[1:])]
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
        assert not torch.allclose(states[0]["norm.running_mean"], states[2]["norm.running_mean"])


def test_without_matching_it_is_the_mean():
    torch.manual_seed(0)
    nets = [Normed() for _ in range(2)]
    merged = MatchedAverage("none", batch_norm="average").merge(nets, weights=[3, 1])
    states = [net.state_dict() for net in nets]
    expected = matched_mean(states, (), [[], []], [], [3, 1])
    assert all(torch.equal(value, expected[name]) for name, value in merged.state.items())
    torch.testing.assert_close(merged.state["head.bias"], 0.75 * nets[0].head.bias + 0.25 * nets[1].head.bias)
    assert merged.groups == []


def test_networks_of_every_kind_and_wider_than_the_module(tmp_path):
    """Files, contents, states and modules; grown networks are loaded into a module of the original widths."""
    torch.manual_seed(0)
    wide, module = (nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)) for _ in range(2))
    example = torch.randn(2, 5)
    resize_module(wide, {"0.weight": torch.randn(9, 5), "0.bias": torch.randn(9), "2.weight": torch.randn(2, 9)})
    nets = [wide, *(permuted(wide, example, seed) for seed in (1, 2, 3))]
    torch.save({"state_dict": nets[0].state_dict()}, tmp_path / "a.ckpt")
    torch.save(nets[1].state_dict(), tmp_path / "b.pt")
    given = [str(tmp_path / "a.ckpt"), tmp_path / "b.pt", {"state_dict": nets[2].state_dict()}, nets[3].state_dict()]
    merged = MatchedAverage().merge(given, module, example_input=example)
    assert merged.module is module
    torch.testing.assert_close(compute(module, example), compute(wide, example))
    parts = [merged.groups[0][:3], MatchedAverage().merge([given[0], wide], example_input=example).groups[0][:3]]
    assert parts == [("0", 9, 9)] * 2


@pytest.mark.parametrize("mode", ["grow", "permute"])
def test_the_seed_decides(mode):
    torch.manual_seed(1)
    nets = [nn.Sequential(nn.Linear(6, 15), nn.ReLU(), nn.Linear(15, 3)) for _ in range(4)]
    example = torch.zeros(2, 6)
    states = [
        MatchedAverage(mode, seed=seed).merge(nets, example_input=example).state["0.bias"].sort()[0]
        for seed in (0, 0, 1, 2)
    ]
    assert torch.equal(states[0], states[1])
    assert not all(state.shape == states[0].shape and torch.equal(state, states[0]) for state in states[2:])


# --- Trained networks -------------------------------------------------------------------------------------------------


def digits():
    """Ten smooth patterns with noise: 1,200 training images and 600 test images."""
    generator = torch.Generator().manual_seed(0)
    patterns = F.interpolate(torch.randn(10, 1, 4, 4, generator=generator), size=8, mode="bicubic")
    labels = torch.randint(10, (1800,), generator=generator)
    return patterns[labels] + 0.8 * torch.randn(1800, 1, 8, 8, generator=generator), labels


def train(net, images, labels, epochs, seed):
    generator, optimizer = torch.Generator().manual_seed(seed), torch.optim.SGD(net.parameters(), 0.02, momentum=0.9)
    net.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels), generator=generator).split(32):
            optimizer.zero_grad()
            F.cross_entropy(net(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    return net.eval()


def accuracy(module, images, labels):
    return float((compute(module, images).argmax(1) == labels).float().mean())


def small_lenet():
    return lenet(10, 1, 16, channels=(8, 16), hidden=64)


@pytest.mark.parametrize(("make", "epochs"), quick([(small_lenet, 4), (resnet, 2)], [(small_lenet, 4)]))
def test_clients_of_one_start_whose_neurons_are_in_other_places(make, epochs):
    """Eight clients with separate data: the plain average is at chance, the matched average equals the clients."""
    images, labels = digits()
    images = F.interpolate(images, scale_factor=2) if make is not resnet else images
    torch.manual_seed(0)
    start = train(make(), images[:1200], labels[:1200], epochs, 0)
    nets, groups = [], PermutationGroups.of(start, images[:2])
    for client in range(8):
        examples = slice(150 * client, 150 * (client + 1))
        client_net = train(copy.deepcopy(start), images[examples], labels[examples], 1, client)
        nets.append(permuted(client_net, images[:2], client, groups))
    test, data = (images[1200:], labels[1200:]), images[:600].split(100)
    assert min(accuracy(net, *test) for net in nets) > 0.97
    scores = {mode: accuracy(MatchedAverage(mode).merge(nets, data=data).module, *test)
              for mode in ("none", "permute", "grow")}  # fmt: skip
    assert scores["none"] < 0.3
    assert min(scores["permute"], scores["grow"]) > 0.97


@pytest.mark.slow
def test_independent_starts_and_what_the_statistics_do():
    """With averaged statistics the matched network scores below 0.6, the plain average even lower."""
    images, labels = digits()
    nets = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        nets.append(train(resnet(), images[:1200], labels[:1200], 3, seed))
    test, data = (images[1200:], labels[1200:]), list(zip(images[:600].split(100), labels.split(100), strict=False))
    scores = {}
    for mode, batch_norm in (("none", "average"), ("permute", "average"), ("permute", "recalibrate")):
        merged = MatchedAverage(mode, batch_norm=batch_norm).merge(nets, data=iter(data))
        scores[mode, batch_norm] = accuracy(merged.module, *test)
        assert all(torch.equal(value, merged.state[name]) for name, value in merged.module.state_dict().items())
    assert scores["none", "average"] < 0.3
    assert scores["permute", "average"] < 0.6
    assert scores["permute", "recalibrate"] > 0.8


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_networks_that_do_not_go_together(tmp_path):
    torch.manual_seed(0)
    net, example = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(2, 3)
    wider = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).state_dict()
    deeper = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).state_dict()
    torch.save(deeper, tmp_path / "b.ckpt")
    convolution = {**net.state_dict(), "0.weight": torch.zeros(4, 3, 1)}
    without = {name: value for name, value in net.state_dict().items() if name != "0.bias"}
    nan = {**net.state_dict(), "0.bias": torch.full((4,), torch.nan)}
    average = MatchedAverage()
    for given, message in (
        ([], "at least one network, but got none"),
        ([net, wider], r"network 1 to have the architecture of the first network, in which '0\.weight' has shape"
                       r" \(4, 3\), but got \(5, 3\)"),
        ([net, tmp_path / "b.ckpt"], r"b\.ckpt to have the module's entries, but it contains unexpected '4\.bias'"),
        ([convolution], r"of the module, in which '0\.weight' has shape \(4, 3\), but got \(4, 3, 1\)"),
        ([net, without], r"network 1 to have the module's entries, but it lacks '0\.bias'"),
        ([net, nan], r"network 1 to be finite, but entry '0\.bias' has NaN"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            average.merge(given, net, example_input=example)
    assert net[0].out_features == 4
    with pytest.raises(ValueError, match="`module` argument, or a module in `networks`, but got neither"):
        average.merge([net.state_dict()], example_input=example)
    with pytest.raises(ValueError, match="`weights` to be greater than 0"):
        average.merge([net, net], example_input=example, weights=[1, 0])
    with pytest.raises(ValueError, match="one weight per network in `weights`, but got 1 for 2"):
        average.merge([net, net], example_input=example, weights=[1])


def test_nothing_to_follow_neurons_with():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="Expected `example_input`, `data`, or a module with `example_input_array`"):
        MatchedAverage().merge([net, net])
    with pytest.raises(ValueError, match="`data` to have at least one batch, but got none"):
        MatchedAverage().merge([net, net], data=[])
    merged = MatchedAverage().merge([net, net], data=[{"x": torch.zeros(1, 3)}])  # one example suffices
    assert merged.groups[0].matched == 1
    module = models.Module(net)
    module.example_input_array = torch.zeros(2, 3)
    assert isinstance(module, L.LightningModule)
    assert MatchedAverage().merge([module, module]).groups[0].name == "net.0"
    merged = MatchedAverage(inputs="scan").merge([net, net], data=[{"scan": torch.zeros(2, 3)}])
    assert merged.groups[0].name == "0"


def test_batch_norm_without_data():
    nets = [Normed(), Normed()]
    for mode in ("grow", "none"):
        with pytest.raises(ValueError, match=r"`data` to measure BatchNorm.* batch_norm='average'"):
            MatchedAverage(mode).merge(nets, example_input=images())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "shrink"}, r"`mode` to be one of \['grow', 'permute', 'none'\], but got 'shrink'"),
        ({"order": "last"}, "`order` to be one of"),
        ({"score": "best"}, "`score` to be one of"),
        ({"batch_norm": "frozen"}, "`batch_norm` to be one of"),
        ({"gamma": 0.0}, "`gamma` to be greater than 0"),
        ({"gamma": -1.0}, "`gamma` to be greater than 0 and finite, but got -1.0"),
        ({"passes": -1}, "`passes` to be at least 0"),
        ({"sweeps": -1}, "`sweeps` to be at least 0"),
        ({"seed": -1}, "`seed` to be at least 0"),
    ],
)
def test_options(options, message):
    with pytest.raises(ValueError, match=message):
        MatchedAverage(**options)
