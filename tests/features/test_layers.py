"""Feature layers of common networks, against the outputs of the extractors."""

import copy

import lightning as L
import pytest
import segmentation_models_pytorch as smp
import timm
import torch
import torchmetrics
import torchvision
from torch import nn

from lightning_fed.modules import FeatureLayer, count_classes, find_classifier, find_feature_layer, tap_features
from lightning_fed.tasks import ClassificationTask, SegmentationTask
from lightning_fed.tasks.networks import build_network
from tests import models
from tests.breadth import quick

CLASSES = 5


def tapped(net, inputs, layer=None):
    with torch.no_grad(), tap_features(net, layer or find_feature_layer(net)) as tap:
        net(inputs)
    return tap.features


def without(net, *path):
    net = copy.deepcopy(net)
    parent = net
    for name in path[:-1]:
        parent = getattr(parent, name)
    setattr(parent, path[-1], nn.Identity())
    return net


def of_ours(net, inputs):
    return net.classifier[:-1](net.features(inputs))


def of_timm(net, inputs):
    return net.forward_head(net.forward_features(inputs), pre_logits=True)


CLASSIFIERS = {
    "mlp": (lambda: build_network("mlp", CLASSES), (1, 28), "classifier.", of_ours),
    "mcmahan_cnn": (lambda: build_network("mcmahan_cnn", CLASSES), (1, 28), "classifier.", of_ours),
    "lenet": (lambda: build_network("lenet", CLASSES), (1, 28), "classifier.", of_ours),
    "vgg9": (lambda: build_network("vgg9", CLASSES, 3, 32), (3, 32), "classifier.", of_ours),
    "torchvision resnet18": (
        lambda: torchvision.models.resnet18(num_classes=CLASSES), (3, 32), "fc",
        lambda net, x: without(net, "fc")(x),
    ),
    "torchvision vit": (
        lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=CLASSES), (3, 32), "heads.head",
        lambda net, x: without(net, "heads", "head")(x),
    ),
    "torchvision squeezenet": (  # the classifier is a convolution
        lambda: torchvision.models.squeezenet1_1(num_classes=CLASSES), (3, 64), "classifier.1",
        lambda net, x: net.features(x),
    ),
    "timm resnet": (lambda: timm.create_model("resnet10t", num_classes=CLASSES), (3, 32), "fc", of_timm),
    "timm vit": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=CLASSES), (3, 32), "head", of_timm,
    ),
    "timm mobilenet": (
        lambda: timm.create_model("mobilenetv3_small_050", num_classes=CLASSES), (3, 32), "classifier", of_timm,
    ),
    "timm convnext": (lambda: timm.create_model("convnext_atto", num_classes=CLASSES), (3, 32), "head.fc", of_timm),
}  # fmt: skip


LARGE = {"torchvision resnet18", "timm resnet", "timm vit"}


@pytest.mark.parametrize("name", quick(CLASSIFIERS, CLASSIFIERS.keys() - LARGE))
def test_classifiers(name):
    build, (channels, size), path, expected = CLASSIFIERS[name]
    net = build().eval()
    inputs = torch.randn(2, channels, size, size)
    layer = find_feature_layer(net)
    assert layer == FeatureLayer(find_classifier(net), "input")
    assert layer.path == path or (path.endswith(".") and layer.path.startswith(path))
    assert count_classes(net) == CLASSES
    with torch.no_grad():
        assert torch.equal(tapped(net, inputs), expected(net, inputs))
    module = models.Module(net)
    assert find_feature_layer(module) == FeatureLayer(f"net.{layer.path}", "input")
    assert count_classes(module) == CLASSES


SEGMENTATION = ["Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3", "DeepLabV3Plus"]
SEGMENTATION += ["UPerNet", "Segformer", "DPT"]


@pytest.mark.parametrize("architecture", quick(SEGMENTATION, ["Unet", "DPT"]))
def test_segmentation_models(architecture):
    options = {"encoder_weights": None, "classes": CLASSES}
    if architecture == "DPT":
        net = smp.DPT("tu-vit_tiny_patch16_224", dynamic_img_size=True, **options)
    else:
        net = getattr(smp, architecture)("resnet18", **options)
    net.eval()
    inputs = torch.randn(1, 3, 128, 128)
    assert find_feature_layer(net) == FeatureLayer("encoder", "output")
    assert find_classifier(net) == "segmentation_head"
    assert count_classes(net) == CLASSES
    with torch.no_grad():
        maps = net.encoder(inputs)
    deepest = maps[0][-1] if architecture == "DPT" else maps[-1]
    assert deepest.ndim == 4
    assert torch.equal(tapped(net, inputs), deepest)


