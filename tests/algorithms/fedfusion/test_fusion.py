"""FedFusion's operators as layers, and models with fused features."""

import copy
import io

import lightning as L
import pytest
import segmentation_models_pytorch as smp
import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

from lightning_fed.algorithms.fedfusion.feature_cache import FeatureCache
from lightning_fed.modules import (
    ConvFusion,
    FeatureLayer,
    FusedExtractor,
    FusionLayer,
    MultiFusion,
    NoFusion,
    SingleFusion,
    build_operator,
    find_fusion,
    fuse,
    plain_state,
    unwrap,
)
from lightning_fed.tasks.networks import build_network
from tests import models
from tests.breadth import quick
from tests.recorders import state_of
from tests.references_fusion import FusedReference

OPERATORS = ["conv", "multi", "single"]


class Net(nn.Module):
    """The paper's split: feature maps with BatchNorm and dropout, then a classifier."""

    def __init__(self, channels=4):
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, 3), nn.BatchNorm2d(channels), nn.ReLU(), nn.Dropout(0.4), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(9 * channels, 3))

    def forward(self, inputs):
        return self.classifier(self.features(inputs))


class Task(L.LightningModule):
    def __init__(self, model=None):
        super().__init__()
        self.model = Net() if model is None else model

    def forward(self, inputs):
        return self.model(inputs)


def images(count=6, size=8, channels=1):
    return torch.randn(count, channels, size, size)


@torch.no_grad()
def disturb(module):
    for value in (*module.parameters(), *module.buffers()):
        if value.is_floating_point():
            value.add_(0.1 * torch.rand_like(value))


# --- Operators --------------------------------------------------------------------------------------------------------


def test_operators_have_so_many_numbers_of_their_own():
    counts = {name: sum(p.numel() for p in build_operator(name, 64).parameters()) for name in (*OPERATORS, "none")}
    assert counts == {"conv": 8256, "multi": 64, "single": 1, "none": 0}
    assert sum(p.numel() for p in build_operator("conv", 64, conv_bias=False).parameters()) == 8192


def test_conv_starts_as_a_convolution_of_pytorch():
    torch.manual_seed(3)
    operator = ConvFusion(5)
    torch.manual_seed(3)
    convolution = nn.Conv2d(10, 5, 1)
    assert torch.equal(operator.weight, convolution.weight.flatten(1))
    assert torch.equal(operator.bias, convolution.bias)


def test_starts_of_operators():
    local, reference = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    for operator in (MultiFusion(4), SingleFusion(), ConvFusion(4, "local"), NoFusion()):
        torch.testing.assert_close(operator(local, reference), local, rtol=0, atol=1e-7)
    torch.testing.assert_close(ConvFusion(4, "average")(local, reference), (local + reference) / 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build_operator("sum", 2), "Expected `operator` to be one of"),
        (lambda: ConvFusion(2, "zeros"), "Expected `init` to be one of"),
        (lambda: MultiFusion(0), "Expected `channels` to be at least 1"),
    ],
)
def test_operators_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- Fused extractor --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPERATORS)
def test_outputs_and_gradients_against_the_reference(kind):
    net = Net().double()
    extractor = FusedExtractor(copy.deepcopy(net.features), kind)
    reference = FusedReference(
        kind, copy.deepcopy(net.features), net.classifier, extractor.feature_fusion.operators["0"].state_dict()
    )
    disturb(net.features)
    extractor.refer(net.features)
    reference.refer(net.features.state_dict())
    inputs = images(4).double()
    assert extractor.feature_fusion.operators["0"].weight.dtype == torch.float64
    torch.manual_seed(1)
    result = extractor.train()(inputs)
    torch.manual_seed(1)
    expected = []
    handle = reference.classifier.register_forward_pre_hook(lambda layer, args: expected.append(args[0]))
    reference.train()
    reference.frozen[0].eval()
    reference(inputs)
    handle.remove()
    torch.testing.assert_close(result, expected[0])
    pairs = [
        (extractor.local[0].weight, reference.features[0].weight),
        (extractor.feature_fusion.operators["0"].weight, reference.operator["weight"]),
    ]
    slope = torch.randn_like(result)
    for ours, reference_tensors in pairs:
        torch.testing.assert_close(
            torch.autograd.grad(result, ours, slope, retain_graph=True)[0],
            torch.autograd.grad(expected[0], reference_tensors, slope, retain_graph=True)[0],
        )


