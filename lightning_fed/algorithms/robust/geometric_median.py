"""Geometric median of client models.

Pillutla, Kakade & Harchaoui, "Robust Aggregation for Federated Learning", IEEE Transactions on Signal Processing 2022.
https://arxiv.org/abs/1912.13445
"""

from __future__ import annotations

from torch import Tensor

from lightning_fed.algorithms.robust.aggregator import RobustAggregator
from lightning_fed.algorithms.robust.equations import geometric_median_weights
from lightning_fed.algorithms.robust.steps import Steps
from lightning_fed.argument_checks import check_positive
from lightning_fed.messages import State
from lightning_fed.method import register


@register
class GeometricMedian(RobustAggregator):
    r"""Model with the smallest sum of distances to the client models ("RFA").

    .. math:: \arg\min_v \sum_i \lVert v - u_i \rVert \quad \text{for client models } u_i

    All clients have equal weight, unlike in the paper. The median does not depend on f = ``num_malicious``, but a round
    requires at least 2 f + 1 clients. BatchNorm's running statistics are averaged without the f smallest and f largest
    values. Reference: Pillutla et al., IEEE TSP 2022, Algorithms 1 and 2.

    - Sends: 1 model down, 1 up.
    - Keeps: nothing.
    - Costs: no additional computation. The server stores all updates of a round.
    - For: an unknown number of malicious clients, fewer than half.

    Args:
        num_malicious: See :class:`RobustAggregator`.
        smoothing: Lower bound for distances in the computation, positive.

    Raises:
        ValueError: If ``smoothing`` is not positive.
    """

    def __init__(
        self,
        num_malicious: int | None = None,
        smoothing: float = 1e-6,
    ) -> None:
        super().__init__(num_malicious)
        self.smoothing = check_positive("smoothing", smoothing)

    def combine(self, steps: Steps, num_malicious: int) -> tuple[State, Tensor]:
        weights = geometric_median_weights(steps.gram, self.smoothing)
        return steps.mean(weights), weights / weights.max()
