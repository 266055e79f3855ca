"""Federated averaging of everything but the BatchNorm layers.

Li, Jiang, Zhang, Kamp & Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.
https://arxiv.org/abs/2102.07623
"""

from __future__ import annotations

from lightning_fed.method import Method, register
from lightning_fed.rule import Aggregator


@register
class FedBN(Method):
    """Averaging of everything but the BatchNorm layers, which stay with their clients.

    Layers are told by their type, so that normalisation layers of any name are found.

    - Sends: the model without its BatchNorm layers, both ways.
    - Keeps: every client its BatchNorm layers.
    - Costs: the training alone.
    - For: clients whose inputs look different: scanners, cameras, drawings and photographs.

    Args:
        aggregator: The method for the other layers, by name or as an object.

    Raises:
        ValueError: In ``fit``, if the model has no BatchNorm.

    Example:
        >>> from lightning_fed import Federation
        >>> Federation(FedBN()).options.batch_norm
        'personal'

    References:
        Li et al., ICLR 2021.

    """

    def __init__(self, aggregator: str | Method | Aggregator = "fedavg") -> None:
        super().__init__(aggregator, batch_norm="personal")
