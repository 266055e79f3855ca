"""The papers' networks: sizes from the papers, explicit forward passes."""

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from lightning_fed.tasks.networks import NETWORKS, build_network

CONV = {  # kernel * kernel * in * out + out
    "mcmahan_cnn": [5 * 5 * 1 * 32 + 32, 5 * 5 * 32 * 64 + 64],
    "fedfusion_cnn": [5 * 5 * 3 * 64 + 64, 5 * 5 * 64 * 64 + 64],
    "lenet": [5 * 5 * 1 * 20 + 20, 5 * 5 * 20 * 50 + 50],
    "niid_cnn": [5 * 5 * 3 * 6 + 6, 5 * 5 * 6 * 16 + 16],
    "vgg9": [9 * i * o + o for i, o in ((3, 32), (32, 64), (64, 128), (128, 128), (128, 256), (256, 256))],
}


@pytest.mark.parametrize(
    ("name", "in_channels", "input_size", "total", "layers"),
    [
        ("mlp", 1, 28, 50_890, [784 * 64 + 64, 64 * 10 + 10]),
        ("mcmahan_cnn", 1, 28, 1_663_370, [*CONV["mcmahan_cnn"], 64 * 7 * 7 * 512 + 512, 512 * 10 + 10]),
        (
            "fedfusion_cnn",
            *(3, 32, 1_756_426),
            [*CONV["fedfusion_cnn"], 64 * 8 * 8 * 384 + 384, 384 * 192 + 192, 192 * 10 + 10],
        ),
        ("lenet", 1, 28, 431_080, [*CONV["lenet"], 50 * 4 * 4 * 500 + 500, 500 * 10 + 10]),
        ("niid_cnn", 3, 32, 62_006, [*CONV["niid_cnn"], 400 * 120 + 120, 120 * 84 + 84, 84 * 10 + 10]),
        (
            "vgg9",
            *(3, 32, 3_491_530),
            [*CONV["vgg9"], 256 * 4 * 4 * 512 + 512, 512 * 512 + 512, 512 * 10 + 10],
        ),
    ],
)
def test_parameters_are_those_of_the_paper(name, in_channels, input_size, total, layers):
    network = build_network(name, 10, in_channels, input_size)
    sizes = [
        sum(parameter.numel() for parameter in module.parameters())
        for module in network.modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    ]
    assert sizes == layers
    assert sum(parameter.numel() for parameter in network.parameters()) == total == sum(layers)
    # required by feature methods: the split, and the output layer at the end
    assert list(dict(network.named_children())) == ["features", "classifier"]
    assert network.classifier[-1].out_features == 10


def by_hand(name, weights, x):
    """Each forward pass as in the paper or published code, in evaluation (without dropout)."""
    w = iter(weights)

    def conv(x, padding):
        return F.relu(F.conv2d(x, next(w), next(w), padding=padding))

    def linear(x):
        return F.linear(x, next(w), next(w))

    if name == "mlp":
        return linear(F.relu(linear(x.flatten(1))))
    if name == "mcmahan_cnn":
        x = F.max_pool2d(conv(x, 2), 2)
        x = F.max_pool2d(conv(x, 2), 2)
        return linear(F.relu(linear(x.flatten(1))))
    if name == "fedfusion_cnn":
        x = F.max_pool2d(conv(x, 2), 3, stride=2, padding=1)
        x = F.max_pool2d(conv(x, 2), 3, stride=2, padding=1)
        return linear(F.relu(linear(F.relu(linear(x.flatten(1))))))
    if name == "lenet":
        x = F.max_pool2d(conv(x, 0), 2)
        x = F.max_pool2d(conv(x, 0), 2)
        return linear(linear(x.flatten(1)))
    if name == "niid_cnn":
        x = F.max_pool2d(conv(x, 0), 2)
        x = F.max_pool2d(conv(x, 0), 2)
        return linear(F.relu(linear(F.relu(linear(x.flatten(1))))))
    for _ in range(3):
        x = F.max_pool2d(conv(conv(x, 1), 1), 2)
    return linear(F.relu(linear(F.relu(linear(x.flatten(1))))))


