"""Gradients of single examples: loops over examples in common networks; clips, trials, refusals."""

import copy
from contextlib import nullcontext

import lightning as L
import numpy as np
import pytest
import segmentation_models_pytorch as smp
import torch
import torchvision
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F

from lightning_fed.modules import to_group_norm
from tests.breadth import quick
from tests.references_privacy import clipped_reference

pytest.importorskip("opacus", reason="opacus is not installed")
from lightning_fed.privacy.gradients import (
    ExampleGradients,
    check_examples,
    clipped_sum,
    find_unsupported,
    of_samples,
)


class Scale(nn.Module):
    """A custom layer without a rule in Opacus."""

    def __init__(self, size):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.linspace(0.5, 2, size)), nn.Linear(size, size)

    def forward(self, inputs):
        return self.inner(inputs) * self.scale


class Residual(nn.Module):
    """Writes into layer outputs, and calls one layer twice."""

    def __init__(self, size):
        super().__init__()
        self.layer, self.norm = nn.Linear(size, size), nn.LayerNorm(size)

    def forward(self, inputs):
        outputs = self.norm(self.layer(inputs))
        outputs += inputs
        return F.relu_(self.layer(outputs))


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, stride=2, dilation=2, groups=4), nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, (3, 5), padding=(1, 2), groups=8, bias=False), nn.MaxPool2d(2), nn.Conv2d(16, 4, 1, padding=1),
        nn.Flatten(), nn.LazyLinear(4),
    )  # fmt: skip


def group_norm_resnet():
    return to_group_norm(torchvision.models.resnet18(num_classes=4))


def deeplab():
    net = to_group_norm(smp.DeepLabV3Plus("resnet18", encoder_weights=None, classes=4))
    for layer in net.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return net


def text():
    return nn.Sequential(nn.Embedding(9, 6, padding_idx=0), nn.Flatten(), nn.Linear(30, 4))


