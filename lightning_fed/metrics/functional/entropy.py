"""Entropy of class probabilities and of feature channels, for each pixel.

Shannon, "A Mathematical Theory of Communication", 1948, as used in FedMargin. Logarithms are natural, and 0 ln 0 is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fed.argument_checks import check_option
from lightning_fed.numerics.chunks import chunk_steps
from lightning_fed.numerics.precision import at_least_float32

Activation = Literal["relu", "abs", "softmax"]


def shannon_entropy(probabilities: Tensor, dim: int = -1, *, normalize: bool = False) -> Tensor:
    r"""Computes the Shannon entropy of probabilities along one dimension.

    .. math:: H = -\sum_c p_c \ln p_c

    Args:
        probabilities: Probabilities :math:`p_c` of the outcomes c, with sum 1 along ``dim``.
        dim: Dimension of the outcomes.
        normalize: Whether to divide by the logarithm of the number of outcomes, so that the result is in 0 to 1.

    Example:
        >>> shannon_entropy(torch.tensor([[0.7, 0.2, 0.1], [1.0, 0.0, 0.0]]))
        tensor([0.8018, 0.0000])
    """
    value: Tensor = torch.special.entr(at_least_float32(probabilities)).sum(dim)
    return value / max(math.log(probabilities.shape[dim]), torch.finfo(value.dtype).tiny) if normalize else value


def softmax_entropy(logits: Tensor, *, normalize: bool = False) -> Tensor:
    r"""Computes the entropy of the class probabilities :math:`\pi_c(u)` at every pixel u, shape ``(N, *size)``.

    .. math:: H(u) = -\sum_c \pi_c(u) \ln \pi_c(u), \qquad \pi(u) = \mathrm{softmax}(\text{logits at } u)

    Args:
        logits: Logits, shape ``(N, C, *size)``; ``size`` may be empty.
        normalize: Whether to divide by :math:`\ln C`.

    Raises:
        ValueError: If there are fewer than two classes.

    Example:
        >>> softmax_entropy(torch.tensor([[0.7, 0.2, 0.1]]).log(), normalize=True)
        tensor([0.7298])
    """
    _check_channels("logits", logits)
    return _by_pieces(logits, lambda piece: shannon_entropy(piece.softmax(1), 1, normalize=normalize))


def feature_entropy(
    features: Tensor, *, activation: Activation = "relu", normalize: bool = False, size: Sequence[int] | None = None
) -> Tensor:
    r"""Computes the entropy over feature channels at every pixel, shape ``(N, *size)``.

    Here :math:`q_c(u)` is the share of channel c in the sum of all features :math:`f` at pixel u. Many active channels
    give a high entropy.

    .. math:: H_f(u) = -\sum_c q_c(u) \ln q_c(u), \qquad q_c(u) = \frac{f_c(u)}{\sum_{c'} f_{c'}(u)}

    If all :math:`d` features of a pixel are 0 after the activation, the entropy is :math:`\ln d`.

    Args:
        features: Features, shape ``(N, d, *size)``; ``size`` may be empty.
        activation: Function that makes features non-negative.
        normalize: Whether to divide by :math:`\ln d`.
        size: Height and width for bilinear resizing of the entropies, for features with shape ``(N, d, H, W)``.

    Raises:
        ValueError: If ``activation`` is unknown, or the features have an invalid shape.

    Example:
        >>> feature_entropy(torch.tensor([[2.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]), normalize=True)
        tensor([0.7500, 1.0000])
    """
    check_option("activation", activation, Activation)
    _check_channels("features", features)
    if size is not None and (features.ndim != 4 or len(size) != 2):
        raise ValueError(
            "Expected `features` of shape (N, d, H, W) and `size` to be a height and a width, but got "
            f"{tuple(features.shape)} and {tuple(size)}."
        )
    maps = _by_pieces(features, lambda piece: shannon_entropy(_shares(piece, activation), 1, normalize=normalize))
    if size is None:
        return maps
    return F.interpolate(maps.unsqueeze(1), tuple(size), mode="bilinear", align_corners=False).squeeze(1)


def _shares(features: Tensor, activation: Activation) -> Tensor:
    if activation == "softmax":
        return features.softmax(1)
    values = features.relu() if activation == "relu" else features.abs()
    total = values.sum(1, keepdim=True)
    return torch.where(total == 0, 1 / features.shape[1], values / total.where(total != 0, 1.0))


# Chunks of pixels limit memory.
def _by_pieces(values: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    flat = values.flatten(2) if values.ndim > 2 else values.unsqueeze(2)
    images, pixels = chunk_steps(*flat.shape)
    rows = [
        torch.cat([function(at_least_float32(piece)) for piece in torch.split(some, pixels, 2)], 1)
        for some in torch.split(flat, images)
    ]
    return torch.cat(rows).reshape(values.shape[:1] + values.shape[2:])


def _check_channels(name: str, values: Tensor) -> None:
    if values.ndim < 2 or values.shape[1] < 2:
        raise ValueError(
            f"Expected `{name}` of shape (N, C, *size) with C of at least 2, but got {tuple(values.shape)}. For a "
            "single class with logit l, pass the two logits 0 and l."
        )
