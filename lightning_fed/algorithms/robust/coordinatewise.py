"""Coordinate-wise median and trimmed mean.

Yin, Chen, Ramchandran & Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML
2018. https://arxiv.org/abs/1803.01498
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from lightning_fed.algorithms.robust.aggregator import RobustAggregator
from lightning_fed.algorithms.robust.equations import trimmed_mean
from lightning_fed.algorithms.robust.steps import Steps
from lightning_fed.messages import State
from lightning_fed.method import register


@register
class Median(RobustAggregator):
    """Coordinate-wise median of the client models.

    For an even number of clients, this is the mean of the middle two values. The median itself does not depend on
    ``num_malicious``, but the rule requires at least ``2 * num_malicious + 1`` clients. Reference: Yin et al., ICML
    2018.

    - Sends: 1 model down, 1 up.
    - Keeps: nothing.
    - Costs: no additional computation. The server stores all updates of a round.
    - For: fewer than half of the clients malicious, and similar data on all clients.

    Args:
        num_malicious: See :class:`RobustAggregator`.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> import torch
        >>> from lightning_fed import ClientUpdate
        >>> rule = Median()
        >>> rule.start(RoundInfo(0), {"w": torch.tensor(0.0)})
        >>> for client, value in {"a": 1.0, "b": 2.0, "c": 1e9}.items():
        ...     rule.receive(ClientUpdate(client, 1, {"w": torch.tensor(value)}))
        >>> rule.aggregate()
        {'w': tensor(2.)}
    """

    def combine(self, steps: Steps, num_malicious: int) -> tuple[State, Tensor]:
        return steps.by_coordinate(partial(trimmed_mean, num_trimmed=(len(steps) - 1) // 2))


@register
class TrimmedMean(RobustAggregator):
    """Coordinate-wise mean of the client models without the f smallest and f largest values.

    Requires at least 2 f + 1 clients. For f = 0 the result equals :class:`FairAvg`. Reference: Yin et al., ICML 2018.

    - Sends: 1 model down, 1 up.
    - Keeps: nothing.
    - Costs: no additional computation. The server stores all updates of a round.
    - For: a known number of malicious clients. For heterogeneous data add ``NearestNeighborMixing``.

    Args:
        num_malicious: Number f, see :class:`RobustAggregator`.
    """

    def combine(self, steps: Steps, num_malicious: int) -> tuple[State, Tensor]:
        return steps.by_coordinate(partial(trimmed_mean, num_trimmed=num_malicious))