class Pairs(nn.Module):
    """Calls one embedding twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6, padding_idx=0)

    def forward(self, inputs):
        return self.embedding(inputs[:, :3]) * self.embedding(inputs[:, 2:])


def pairs():
    return nn.Sequential(Pairs(), nn.Flatten(), nn.Linear(18, 4))


def tied():
    """An embedding and an output layer with one weight, as in language models; each alone has the short norm."""
    net = nn.Sequential(nn.Embedding(40, 16), nn.Tanh(), nn.Linear(16, 40), nn.Flatten())
    net[2].weight = net[0].weight
    return net


def positions():
    """Both forms of the norm for sequences: the first layer by positions, the second by entries."""
    return nn.Sequential(
        nn.Linear(6, 20), nn.ReLU(inplace=True), nn.Linear(20, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(6, 4)
    )


def small_maps():
    """Convolutions with fewer positions than entries."""
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(16, 32, 3, 2, padding=2, dilation=2),
        nn.ReLU(inplace=True), nn.Conv2d(32, 8, 1), nn.LayerNorm([8, 2, 2]), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip


def other_maps():
    return nn.Sequential(
        nn.Conv1d(3, 8, 3, 2, padding=1), nn.ReLU(inplace=True), nn.Unflatten(2, (2, 2, 2)), nn.Conv3d(8, 4, 2),
        nn.Flatten(), nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 3, padding="same"),
        nn.InstanceNorm2d(4, affine=True), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip


def own_layers():
    return nn.Sequential(Scale(6), nn.Tanh(), Residual(6), nn.Linear(6, 4))


NETS = {
    "cnn": (cnn, (6, 3, 20, 20), ()),
    "resnet": (group_norm_resnet, (3, 3, 32, 32), ()),
    "deeplab": (deeplab, (3, 3, 32, 32), (32, 32)),
    "text": (text, (5, 5), ()),
    "own layers": (own_layers, (5, 6), ()),
    "pairs": (pairs, (5, 5), ()),
    "tied": (tied, (5, 2), ()),
    "positions": (positions, (5, 3, 6), ()),
    "small maps": (small_maps, (5, 8, 3, 3), ()),
    "other maps": (other_maps, (5, 3, 16), ()),
}


def data_of(name, net_shape, target_shape):
    generator = torch.Generator().manual_seed(3)
    if name in ("text", "pairs", "tied"):
        inputs = torch.randint(9, net_shape, generator=generator)
    else:
        inputs = torch.randn(net_shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(4, (net_shape[0], *target_shape), generator=generator)


def row_of(gradients, row):
    return gradients.weigh(slice(row, row + 1), torch.ones_like(gradients.norms[:1]))


@pytest.mark.parametrize("name", quick(NETS, [name for name in NETS if name not in ("resnet", "deeplab")]))
def test_the_gradients_of_a_loop_over_the_examples(name):
    """To 1e-9 in float64: in float32 another order of sums switches single ReLUs."""
    torch.manual_seed(0)
    make, *shapes = NETS[name]
    inputs, targets = data_of(name, *shapes)
    net = make().double()
    net(inputs)  # initialises lazy layers
    plain = copy.deepcopy(net)
    gradients = ExampleGradients(net, net.parameters())
    F.cross_entropy(net(inputs), targets).backward()
    assert gradients.values.keys() == set(net.parameters())
    for row in range(len(inputs)):
        plain.zero_grad()
        F.cross_entropy(plain(inputs[row : row + 1]), targets[row : row + 1]).backward()
        alone = torch.cat([parameter.grad.flatten() for parameter in plain.parameters()])
        together = torch.cat([row_of(gradients.values[parameter], row).flatten() for parameter in net.parameters()])
        assert (len(inputs) * together - alone).norm() <= 1e-9 * alone.norm()
        assert alone.norm() > 1e-3
        for parameter, single in zip(net.parameters(), plain.parameters(), strict=True):
            norm = len(inputs) * gradients.values[parameter].norms[row]
            assert abs(norm - single.grad.norm()) <= 1e-9 * alone.norm()
    assert all(parameter.grad is None or "own" in name for parameter in net.parameters())
    gradients.remove()
    assert [vars(layer).keys() for layer in net.modules()] == [vars(layer).keys() for layer in plain.modules()]
    hooks_of = [vars(layer)["_forward_hooks"] for layer in net.modules()]
    assert not any(hooks_of)
    assert {key for value in net.parameters() for key in vars(value)} == set()


def test_clipped_sums_in_float32_equal_those_of_single_gradients():
    torch.manual_seed(0)
    net = small_maps()
    inputs, targets = torch.randn(6, 8, 3, 3), torch.randint(4, (6,))
    singles = []
    for row in range(6):
        loss = F.cross_entropy(net(inputs[row : row + 1]), targets[row : row + 1])
        singles.append(torch.cat([part.flatten() for part in torch.autograd.grad(loss, net.parameters())]))
    clip = float(torch.stack(singles).norm(dim=1).median())
    gradients = ExampleGradients(net, net.parameters())
    F.cross_entropy(net(inputs), targets).backward()
    sums = clipped_sum(gradients.values, 6, clip)
    found = torch.cat([sums[parameter].flatten() for parameter in net.parameters()])
    expected = sum(single * min(1.0, clip / float(single.norm())) for single in singles)
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert [gradients.values[layer.weight].samples is None for layer in net if isinstance(layer, nn.Conv2d)] == [
        True
    ] * 3


def test_examples_that_are_not_finite_are_left_out_of_every_kind_of_layer():
    for name in ("text", "positions", "small maps", "other maps"):
        torch.manual_seed(0)
        make, *shapes = NETS[name]
        inputs, targets = data_of(name, *shapes)
        net = make().double()
        gradients = ExampleGradients(net, net.parameters())
        (F.cross_entropy(net(inputs), targets, reduction="none") / len(inputs))[1:].sum().backward()
        expected = clipped_sum(gradients.values, len(inputs), 0.5)
        gradients.clear()
        weights = torch.ones(len(inputs), dtype=torch.float64)
        weights[0] = float("inf")
        (weights * F.cross_entropy(net(inputs), targets, reduction="none")).mean().backward()
        found = clipped_sum(gradients.values, len(inputs), 0.5)
        for parameter in net.parameters():
            torch.testing.assert_close(found[parameter], expected[parameter])


def test_an_error_in_a_layer_leaves_its_parameters_trained():
    net = nn.Sequential(nn.Linear(3, 2))
    gradients = ExampleGradients(net, net.parameters())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net(torch.ones(4, 5))
    assert all(parameter.requires_grad for parameter in net.parameters())
    net(torch.ones(4, 3)).mean().backward()
    assert gradients.values.keys() == set(net.parameters())


def test_parameters_that_do_not_train_are_left_out():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    net[0].requires_grad_(False)
    net[1].bias.requires_grad_(False)
    gradients = ExampleGradients(net, net.parameters())
    net(torch.ones(4, 3)).mean().backward()
    assert list(gradients.values) == [net[1].weight]
    with torch.no_grad():
        net(torch.ones(4, 3))
    assert len(gradients.values) == 1


@pytest.mark.parametrize("clip", [0.05, 1.0, 30.0, float("inf")])
def test_the_clipped_sum_against_numpy(clip):
    rng = np.random.default_rng(2)
    values = {"w": rng.normal(size=(7, 3, 2)), "b": rng.normal(size=(7, 5))}
    values = {
        name: value * np.logspace(-2, 1, 7).reshape(-1, *[1] * (value.ndim - 1)) for name, value in values.items()
    }
    values["w"][3], values["b"][3] = 0.0, 0.0  # an example without gradient
    flat = np.concatenate([value.reshape(7, -1) for value in values.values()], axis=1)
    expected = sum(clipped_reference(row, clip) for row in flat)
    parameters = {
        name: nn.Parameter(torch.zeros(value.shape[1:], dtype=torch.float64)) for name, value in values.items()
    }
    gradients = {parameters[name]: of_samples(torch.from_numpy(value) / 7) for name, value in values.items()}
    sums = clipped_sum(gradients, 7, clip)
    found = np.concatenate([sums[parameters[name]].numpy().reshape(-1) for name in values])
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_example_whose_gradient_is_not_finite_adds_nothing(bad):
    weight, bias = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    gradients = {weight: torch.tensor([[3.0, 4.0], [bad, 0.0]]) / 2, bias: torch.tensor([[0.0, 0.0], [1.0, 1.0]]) / 2}
    sums = clipped_sum({parameter: of_samples(values) for parameter, values in gradients.items()}, 2, 1.0)
    torch.testing.assert_close(sums[weight], torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(sums[bias], torch.zeros(2))


def test_one_example_changes_the_sum_by_the_clip_at_most():
    generator = torch.Generator().manual_seed(1)
    weight = nn.Parameter(torch.zeros(300))
    for scale in (1e-4, 1.0, 1e4):
        values = scale * torch.randn(20, 300, generator=generator)
        for left_out in range(20):
            rest = torch.cat([values[:left_out], values[left_out + 1 :]])
            total, remaining = (
                clipped_sum({weight: of_samples(part / len(part))}, len(part), 0.7)[weight] for part in (values, rest)
            )
            assert (total - remaining).norm() <= 0.7 * (1 + 1e-5)


# --- Trial ------------------------------------------------------------------------------------------------------------


def cross_entropy_without_ignored(logits, targets):
    return F.cross_entropy(logits, targets, ignore_index=3)


def soft_dice(logits, targets):
    shares, truth = logits.softmax(1), F.one_hot(targets, 4)
    return (1 - 2 * (shares * truth).sum(0) / (shares + truth).sum(0)).mean()


def contrastive(logits, targets):
    return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


def slightly_weighted(logits, targets):
    """Mean with class weights: alone, an example's gradient differs by 3 % from the gradient in the batch."""
    return F.cross_entropy(logits, targets, torch.tensor([1.0, 1.03, 1.0, 1.06]))