@pytest.mark.parametrize("kind", ["multi", "single"])
def test_weights_of_zero_are_the_plain_model(kind):
    """Equal loss and gradients; the gradient of the operator equals the sum from the paper's chain rule."""
    plain, task = Net(), Task(Net())
    fusion = fuse(task, kind)
    inputs, targets = images(), torch.randint(3, (6,))
    disturb(fusion.frozen.network)
    fusion.refer(fusion.frozen.state())
    fused, losses = [], []

    def watch(layer, args, output):
        output.retain_grad()
        fused.append(output)

    task.model.features.register_forward_hook(watch)
    for net in (plain, task):
        torch.manual_seed(2)
        losses.append(F.cross_entropy(net.train()(inputs), targets))
        losses[-1].backward()
    assert torch.equal(*losses)
    for ours, plain_parameter in zip(task.model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, plain_parameter.grad)
    weight = fusion.operators["0"].weight
    difference = fused[0].grad * (fusion.frozen(inputs) - fused[0].detach())  # F = E_l here
    expected = difference.sum() if kind == "single" else difference.sum((0, 2, 3))
    torch.testing.assert_close(weight.grad, expected)
    assert expected.abs().max() > 0
    fusion.refer()  # E_g = E_l: no gradient in the first step of a visit
    weight.grad = None
    F.cross_entropy(task.eval()(inputs), targets).backward()
    assert not weight.grad.any()


@pytest.mark.parametrize("kind", ["multi", "single"])
def test_without_another_reference_the_weights_do_not_matter(kind):
    task, inputs = Task().eval(), images()
    expected = task(inputs)
    fusion = fuse(task, kind)
    for value in (0.0, 0.3, -4.0, 1.0):
        fusion.operators["0"].weight.data.fill_(value)
        assert torch.equal(task(inputs), expected)


def test_the_frozen_copy_is_nobodys_and_stays_as_it_is():
    task = Task()
    fusion = fuse(task, "conv")
    names = [name for name, _ in task.named_parameters()]
    assert names[-2:] == ["feature_fusion.operators.0.weight", "feature_fusion.operators.0.bias"]
    assert len(names) == len(list(Net().parameters())) + 2
    assert len(task.state_dict()) == len(Net().state_dict()) + 2
    fusion.refer()
    sent = fusion.frozen.state()
    task.train()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        task(images()).square().sum().backward()
        optimizer.step()
    frozen = fusion.frozen.network
    assert not frozen.training
    assert not any(layer.training for layer in frozen.modules())
    assert all(not value.requires_grad and value.grad is None for value in frozen.parameters())
    after = fusion.frozen.state()
    assert all(torch.equal(after[name], sent[name]) for name in sent)
    assert not torch.equal(task.model.features[0].weight, sent["0.weight"])
    assert not torch.equal(task.model.features[1].running_mean, sent["1.running_mean"])


def test_references_are_taken_from_networks_and_states():
    net, reference, inputs = Net().features.eval(), Net().features.eval(), images()
    disturb(reference)
    plain = net(inputs)
    assert not torch.equal(reference(inputs), plain)
    extractor = FusedExtractor(net, "single")
    extractor.feature_fusion.operators["0"].weight.data.fill_(1)  # only the global features
    for source in (reference, reference.state_dict()):
        extractor.refer(source)
        assert torch.equal(extractor(inputs), reference(inputs))
        extractor.release()
        assert torch.equal(extractor(inputs), plain)
    extractor.refer()
    assert torch.equal(extractor(inputs), plain)
    with pytest.raises(ValueError, match=r"Expected '0.bias' of the extractor to have shape \(4,\), but got \(1,\)"):
        extractor.refer({"0.bias": torch.zeros(1)})


def checkpointed():
    model = timm.create_model("resnet10t", num_classes=3)
    model.set_grad_checkpointing(True)
    return model


