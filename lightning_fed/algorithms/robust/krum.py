"""Krum, Multi-Krum and Bulyan: select clients whose updates are close to their nearest neighbours.

Blanchard, El Mhamdi, Guerraoui & Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent",
NeurIPS 2017, https://arxiv.org/abs/1703.02757; El Mhamdi, Guerraoui & Rouault, "The Hidden Vulnerability of Distributed
Learning in Byzantium", ICML 2018, https://arxiv.org/abs/1802.07927.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lightning_fed.algorithms.robust.aggregator import RobustAggregator
from lightning_fed.algorithms.robust.equations import (
    bulyan_choice,
    krum_order,
    mean_around_median,
    squared_distances,
)
from lightning_fed.algorithms.robust.steps import Steps
from lightning_fed.argument_checks import check_count
from lightning_fed.messages import State
from lightning_fed.method import register


@register
class Krum(RobustAggregator):
    """Client model with the smallest sum of squared distances to the nearest n - f - 2 client models.

    Here n is the number of clients in the round, and f is ``num_malicious``. Requires at least 2 f + 3 clients.
    Reference: Blanchard et al., NeurIPS 2017, section 4.

    - Sends: 1 model down, 1 up.
    - Keeps: nothing.
    - Costs: no additional computation. The server stores all updates of a round.
    - For: similar client data, because the updates of all other clients are discarded.

    Args:
        num_malicious: Number f, see :class:`RobustAggregator`.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> from lightning_fed import ClientUpdate
        >>> rule = Krum(num_malicious=1)
        >>> rule.start(RoundInfo(0), {"w": torch.tensor(0.0)})
        >>> for client, value in {"a": 1.0, "b": 1.1, "c": 1.3, "d": 2.0, "e": 1e9}.items():
        ...     rule.receive(ClientUpdate(client, 1, {"w": torch.tensor(value)}))
        >>> rule.aggregate()
        {'w': tensor(1.1000)}
    """

    least = (2, 3)

    def combine(self, steps: Steps, num_malicious: int) -> tuple[State, Tensor]:
        return _mean_of_lowest(steps, num_malicious, 1)


@register
class MultiKrum(RobustAggregator):
    """Mean over the clients with the lowest :class:`Krum` scores.

    Requires at least 2 f + 3 clients for f = ``num_malicious``. For f = 0 the result equals :class:`FairAvg`.
    Reference: Blanchard et al., NeurIPS 2017.

    - Sends: 1 model down, 1 up.
    - Keeps: nothing.
    - Costs: no additional computation. The server stores all updates of a round.
    - For: a known number of malicious clients. For heterogeneous data add ``NearestNeighborMixing``.

    Args:
        num_malicious: Number f, see :class:`RobustAggregator`.
        num_selected: Number of clients in the mean; by default all but f clients.

    Raises:
        ValueError: If ``num_selected`` is not a positive integer.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> from lightning_fed import ClientUpdate
        >>> rule = MultiKrum(num_malicious=1)
        >>> rule.start(RoundInfo(0), {"w": torch.tensor(0.0)})
        >>> for client, value in {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 1e9}.items():
        ...     rule.receive(ClientUpdate(client, 1, {"w": torch.tensor(value)}))
        >>> rule.aggregate()
        {'w': tensor(2.5000)}
    """

    least = (2, 3)

    def __init__(
        self,
        num_malicious: int | None = None,
        num_selected: int | None = None,
    ) -> None:
        super().__init__(num_malicious)
        self.num_selected = None if num_selected is None else check_count("num_selected", num_selected)

    def combine(self, steps: Steps, num_malicious: int) -> tuple[State, Tensor]:
        count = len(steps) - num_malicious if self.num_selected is None else self.num_selected
        return _mean_of_lowest(steps, num_malicious, min(count, len(steps)))


@register
class Bulyan(RobustAggregator):
    """Coordinate-wise mean of the values nearest to the median, over clients selected by :class:`Krum`.

    Krum selects n - 2 f among n clients one by one, for f = ``num_malicious``. For each coordinate the n - 4 f values
    nearest to the median are averaged. Requires at least 4 f + 3 clients. For f = 0 the result equals :class:`FairAvg`.
    Reference: El Mhamdi et al., ICML 2018.

    - Sends: 1 model down, 1 up.
    - Keeps: nothing.
    - Costs: no additional computation. The server stores all updates of a round.
    - For: many clients, less than a quarter malicious.

    Args:
        num_malicious: Number f, see :class:`RobustAggregator`.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> from lightning_fed import ClientUpdate
        >>> rule = Bulyan(num_malicious=1)
        >>> rule.start(RoundInfo(0), {"w": torch.tensor(0.0)})
        >>> for client, value in enumerate([1.0, 2.0, 3.0, 4.0, 5.0, 9.0, 1e9]):
        ...     rule.receive(ClientUpdate(client, 1, {"w": torch.tensor(value)}))
        >>> rule.aggregate()
        {'w': tensor(3.)}
    """

    least = (4, 3)

    def combine(self, steps: Steps, num_malicious: int) -> tuple[State, Tensor]:
        chosen = bulyan_choice(squared_distances(steps.gram), num_malicious)
        count = len(steps) - 4 * num_malicious
        return steps.by_coordinate(partial(mean_around_median, count=count), chosen)


def _mean_of_lowest(steps: Steps, num_malicious: int, count: int) -> tuple[State, Tensor]:
    order = krum_order(squared_distances(steps.gram), num_malicious)
    chosen = torch.zeros(len(steps), dtype=torch.float64)
    chosen[order[:count]] = 1.0
    return steps.mean(chosen / count), chosen