class Task(L.LightningModule):
    def __init__(self, net, loss):
        super().__init__()
        self.net, self.loss, self.seen = net, loss, 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        self.log("seen", float(self.seen))
        return {"loss": self.loss(self.net(batch["inputs"]), batch["targets"])}


def tried(net, loss, targets=(0, 3, 1)):
    torch.manual_seed(0)
    task = Task(net, loss)
    batch = {"inputs": torch.randn(3, 6), "targets": torch.tensor(targets), "name": "x"}
    gradients = ExampleGradients(task, task.parameters())
    before = {name: value.clone() for name, value in task.state_dict().items()}
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    numbers = torch.get_rng_state()
    check_examples(trainer, task, batch, gradients)
    assert torch.equal(numbers, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in task.state_dict().items())
    assert task.seen == 0
    assert task.training
    assert gradients.values == {}
    assert all(parameter.grad is None for parameter in task.parameters())


@pytest.mark.parametrize("extra", [nn.Identity, lambda: nn.Dropout(0.5), lambda: nn.LayerNorm(6)])
def test_a_mean_over_examples_passes_the_trial(extra):
    tried(nn.Sequential(nn.Linear(6, 6), extra(), nn.Linear(6, 4)), F.cross_entropy)


def test_a_step_that_draws_cannot_be_tried():
    tried(nn.Linear(6, 4), lambda logits, targets: F.cross_entropy(logits + torch.randn_like(logits), targets))


