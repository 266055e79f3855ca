"""Federated averaging whose BatchNorm statistics are fixed after some rounds.

Zhong, Chen & Chao, "Making Batch Normalization Great in Federated Deep Learning", 2023.
https://arxiv.org/abs/2303.06530
"""

from __future__ import annotations

from lightning_fed.fit.options import FixedStatistics
from lightning_fed.method import Method, register
from lightning_fed.rule import Aggregator


@register
class FixBN(Method):
    """Averaging in two stages: ordinary rounds, then rounds with fixed BatchNorm statistics.

    In the first stage BatchNorm normalises every batch with its own statistics, and the running statistics are averaged
    like all entries. In the second the global ones stay as they are and normalise in training too, so that clients and
    server train the same function; weights and biases of the layers go on training.

    - Sends: the model, both ways.
    - Keeps: nothing.
    - Costs: the training alone.
    - For: models with BatchNorm and clients that lack classes.

    Args:
        after: Rounds of the first stage. The paper takes half of all.
        aggregator: The method, by name or as an object.

    Example:
        >>> from lightning_fed import Federation
        >>> Federation(FixBN(after=50)).options.batch_norm
        FixedStatistics(after=50)

    References:
        Zhong et al., 2023.

    """

    def __init__(self, after: int, aggregator: str | Method | Aggregator = "fedavg") -> None:
        super().__init__(aggregator, batch_norm=FixedStatistics(after))
