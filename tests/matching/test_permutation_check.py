"""Wrong groups are detected for any module values, and the module does not change."""

import copy

import lightning as L
import pytest
import torch
from torch import nn

from lightning_fed.matching import PermutationGroup, PermutationGroups
from lightning_fed.matching.operation_rules import RULES
from tests import models
from tests.matching.networks import LeNet, build, images


def wrong_groups(module):
    """A group without running statistics, a group with the wrong next layer, and a group of outputs."""
    state = module.state_dict()
    first = {("0.weight", 0): "out", ("0.bias", 0): "vec", ("1.weight", 0): "vec", ("1.bias", 0): "vec"}
    yield PermutationGroup.over(state, {**first, ("3.weight", 1): "in"}, 8)
    statistics = {("1.running_mean", 0): "vec", ("1.running_var", 0): "vec"}
    yield PermutationGroup.over(state, {**first, **statistics, ("5.weight", 1): "in"}, 8)
    yield PermutationGroup.over(state, {("5.weight", 0): "out", ("5.bias", 0): "vec"}, 3)


def chain():
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)]
    return nn.Sequential(*layers), torch.randn(5, 4)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("is_blank", [False, True], ids=["random", "zeros and ones"])
def test_a_wrong_group_is_caught(which, is_blank):
    """Even if the initial values are symmetric under permutations."""
    module, example = build(chain)
    if is_blank:
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
        module[1].reset_running_stats()
        example = torch.zeros_like(example)
    wrong = list(wrong_groups(module))[which]
    with pytest.warns(UserWarning, match=f"permutations change the module's outputs: {wrong.name!r}"):
        groups = PermutationGroups.of(module, example, extra_groups=[wrong])
    assert wrong.name not in groups.names
    assert set(groups.names) == ({"0", "3"} if which == 2 else {"3"} if which == 0 else set())


def test_several_wrong_groups_are_caught_and_the_good_ones_stay():
    module, example = build(lambda: (LeNet(), images(28, 1)))
    state = module.state_dict()
    wrong = [
        PermutationGroup.over(state, {(f"{layer}.weight", 0): "out"}, len(state[f"{layer}.weight"]))
        for layer in ("conv1", "fc1")
    ]
    with pytest.warns(UserWarning, match="change the module's outputs: 'conv1', 'fc1'"):
        groups = PermutationGroups.of(module, example, extra_groups=wrong)
    assert groups.sizes == {"conv2": 50}


def test_a_wrong_rule_is_caught(monkeypatch):
    """Any tracing error: here an addition that ignores the second operand."""
    module, example = build(lambda: (Residual(), torch.randn(3, 5)))
    assert PermutationGroups.of(module, example).sizes == {"first": 8, "last": 6}
    monkeypatch.setitem(RULES, "add", lambda tracer, call: call.args[0])
    with pytest.warns(UserWarning, match="change the module's outputs: 'first', 'second'"):
        groups = PermutationGroups.of(module, example)
    assert groups.sizes == {"last": 6}


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last, self.head = (
            nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(6, 2),
        )  # fmt: skip

    def forward(self, inputs):
        hidden = self.first(inputs)
        return self.head(self.last(hidden + self.second(hidden).relu()).relu())


def test_a_group_that_is_found_wrongly_growable_is_caught(monkeypatch):
    """A mean over channels, mistaken for an operation independent of the width."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, inputs):
            hidden = self.first(inputs)
            return self.second(hidden - hidden.mean(1, keepdim=True))

    module, example = build(lambda: (Net(), torch.randn(3, 5)))
    assert not PermutationGroups.of(module, example)["first"].is_growable
    wrong = PermutationGroup.over(
        module.state_dict(), {("first.weight", 0): "out", ("first.bias", 0): "vec", ("second.weight", 1): "in"}, 8
    )
    assert wrong.is_growable
    assert not PermutationGroups.of(module, example, extra_groups=[wrong])["first"].is_growable


def test_a_module_that_computes_nothing_finite_has_no_groups():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, inputs):
            return self.second(self.first(inputs)) / 0

    with pytest.warns(UserWarning, match="permutations change the module's outputs: 'first'"):
        assert len(PermutationGroups.of(*build(lambda: (Net(), torch.randn(3, 5))))) == 0


def test_a_module_with_its_type_written_into_it_is_tried_in_float32():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, inputs):
            return self.second(self.first(inputs.float()).relu())

    module, example = build(lambda: (Net(), torch.randn(3, 5)))
    assert PermutationGroups.of(module, example).sizes == {"first": 8}
    wrong = PermutationGroup.over(module.state_dict(), {("first.weight", 0): "out"}, 8)
    with pytest.warns(UserWarning, match="change the module's outputs: 'first'"):
        PermutationGroups.of(module, example, extra_groups=[wrong])


# --- Unchanged module -------------------------------------------------------------------------------------------------


def test_the_module_is_as_it_was():
    module, example = build(lambda: (LeNet(), images(28, 1)))
    module.extra = nn.Sequential(nn.BatchNorm2d(20), nn.Dropout())
    module.conv1.weight.requires_grad_(False)
    module.train()
    module.extra[0].eval()
    module.fc2.out_features = "as it was"  # an attribute unrelated to matching
    loss = module(example).sum()
    loss.backward()
    before = copy.deepcopy(module.state_dict())
    tensors = {name: (id(value), value.data_ptr(), value.requires_grad) for name, value in module.named_parameters()}
    gradients = {name: value.grad.clone() for name, value in module.named_parameters() if value.grad is not None}
    modes, random = [layer.training for layer in module.modules()], torch.get_rng_state()
    PermutationGroups.of(module, example)
    assert torch.equal(torch.get_rng_state(), random)
    assert [layer.training for layer in module.modules()] == modes
    assert module.fc2.out_features == "as it was"
    for name, value in module.named_parameters():
        assert (id(value), value.data_ptr(), value.requires_grad) == tensors[name]
        assert torch.equal(value, before[name])
        assert name not in gradients or torch.equal(value.grad, gradients[name])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert (module.conv2.in_channels, module.fc1.out_features) == (20, 500)


def test_it_is_as_it_was_also_after_an_error():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.calls = nn.Linear(5, 8), 0

        def forward(self, inputs):
            raise ValueError("no")

    module = Net().train()
    before = module.first.weight.clone()
    with pytest.warns(UserWarning, match="can be permuted. ValueError: no"):
        PermutationGroups.of(module, torch.randn(3, 5))
    assert module.training
    assert torch.equal(module.first.weight, before)


def test_a_lightning_module_within_a_fit(plain_trainer):
    class Finds(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.groups = PermutationGroups.of(pl_module, batch[0][:2])
            assert pl_module.training

    finder = Finds()
    data = torch.utils.data.TensorDataset(*models.vectors({"ann": 32})["ann"])
    trainer = plain_trainer(max_epochs=1, callbacks=[finder])
    loader = torch.utils.data.DataLoader(data, 16)
    trainer.fit(models.Module(models.norm_mlp()), loader, loader)
    assert finder.groups.sizes == {"net.0": 8, "net.4": 8}


@pytest.mark.parametrize(
    "given", [torch.zeros(2, 3), (torch.zeros(2, 3),), {"inputs": torch.zeros(2, 3), "scale": 2.0}], ids=type
)
def test_inputs_can_be_given_in_three_ways(given):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

        def forward(self, inputs, scale=1.0):
            return scale * self.second(self.first(inputs).relu())

    assert PermutationGroups.of(Net(), given).sizes == {"first": 4}