class MixesRows(nn.Module):
    def forward(self, inputs):
        return inputs - inputs.mean(0)


@pytest.mark.parametrize("loss", [cross_entropy_without_ignored, soft_dice, contrastive, slightly_weighted])
def test_losses_that_mix_examples_are_refused(loss):
    with pytest.raises(MisconfigurationException, match="a mean over the losses of single examples"):
        tried(nn.Linear(6, 4), loss)


def test_a_sum_over_examples_is_refused():
    with pytest.raises(MisconfigurationException, match="a mean over the losses of single examples"):
        tried(nn.Linear(6, 4), lambda logits, targets: F.cross_entropy(logits, targets, reduction="sum"))


def test_a_network_that_mixes_examples_is_refused():
    with pytest.raises(MisconfigurationException, match="depends on other examples"):
        tried(nn.Sequential(nn.Linear(6, 6), MixesRows(), nn.Linear(6, 4)), F.cross_entropy)


@pytest.mark.parametrize("num_mixed", [4, 5])
def test_dependence_at_all_tried_weights_is_refused(num_mixed):
    """At single weights, rounding can look like dependence. Five weights are tried."""
    layer, norms = nn.Linear(6, 4), {}

    def loss(logits, targets):
        place = norms.setdefault(float(layer.weight.detach().norm()), len(norms))
        return F.cross_entropy(logits, targets) + (place < num_mixed) * (logits - logits.mean(0)).square().mean()

    refused = pytest.raises(MisconfigurationException, match="depends on other examples")
    with refused if num_mixed == 5 else nullcontext():
        tried(layer, loss)
    assert len(norms) == 5


class Edge(nn.Module):
    """A ReLU at 0; as with another summation order, the last bit depends on the number of rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        with torch.no_grad():
            self.layer.weight.fill_(1e-3), self.layer.bias.fill_(1.0)

    def forward(self, inputs):
        hidden = self.layer(torch.ones_like(inputs))
        return F.relu(hidden - 1.006 + 1e-6 * (len(inputs) - 2))


def test_a_rounding_error_that_flips_a_unit_is_not_refused():
    tried(nn.Sequential(Edge(), nn.Linear(6, 4)), F.cross_entropy)


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_layers_that_are_refused_by_name():
    net = nn.ModuleDict(
        {
            "norm": nn.BatchNorm2d(2, affine=False), "memory": nn.LSTM(2, 2), "attention": nn.MultiheadAttention(2, 1),
            "plain": nn.Linear(2, 2), "group": nn.GroupNorm(1, 2),
        }
    )  # fmt: skip
    assert find_unsupported(net) == ["'norm' (BatchNorm2d)", "'memory' (LSTM)", "'attention' (MultiheadAttention)"]


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))


class WithBuffer(Own):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(1))


def test_parameters_and_buffers_that_are_refused():
    own = Own()
    ExampleGradients(own, [])  # without trained parameters no layer is refused
    with pytest.raises(MisconfigurationException, match=r"Own has parameters outside any layer \('temperature'\)"):
        ExampleGradients(own, own.parameters())
    with pytest.raises(MisconfigurationException, match=r"The layer '0' \(WithBuffer\) has buffers"):
        ExampleGradients(net := nn.Sequential(WithBuffer()), net.parameters())


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs):
        return self.layer(input=inputs)


class Unrolled(nn.Module):
    """The layer sees parts of an example as rows in one call, and examples as rows in another."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs):
        return self.layer(self.layer(inputs.flatten(0, 1)).view_as(inputs))


def test_calls_that_are_refused():
    net = ByName()
    ExampleGradients(net, net.parameters())
    with pytest.raises(MisconfigurationException, match=r"'layer' \(Linear\) is not called with positional tensors"):
        net(torch.ones(2, 2))
    net = Unrolled()
    ExampleGradients(net, net.parameters())
    with pytest.raises(MisconfigurationException, match="'layer' is called with 3 and with 6 rows in one batch"):
        net(torch.ones(3, 2, 2)).mean().backward()
