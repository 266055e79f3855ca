"""Federated averaging with fixed BatchNorm statistics in the later rounds.

Zhong, Chen & Chao, "Making Batch Normalization Great in Federated Deep Learning", 2023. arXiv:2303.06530
"""

from __future__ import annotations

from lightning_fed.fit.options import FixedStatistics
from lightning_fed.method import Method, register
from lightning_fed.rule import Aggregator


@register
class FixBN(Method):
    """Federated averaging in two stages: ordinary rounds, then rounds with fixed BatchNorm statistics.

    In the first stage BatchNorm normalises with batch statistics, and running statistics are averaged like all entries.
    In the second stage the global statistics are fixed and are also used for normalisation in training, so clients and
    server compute the same function. BatchNorm weights and biases continue to train. Reference: Zhong et al., 2023.

    - Sends: the model, both ways.
    - Keeps: nothing.
    - Costs: no additional computation.
    - For: models with BatchNorm, and clients with missing classes.

    Args:
        after: Number of rounds in the first stage. The paper uses half of all rounds.
        aggregator: Federated method for averaging, by name or as an object.

    Example:
        >>> from lightning_fed import Federation
        >>> Federation(FixBN(after=50)).options.batch_norm
        FixedStatistics(after=50)
    """

    def __init__(self, after: int, aggregator: str | Method | Aggregator = "fedavg") -> None:
        super().__init__(aggregator, batch_norm=FixedStatistics(after))