# --- Fusion in models -------------------------------------------------------------------------------------------------

PLACES = {  # a model and its options; inputs; channels of each level
    "features": (Net, {}, images(), {"0": 4}),
    "a layer inside": (Net, {"at": "model.features.1"}, images(), {"0": 4}),
    "vectors": (models.mlp, {"at": "model.1"}, torch.randn(6, 6), {"0": 8}),
    "resnet": (lambda: timm.create_model("resnet10t", num_classes=3), {}, images(2, 32, 3), {"0": 512}),
    "mobilenet": (
        lambda: timm.create_model("mobilenetv3_small_050", num_classes=3), {}, images(2, 32, 3), {"0": 288},
    ),
    "tokens": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3),
        {"at": "model.blocks"}, images(2, 32, 3), {"0": 192},
    ),
    "channels last": (
        lambda: timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=64, window_size=2, depths=(1, 1), embed_dim=32, num_heads=(2, 2),
            num_classes=3,
        ),
        {}, images(2, 64, 3), {"0": 64},
    ),
    "channels last, of torchvision": (
        lambda: torchvision.models.SwinTransformer([4, 4], 32, [1, 1], [2, 2], [2, 2], num_classes=3),
        {}, images(2, 64, 3), {"0": 64},
    ),
    "layers in a list": (
        lambda: timm.create_model(
            "beit_base_patch16_224", img_size=32, embed_dim=32, depth=1, num_heads=2, num_classes=3
        ),
        {}, images(2, 32, 3), {"0": 32},
    ),
    "checkpointed activations": (checkpointed, {}, images(2, 32, 3), {"0": 512}),
    "all levels of an encoder": (models.deeplab, {}, images(2, 32, 3), {"1": 16, "2": 24, "3": 32, "4": 96, "5": 1280}),
    "some levels": (models.unet, {"levels": [-1, 2]}, images(2, 32, 3), {"3": 128, "2": 64}),
}  # fmt: skip


@pytest.mark.parametrize("place", quick(PLACES, [place for place in PLACES if place not in ("resnet", "mobilenet")]))
def test_fusion_in_any_model(place):
    """Zero weights give the plain model; "single" with weight 1 gives the features of the received model."""
    make, options, inputs, channels = PLACES[place]
    task = Task(make()).eval()
    reference = copy.deepcopy(task)
    disturb(reference)
    reference.eval()
    plain, names = task(inputs), list(task.state_dict())
    fusion = fuse(task, "single", **options)
    assert list(task.state_dict())[: len(names)] == names
    assert torch.equal(task(inputs), plain)
    network = next(name for name, layer in task.named_modules() if layer is fusion.network)
    fusion.refer(reference.get_submodule(network))
    assert torch.equal(task(inputs), plain)  # all weights are 0
    for operator in fusion.operators.values():
        operator.weight.data.fill_(1)
    assert not torch.equal(task(inputs), plain)
    if "levels" not in options:
        # Layers behind the features are equal once the received model has the same weights.
        behind = {name: value for name, value in task.model.state_dict().items() if not is_extractor(name, fusion)}
        reference.model.load_state_dict(behind, strict=False)
        torch.testing.assert_close(task(inputs), reference(inputs), rtol=1e-4, atol=1e-4)
    unwrap(task)
    fusion = fuse(task, "multi", **options)
    assert {name: operator.weight.numel() for name, operator in fusion.operators.items()} == channels
    unwrap(task)
    fusion = fuse(task, "conv", conv_init="local", **options)
    fusion.refer(reference.get_submodule(network))
    torch.testing.assert_close(task(inputs), plain, rtol=1e-3, atol=1e-4)