@pytest.mark.parametrize("name", sorted(NETWORKS))
@pytest.mark.parametrize(("in_channels", "input_size", "num_classes"), [(1, 28, 10), (3, 33, 7)])
def test_forward_equals_the_one_written_by_hand(name, in_channels, input_size, num_classes):
    torch.manual_seed(0)
    network = build_network(name, num_classes, in_channels, input_size).eval()
    x = torch.randn(2, in_channels, input_size, input_size)
    expected = by_hand(name, list(network.parameters()), x)
    assert expected.shape == (2, num_classes)
    assert torch.equal(network(x), expected)


@pytest.mark.parametrize(
    ("name", "dropouts"),
    [
        ("mcmahan_cnn", []),
        ("fedfusion_cnn", [(nn.Dropout, 0.2), (nn.Dropout, 0.2)]),
        ("lenet", []),
        ("vgg9", [(nn.Dropout2d, 0.05), (nn.Dropout, 0.1), (nn.Dropout, 0.1)]),
    ],
)
def test_dropout_is_the_papers(name, dropouts):
    network = build_network(name, 10, 3, 32)
    layers = [(type(m), m.p) for m in network.modules() if isinstance(m, nn.Dropout | nn.Dropout2d)]
    assert layers == dropouts


def test_options_of_the_builders():
    network = build_network("mcmahan_cnn", 10, dropout=0.2)
    assert [m.p for m in network.modules() if isinstance(m, nn.Dropout)] == [0.2]
    widths = [m.out_features for m in build_network("mlp", 10, hidden=(32, 16)).modules() if isinstance(m, nn.Linear)]
    assert widths == [32, 16, 10]
    assert build_network("mlp", 3, hidden=())(torch.zeros(1, 1, 28, 28)).shape == (1, 3)
    cast_back = build_network("lenet", 62, channels=(10, 20), hidden=128)
    shapes = [tuple(m.weight.shape[:2]) for m in cast_back.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert shapes == [(10, 1), (20, 10), (128, 320), (62, 128)]
    assert cast_back(torch.zeros(2, 1, 28, 28)).shape == (2, 62)
    cast_back = build_network("vgg9", 10, 3, 32, width=0.25)
    shapes = [tuple(m.weight.shape[:2]) for m in cast_back.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    convolutions = [(8, 3), (16, 8), (32, 16), (32, 32), (64, 32), (64, 64)]
    assert shapes == [*convolutions, (128, 1024), (128, 128), (10, 128)]
    cast_back = build_network("mcmahan_cnn", 10, channels=(8, 16), hidden=64)
    shapes = [tuple(m.weight.shape[:2]) for m in cast_back.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert shapes == [(8, 1), (16, 8), (64, 16 * 49), (10, 64)]
    cast_back = build_network("fedfusion_cnn", 10, 3, 32, channels=(12, 16), hidden=(32, 24))
    shapes = [tuple(m.weight.shape[:2]) for m in cast_back.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert shapes == [(12, 3), (16, 12), (32, 16 * 64), (24, 32), (10, 24)]
    of_mnist = build_network("fedfusion_cnn", 10, 1, 28, channels=(32, 64), kernels=(5, 3), hidden=(512,)).eval()
    sizes = [tuple(m.weight.shape) for m in of_mnist.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert sizes == [(32, 1, 5, 5), (64, 32, 3, 3), (512, 64 * 49), (10, 512)]
    x = torch.rand(2, 1, 28, 28)
    first, second, hidden, output = zip(*[iter(of_mnist.parameters())] * 2, strict=True)
    maps = F.max_pool2d(F.relu(F.conv2d(x, *first, padding=2)), 3, stride=2, padding=1)
    maps = F.max_pool2d(F.relu(F.conv2d(maps, *second, padding=1)), 3, stride=2, padding=1)
    assert torch.equal(of_mnist(x), F.linear(F.relu(F.linear(maps.flatten(1), *hidden)), *output))
    with pytest.raises(TypeError, match="unexpected keyword argument 'depth'"):
        build_network("lenet", 10, depth=3)


def test_fedfusion_starts_xavier_uniform_with_zero_biases():
    torch.manual_seed(0)
    for module in build_network("fedfusion_cnn", 10, 3, 32).modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            area = module.weight[0, 0].numel()
            bound = (6 / (area * (module.weight.shape[0] + module.weight.shape[1]))) ** 0.5
            assert 0.98 * bound < module.weight.abs().max() <= bound
            assert not module.bias.any()


def test_any_timm_model_by_name():
    torch.manual_seed(3)
    network = build_network("resnet18", num_classes=7, in_channels=1, zero_init_last=False)
    torch.manual_seed(3)
    expected = timm.create_model("resnet18", num_classes=7, in_chans=1, zero_init_last=False)
    assert type(network) is type(expected)
    for name, value in expected.state_dict().items():
        assert torch.equal(network.state_dict()[name], value), name
    assert network(torch.zeros(2, 1, 32, 32)).shape == (2, 7)
    assert build_network("mobilenetv3_small_050.lamb_in1k", 4)(torch.zeros(2, 1, 32, 32)).shape == (2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("resnet18x", 10),
            r"one of \['fedfusion_cnn', 'lenet', 'mcmahan_cnn', 'mlp', 'niid_cnn', 'vgg9'\] or a timm model",
        ),
        (("resnet18x", 10), r"timm.list_models\(\).*but got 'resnet18x'"),
        (("mlp", 0), "`num_classes` to be at least 1, but got 0"),
        (("mlp", 10, 0), "`in_channels` to be at least 1, but got 0"),
        (("mlp", 10, 1, 0), "`input_size` to be at least 1, but got 0"),
        (("mcmahan_cnn", 10, 1, 3), "`input_size` to be at least 4 .*but got 3"),
        (("lenet", 10, 1, 15), "`input_size` to be at least 16 .*but got 15"),
        (("vgg9", 10, 1, 7), "`input_size` to be at least 8 .*but got 7"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_network(*arguments)


def test_no_layer_without_channels():
    with pytest.raises(ValueError, match=r"`width`, .*, to be at least 1/32, but got 0\.01"):
        build_network("vgg9", 10, 3, 32, width=0.01)


def test_kaiming_initialisation():
    """Activations keep their scale through nine layers, but shrink with PyTorch's default initialisation."""
    torch.manual_seed(0)
    images = torch.randn(16, 3, 32, 32)
    sizes = {}
    for init in ("default", "kaiming"):
        network = build_network("vgg9", 10, 3, 32, width=0.5, init=init).eval()
        sizes[init] = float(network(images).detach().var(0).mean().sqrt())  # variation between images
        has_biases = any(bool(m.bias.any()) for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear))
        assert has_biases == (init == "default")
    assert sizes["default"] < 0.01
    assert 0.1 < sizes["kaiming"] < 3
    with pytest.raises(ValueError, match=r"`init` to be one of \['default', 'kaiming'\], but got 'he'"):
        build_network("vgg9", 10, 3, 32, init="he")


def test_the_smallest_sizes_named_in_the_refusals_work():
    for name, size in (
        ("mcmahan_cnn", 4),
        ("lenet", 16),
        ("niid_cnn", 16),
        ("vgg9", 8),
        ("fedfusion_cnn", 1),
        ("mlp", 1),
    ):
        assert build_network(name, 10, 1, size)(torch.zeros(2, 1, size, size)).shape == (2, 10)


def test_papers_networks_have_no_pretrained_weights():
    with pytest.raises(ValueError, match="`pretrained` to be False for 'lenet'"):
        build_network("lenet", 10, pretrained=True)
    with pytest.raises(ValueError, match="`hidden` to be at least 1, but got 0"):
        build_network("mlp", 10, hidden=(0,))
    for name in ("lenet", "mcmahan_cnn", "fedfusion_cnn"):
        for channels in ((10,), (10, 0), (1, 2, 3)):
            with pytest.raises(ValueError, match="`channels` to be two widths of at least 1, but got"):
                build_network(name, 10, channels=channels)
        with pytest.raises(ValueError, match="`hidden` to be at least 1, but got 0"):
            build_network(name, 10, hidden=(4, 0) if name == "fedfusion_cnn" else 0)
    for kernels in ((5,), (5, 4), (5, 5, 5)):
        with pytest.raises(ValueError, match="`kernels` to be two odd positive sizes, but got"):
            build_network("fedfusion_cnn", 10, kernels=kernels)
