"""Builds networks by name: the networks of the papers, and every `timm` model.

Each builder returns ``Sequential(features=..., classifier=...)``. ``features`` is the feature extractor, which outputs
feature maps in convolutional networks. ``classifier`` flattens the features and ends with the output layer,
``classifier[-1]``. McMahan et al., AISTATS 2017; Yao et al., ICIP 2019 (FedFusion); Wang et al., ICLR 2020 (FedMA:
LeNet and VGG-9); Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022 (NIID-Bench).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor, nn

from lightning_fed.argument_checks import check_count, check_option

__all__ = ["NETWORKS", "build_network", "fedfusion_cnn", "lenet", "mcmahan_cnn", "mlp", "niid_cnn", "vgg9"]


def build_network(
    name: str,
    num_classes: int,
    in_channels: int = 1,
    input_size: int = 28,
    *,
    pretrained: bool = False,
    **kwargs: Any,
) -> nn.Module:
    """Builds a classification network by name, from images to logits, shape ``(N, num_classes)``.

    Args:
        name: Name in `NETWORKS` (``mlp``, ``mcmahan_cnn``, ``fedfusion_cnn``, ``lenet``, ``niid_cnn``, ``vgg9``), or
            any `timm` model, such as ``resnet18.a1_in1k`` or ``hf-hub:...``.
        num_classes: Number of classes.
        in_channels: Number of image channels.
        input_size: Side of the square images, in pixels. `timm` models ignore this argument; some accept ``img_size``.
        pretrained: Whether to load `timm`'s published weights (a download).
        **kwargs: Arguments for the builder, or for the `timm` model.

    Raises:
        ValueError: If the name is unknown, a size is too small for the network, or no published weights exist.

    Example:
        >>> network = build_network("mcmahan_cnn", num_classes=10)
        >>> sum(parameter.numel() for parameter in network.parameters())
        1663370
    """
    for argument, value in (("num_classes", num_classes), ("in_channels", in_channels), ("input_size", input_size)):
        check_count(argument, value)
    if name in NETWORKS:
        if pretrained:
            raise ValueError(f"Expected `pretrained` to be False for '{name}', which has no published weights.")
        return NETWORKS[name](num_classes, in_channels, input_size, **kwargs)

    import timm  # importing takes half a second, and is needed only here

    # a name with a source ("hf-hub:...") is not in timm's list
    if ":" not in name and not timm.is_model(name):
        raise ValueError(
            f"Expected `name` to be one of {sorted(NETWORKS)} or a timm model (`timm.list_models()` lists them), "
            f"but got '{name}'."
        )
    network: nn.Module = timm.create_model(
        name, pretrained=pretrained, num_classes=num_classes, in_chans=in_channels, **kwargs
    )
    return network


def mlp(
    num_classes: int = 10, in_channels: int = 1, input_size: int = 28, *, hidden: Sequence[int] = (64,)
) -> nn.Sequential:
    """Fully connected network with ReLU and one linear layer for each width in ``hidden``.

    By default 50,890 parameters (784-64-10). ``hidden=()`` gives softmax regression.
    """
    layers = _dense(in_channels * input_size**2, hidden, num_classes)
    return _network(layers[:-1], layers[-1:])


def mcmahan_cnn(
    num_classes: int = 10,
    in_channels: int = 1,
    input_size: int = 28,
    *,
    dropout: float = 0.0,
    channels: Sequence[int] = (32, 64),
    hidden: int = 512,
) -> nn.Sequential:
    """McMahan et al.'s CNN: two 5x5 convolutions (32, 64), each with ReLU and 2x2 max-pooling, then 512 units.

    Padding 2 gives the paper's 1,663,370 parameters for 28x28 grey images and 10 classes. Images need at least 4 pixels
    per side. FedFusion's version has dropout 0.2 after the hidden layer.
    """
    side = _at_least_one(input_size // 2 // 2, input_size, 4)
    features = _convolutions(in_channels, channels, True)
    return _network(features, _dense(channels[1] * side**2, [hidden], num_classes, dropout))


def fedfusion_cnn(
    num_classes: int = 10,
    in_channels: int = 3,
    input_size: int = 32,
    *,
    dropout: float = 0.2,
    channels: Sequence[int] = (64, 64),
    kernels: Sequence[int] = (5, 5),
    hidden: Sequence[int] = (384, 192),
) -> nn.Sequential:
    """CNN of FedFusion's authors: two padded convolutions with overlapping pools, then layers with dropout.

    1,756,426 parameters for CIFAR-10. The authors' program for MNIST has ``channels=(32, 64)``, ``kernels=(5, 3)`` and
    ``hidden=(512,)``: 1,630,602 parameters for 28x28 grey images and 10 classes. The 3x3 max-pools have stride 2 and
    padding 1. Initial weights are Xavier-uniform, and initial biases are zero.
    """
    if min(kernels) < 1 or [kernel % 2 for kernel in kernels] != [1, 1]:
        raise ValueError(f"Expected `kernels` to be two odd positive sizes, but got {list(kernels)}.")
    side = (input_size + 3) // 4  # the padded pooling layers halve the size and round up
    features = _convolutions(in_channels, channels, True, kernels, (3, 2, 1))
    network = _network(features, _dense(channels[1] * side**2, hidden, num_classes, dropout))
    return _initialize(network, nn.init.xavier_uniform_)


def lenet(
    num_classes: int = 10,
    in_channels: int = 1,
    input_size: int = 28,
    *,
    channels: Sequence[int] = (20, 50),
    hidden: int = 500,
) -> nn.Sequential:
    """FedMA's LeNet: 5x5 convolutions (20, 50) without padding, each with 2x2 max-pooling, then 500 units.

    431,080 parameters for 28x28 grey images and 10 classes. Images need at least 16 pixels per side. No activation
    separates the linear layers.
    """
    side = _at_least_one(((input_size - 4) // 2 - 4) // 2, input_size, 16)
    check_count("hidden", hidden)
    _check_channels(channels)
    classifier = [nn.Flatten(), nn.Linear(channels[1] * side**2, hidden), nn.Linear(hidden, num_classes)]
    return _network(_convolutions(in_channels, channels), classifier)


def niid_cnn(
    num_classes: int = 10,
    in_channels: int = 3,
    input_size: int = 32,
    *,
    channels: Sequence[int] = (6, 16),
    hidden: Sequence[int] = (120, 84),
) -> nn.Sequential:
    """NIID-Bench's CNN: 5x5 convolutions (6, 16) without padding, each with ReLU and 2x2 max-pooling.

    Linear layers with 120 and 84 units follow. 62,006 parameters for 32x32 colour images and 10 classes. Images need at
    least 16 pixels per side. PFLlib's CNN has 32 and 64 channels and one layer with 512 units.
    """
    side = _at_least_one(((input_size - 4) // 2 - 4) // 2, input_size, 16)
    return _network(_convolutions(in_channels, channels), _dense(channels[1] * side**2, hidden, num_classes))


def vgg9(
    num_classes: int = 10,
    in_channels: int = 3,
    input_size: int = 32,
    *,
    width: float = 1.0,
    init: Literal["default", "kaiming"] = "default",
) -> nn.Sequential:
    """FedMA's VGG-9: six 3x3 convolutions and three linear layers, without normalisation layers.

    The convolutions have 32, 64, 128, 128, 256 and 256 channels, with max-pooling after each pair. Both hidden layers
    have 512 units. 3,491,530 parameters for 32x32 colour images and 10 classes. Images need at least 8 pixels per side.
    Dropout has the rate 0.05 after the second pool (whole channels), and 0.1 before the first and last linear layer.
    ``width`` scales channels and units. ``init="kaiming"`` draws He et al.'s normal weights, with zero biases.
    """
    check_option("init", init, ("default", "kaiming"))
    side = _at_least_one(input_size // 2 // 2 // 2, input_size, 8)
    a, b, c, d, hidden = (int(width * channels) for channels in (32, 64, 128, 256, 512))
    if a < 1:
        raise ValueError(
            f"Expected `width`, a factor for the numbers of channels, to be at least 1/32, but got {width}."
        )
    features = [
        *(nn.Conv2d(in_channels, a, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(b, c, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(c, c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.05)),
        *(nn.Conv2d(c, d, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(d, d, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    ]
    classifier = [
        *(nn.Flatten(), nn.Dropout(0.1)),
        *(nn.Linear(d * side**2, hidden), nn.ReLU()),
        *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.1)),
        nn.Linear(hidden, num_classes),
    ]
    network = _network(features, classifier)
    return network if init == "default" else _initialize(network, partial(nn.init.kaiming_normal_, nonlinearity="relu"))


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "fedfusion_cnn": fedfusion_cnn,
    "lenet": lenet,
    "mcmahan_cnn": mcmahan_cnn,
    "mlp": mlp,
    "niid_cnn": niid_cnn,
    "vgg9": vgg9,
}
"""The papers' networks: name and builder ``(num_classes, in_channels, input_size, **kwargs)``."""