FAMILIES = [  # one encoder from each family in smp
    "resnet18", "timm-resnest14d", "timm-res2net50_26w_4s", "timm-regnetx_002", "timm-gernet_s", "se_resnet50",
    "timm-skresnet18", "densenet121", "inceptionresnetv2", "inceptionv4", "efficientnet-b0", "timm-efficientnet-b0",
    "mobilenet_v2", "timm-mobilenetv3_small_075", "dpn68", "vgg11_bn", "xception", "mit_b0", "mobileone_s0",
    "tu-convnext_atto", "tu-hrnet_w18_small", "tu-pvt_v2_b0", "tu-mobilenetv4_conv_small",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`timm-` encoders are deprecated")
@pytest.mark.parametrize("name", FAMILIES)
def test_fusion_in_every_encoder_of_smp(name):
    task, inputs = Task(smp.FPN(name, encoder_weights=None, classes=2)).eval(), images(2, 64, 3)
    with torch.no_grad():
        plain = task(inputs)
        fusion = fuse(task, "single")
        for operator in fusion.operators.values():
            operator.weight.fill_(0.5)
        fusion.refer()
        torch.testing.assert_close(task(inputs), plain)
        disturb(fusion.frozen.network)
        assert not torch.allclose(task(inputs), plain)
    assert len(fusion.operators) >= 4


def is_extractor(name, fusion):
    prefixes = {"model.features": "features.", "model.encoder": "encoder."}
    return name in fusion.frozen.entries or any(
        name == f"{prefix}{entry}" for prefix in prefixes.values() for entry in fusion.frozen.entries
    )


def test_a_single_level_by_its_key():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Linear(4, 3)
            self.backbone.forward = self.twice
            self.classifier = nn.Linear(3, 2)

        def twice(self, inputs):
            out = F.linear(inputs, self.backbone.weight, self.backbone.bias)
            return {"out": out, "aux": out}

        def forward(self, inputs):
            return self.classifier(self.backbone(inputs)["out"])

    assert list(fuse(Task(Two()), "multi", levels=["out"]).operators) == ["out"]
    assert list(fuse(Task(Two()), "multi").operators) == ["out", "aux"]
    with pytest.raises(ValueError, match=r"among the extractor's features, \{'out': .* but got \['in'\]"):
        fuse(Task(Two()), "multi", levels=["in"])


def test_layers_in_the_lightning_module_itself():
    class Flat(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2, self.fc = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 3, 3), nn.Linear(3, 2)

        def forward(self, inputs):
            return self.fc(self.conv2(self.conv1(inputs)).mean((2, 3)))

    inputs, module = images(), Flat()
    fuse(module, "multi", at="conv2").refer()
    with pytest.raises(RuntimeError, match="Expected Conv2d, the network with fused features, to receive a batch's"):
        module(inputs)
    unwrap(module)
    fusion = fuse(module, "single", at="conv2", network="")
    fusion.refer()
    assert fusion.frozen.entries == {"conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"}
    plain = module(inputs)
    disturb(module.conv1)
    disturb(module.conv2)
    fusion.operators["0"].weight.data.fill_(1)
    assert torch.equal(module(inputs), plain)
    with pytest.raises(RuntimeError, match="the layer ran twice in a call or outside one"):
        module.conv2(module.conv1(inputs))


def test_a_layer_that_is_run_twice_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Linear(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, inputs):
            return self.head(self.features(self.features(inputs)))

    task = Task(Twice())
    fuse(task, "conv", network="model", at="model.features").refer()
    with pytest.raises(RuntimeError, match="to be computed once per Twice call, but the layer ran twice in a call"):
        task(torch.randn(2, 4))


def test_no_fusion_is_the_plain_model_without_a_second_pass():
    task, inputs, results = Task().train(), images(), []
    fusion = fuse(task, "none")
    disturb(fusion.frozen.network)
    fusion.refer(fusion.frozen.state())
    ran = []
    fusion.frozen.network.register_forward_hook(lambda *args: ran.append(True))
    for net in (task, Net().train()):
        torch.manual_seed(1)
        results.append(net(inputs))
    assert torch.equal(*results)
    assert not ran
    assert list(task.state_dict()) == list(Task().state_dict())
    assert not list(fusion.frozen.network.parameters())  # the network is not copied


def test_channels_can_be_said_where_the_network_cannot_be_run():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Linear(4, 6)
            self.head = nn.Linear(6, 2)

        def forward(self, inputs):
            return self.head(self.features(inputs["x"]))

    task = Task(Odd())
    with pytest.raises(ValueError, match=r"Expected to infer the channels .* set the module's `example_input_array`"):
        fuse(task, at="model.head", network="model")
    fusion = fuse(task, "conv", at="model.features", network="model", channels=6)
    fusion.refer()
    assert task({"x": torch.randn(2, 4)}).shape == (2, 2)
    unwrap(task)
    task.example_input_array = ({"x": torch.randn(3, 4)},)
    assert fuse(task, "multi", at="model.features", network="model").operators["0"].weight.shape == (6,)
    unwrap(task)
    task.example_input_array = {"inputs": {"x": torch.randn(3, 4)}}  # Lightning passes keyword arguments
    assert fuse(task, "multi", at="model.features", network="model").operators["0"].weight.shape == (6,)
    with pytest.raises(ValueError, match="Expected one number in `channels` for each of 1 levels, but got"):
        FusionLayer(nn.Linear(2, 3), FeatureLayer(""), channels=[3, 3], levels=[0])


def test_an_example_with_names_reaches_the_network():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.features, self.head = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, *, x, scale):
            return self.head(self.features(scale * x))

    class Caller(Task):
        def forward(self, x, scale):
            return self.model(x=x, scale=scale)

    example = torch.randn(3, 4), torch.ones(3, 1)
    for given in (list(example), tuple(example), dict(zip(("x", "scale"), example, strict=True))):
        task = Caller(Scaled())
        task.example_input_array = given
        fusion = fuse(task, "conv", at="model.features", network="model")
        fusion.refer()
        assert fusion.operators["0"].weight.shape == (6, 12)
        assert task(*example).shape == (3, 2)


