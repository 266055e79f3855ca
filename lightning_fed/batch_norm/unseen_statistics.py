"""BatchNorm with batch statistics for data from unknown clients, as in domain adaptation (AdaBN).

Andreux et al., "Siloed Federated Learning for Multi-Centric Histopathology Datasets", DART 2020 (SiloBN).
Li et al., "Adaptive Batch Normalization for practical domain adaptation", Pattern Recognition 80, 2018.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from lightning_fed.features.layers import without_compiled_code
from lightning_fed.model.entries import batch_norm_layers


class UnseenStatistics:
    """Makes BatchNorm layers in evaluation mode normalise with batch statistics.

    Each layer uses the batch's mean and biased variance, as in training. Predictions depend on the batch, so use
    batches with many examples from one source. Layers in training mode or without running statistics are unchanged.

    Args:
        module: The module, changed until :meth:`remove` or the end of a ``with`` block. Compiled models run eagerly.
        layers: Names of BatchNorm layers; by default all BatchNorm layers.

    Attributes:
        is_active: Whether to use batch statistics instead of running statistics.
        names: Names of the layers.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm1d(1)).eval()
        >>> with UnseenStatistics(net):
        ...     net(torch.tensor([[3.0], [5.0]])).squeeze().tolist()
        [-0.9999949932098389, 0.9999949932098389]
    """

    def __init__(self, module: nn.Module, layers: Iterable[str] | None = None) -> None:
        all_layers = batch_norm_layers(module)
        names = list(all_layers if layers is None else layers)
        self.is_active, self.names = True, names
        self._handles = [all_layers[name].register_forward_pre_hook(partial(self._adapt, name)) for name in names]
        self._eager = ExitStack()
        self._eager.enter_context(without_compiled_code())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.remove()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._eager.close()

    @torch.no_grad()
    def _adapt(self, name: str, layer: nn.BatchNorm2d, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self.is_active or layer.training:
            return None
        x = inputs[0]
        values = x.float().flatten(2) if x.ndim > 2 else x.float().unsqueeze(2)
        mean, variance = self.statistics(name, layer, values)
        # The layer applies running statistics afterwards, so the inputs are transformed to cancel these.
        scale = ((layer.get_buffer("running_var") + layer.eps) / (variance + layer.eps)).sqrt()
        adapted = (values - mean.unsqueeze(-1)) * scale.unsqueeze(-1) + layer.get_buffer("running_mean").unsqueeze(-1)
        return adapted.reshape(x.shape).to(x.dtype), *inputs[1:]

    def statistics(self, name: str, layer: nn.BatchNorm2d, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and biased variance of each channel of ``values``, for the normalisation.

        ``values`` are the layer's inputs, shape ``(N, C, positions)``. The results have shape ``(1, C)``. A subclass
        may return other statistics, also with shape ``(N, C)`` for separate statistics per example.
        """
        return values.mean((0, 2)).unsqueeze(0), values.var((0, 2), correction=0).unsqueeze(0)