def _network(features: Sequence[nn.Module], classifier: Sequence[nn.Module]) -> nn.Sequential:
    parts = {"features": nn.Sequential(*features), "classifier": nn.Sequential(*classifier)}
    return nn.Sequential(OrderedDict[str, nn.Module](parts))


def _initialize(network: nn.Sequential, draw: Callable[[Tensor], Tensor]) -> nn.Sequential:
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            draw(layer.weight)
            nn.init.zeros_(layer.get_parameter("bias"))
    return network


def _convolutions(
    inputs: int,
    channels: Sequence[int],
    padded: bool = False,
    kernels: Sequence[int] = (5, 5),
    pool: tuple[int, int, int] = (2, 2, 0),
) -> list[nn.Module]:
    _check_channels(channels)
    return [
        layer
        for (width, outputs), kernel in zip(pairwise([inputs, *channels]), kernels, strict=True)
        for layer in (
            nn.Conv2d(width, outputs, kernel, padding=padded * (kernel // 2)),
            nn.ReLU(),
            nn.MaxPool2d(*pool),
        )
    ]


def _check_channels(channels: Sequence[int]) -> None:
    if len(channels) != 2 or min(channels) < 1:
        raise ValueError(f"Expected `channels` to be two widths of at least 1, but got {list(channels)}.")


def _dense(width: int, hidden: Sequence[int], num_classes: int, dropout: float = 0.0) -> list[nn.Module]:
    if min(hidden, default=1) < 1:
        raise ValueError(f"Expected `hidden` to be at least 1, but got {min(hidden)}.")
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise([width, *hidden]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(), *([nn.Dropout(dropout)] if dropout > 0 else [])]
    return [*layers, nn.Linear([width, *hidden][-1], num_classes)]


def _at_least_one(side: int, input_size: int, minimum: int) -> int:
    if side < 1:
        raise ValueError(f"Expected `input_size` to be at least {minimum} for this network, but got {input_size}.")
    return side