def test_said_channels_keep_what_is_behind_the_features_out_of_the_copy_too():
    task = Task()
    fusion = fuse(task, "conv", channels=4)
    assert not any("classifier" in name for name in fusion.frozen.entries)
    cnn = fuse(Task(models.cnn()), "multi", channels=8)
    assert not any(name.startswith("9.") for name in cnn.frozen.entries)


def test_models_that_cannot_be_fused():
    task = Task()
    fuse(task)
    with pytest.raises(
        ValueError,
        match="Expected Task without `feature_fusion`, but the module has one",
    ):
        fuse(task)
    with pytest.raises(ValueError, match="Expected no container of layers, but got Sequential"):
        fuse(models.cnn())
    with pytest.raises(ValueError, match="Expected Net to have a fusion layer, but found none"):
        unwrap(Net())
    both = nn.ModuleList([FusedExtractor(nn.Linear(2, 2)), FusedExtractor(nn.Linear(2, 2))])
    with pytest.raises(ValueError, match="Expected ModuleList to have one fusion layer, but got 2"):
        find_fusion(both)


# --- States, copies, devices and dtypes -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*OPERATORS, "none"])
def test_a_plain_state_loads_and_leaves_the_operators(kind):
    task, plain = Task(), Task()
    disturb(plain)
    fusion = fuse(task, kind)
    disturb(fusion.operators)
    before = state_of(fusion)
    task.load_state_dict(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(task.state_dict()[name], value)
    assert all(torch.equal(fusion.state_dict()[name], value) for name, value in before.items())


def test_a_state_with_half_an_operator_does_not_load():
    task = Task()
    fuse(task, "conv")
    state = task.state_dict()
    del state["feature_fusion.operators.0.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "feature_fusion.operators.0.bias"'):
        task.load_state_dict(state)
    del state["model.classifier.1.bias"], state["feature_fusion.operators.0.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "model.classifier.1.bias"\. *$'):
        task.load_state_dict(state)


@pytest.mark.parametrize("kind", ["multi", "single", "none"])
def test_fusion_is_taken_out_of_models_and_states(kind):
    task, inputs = Task().eval(), images()
    fusion = fuse(task, kind)
    disturb(task)
    expected, state = task(inputs), state_of(task)
    assert unwrap(task) is task
    assert not any(isinstance(layer, FusionLayer) for layer in task.modules())
    assert torch.equal(task(inputs), expected)
    plain = Task().eval()
    plain.load_state_dict(plain_state(state))
    assert torch.equal(plain(inputs), expected)
    plain.load_state_dict(task.state_dict())
    fusion.refer()  # the hooks are removed
    assert torch.equal(task(inputs), expected)
    with pytest.raises(RuntimeError, match="Missing key"):  # missing keys are errors again
        task.load_state_dict({})


CONVOLUTIONS = {
    "maps": (Net, {}, images(), nn.Conv2d),
    "at an input": (models.cnn, {}, images(), nn.Conv2d),
    "vectors": (models.mlp, {"at": "model.1"}, torch.randn(6, 6), nn.Linear),
    "tokens": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3),
        {"at": "model.blocks"}, images(2, 32, 3), nn.Linear,
    ),
    "sequences": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(24, 3)),
        {"at": "model.0", "channel_axis": 1, "conv_bias": False}, torch.randn(5, 2, 8), nn.Conv1d,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "options", "inputs", "kind"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_a_convolution_stays_as_a_layer_of_pytorch(make, options, inputs, kind):
    task = Task(make()).eval()
    fuse(task, "conv", **options)
    expected = task(inputs)
    with pytest.raises(ValueError, match="Expected a state without 'conv' fusion"):
        plain_state(task.state_dict())
    unwrap(task)
    torch.testing.assert_close(task(inputs), expected, rtol=1e-4, atol=1e-5)
    assert all(type(layer).__module__.split(".")[0] != "lightning_fed" for layer in task.modules())
    assert any(type(layer) is kind and layer.weight.shape[0] == layer.weight.shape[1] for layer in task.modules())


def test_a_fused_extractor_is_taken_out():
    class Own(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.extractor = FusedExtractor(nn.Linear(4, 3), kind)
            self.head = nn.Linear(3, 2)

        def forward(self, inputs):
            return self.head(self.extractor(inputs))

    inputs = torch.randn(5, 4)
    for kind in ("multi", "conv"):
        net = Own(kind)
        expected = net(inputs)
        unwrap(net)
        torch.testing.assert_close(net(inputs), expected)
        assert type(net.extractor) is {"multi": nn.Linear, "conv": nn.Sequential}[kind]
    alone = FusedExtractor(nn.Linear(4, 3), "single")
    assert unwrap(alone) is alone.local


def test_a_convolution_over_levels_stays():
    task = Task(models.unet())
    fuse(task, "conv")
    with pytest.raises(
        ValueError, match=r"one feature tensor, .* at the output of 'model.encoder' the layer has other inputs"
    ):
        unwrap(task)
    assert find_fusion(task) is not None
    task = Task(models.unet())
    fuse(task, "conv", levels=[-1])  # the following layer still receives a list
    with pytest.raises(ValueError, match="one feature tensor"):
        unwrap(task)


def test_a_convolution_behind_a_layer_of_several_inputs_stays():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix, self.head = nn.Bilinear(4, 4, 5), nn.Linear(5, 2)

        def forward(self, inputs):
            return self.head(self.mix(inputs, inputs))

    for channels in ("infer", 5):  # inferred lazily, and given
        task = Task(Masked())
        task.example_input_array = torch.randn(2, 4)
        fuse(task, "conv", at="model.mix", network="model", channels=channels)
        if channels != "infer":
            with pytest.raises(ValueError, match=r"the output of 'model\.mix' has not run yet"):
                unwrap(task)
        task(torch.randn(2, 4))
        with pytest.raises(ValueError, match="to have one input and one feature tensor"):
            unwrap(task)


def test_copies_are_models_of_their_own():
    task, inputs = Task().eval(), images()
    fusion = fuse(task, "single")
    fusion.operators["0"].weight.data.fill_(0.5)
    fusion.refer()
    disturb(task.model)
    expected = task(inputs)
    file = io.BytesIO()
    torch.save(task, file)
    file.seek(0)
    for copied in (copy.deepcopy(task), torch.load(file, weights_only=False)):
        assert torch.equal(copied(inputs), expected)
        find_fusion(copied).refer()
        assert not torch.equal(copied(inputs), expected)
        disturb(find_fusion(copied).frozen.network)
        assert torch.equal(task(inputs), expected)
        assert find_fusion(copied).network is copied.model.features


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_frozen_copy_follows(dtype):
    task = Task().eval()
    fusion = fuse(task, "conv")
    fusion.refer()
    disturb(task.model)
    before = fusion.frozen.state()
    task.to(dtype)
    assert task(images().to(dtype)).dtype == dtype
    assert {value.dtype for value in fusion.frozen.network.parameters()} == {dtype}
    after = fusion.frozen.state()
    assert all(torch.equal(after[name], value.to(after[name].dtype)) for name, value in before.items())
    meta = copy.deepcopy(task).to("meta")
    meta(images().to("meta", dtype))
    assert {value.device.type for value in find_fusion(meta).frozen.network.parameters()} == {"meta"}


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_autocast(precision):
    task = Task().eval()
    fusion = fuse(task, "multi")
    fusion.refer()
    seen = []
    task.model.classifier.register_forward_pre_hook(lambda layer, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", precision):
        task(images())
        find_fusion(task).release()
        task(images())
    unwrap(task)
    with torch.autocast("cpu", precision):
        task(images())
    assert len(set(seen)) == 1


@pytest.mark.parametrize("when", quick(["before", "after", "in place", "after a run"], ["before", "after"]))
def test_models_that_are_compiled(when):
    """Compiled code uses the fusion and every new reference."""
    inputs, task, second = images(), Task().eval(), Net()
    disturb(second)
    plain = copy.deepcopy(task)
    if when == "in place":
        task.model.compile(backend="eager")
    elif when != "after":
        task.model = torch.compile(task.model, backend="eager")
    if when == "after a run":
        task(inputs)
    fusion = fuse(task, "single")
    if when == "after":
        task.model = torch.compile(task.model, backend="eager")
    fusion.operators["0"].weight.data.fill_(1)
    torch.testing.assert_close(task(inputs), plain(inputs))
    for state in (state_of(second.features), state_of(plain.model.features)):
        fusion.refer(state)
        plain.model.features.load_state_dict(state)
        torch.testing.assert_close(task(inputs), plain(inputs))
    fusion.release()
    task.train()
    torch.manual_seed(0)
    result = task(inputs)
    torch.manual_seed(0)
    torch.testing.assert_close(result, plain.train()(inputs))
    result.sum().backward()


# --- Cache ------------------------------------------------------------------------------------------------------------


def test_cached_features_are_those_that_are_computed():
    net = build_network("mcmahan_cnn", 10)
    task = Task(net)
    fusion = fuse(task, "conv")
    fusion.refer()
    disturb(net.features)
    inputs, targets = images(12, 28), torch.randint(10, (12,))
    batches = [positions for _ in range(3) for positions in torch.randperm(12).split(5)]
    results = []
    for cache in (None, FeatureCache()):
        fusion.cache = cache
        for positions in batches:
            task.zero_grad()
            loss = F.cross_entropy(task(inputs[positions]), targets[positions])
            loss.backward()
            results.append([loss.detach(), *(value.grad for value in task.parameters())])
    for computed, cached in zip(results[: len(batches)], results[len(batches) :], strict=True):
        torch.testing.assert_close(cached, computed, rtol=1e-6, atol=1e-6)
    assert (fusion.cache.hits, fusion.cache.misses) == (24, 12)


def test_the_cache_computes_what_it_does_not_know():
    cache, asked = FeatureCache(), []

    def compute(samples):
        asked.append(samples.clone())
        return {"0": 2 * samples, "1": samples.sum(1)}

    samples = torch.randn(6, 3)
    cache.get(samples[:4], compute)
    result = cache.get(samples[[5, 1, 4, 0, 5]], compute)
    assert torch.equal(asked[1], samples[[5, 4, 5]])
    assert torch.equal(result["0"], 2 * samples[[5, 1, 4, 0, 5]])
    assert torch.equal(result["1"], samples[[5, 1, 4, 0, 5]].sum(1))
    cache.is_filling = False
    changed = samples + 1
    assert torch.equal(cache.get(changed, compute)["0"], 2 * changed)  # other content gives other features
    cache.get(changed, compute)
    assert cache.misses == 4 + 3 + 6 + 6
