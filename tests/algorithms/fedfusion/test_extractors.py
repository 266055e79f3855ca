"""Automatic choice of the feature extractor in real models."""

import lightning as L
import pytest
import segmentation_models_pytorch as smp
import timm
import torch
import torchmetrics
import torchvision
from torch import nn

from lightning_fed.algorithms.fedfusion.extractors import example_inputs, named_features, replace_features
from lightning_fed.algorithms.fedfusion.frozen_extractor import FrozenExtractor
from lightning_fed.modules import FeatureLayer, find_extractor
from lightning_fed.tasks.networks import build_network
from tests import models
from tests.breadth import quick


class Task(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model


class Flat(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3)))


class Tokens(nn.Module):
    """A transformer; the inputs do not enter at the encoder."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(6, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens))).mean(1)


FOUND = {  # a model: network and layer, shapes of the features for 64 x 64 images
    "mcmahan_cnn": (lambda: build_network("mcmahan_cnn", 10), "model.features", "", "output", [64]),
    "mlp": (lambda: build_network("mlp", 10), "model.features", "", "output", [64]),
    "timm resnet": (lambda: timm.create_model("resnet10t"), "model", "global_pool", "input", [512]),
    "timm mobilenet": (
        lambda: timm.create_model("mobilenetv3_small_050"), "model", "global_pool", "input", [288],
    ),
    "timm convnext": (lambda: timm.create_model("convnext_atto"), "model", "head.global_pool", "input", [320]),
    "timm vit": (
        lambda: timm.create_model("vit_tiny_patch16_224", depth=2), "model", "head", "input", [192],
    ),
    "torchvision resnet": (
        lambda: torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1]),
        "model", "avgpool", "input", [512],
    ),
    "torchvision mobilenet": (torchvision.models.mobilenet_v2, "model.features", "", "output", [1280]),
    "torchvision without pooling layer": (
        torchvision.models.shufflenet_v2_x0_5, "model", "fc", "input", [1024],
    ),
    "torchvision segmentation": (
        lambda: torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights_backbone=None),
        "model.backbone", "", "output", [40, 960],
    ),
    "deeplab": (models.deeplab, "model.encoder", "", "output", [3, 16, 24, 32, 96, 1280]),
    "unet": (models.unet, "model.encoder", "", "output", [3, 64, 64, 128]),
    "segformer encoder": (
        lambda: smp.FPN("mit_b0", encoder_weights=None), "model.encoder", "", "output", [3, 0, 32, 64, 160, 256],
    ),
    "sequential": (models.cnn, "model", "7", "input", [8]),
    "flatten": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 8), nn.ReLU(), nn.Linear(8, 2)),
        "model", "1", "input", [4],
    ),
    "base and head": (models.BaseAndHead, "model.base", "", "output", [8]),
    "encoder behind an embedding": (Tokens, "model", "head", "input", [8]),
}  # fmt: skip
# Found like other models.
REPEATED = {"timm resnet", "timm convnext", "torchvision resnet", "torchvision mobilenet", "unet", "segformer encoder"}


@pytest.mark.filterwarnings("ignore:The parameter 'pretrained'")
@pytest.mark.parametrize("model", quick(FOUND, [model for model in FOUND if model not in REPEATED]))
def test_extractors_are_found_and_run(model):
    make, network, path, side, channels = FOUND[model]
    task = Task(make())
    extractor_end = find_extractor(task)
    assert extractor_end == (network, FeatureLayer(path, side))
    root = task.get_submodule(network)
    extractor = FrozenExtractor(root, extractor_end.layer)
    features = None
    for inputs in example_inputs(root):
        try:
            features = extractor(inputs)
        except Exception:
            continue
        break
    axis = -1 if isinstance(root, Tokens) else 1
    assert [value.shape[axis] for _, value in named_features(features)] == channels


def test_layers_of_a_lightning_module_are_in_the_module_itself():
    assert find_extractor(Flat()) == ("", FeatureLayer("head", "input"))
    assert find_extractor(Flat(), "conv") == ("conv", FeatureLayer(""))
    assert find_extractor(Flat(), "conv", network="") == ("", FeatureLayer("conv"))


class Judged(L.LightningModule):
    """A metric with an internal network, defined before the model."""

    def __init__(self):
        super().__init__()
        self.distance = Distance()
        self.model = models.cnn()


class Distance(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.inner = models.BaseAndHead()

    def update(self):
        pass

    def compute(self):
        pass


def test_networks_of_metrics_are_not_the_model():
    assert find_extractor(Judged()) == ("model", FeatureLayer("7", "input"))
    # unless the extractor is named
    assert find_extractor(Judged(), "distance.inner.base").path == "distance.inner.base"


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "crossvit_tiny_240"])
def test_several_layers_with_logits_are_not_guessed(name):
    with pytest.raises(
        ValueError, match=r"to have one layer that computes the logits, but the module has 2: name the feature layer"
    ):
        find_extractor(Task(timm.create_model(name)))


def test_layers_that_are_named():
    task = Task(models.cnn())
    assert find_extractor(task, "model.4") == ("model", FeatureLayer("4"))
    assert find_extractor(task, FeatureLayer("model.7", "input")) == ("model", FeatureLayer("7", "input"))
    assert str(find_extractor(task, "model.4")) == "the output of 'model.4'"
    assert find_extractor(Task(models.deeplab()), "model.encoder") == ("model.encoder", FeatureLayer(""))
    assert find_extractor(models.cnn(), "4") == ("", FeatureLayer("4"))


def test_networks_that_are_compiled_are_named_as_they_are():
    task = Task(torch.compile(models.cnn(), backend="eager"))
    assert find_extractor(task) == ("model._orig_mod", FeatureLayer("7", "input"))


@pytest.mark.parametrize(
    ("at", "network", "message"),
    [
        ("model.conv", "auto", r"name of a layer of Task, but got 'model.conv': 'model' has \['model.0'"),
        ("nothing", "auto", r"but got 'nothing': it has \['model'\]"),
        ("model.4", "other", "name of a layer of Task, but got 'other'"),
        ("model.4", "model.5", "Expected `network` to hold the layer 'model.4', but got 'model.5'"),
        (FeatureLayer("model", "input"), "model", "is the network's input"),
    ],
)
def test_layers_that_are_not_there(at, network, message):
    with pytest.raises(ValueError, match=message):
        find_extractor(Task(models.cnn()), at, network)


def test_a_model_without_layers():
    with pytest.raises(ValueError, match="to have an encoder, a backbone, a linear layer or a convolution"):
        find_extractor(nn.ReLU())


def test_features_are_named_and_replaced():
    features = {"out": torch.zeros(1), "aux": [torch.ones(1), (torch.arange(2), torch.ones(1))], "size": 3}
    named = dict(named_features(features))
    assert list(named) == ["out", "aux_0", "aux_1_1"]  # integer tensors are not features
    changed = replace_features(features, {"aux_1_1": torch.full((1,), 7.0)})
    assert changed["aux"][1][1].item() == 7
    assert isinstance(changed["aux"][1], tuple)
    assert changed["out"] is features["out"]
    assert changed["size"] == 3
    assert features["aux"][1][1].item() == 1


# --- Frozen copy ------------------------------------------------------------------------------------------------------


def test_frozen_features_are_those_of_the_network():
    net = models.cnn()
    net(torch.randn(20, 1, 8, 8))  # changes the running statistics
    inputs = torch.randn(5, 1, 8, 8)
    for layer, last in ((FeatureLayer("4"), 5), (FeatureLayer("7", "input"), 7), (FeatureLayer(""), 10)):
        extractor = FrozenExtractor(net.train(), layer)
        expected = inputs
        for part in list(net.eval())[:last]:
            expected = part(expected)
        assert torch.equal(extractor(inputs), expected)
        assert not extractor(inputs.clone().requires_grad_()).requires_grad


def test_a_frozen_copy_that_follows_its_network_in_an_evaluation_can_be_written_into_later():
    net = models.cnn()
    extractor = FrozenExtractor(net, FeatureLayer("4"))
    net.double()
    with torch.inference_mode():
        extractor.refer(net)
    extractor.refer({"0.bias": torch.ones(4).double()})
    assert torch.equal(extractor.state()["0.bias"], torch.ones(4).double())


class Attentive(nn.Module):
    """Attention uses the weight of a projection without calling the layer; another layer never runs."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.first = nn.Linear(4, 3)
        self.mix = nn.MultiheadAttention(3, 1)
        self.head = nn.Linear(3, 100)
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs):
        tokens = self.scale * self.first(inputs)
        return self.head(self.mix(tokens, tokens, tokens)[0])


