"""Replaces the last linear layer of any classifier by FedSS's ``SampledSoftmaxHead``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_fed.algorithms.fedss.head import SampledSoftmaxHead
from lightning_fed.algorithms.fedss.losses import MarginOf
from lightning_fed.features.layers import find_classifier, replace_layer


class MarginLoss(nn.Module):
    """ArcFace or CosFace loss computed by a `SampledSoftmaxHead`, with ``pytorch-metric-learning``'s interface."""

    def __init__(self, head: SampledSoftmaxHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return self.head.loss(embeddings, labels)


def to_sampled_softmax(module: nn.Module, scale: float = 20.0, normalize: bool = True) -> nn.Module:
    """Replaces a classifier's last linear layer by a `SampledSoftmaxHead`, in place.

    The new layer uses the linear layer's weight. Hooks on the linear layer are lost. An ``ArcFaceLoss`` or
    ``CosFaceLoss`` from ``pytorch-metric-learning`` is replaced instead, by a ``MarginLoss`` with the same weight.

    Args:
        module: Any classifier. For a linear layer the result is the new layer.
        scale: Factor for cosine logits.
        normalize: Whether to compute cosine logits without a bias. With false, the model's output does not change.

    Raises:
        TypeError: If the layer that computes the logits is not linear.

    Example:
        >>> model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 1000))
        >>> to_sampled_softmax(model)[2]
        SampledSoftmaxHead(in_features=64, num_classes=1000, scale=20.0, bias=False)
    """
    margin_losses = [name for name, layer in module.named_modules() if _is_margin_loss(layer)]
    if margin_losses:
        return replace_layer(module, margin_losses[-1], _convert_loss(module.get_submodule(margin_losses[-1])))
    path = find_classifier(module)
    linear = None if path is None else module.get_submodule(path)
    if path is None or not isinstance(linear, nn.Linear):
        actual = "none" if linear is None else f"{path!r} ({type(linear).__name__})"
        raise TypeError(f"Expected the layer that computes the logits to be linear, but got {actual}.")
    has_bias = linear.bias is not None and not normalize
    with torch.device("meta"):  # the parameters already exist
        head = SampledSoftmaxHead(linear.in_features, linear.out_features, scale, normalize, has_bias)
    for name in ["weight", "bias"] if has_bias else ["weight"]:
        head.register_parameter(name, linear.get_parameter(name))
    head.train(linear.training)
    return replace_layer(module, path, head)


def _is_margin_loss(layer: nn.Module) -> bool:
    # Matched by name, because the package may not be installed.
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(layer).__mro__}
    return bool(kinds & {("pytorch_metric_learning", "ArcFaceLoss"), ("pytorch_metric_learning", "CosFaceLoss")})


def _convert_loss(loss: Any) -> MarginLoss:
    in_features, num_classes = loss.W.shape
    is_arcface = any(kind.__name__ == "ArcFaceLoss" for kind in type(loss).__mro__)
    margin, scale = float(loss.margin), float(loss.scale)
    with torch.device("meta"):
        kind: MarginOf = "angle" if is_arcface else "cosine"
        head = SampledSoftmaxHead(in_features, num_classes, scale, margin=margin, margin_of=kind)
    head.weight = nn.Parameter(loss.W.detach().t().contiguous(), loss.W.requires_grad)
    return MarginLoss(head).train(loss.training)
