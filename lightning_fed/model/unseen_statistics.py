r"""BatchNorm for data of no known client, where every client has running statistics of its own.

With local statistics (SiloBN) the global model has shared weights and no statistics that go with them. Data of a
client that is not known are normalised with their own batch's statistics, as domain adaptation by BatchNorm does
(AdaBN).

References:
    Andreux et al., "Siloed Federated Learning for Multi-Centric Histopathology Datasets", DART 2020.
    Li et al., "Adaptive Batch Normalization for practical domain adaptation", Pattern Recognition 80, 2018.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from lightning_fed.model.batch_norm import batch_norm_layers
from lightning_fed.model.features import without_compiled_code


class UnseenStatistics:
    """Makes BatchNorm layers in evaluation mode normalise with the batch's statistics instead of their running ones.

    These are the mean and the biased variance of the batch, layer by layer, as in training. Predictions then depend on
    the batch: use batches of one source, and not of a few examples. A layer with a single value per channel (global
    pooling of one image) has nothing to measure, and gives its bias.

    Layers in training mode, and those without running statistics, are left alone. Nothing is written into the module.
    Compiled models run eagerly meanwhile, because code that was compiled before does not call new hooks.

    Args:
        module: The module. Hooks are on it until :meth:`remove`, or the end of a ``with`` block.
        layers: Names of the BatchNorm layers; ``None`` for all.

    Attributes:
        is_active: Whether the layers are changed; otherwise they use their running statistics.
        names: Names of the layers.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm1d(1)).eval()
        >>> batch = torch.tensor([[3.0], [5.0]])
        >>> with UnseenStatistics(net):
        ...     net(batch).squeeze().tolist()
        [-0.9999949932098389, 0.9999949932098389]

    """

    def __init__(self, module: nn.Module, layers: Iterable[str] | None = None) -> None:
        known = batch_norm_layers(module)
        names = list(known if layers is None else layers)
        self.is_active, self.names = True, names
        self._handles = [known[name].register_forward_pre_hook(partial(self._adapt, name)) for name in names]
        self._eager = ExitStack()
        self._eager.enter_context(without_compiled_code())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Takes the hooks off the module."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._eager.close()

    @torch.no_grad()
    def _adapt(self, name: str, layer: nn.BatchNorm2d, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Inputs that the layer's running statistics normalise as the chosen ones would have."""
        if not self.is_active or layer.training:
            return None
        x = inputs[0]
        values = x.float().flatten(2) if x.ndim > 2 else x.float().unsqueeze(2)
        mean, variance = self.statistics(name, layer, values)
        scale = ((layer.get_buffer("running_var") + layer.eps) / (variance + layer.eps)).sqrt()
        adapted = (values - mean.unsqueeze(-1)) * scale.unsqueeze(-1) + layer.get_buffer("running_mean").unsqueeze(-1)
        return adapted.reshape(x.shape).to(x.dtype), *inputs[1:]

    def statistics(self, name: str, layer: nn.BatchNorm2d, values: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance per channel that normalise a layer's inputs; subclasses may take others.

        Args:
            name: The layer's name.
            layer: The layer.
            values: Its inputs, shape ``(N, C, positions)``.

        Returns:
            Two tensors of shape ``(1, C)`` or ``(N, C)``.

        """
        return values.mean((0, 2)).unsqueeze(0), values.var((0, 2), correction=0).unsqueeze(0)
