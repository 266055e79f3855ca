"""Replacing a model's linear head with the sampled-softmax head."""

import copy

import lightning as L
import pytest
import timm
import torch
import torchvision
from torch import nn

from lightning_fed.modules import (
    SampledSoftmaxHead,
    count_classes,
    find_classifier,
    find_feature_layer,
    find_sampled_softmax_head,
    tap_features,
    to_sampled_softmax,
)
from tests.breadth import quick

D, N = 5, 12


class Network(L.LightningModule):
    def __init__(self, num_heads=1):
        super().__init__()
        self.body = timm.create_model("mobilenetv3_small_050", num_classes=D)
        self.heads = nn.ModuleList([SampledSoftmaxHead(D, N) for _ in range(num_heads)])


def test_the_head_is_found():
    assert find_sampled_softmax_head(Network()) == "heads.0"
    assert find_sampled_softmax_head(SampledSoftmaxHead(D, N)) == ""
    shared = Network()
    shared.again = shared.heads[0]
    assert find_sampled_softmax_head(shared) == "heads.0"
    with pytest.raises(ValueError, match=r"Expected Network to have one SampledSoftmaxHead, but got none: make the"):
        find_sampled_softmax_head(Network(0))
    with pytest.raises(ValueError, match=r"but got \['heads.0', 'heads.1'\]"):
        find_sampled_softmax_head(Network(2))


def test_features_are_what_goes_into_the_head():
    """The layer named classifier by timm computes the embedding here."""
    network = Network().eval()
    assert find_classifier(network) == "heads.0"
    assert (find_feature_layer(network).path, find_feature_layer(network).side) == ("heads.0", "input")
    assert count_classes(network) == N
    head = network.heads[0]
    head.weight.data = head.weight.data[:4]  # as in a visit
    assert count_classes(network) == N
    features = torch.randn(2, 3, D)
    with tap_features(head, find_feature_layer(head)) as tap:
        head(features)
    assert torch.equal(tap.features, features.movedim(-1, 1))


MODELS = {
    "sequential": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4), nn.Linear(4, N)), "2"),
    "linear": (lambda: nn.Sequential(nn.Linear(32, N))[0], ""),
    "torchvision resnet18": (lambda: torchvision.models.resnet18(num_classes=N), "fc"),
    "timm mobilenetv3": (lambda: timm.create_model("mobilenetv3_small_050", num_classes=N), "classifier"),
}


@pytest.mark.parametrize("name", quick(MODELS, MODELS.keys() - {"torchvision resnet18"}))
def test_conversion_to_linear_logits_changes_nothing(name):
    make, path = MODELS[name]
    model = make().eval()
    x = torch.randn(2, 3, 32, 32)
    expected, state, parameters = model(x), copy.deepcopy(model.state_dict()), list(model.parameters())
    numbers = torch.get_rng_state()
    converted = to_sampled_softmax(model, normalize=False)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert (converted is model) == (path != "")
    assert find_sampled_softmax_head(converted) == path
    assert torch.equal(converted(x), expected)
    assert list(converted.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in converted.state_dict().items())
    assert [id(p) for p in converted.parameters()] == [id(p) for p in parameters]
    assert not any(module.training for module in converted.modules())


@pytest.mark.parametrize("name", MODELS)
def test_conversion_to_cosine_logits_keeps_the_rows(name):
    make, path = MODELS[name]
    model = make()
    weight = model.get_submodule(path).weight
    weight.requires_grad_(False)
    model = to_sampled_softmax(model, scale=7.0)
    head = model.get_submodule(path)
    assert head.weight is weight
    assert (head.bias, head.scale, head.training) == (None, 7.0, True)
    assert not head.weight.requires_grad
    logits = model.eval()(torch.randn(2, 3, 32, 32))
    assert logits.shape[-1] == N
    assert logits.abs().max() <= 7


def test_conversion_of_timm_is_known_to_timm():
    model = to_sampled_softmax(timm.create_model("mobilenetv3_small_050", num_classes=N))
    assert isinstance(model.get_classifier(), SampledSoftmaxHead)


def test_what_cannot_be_converted():
    with pytest.raises(TypeError, match=r"linear, but got '0' \(Conv2d\)"):
        to_sampled_softmax(nn.Sequential(nn.Conv2d(3, 4, 1)))
    with pytest.raises(TypeError, match=r"linear, but got none"):
        to_sampled_softmax(nn.ReLU())
    with pytest.raises(TypeError, match=r"but got 'heads.0' \(SampledSoftmaxHead\)"):
        to_sampled_softmax(Network())
    model = nn.Sequential(nn.Linear(2, 3))
    with pytest.raises(ValueError, match="`scale`"):
        to_sampled_softmax(model, scale=2.0, normalize=False)
    assert isinstance(model[0], nn.Linear)


@pytest.mark.parametrize(("name", "margin", "kind"), [("ArcFaceLoss", 0.5, "angle"), ("CosFaceLoss", 0.35, "cosine")])
def test_a_loss_of_pytorch_metric_learning_is_converted(name, margin, kind):
    """A class with the same name, package and attributes; the step calls the replacement unchanged."""
    base = type(name, (nn.Module,), {"__module__": f"pytorch_metric_learning.losses.{name.lower()}"})
    loss = type("Own", (base,), {})()
    loss.W, loss.margin, loss.scale = nn.Parameter(torch.randn(D, N)), margin, 64
    module = nn.ModuleDict({"trunk": nn.Linear(3, D), "loss": loss})
    assert to_sampled_softmax(module) is module
    head = module["loss"].head
    assert (head.margin, head.margin_of, head.scale) == (margin, kind, 64.0)
    assert torch.equal(head.weight, loss.W.t())
    assert head.weight.requires_grad
    embeddings, labels = module["trunk"](torch.randn(4, 3)), torch.tensor([0, 3, 3, 11])
    assert torch.equal(module["loss"](embeddings, labels), head.loss(embeddings, labels))
    assert find_sampled_softmax_head(module) == "loss.head"
