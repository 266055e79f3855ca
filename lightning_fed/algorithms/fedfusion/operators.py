"""FedFusion's operators F as layers, which fuse a client's features with those of the global model.

Yao, Huang, Wu, Zhang and Sun, "Towards Faster and Better Federated Learning: A Feature Fusion Approach", ICIP 2019. The
equations are in :mod:`lightning_fed.algorithms.fedfusion.equations`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_fed.algorithms.fedfusion.equations import fuse_conv, fuse_multi, fuse_single
from lightning_fed.argument_checks import check_count, check_option

OperatorName = Literal["conv", "multi", "single", "none"]
ConvInit = Literal["default", "local", "average"]


class FusionOperator(nn.Module, ABC):
    """Operator that fuses the features of the client with those of the global model (abstract)."""

    @abstractmethod
    def forward(self, local: Tensor, reference: Tensor) -> Tensor:
        """The fused features, in the shape of ``local``."""

    @abstractmethod
    def summary(self) -> dict[str, float]:
        """Numbers by name that say how far the global features count."""


class MixingOperator(FusionOperator):
    r"""Operator whose weights are the shares of the global features (abstract).

    Attributes:
        weight: The weights :math:`\lambda`.

    """

    weight: nn.Parameter

    @torch.no_grad()
    def summary(self) -> dict[str, float]:
        """``lambda``, the mean of its weights, and ``largest_lambda``, the largest without their signs."""
        return {"lambda": float(self.weight.mean()), "largest_lambda": float(self.weight.abs().max())}

    def extra_repr(self) -> str:
        """Text in the printed module."""
        return f"weights={self.weight.numel()}"


class MultiFusion(MixingOperator):
    r"""A weight for every channel, see :func:`~lightning_fed.algorithms.fedfusion.fuse_multi`.

    The weights start from 0, where the operator is the identity, and have no bounds, as in the paper.

    Args:
        channels: Number of channels :math:`C`.
        channel_axis: The axis of the channels; ``None`` for the second, or of three axes the last.

    Raises:
        ValueError: If a number is out of its range.

    Example:
        >>> operator = MultiFusion(channels=4)
        >>> local, reference = torch.rand(2, 4, 8, 8), torch.rand(2, 4, 8, 8)
        >>> torch.equal(operator(local, reference), local)
        True

    """

    def __init__(self, channels: int, channel_axis: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(check_count("channels", channels)))
        self.channel_axis = channel_axis

    def forward(self, local: Tensor, reference: Tensor) -> Tensor:
        """The fused features, in the shape of ``local``."""
        return fuse_multi(local, reference, self.weight, self.channel_axis)


class SingleFusion(MixingOperator):
    r"""One weight for all channels, see :func:`~lightning_fed.algorithms.fedfusion.fuse_single`; it starts from 0.

    Example:
        >>> SingleFusion()(torch.ones(2, 4), torch.zeros(2, 4)).sum().item()
        8.0

    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, local: Tensor, reference: Tensor) -> Tensor:
        """The fused features, in the shape of ``local``."""
        return fuse_single(local, reference, self.weight)


class ConvFusion(FusionOperator):
    r"""A 1x1 convolution over the channels of both, see :func:`~lightning_fed.algorithms.fedfusion.fuse_conv`.

    Args:
        channels: Number of channels :math:`C`.
        init: Start of the weights: ``"default"`` as those of any convolution of PyTorch, which is what the authors do;
            ``"local"`` as the identity of the client's features; ``"average"`` as the mean of both. In the latter two
            the bias is 0.
        bias: Whether it has a bias, as in the authors' program; the paper shows none.
        channel_axis: The axis of the channels; ``None`` for the second, or of three axes the last.

    Attributes:
        weight: Shape ``(C, 2C)``, the global features' columns first.
        bias: Shape ``(C,)``, or ``None``.

    Raises:
        ValueError: If ``init`` is unknown or there are no channels.

    Example:
        >>> operator = ConvFusion(channels=64)
        >>> sum(parameter.numel() for parameter in operator.parameters())
        8256

    """

    def __init__(
        self, channels: int, init: ConvInit = "default", bias: bool = True, channel_axis: int | None = None
    ) -> None:
        super().__init__()
        check_option("init", init, ConvInit)
        layer = nn.Linear(2 * check_count("channels", channels), channels, bias)  # starts as a 1x1 convolution does
        self.weight = layer.weight
        self.bias = layer.bias
        self.init = init
        self.channel_axis = channel_axis
        if init != "default":
            identity, shares = torch.eye(channels), {"local": (0.0, 1.0), "average": (0.5, 0.5)}[init]
            with torch.no_grad():
                self.weight.copy_(torch.cat([share * identity for share in shares], 1))
                if bias:
                    self.bias.zero_()

    def forward(self, local: Tensor, reference: Tensor) -> Tensor:
        """The fused features, in the shape of ``local``."""
        return fuse_conv(local, reference, self.weight, self.bias, self.channel_axis)

    @torch.no_grad()
    def summary(self) -> dict[str, float]:
        """``global_share``: the share of the global features' columns in the sum of its weights' squares."""
        squares = self.weight.square()
        return {"global_share": float(squares[:, : len(squares)].sum() / squares.sum())}

    def extra_repr(self) -> str:
        """Text in the printed module."""
        return f"channels={len(self.weight)}, init={self.init!r}, bias={self.bias is not None}"


class NoFusion(FusionOperator):
    """The client's features alone: with it FedFusion is federated averaging.

    Example:
        >>> local = torch.rand(2, 4)
        >>> NoFusion()(local, torch.rand(2, 4)) is local
        True

    """

    def forward(self, local: Tensor, reference: Tensor) -> Tensor:
        """``local``."""
        return local

    def summary(self) -> dict[str, float]:
        """No numbers."""
        return {}


def build_operator(
    name: OperatorName,
    channels: int,
    *,
    conv_init: ConvInit = "default",
    conv_bias: bool = True,
    channel_axis: int | None = None,
) -> FusionOperator:
    """An operator by name.

    Args:
        name: ``"conv"``, ``"multi"``, ``"single"`` or ``"none"``.
        channels: Number of channels.
        conv_init: Of "conv", see :class:`ConvFusion`.
        conv_bias: Of "conv", see :class:`ConvFusion`.
        channel_axis: The axis of the channels; ``None`` for the second, or of three axes the last.

    Raises:
        ValueError: If an option is unknown or out of its range.

    Example:
        >>> build_operator("multi", channels=8)
        MultiFusion(weights=8)

    """
    check_option("operator", name, OperatorName)
    if name == "conv":
        return ConvFusion(channels, conv_init, conv_bias, channel_axis)
    if name == "multi":
        return MultiFusion(channels, channel_axis)
    return SingleFusion() if name == "single" else NoFusion()
