"""Federated averaging with fixed BatchNorm statistics in the later rounds.

Zhong, Chen & Chao, "Making Batch Normalization Great in Federated Deep Learning", 2023. arXiv:2303.06530
"""

from __future__ import annotations

from lightning_fed.fit.options import FixedStatistics
from lightning_fed.method import Method, register
from lightning_fed.rule import Aggregator


@register
class FixBN(Method):
    """Federated averaging with fixed BatchNorm statistics in the later rounds.

    In the first rounds, the running statistics are averaged like all parameters. Afterwards, the running statistics are
    fixed, and BatchNorm also uses these in training. BatchNorm weights and biases continue to train. Reference: Zhong
    et al., 2023.

    - Sends: the model, both ways.
    - Keeps: nothing.
    - Costs: no additional computation.
    - For: models with BatchNorm, and clients with missing classes.

    Args:
        after: Number of rounds before the statistics are fixed. The paper uses half of all rounds.
        aggregator: Federated method for averaging, by name or as an object.

    Example:
        >>> from lightning_fed import Federation
        >>> Federation(FixBN(after=50)).options.batch_norm
        FixedStatistics(after=50)
    """

    def __init__(self, after: int, aggregator: str | Method | Aggregator = "fedavg") -> None:
        super().__init__(aggregator, batch_norm=FixedStatistics(after))