@pytest.mark.parametrize("architecture", ["deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"])
def test_segmentation_models_of_torchvision(architecture):
    build = getattr(torchvision.models.segmentation, architecture)
    net = build(weights=None, weights_backbone=None, num_classes=CLASSES).eval()
    inputs = torch.randn(1, 3, 64, 64)
    assert find_feature_layer(net) == FeatureLayer("backbone", "output")
    assert count_classes(net) == CLASSES
    with torch.no_grad():
        maps = net.backbone(inputs)
        assert torch.equal(tapped(net, inputs), maps["out"] if "out" in maps else list(maps.values())[-1])


def test_a_second_head_is_not_mistaken():
    net = smp.Unet(
        "resnet18", encoder_weights=None, classes=CLASSES, aux_params={"classes": 9, "pooling": "avg"}
    ).eval()
    assert (find_classifier(net), count_classes(net)) == ("segmentation_head", CLASSES)
    assert tapped(net, torch.randn(1, 3, 64, 64)).shape == (1, 512, 2, 2)


def test_a_projector_behind_a_network_is_not_mistaken():
    net = timm.create_model("resnet10t", num_classes=CLASSES)
    parts = nn.ModuleDict({"net": net, "projector": nn.Linear(512, 64)})
    assert find_feature_layer(parts) == FeatureLayer("net.fc", "input")
    assert count_classes(parts) == CLASSES


def test_one_logit_means_two_classes():
    assert count_classes(nn.Sequential(nn.Linear(2, 1))) == 2
    assert count_classes(smp.Unet("resnet18", encoder_weights=None, classes=1)) == 2


class Judge(torchmetrics.Metric):
    """A metric with an internal network, as image metrics have."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 99)

    def update(self, *arguments):
        pass

    def compute(self):
        pass


class Measured(L.LightningModule):
    """Metrics after the network, one of them with an internal network."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.judge = Judge()
        self.scores = nn.ModuleDict({"val": torchmetrics.MetricCollection({"a": Judge()})})


def test_networks_of_metrics_are_left_out():
    module = Measured(models.mlp())
    assert find_feature_layer(module) == FeatureLayer("net.2", "input")
    assert count_classes(module) == models.CLASSES


def test_the_ready_tasks():
    task = ClassificationTask("mcmahan_cnn", num_classes=CLASSES)
    assert torch.is_tensor(tapped(task, torch.randn(2, 1, 28, 28)))
    assert tapped(task, torch.randn(2, 1, 28, 28)).shape == (2, 512)
    assert count_classes(task) == CLASSES
    task = SegmentationTask("Unet", num_classes=CLASSES, encoder_name="resnet18", encoder_weights=None).eval()
    assert tapped(task, torch.randn(1, 3, 64, 64)).shape == (1, 512, 2, 2)
    assert count_classes(task) == CLASSES


def test_sequences_have_their_channels_second():
    """Linear layers over a sequence are transposed, convolutions already have channels second."""
    net = models.Tied()
    tokens = torch.randint(7, (3, 4))
    mixed = torch.tanh(net.mix(net.embedding(tokens)).cumsum(1)).detach()
    assert torch.equal(tapped(net, tokens), mixed.transpose(1, 2))
    assert torch.equal(tapped(net, tokens, FeatureLayer("mix")), net.mix(net.embedding(tokens)).transpose(1, 2))
    line = nn.Sequential(nn.Conv1d(2, 6, 3), nn.ReLU(), nn.Conv1d(6, 4, 1))
    inputs = torch.randn(3, 2, 8)
    assert torch.equal(tapped(line, inputs), line[:2](inputs).detach())
    assert (find_classifier(line), count_classes(line)) == ("2", 4)


def test_a_layer_by_its_name():
    net = models.cnn().eval()
    inputs = torch.randn(2, 1, 8, 8)
    assert torch.equal(tapped(net, inputs, FeatureLayer("4")), net[:5](inputs).detach())
    assert torch.equal(tapped(net, inputs, FeatureLayer("4", "input")), net[:4](inputs).detach())
    assert str(FeatureLayer("4", "input")) == "the input of '4'"


