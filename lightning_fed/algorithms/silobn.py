"""Federated averaging for all entries except BatchNorm's running statistics.

Andreux, Ogier du Terrail, Beguier & Tramel, "Siloed Federated Learning for Multi-Centric Histopathology Datasets",
DART at MICCAI 2020. https://arxiv.org/abs/2008.07424
"""

from __future__ import annotations

from typing import Literal

from lightning_fed.fit.options import LocalStatistics
from lightning_fed.method import Method, register
from lightning_fed.rule import Aggregator


@register
class SiloBN(Method):
    """Averages the model except BatchNorm's running statistics, which stay on the clients.

    BatchNorm weights and biases are averaged. Each client normalises with the mean and variance of the local data.
    Reference: Andreux et al., DART 2020.

    - Sends: the model without BatchNorm's running statistics, both ways.
    - Keeps: running statistics per client.
    - Costs: no additional computation.
    - For: clients with different input statistics that can share all weights.

    Args:
        unseen: Normalisation for clients without statistics, see :class:`~lightning_fed.LocalStatistics`.
        aggregator: Federated method for the shared tensors, by name or as an object.

    Raises:
        ValueError: In ``fit``, if the model has no BatchNorm.

    Example:
        >>> from lightning_fed import Federation
        >>> Federation(SiloBN()).options.batch_norm
        LocalStatistics(unseen='batch', measured='visit')
    """

    def __init__(
        self,
        unseen: Literal["batch", "data", "pooled"] = "batch",
        aggregator: str | Method | Aggregator = "fedavg",
    ) -> None:
        super().__init__(aggregator, batch_norm=LocalStatistics(unseen, measured="visit"))
