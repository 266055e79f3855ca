"""Federated averaging for all layers except BatchNorm.

Li, Jiang, Zhang, Kamp & Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.
https://arxiv.org/abs/2102.07623
"""

from __future__ import annotations

from lightning_fed.method import Method, register
from lightning_fed.rule import Aggregator


@register
class FedBN(Method):
    """Averages all layers except BatchNorm; each client keeps separate BatchNorm layers.

    Reference: Li et al., ICLR 2021.

    - Sends: the model without BatchNorm layers, both ways.
    - Keeps: BatchNorm layers per client.
    - Costs: no additional computation.
    - For: clients with different input statistics, such as scanners or cameras.

    Args:
        aggregator: Federated method for the other layers, by name or as an object.

    Raises:
        ValueError: In ``fit``, if the model has no BatchNorm.

    Example:
        >>> from lightning_fed import Federation
        >>> Federation(FedBN()).options.batch_norm
        'personal'
    """

    def __init__(self, aggregator: str | Method | Aggregator = "fedavg") -> None:
        super().__init__(aggregator, batch_norm="personal")
