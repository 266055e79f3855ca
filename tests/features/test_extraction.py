"""Features of a trained model: correct vectors, a uniform sample, and an unchanged model."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.features.isolated_pass import evaluating
from lightning_fed.metrics import MaximumMeanDiscrepancy
from lightning_fed.modules import extract_features
from tests import models


def maps_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.Dropout(0.5), nn.Conv2d(5, 3, 1))


def batches(count=3, size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 2, 7, 6, generator=generator), torch.zeros(size)) for _ in range(count)]


def all_vectors(net, data, path="1"):
    """Vectors in the order images, rows, columns, by hand."""
    net = copy.deepcopy(net).eval()
    rows = []
    for x, _ in data:
        maps = x
        for name, layer in net.named_children():
            maps = layer(maps)
            if name == path:
                break
        rows += [maps[i, :, y, z] for i in range(len(x)) for y in range(maps.shape[2]) for z in range(maps.shape[3])]
    return torch.stack(rows).detach()


def test_every_position_is_a_vector():
    net, data = maps_net(), batches()
    expected = all_vectors(net, data)
    assert expected.shape == (3 * 4 * 5 * 4, 5)
    for max_samples in (None, 240, 5000):
        features_found = extract_features(net, data, "1", max_samples=max_samples)
        assert torch.equal(features_found, expected)
    assert torch.equal(extract_features(net, data, max_samples=None), expected)  # "auto": the last layer's input


@pytest.mark.parametrize("max_samples", [1, 7, 80, 100, 239])
def test_a_sample_is_of_these_vectors_in_their_order(max_samples):
    net, data = maps_net(), batches()
    vectors = all_vectors(net, data)
    positions = []
    for seed in (0, 1):
        features_found = extract_features(net, data, "1", max_samples=max_samples, seed=seed)
        assert features_found.shape == (max_samples, 5)
        matches = (features_found[:, None] == vectors).all(2)
        assert (matches.sum(1) == 1).all()
        positions.append(matches.long().argmax(1))
        assert (positions[-1].diff() > 0).all()  # in order, without replacement
        assert torch.equal(features_found, extract_features(net, data, "1", max_samples=max_samples, seed=seed))
    assert not torch.equal(*positions)


def test_every_vector_is_drawn_as_often():
    """Also vectors in the first and last batch: 12 of 240 vectors, 400 times, gives 20 per vector."""
    net, data = nn.Sequential(nn.Identity(), nn.Linear(1, 2)), torch.arange(240.0).reshape(3, 80, 1)
    counts = torch.zeros(240)
    for seed in range(400):
        counts[extract_features(net, data, "0", max_samples=12, seed=seed)[:, 0].long()] += 1
    assert counts.sum() == 4800
    for third in counts.chunk(3):
        assert abs(third.sum() - 1600) < 5 * (4800 * 2 / 9) ** 0.5
    assert counts.min() > 0
    assert counts.max() < 20 + 6 * 20**0.5


def test_two_models_give_the_same_positions():
    net, data = maps_net(), batches()
    scaled_net = copy.deepcopy(net)
    with torch.no_grad():
        scaled_net[1].weight.mul_(2)
        scaled_net[1].bias.mul_(2)
    features_found = [extract_features(model, data, "1", max_samples=50) for model in (net, scaled_net)]
    assert torch.equal(2 * features_found[0], features_found[1])


def test_vectors_of_classifiers_and_of_linear_layers():
    net = models.norm_mlp()
    x = models.vectors({"a": 40})["a"][0]
    loader = DataLoader(TensorDataset(x, torch.zeros(40)), 16)
    with torch.no_grad():
        expected = copy.deepcopy(net).eval()[:-1](x)
    assert torch.allclose(extract_features(net, loader), expected)
    tokens = torch.randn(3, 9, 4)  # channels come last in a linear layer
    plain = nn.Sequential(nn.Identity(), nn.Linear(4, 2))
    features_found = extract_features(plain, [tokens], "1", max_samples=None)
    assert torch.allclose(features_found, plain[1](tokens).reshape(27, 2), atol=1e-6)


@pytest.mark.parametrize("kind", ["lightning", "plain"])
def test_the_model_is_left_as_it_was(kind):
    net = maps_net()
    net[1].eval()  # frozen
    model = models.Module(net) if kind == "lightning" else net
    state = copy.deepcopy(model.state_dict())
    modes = [layer.training for layer in model.modules()]
    seen = []
    net[2].register_forward_hook(lambda *_: seen.append((net[2].training, torch.is_grad_enabled())))
    path = "net.1" if kind == "lightning" else "1"
    features_found = extract_features(model, batches(), path)
    assert torch.equal(features_found, all_vectors(net, batches()))
    assert not features_found.requires_grad
    assert seen == [(False, False)] * 3
    assert [layer.training for layer in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(layer._forward_hooks for layer in (net[0], net[1], net[3]))  # noqa: SLF001 - no public name

    def fail(*_):
        raise RuntimeError("no")

    net[3].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        extract_features(model, batches(), path)
    assert [layer.training for layer in model.modules()] == modes
    assert torch.is_grad_enabled()


def test_features_before_a_layer_that_works_in_place():
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    x = torch.randn(30, 2)
    assert torch.equal(extract_features(net, [x], "0"), net[0](x).detach())


def test_features_of_the_first_pass_through_a_layer():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    net.forward = lambda x: net[1](net[0](net[0](x)))
    x = torch.randn(5, 3)
    assert torch.equal(extract_features(net, [x, x], "0"), net[0](x).detach().repeat(2, 1))


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="torch 2.6 brings it")
def test_features_of_a_compiled_model():
    net, data = maps_net().eval(), batches(1)
    compiled = torch.compile(net, backend="eager")
    with torch.no_grad():
        compiled(data[0][0])  # compiled before features are tapped
    assert torch.equal(extract_features(compiled, data, "_orig_mod.1"), all_vectors(net, data))


def test_where_a_batch_has_its_inputs():
    net, (x, _) = maps_net(), batches(1)[0]
    expected = all_vectors(net, [(x, None)])
    for batch, inputs in (
        ((x, 0), None),
        ([x], None),
        (x, None),
        ({"mask": 0, "image": x}, None),
        ({"other": x, "x": 0}, "other"),
        ((0, x), 1),
        ({"deep": [x / 2]}, lambda batch: 2 * batch["deep"][0]),
    ):
        assert torch.equal(extract_features(net, [batch], "1", inputs=inputs), expected)


def test_only_the_sample_and_a_batch_are_held():
    """Features of earlier batches are freed, although the sample contains some of their vectors."""
    net, alive = maps_net(), []

    def stream():
        for batch in batches(6):
            gc.collect()
            assert sum(reference() is not None for reference in alive) <= 1
            yield batch

    net[1].register_forward_hook(lambda layer, inputs, output: alive.append(weakref.ref(output)))
    assert extract_features(net, stream(), "1", max_samples=30).shape == (30, 5)
    assert len(alive) == 6


def test_half_precision_becomes_float32():
    net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2)).bfloat16()
    assert extract_features(net, [torch.randn(3, 2).bfloat16()]).dtype == torch.float32


def test_refusals():
    net = maps_net()
    with pytest.raises(ValueError, match="`max_samples` to be at least 1, but got 0"):
        extract_features(net, batches(), max_samples=0)
    with pytest.raises(ValueError, match="name of a layer in Sequential, but got 'neck'"):
        extract_features(net, batches(), "neck")
    with pytest.raises(ValueError, match="at least one batch, but got none"):
        extract_features(net, [])
    with pytest.raises(ValueError, match="with inputs, but got NoneType: select the inputs with `inputs`"):
        extract_features(net, [{"picture": batches(1)[0][0]}])
    net.add_module("unused", nn.Linear(1, 1))
    net.forward = lambda x: net[3](net[0](x))
    with pytest.raises(ValueError, match="but the output of '1' did not run"):
        extract_features(net, batches(), "1")


def test_modes_come_back_where_layers_share_a_module():
    shared = nn.Dropout()
    model = nn.Sequential(shared, nn.Sequential(shared, nn.Dropout().eval()))
    with evaluating(model):
        assert not any(layer.training for layer in model.modules())
    assert [layer.training for layer in model.modules()] == [True, True, True, False]


# --- Purpose ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_discrepancy_to_a_centrally_trained_model(plain_trainer):
    """A partly trained model is closer to the trained model than an untrained model."""
    x, y = models.vectors({"a": 200})["a"]
    loader = DataLoader(TensorDataset(x, y), 20)
    features_found = {}
    for epochs in (0, 2, 12):
        module = models.Module(models.mlp(), models.adam)
        plain_trainer(max_epochs=epochs).fit(module, loader, loader)
        features_found[epochs] = extract_features(module, loader, max_samples=150)
    distances = {}
    for epochs, features in features_found.items():
        discrepancy = MaximumMeanDiscrepancy()
        discrepancy.update(features, features_found[12])
        distances[epochs] = float(discrepancy.compute())
    assert distances[12] < 1e-6 < distances[2] < distances[0]