class Weighing(nn.Module):
    """A head called with features and another input."""

    def __init__(self, call):
        super().__init__()
        self.body, self.call = nn.Linear(6, 8), call
        self.head = Scaled()

    def get_classifier(self):
        return self.head

    def forward(self, inputs):
        features = torch.relu(self.body(inputs))
        return self.call(self.head, features, 2 * torch.ones_like(features))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)

    def forward(self, features, weights=1.0, mode=None):
        return self.layer((features[-1] if isinstance(features, list) else features) * weights)


@pytest.mark.parametrize(
    "call",
    [
        lambda head, features, weights: head(features, weights),
        lambda head, features, weights: head(features=features, weights=weights),
        lambda head, features, weights: head(features, mode="train", weights=weights),
        lambda head, features, weights: head([weights, features], 1.0),
    ],
)
def test_the_first_input_of_a_head_is_the_features(call):
    """Passed by position or by name; the last map in a list."""
    net, inputs = Weighing(call), torch.randn(4, 6)
    assert find_feature_layer(net) == FeatureLayer("head", "input")
    assert torch.equal(tapped(net, inputs), torch.relu(net.body(inputs)).detach())


def test_a_layer_that_is_called_by_name():
    net, inputs = nn.Linear(6, 8), torch.randn(4, 6)
    with tap_features(net, FeatureLayer("", "input")) as tap:
        net(input=inputs)
    assert torch.equal(tap.features, inputs)


class Excited(nn.Module):
    """A fully convolutional network with squeeze and excitation by linear layers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3, padding=1)
        self.excite = nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8))
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, inputs):
        maps = self.body(inputs)
        return self.head(maps * torch.sigmoid(self.excite(maps.mean((2, 3))))[..., None, None])


def test_a_linear_layer_before_the_last_convolution_is_not_mistaken():
    net = Excited()
    assert (find_classifier(net), count_classes(net)) == ("head", CLASSES)
    assert tapped(net, torch.randn(2, 3, 8, 8)).shape == (2, 8, 8, 8)


def test_features_are_handed_over_before_a_layer_changes_them():
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    inputs, seen = torch.randn(5, 2), []
    with tap_features(net, FeatureLayer("0")) as tap:
        tap.on_features = lambda features: seen.append(features.clone())
        net(inputs)
    assert (seen[0] < 0).any()
    assert torch.equal(seen[0], net[0](inputs).detach())
    assert not seen[0].requires_grad


def test_the_hook_is_gone_afterwards():
    net = models.mlp()
    with pytest.raises(ZeroDivisionError), tap_features(net, FeatureLayer("2", "input")) as tap:
        raise ZeroDivisionError
    net(torch.randn(4, 6))
    assert tap.features is None


def test_a_layer_that_is_not_there():
    module = models.Module(models.BaseAndHead())
    with pytest.raises(
        ValueError, match=r"`layer` .* in Module, but got 'net\.bas': 'net' contains \['net\.base', 'net\.h"
    ):
        tap_features(module, FeatureLayer("net.bas")).__enter__()
    with pytest.raises(ValueError, match=r"but got 'encoder.x': the module contains \['net'\]"):
        tap_features(module, FeatureLayer("encoder.x")).__enter__()


def test_nothing_to_find():
    net = nn.Sequential(nn.Flatten(), nn.ReLU())
    with pytest.raises(ValueError, match=r"Expected Sequential to have an encoder, .*: name the feature layer"):
        find_feature_layer(net)
    assert find_classifier(net) is None
    assert count_classes(net) is None
    with pytest.raises(ValueError, match=r"'0' to be a tensor, but got int"):
        tapped(nn.Sequential(Answer()), torch.zeros(1), FeatureLayer("0"))


class Answer(nn.Module):
    def forward(self, inputs):
        return 42


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="torch 2.6 brings it")
def test_compiled_models():
    """Found under the compiled name; features are read outside compiled code, which ignores new hooks."""
    net = models.norm_mlp().eval()
    module = nn.Module()
    module.net = torch.compile(net, backend="eager")
    assert find_feature_layer(module) == FeatureLayer("net._orig_mod.7", "input")
    assert count_classes(module) == models.CLASSES
    inputs = torch.randn(4, 6)
    with torch.no_grad():
        module.net(inputs)  # compiled without a hook
        for _ in range(2):
            with tap_features(module, find_feature_layer(module)) as tap, torch.compiler.set_stance("force_eager"):
                module.net(inputs)
            assert torch.equal(tap.features, net[:7](inputs))
