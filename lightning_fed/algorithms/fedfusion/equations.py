"""FedFusion's equations for fusing a client's features with the global model's features.

Yao, Huang, Wu, Zhang and Sun, "Towards Faster and Better Federated Learning: A Feature Fusion Approach", ICIP 2019,
equations 1 to 3; longer version: https://arxiv.org/abs/1908.05891, authors' program:
https://github.com/thu-media/FedFusion. :math:`E_l(x)` are the client's features, :math:`E_g(x)` the broadcast model's.

Features are maps ``(N, C, *size)``, vectors ``(N, C)`` or token sequences ``(N, T, C)``. By default the number of axes
determines the channel axis. Pass ``channel_axis=-1`` for maps ``(N, H, W, C)``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fed.numerics.precision import at_least_float32, cast_back, to_float64


def fuse_multi(local: Tensor, reference: Tensor, weight: Tensor, channel_axis: int | None = None) -> Tensor:
    r"""Fuses features with one weight per channel (eq. 2).

    .. math:: F(x) = \lambda \odot E_g(x) + (1 - \lambda) \odot E_l(x), \qquad \lambda \in \mathbb{R}^C

    Args:
        local: The client's features :math:`E_l(x)`.
        reference: The global model's features :math:`E_g(x)`, in the same shape.
        weight: The weights :math:`\lambda`, shape ``(C,)`` for ``C`` channels.
        channel_axis: Channel axis; by default the last axis for features with three axes, and axis 1 otherwise.

    Raises:
        ValueError: If shapes do not match.

    Example:
        >>> local, reference = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]])
        >>> fuse_multi(local, reference, torch.tensor([0.25, 0.5]))
        tensor([[1.5000, 0.5000]])
    """
    axis = _check_shapes(local, reference, channel_axis)
    if weight.shape != local.shape[axis : axis + 1]:
        raise ValueError(
            f"Expected `weight` to have a number for each of {local.shape[axis]} channels, but got shape"
            f" {tuple(weight.shape)}."
        )
    return _interpolate(local, reference, weight.reshape(-1, *[1] * (local.ndim - 1 - axis)))


def fuse_single(local: Tensor, reference: Tensor, weight: Tensor) -> Tensor:
    r"""Fuses features with one weight for all channels (eq. 3).

    .. math:: F(x) = \lambda E_g(x) + (1 - \lambda) E_l(x), \qquad \lambda \in \mathbb{R}

    Args:
        local: The client's features :math:`E_l(x)`.
        reference: The global model's features :math:`E_g(x)`, in the same shape.
        weight: The weight :math:`\lambda`, shape ``()``.

    Raises:
        ValueError: If shapes do not match.

    Example:
        >>> local, reference = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]])
        >>> fuse_single(local, reference, torch.tensor(0.25))
        tensor([[1.5000, 1.2500]])
    """
    _check_shapes(local, reference, None)
    if weight.ndim:
        raise ValueError(f"Expected `weight` to be one number, but got shape {tuple(weight.shape)}.")
    return _interpolate(local, reference, weight)


def fuse_conv(
    local: Tensor,
    reference: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    channel_axis: int | None = None,
) -> Tensor:
    r"""Fuses features with a 1x1 convolution over the concatenated channels (eq. 1).

    .. math:: F(x) = W \, (E_g(x) \,\Vert\, E_l(x)) + b, \qquad W \in \mathbb{R}^{C \times 2C}

    The operator :math:`\Vert` concatenates channels. For vectors and tokens the convolution is a linear layer.

    Args:
        local: The client's features :math:`E_l(x)`.
        reference: The global model's features :math:`E_g(x)`, in the same shape.
        weight: The weights :math:`W`, shape ``(C, 2C)`` for ``C`` channels.
        bias: The bias :math:`b`, shape ``(C,)``, or ``None``.
        channel_axis: Channel axis; by default the last axis for features with three axes, and axis 1 otherwise.

    Raises:
        ValueError: If shapes do not match.

    Example:
        >>> local, reference = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]])
        >>> fuse_conv(local, reference, torch.tensor([[1.0, 0.0, 0.5, 0.0], [0.0, 2.0, 0.0, -1.0]]))
        tensor([[ 3.5000, -4.0000]])
    """
    axis = _check_shapes(local, reference, channel_axis)
    channels = local.shape[axis]
    if weight.shape != (channels, 2 * channels):
        raise ValueError(
            f"Expected `weight` to have shape {(channels, 2 * channels)} for {channels} channels, but got"
            f" {tuple(weight.shape)}."
        )
    both = torch.cat([reference.to(local.dtype), local], axis)
    if axis == 1 and local.ndim == 4:
        return F.conv2d(both, weight[:, :, None, None], bias)  # preserves the memory layout of maps in gradients
    return F.linear(both.movedim(axis, -1), weight, bias).movedim(-1, axis)


@torch.no_grad()
def smooth_weight(weight: Tensor, previous: Tensor, ema: float) -> Tensor:
    r"""Computes a moving average of fusion weights over rounds.

    .. math:: \lambda_{r+1} = (1 - \mu) \bar\lambda_{r+1} + \mu \lambda_r

    Here :math:`r` counts rounds. The formula and :math:`\mu = 0.9` come from the authors' program.

    Args:
        weight: The clients' mean weights :math:`\bar\lambda_{r+1}`, any shape.
        previous: The previous weights :math:`\lambda_r`, in the same shape, initially 0.
        ema: Share :math:`\mu` of the previous weights, in [0, 1).

    Example:
        >>> smooth_weight(torch.tensor(0.3), torch.tensor(0.02), ema=0.9)
        tensor(0.0480)
    """
    if not ema:
        return weight
    return cast_back((1 - ema) * to_float64(weight) + ema * to_float64(previous), weight)


def channel_axis_of(features: Tensor, channel_axis: int | None = None) -> int:
    """Returns the channel axis, at least 1. The default is axis 2 if features have three axes, and axis 1 otherwise."""
    if channel_axis is None:
        channel_axis = -1 if features.ndim == 3 else 1
    if features.ndim < 2 or channel_axis not in (*range(1, features.ndim), *range(1 - features.ndim, 0)):
        raise ValueError(
            f"Expected features with examples on the first axis and channels on axis {channel_axis}, but got shape"
            f" {tuple(features.shape)}."
        )
    return channel_axis % features.ndim


def _check_shapes(local: Tensor, reference: Tensor, channel_axis: int | None) -> int:
    if local.shape != reference.shape:
        raise ValueError(
            f"Expected `reference` to have the shape of `local`, {tuple(local.shape)}, but got"
            f" {tuple(reference.shape)}."
        )
    return channel_axis_of(local, channel_axis)


def _interpolate(local: Tensor, reference: Tensor, weight: Tensor) -> Tensor:
    start = at_least_float32(local)
    return torch.lerp(start, reference.to(start.dtype), weight.to(start.dtype)).to(local.dtype)
