"""FedSS's head in place of the last linear layer of any classifier."""

from __future__ import annotations

import torch
from torch import nn

from lightning_fed.algorithms.fedss.head import SampledSoftmaxHead
from lightning_fed.model.features import find_classifier


def to_sampled_softmax(module: nn.Module, scale: float = 20.0, normalize: bool = True) -> nn.Module:
    """Replaces the last linear layer by a `SampledSoftmaxHead`, in place.

    Its weight is the linear layer's own parameter, so it keeps its name in the ``state_dict``, its values, device and
    whether it is trained. With ``normalize=False`` so is its bias, and the model computes what it did; cosine logits
    have none, and what a trained model computed is lost. Hooks on the old layer do not carry over.

    Args:
        module: Any classifier: timm, torchvision or your own.
        scale: Factor of cosine logits.
        normalize: Whether logits are cosines.

    Returns:
        The same module, or the new layer if ``module`` itself is a linear layer.

    Raises:
        ValueError: If ``scale`` does not fit, see `SampledSoftmaxHead`.
        TypeError: If the layer that makes the logits is not linear.

    Example:
        >>> model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 1000))
        >>> to_sampled_softmax(model)[2]
        SampledSoftmaxHead(in_features=64, num_classes=1000, scale=20.0, bias=False)

    """
    path = find_classifier(module)
    linear = None if path is None else module.get_submodule(path)
    if path is None or not isinstance(linear, nn.Linear):
        actual = "none" if linear is None else f"{path!r} ({type(linear).__name__})"
        raise TypeError(f"Expected the layer that makes the logits to be a linear one, but got {actual}.")
    has_bias = linear.bias is not None and not normalize
    with torch.device("meta"):  # its parameters are there already
        head = SampledSoftmaxHead(linear.in_features, linear.out_features, scale, normalize, has_bias)
    for name in ["weight", "bias"] if has_bias else ["weight"]:
        head.register_parameter(name, linear.get_parameter(name))
    head.train(linear.training)
    if path == "":
        return head
    parent, _, name = path.rpartition(".")
    module.get_submodule(parent).register_module(name, head)
    return module
