"""In-place changes of widths: layer attributes, identical parameters, optimizers, checkpoints."""

import copy
import io

import lightning as L
import pytest
import torch
from torch import nn

from lightning_fed.matching import PermutationGroups, resize_module
from tests import models
from tests.matching.networks import Characters, LeNet, Mixed, build, images, outputs, tokens

NUMBERS = [
    "in_channels",
    "out_channels",
    "groups",
    "num_features",
    "normalized_shape",
    "num_embeddings",
    "embedding_dim",
    "hidden_size",
    "input_size",
    "proj_size",
    "in_features",
    "out_features",
    "num_parameters",
]


def numbers(module):
    numbers = {}
    for name, layer in module.named_modules():
        numbers[name] = {number: getattr(layer, number) for number in NUMBERS if hasattr(layer, number)}
    return numbers


LAYERS = [
    (lambda width: nn.Conv2d(width, 4, 3), {"weight": 1}),
    (lambda width: nn.Conv2d(3, width, 3), {"weight": 0, "bias": 0}),
    (lambda width: nn.Conv2d(width, width, 3, groups=width), {"weight": 0, "bias": 0}),
    (lambda width: nn.Conv1d(width, 2 * width, 3, groups=width), {"weight": 0, "bias": 0}),
    (lambda width: nn.Conv2d(2 * width, 6, 3, groups=2), {"weight": 1}),
    (lambda width: nn.ConvTranspose2d(width, 5, 3), {"weight": 0}),
    (lambda width: nn.ConvTranspose2d(5, width, 3), {"weight": 1, "bias": 0}),
    (lambda width: nn.ConvTranspose1d(width, width, 3, groups=width), {"weight": 0, "bias": 0}),
    (lambda width: nn.Linear(width, 4, bias=False), {"weight": 1}),
    (lambda width: nn.Linear(4, width), {"weight": 0, "bias": 0}),
    (nn.BatchNorm2d, dict.fromkeys(("weight", "bias", "running_mean", "running_var"), 0)),
    (lambda width: nn.BatchNorm1d(width, affine=False), dict.fromkeys(("running_mean", "running_var"), 0)),
    (lambda width: nn.InstanceNorm2d(width, affine=True), {"weight": 0, "bias": 0}),
    (nn.LayerNorm, {"weight": 0, "bias": 0}),
    (lambda width: nn.Embedding(7, width), {"weight": 1}),
    (nn.PReLU, {"weight": 0}),
]


@pytest.mark.parametrize("which", range(len(LAYERS)))
def test_a_resized_layer_is_one_that_was_made_so(which):
    make, _ = LAYERS[which]
    for before, after in ((4, 6), (6, 3), (5, 5)):
        layer, expected = make(before), make(after)
        resize_module(layer, expected.state_dict())
        assert repr(layer) == repr(expected)
        assert numbers(layer) == numbers(expected)
        assert all(torch.equal(value, expected.state_dict()[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}], ids=str)
def test_recurrent_layers(kind, options):
    layer, expected = kind(3, 4, batch_first=True, **options), kind(5, 7, batch_first=True, **options)
    resize_module(layer, expected.state_dict())
    example = torch.randn(2, 6, 5)
    assert torch.equal(layer(example)[0], expected(example)[0])
    assert repr(layer) == repr(expected)
    for layer, expected in ((nn.LSTMCell(3, 4), nn.LSTMCell(5, 7)), (nn.GRUCell(3, 4), nn.GRUCell(5, 7))):
        resize_module(layer, expected.state_dict())
        assert torch.equal(*(cell(example[:, 0])[0] for cell in (layer, expected)))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_projected_lstm():
    layer, expected = nn.LSTM(3, 6, proj_size=2), nn.LSTM(3, 8, proj_size=4)
    resize_module(layer, expected.state_dict())
    example = torch.randn(5, 2, 3)
    assert torch.equal(layer(example)[0], expected(example)[0])
    assert repr(layer) == repr(expected)


