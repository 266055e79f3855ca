"""The operators F in FedFusion, as layers."""

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
    """Base class of operators that fuse a client's features with the global model's features."""

    @abstractmethod
    def forward(self, local: Tensor, reference: Tensor) -> Tensor:
        """Fuses local features with global features in the same shape."""

    @abstractmethod
    def summary(self) -> dict[str, float]:
        """Returns values to log, such as the mean fusion weight, by name."""


class MixingOperator(FusionOperator):
    """Base class of operators with a weighted mean. ``weight`` is the global features' share."""

    weight: nn.Parameter

    @torch.no_grad()
    def summary(self) -> dict[str, float]:
        """Returns the mean and the largest absolute fusion weight, for the log."""
        return {"lambda": float(self.weight.mean()), "largest_lambda": float(self.weight.abs().max())}

    def extra_repr(self) -> str:
        return f"weights={self.weight.numel()}"


class MultiFusion(MixingOperator):
    """Operator with one weight per channel, see :func:`~lightning_fed.algorithms.fedfusion.fuse_multi`.

    The weights start at 0, so the initial output equals the local features.

    Args:
        channels: Number of channels :math:`C`.
        channel_axis: Channel axis; by default the last axis for features with three axes, and axis 1 otherwise.

    Raises:
        ValueError: If ``channels`` is not a positive number.

    Example:
        >>> torch.equal(MultiFusion(channels=4)(torch.ones(2, 4), torch.zeros(2, 4)), torch.ones(2, 4))
        True
    """

    def __init__(self, channels: int, channel_axis: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(check_count("channels", channels)))
        self.channel_axis = channel_axis

    def forward(self, local: Tensor, reference: Tensor) -> Tensor:
        return fuse_multi(local, reference, self.weight, self.channel_axis)


class SingleFusion(MixingOperator):
    """Operator with one weight for all channels, see :func:`~lightning_fed.algorithms.fedfusion.fuse_single`.

    Example:
        >>> SingleFusion()(torch.ones(2, 4), torch.zeros(2, 4)).sum().item()
        8.0
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, local: Tensor, reference: Tensor) -> Tensor:
        return fuse_single(local, reference, self.weight)


class ConvFusion(FusionOperator):
    """A 1x1 convolution over the concatenated channels, see :func:`~lightning_fed.algorithms.fedfusion.fuse_conv`.

    Args:
        channels: Number of channels :math:`C`.
        init: Initial weights: ``"default"`` as in PyTorch's convolutions, ``"local"`` to return the local features, or
            ``"average"`` to return the mean over local and global features.
        bias: Whether to add a bias, as in the authors' program; the paper has no bias.
        channel_axis: Channel axis; by default the last axis for features with three axes, and axis 1 otherwise.

    Raises:
        ValueError: If ``init`` is unknown or ``channels`` is not positive.

    Example:
        >>> sum(parameter.numel() for parameter in ConvFusion(channels=64).parameters())
        8256
    """

    def __init__(
        self, channels: int, init: ConvInit = "default", bias: bool = True, channel_axis: int | None = None
    ) -> None:
        super().__init__()
        check_option("init", init, ConvInit)
        layer = nn.Linear(2 * check_count("channels", channels), channels, bias)  # initialised like a 1x1 convolution
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
        return fuse_conv(local, reference, self.weight, self.bias, self.channel_axis)

    @torch.no_grad()
    def summary(self) -> dict[str, float]:
        """Returns ``global_share``, to log: the global features' fraction of the sum of squared weights."""
        squares = self.weight.square()
        return {"global_share": float(squares[:, : len(squares)].sum() / squares.sum())}

    def extra_repr(self) -> str:
        return f"channels={len(self.weight)}, init={self.init!r}, bias={self.bias is not None}"


class NoFusion(FusionOperator):
    """Returns the local features unchanged, so FedFusion equals federated averaging.

    Example:
        >>> local = torch.rand(2, 4)
        >>> NoFusion()(local, torch.rand(2, 4)) is local
        True
    """

    def forward(self, local: Tensor, reference: Tensor) -> Tensor:
        return local

    def summary(self) -> dict[str, float]:
        return {}


def build_operator(
    name: OperatorName,
    channels: int,
    *,
    conv_init: ConvInit = "default",
    conv_bias: bool = True,
    channel_axis: int | None = None,
) -> FusionOperator:
    """Builds a fusion operator by name.

    Args:
        name: ``"conv"``, ``"multi"``, ``"single"`` or ``"none"``.
        channels: Number of channels.
        conv_init: For "conv", see :class:`ConvFusion`.
        conv_bias: For "conv": whether to add a bias.
        channel_axis: Channel axis; by default the last axis for features with three axes, and axis 1 otherwise.

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