def test_frozen_copy_lets_go_of_what_is_behind_the_features():
    net = Attentive()
    extractor = FrozenExtractor(net, FeatureLayer("mix"))
    extractor.prune(torch.randn(2, 4))
    assert extractor.entries == {name for name in net.state_dict() if not name.startswith(("head.", "unused."))}
    assert "mix.out_proj.weight" in extractor.entries
    assert sum(value.numel() for value in extractor.network.head.parameters()) == 0
    with torch.no_grad():
        net.scale.mul_(2)
    extractor.refer(net)
    inputs = torch.randn(2, 4)
    tokens = net.scale * net.first(inputs)
    assert torch.equal(extractor(inputs)[0], net.mix(tokens, tokens, tokens)[0])
    assert extractor.state().keys() == extractor.state(net).keys() == extractor.entries


class Uncalled(nn.Module):
    """Layers and parameters in lists, a submodule used through a method, and a submodule used through its layers."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.full((4,), 2.0))])
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.part = models.BaseAndHead()
        self.part.base = nn.Linear(4, 4)
        self.steps = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.heads = nn.ModuleList([nn.Linear(4, 2)])

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(self.scales[0] * inputs)
        inputs = self.part.base(inputs)
        for step in self.steps:
            inputs = step(inputs)
        return self.heads[0](inputs)


def test_frozen_copy_keeps_what_is_run_without_being_called():
    net = Uncalled()
    extractor = FrozenExtractor(net, FeatureLayer("heads.0", "input"))
    extractor.prune(torch.randn(3, 4))
    assert extractor.entries == {
        name for name, _ in (*net.named_parameters(), *net.named_buffers())
        if not name.startswith(("heads.", "part.head."))
    }  # fmt: skip
    inputs, seen = torch.randn(3, 4), []
    net.heads[0].register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
    net.eval()(inputs)
    assert torch.equal(extractor(inputs), seen[0])


def test_frozen_copy_keeps_all_where_a_weight_is_used_past_its_layer():
    net = models.Tied()
    net.forward = lambda tokens: net.mix(nn.functional.embedding(tokens, net.embedding.weight))
    extractor = FrozenExtractor(net, FeatureLayer("mix"))
    extractor.network.forward = lambda tokens: extractor.network.mix(
        nn.functional.embedding(tokens, extractor.network.embedding.weight)
    )
    tokens = torch.randint(7, (2, 3))
    features, last = extractor.prune(tokens)
    assert extractor.entries == set(dict(net.named_parameters()))
    assert torch.equal(extractor(tokens), features)
    assert last is extractor.network.mix


def test_frozen_copy_of_a_layer_that_is_not_run():
    with pytest.raises(RuntimeError, match="to run the output of 'unused', but this layer did not run: name another"):
        FrozenExtractor(Attentive(), FeatureLayer("unused"))(torch.randn(2, 4))
