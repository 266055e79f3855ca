"""Federated averaging of everything but BatchNorm's running statistics.

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
    """Averaging of everything but BatchNorm's running statistics, which stay with their clients.

    The layers' weights and biases are averaged; every client normalises with the mean and variance of its own data, and
    no statistic of activations leaves it.

    - Sends: the model without BatchNorm's running statistics, both ways.
    - Keeps: every client its running statistics.
    - Costs: the training alone.
    - For: clients whose inputs look different, with layers that learn from all of them.

    Args:
        unseen: What normalises data of no known client: see :class:`~lightning_fed.LocalStatistics`.
        aggregator: The method for what travels, by name or as an object.

    Raises:
        ValueError: In ``fit``, if the model has no BatchNorm.

    Example:
        >>> from lightning_fed import Federation
        >>> Federation(SiloBN()).options.batch_norm
        LocalStatistics(unseen='batch', measured='visit')

    References:
        Andreux et al., DART 2020.

    """

    def __init__(
        self,
        unseen: Literal["batch", "data", "pooled"] = "batch",
        aggregator: str | Method | Aggregator = "fedavg",
    ) -> None:
        super().__init__(aggregator, batch_norm=LocalStatistics(unseen, measured="visit"))
