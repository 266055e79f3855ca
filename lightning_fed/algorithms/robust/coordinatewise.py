"""Median and trimmed mean by coordinate.

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
    """The median of the clients' models by coordinate; of an even number of clients the mean of the middle two.

    It needs at least ``2 f + 1`` clients. The number of malicious clients does not matter.

    - Sends: 1 model down, 1 up.
    - Keeps: nothing.
    - Costs: the training alone; the server holds a round's updates until all are there.
    - For: fewer than half malicious, and clients whose data are alike.

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

    References:
        Yin et al., ICML 2018, definition 1.

    """

    def combine(self, steps: Steps, num_malicious: int) -> tuple[State, Tensor]:
        """The median of the rows."""
        return steps.by_coordinate(partial(trimmed_mean, num_trimmed=(len(steps) - 1) // 2))


@register
class TrimmedMean(RobustAggregator):
    """The mean of the clients' models by coordinate, without the ``f`` smallest and the ``f`` largest values.

    It needs at least ``2 f + 1`` clients; with ``num_malicious=0`` it is :class:`FairAvg`.

    - Sends: 1 model down, 1 up.
    - Keeps: nothing.
    - Costs: the training alone; the server holds a round's updates until all are there.
    - For: a known number of malicious clients; after NNM also clients that differ.

    Args:
        num_malicious: Number f, see :class:`RobustAggregator`.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> import torch
        >>> from lightning_fed import ClientUpdate
        >>> rule = TrimmedMean(num_malicious=1)
        >>> rule.start(RoundInfo(0), {"w": torch.tensor(0.0)})
        >>> for client, value in {"a": 1.0, "b": 2.0, "c": 3.0, "d": 1e9}.items():
        ...     rule.receive(ClientUpdate(client, 1, {"w": torch.tensor(value)}))
        >>> rule.aggregate()
        {'w': tensor(2.5000)}

    References:
        Yin et al., ICML 2018, definition 2.

    """

    def combine(self, steps: Steps, num_malicious: int) -> tuple[State, Tensor]:
        """The trimmed mean of the rows."""
        return steps.by_coordinate(partial(trimmed_mean, num_trimmed=num_malicious))