def test_parameters_stay_the_same_objects():
    """Tied weights, optimizers and hooks remain; resized parameters lose the gradient."""
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    module[1].again = module[0]
    parameters = list(module.parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    seen = []
    module[2].weight.register_hook(lambda gradient: seen.append(gradient.shape))
    module(torch.randn(5, 3)).sum().backward()
    before = module[2].bias.grad.clone()
    wide = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).state_dict()
    resize_module(module, wide)
    assert all(
        parameter is parameter_before
        for parameter, parameter_before in zip(module.parameters(), parameters, strict=True)
    )
    assert module[0].weight.grad is None
    assert torch.equal(module[2].bias.grad, before)
    module[2].bias.grad = None
    module(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    assert module[2].weight.shape == module[2].weight.grad.shape == seen[-1] == (2, 6)
    assert not torch.equal(module[0].weight, wide["0.weight"])
    state = module.state_dict()
    assert torch.equal(state["1.again.weight"], state["0.weight"])


def test_types_and_devices_are_the_modules():
    module = nn.Linear(3, 4).half()
    resize_module(module, {"weight": torch.ones(5, 3, dtype=torch.float64), "bias": torch.ones(5)})
    assert {value.dtype for value in module.state_dict().values()} == {torch.float16}
    source = torch.ones(6, 3, dtype=torch.float16)
    resize_module(module, {"weight": source, "bias": torch.ones(6)})
    source.zero_()
    assert module.weight.sum() == 18


def test_a_checkpoint_says_how_wide_its_module_is():
    module, example = build(lambda: (LeNet(), images(28, 1)))
    groups = PermutationGroups.of(module, example)
    wide = copy.deepcopy(module)
    resize_module(wide, groups.grow(module.state_dict(), {"conv1": 24, "conv2": 51, "fc1": 503}))
    file = io.BytesIO()
    torch.save(wide.state_dict(), file)
    file.seek(0)
    fresh = LeNet().eval()
    resize_module(fresh, torch.load(file, weights_only=True))
    assert numbers(fresh) == numbers(wide)
    assert torch.equal(outputs(fresh, example), outputs(module, example)) or torch.allclose(
        outputs(fresh, example), outputs(module, example), rtol=1e-12, atol=1e-12
    )
    resize_module(fresh, module.state_dict())
    assert numbers(fresh) == numbers(LeNet())
    fresh.load_state_dict(module.state_dict())


def test_found_groups_can_be_put_into_every_kind_of_layer():
    for make in (lambda: (Mixed(), images(12)), lambda: (Characters(nn.GRU, 32), tokens())):
        module, example = build(make)
        groups = PermutationGroups.of(module, example)
        sizes = {group.name: group.size + 2 for group in groups if group.is_growable}
        wide = copy.deepcopy(module)
        resize_module(wide, groups.grow(module.state_dict(), sizes))
        assert PermutationGroups.of(wide, example).sizes == groups.resized(sizes).sizes


def test_a_fit_goes_on_with_other_widths(plain_trainer):
    """Grown between two batches; momentum of the old shape is reset."""

    class Grows(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step == 2:
                groups = PermutationGroups.of(pl_module, batch[0][:2])
                resize_module(pl_module, groups.grow(pl_module.state_dict(), {"net.0": 11, "net.4": 9}))
                trainer.optimizers[0].state.clear()

    module = models.Module(models.norm_mlp(), models.momentum)
    data = torch.utils.data.TensorDataset(*models.vectors({"ann": 64})["ann"])
    loader = torch.utils.data.DataLoader(data, 16)
    trainer = plain_trainer(max_epochs=2, callbacks=[Grows()])
    trainer.fit(module, loader, loader)
    assert (module.net[0].out_features, module.net[4].in_features, module.net[4].out_features) == (11, 11, 9)
    assert trainer.optimizers[0].state[module.net[0].weight]["momentum_buffer"].shape == (11, 6)
    assert trainer.validate(module, loader, verbose=False)


def test_refusals():
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match=r"entries of the module, but got '5\.weight'"):
        resize_module(module, {"0.bias": torch.zeros(9), "5.weight": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"'0\.weight' to have 2 axes, but got the shape \(9,\)"):
        resize_module(module, {"0.bias": torch.zeros(9), "0.weight": torch.zeros(9)})
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_graph_that_lives_on_does_not_remember_the_width():
    """For example, a module stores the last loss."""
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    loss = net(torch.ones(4, 2)).sum()
    loss.backward()
    state = {"0.weight": torch.ones(5, 2), "0.bias": torch.zeros(5), "2.weight": torch.ones(1, 5)}
    resize_module(net, state)
    assert net[0].weight.grad is None
    net(torch.ones(4, 2)).sum().backward()
    assert net[2].weight.grad.shape == (1, 5)
    assert net[0].weight.dtype == loss.dtype
