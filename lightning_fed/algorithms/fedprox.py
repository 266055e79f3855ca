"""Federated averaging of clients that are pulled towards the model they got.

Li, Sahu, Zaheer, Sanjabi, Talwalkar & Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm
2. https://arxiv.org/abs/1812.06127
"""

from __future__ import annotations

from lightning_fed.algorithms.fedavg import FedAvg
from lightning_fed.algorithms.proximal_term import ProximalTerm
from lightning_fed.method import Method, register
from lightning_fed.numerics.row_sums import RowWeighting


@register
class FedProx(Method):
    r"""The average of the clients' models by their numbers of examples; clients train with a proximal term.

    .. math:: \min_w F_k(w) + \frac{\mu}{2} \lVert w - w_t \rVert^2, \qquad
        w_{t+1} = \sum_k \frac{n_k}{\sum_j n_j} w_k

    The term is :class:`~lightning_fed.callbacks.ProximalTerm`, which is added to the Trainer if it has none. It works
    with any other rule as well: ``Federation("fairavg")`` beside ``ProximalTerm(0.1)``. The other half of the method,
    to keep what stragglers got done, is ``partial_work="keep"``, the default.

    - Sends: 1 model down, 1 up.
    - Keeps: nothing.
    - Costs: the training alone.
    - For: clients that differ and train long, and stragglers.

    Args:
        mu: Strength of the pull, per step: 0 gives FedAvg's weights, exactly. The authors tune it in {0.001,
            0.01, 0.1, 0.5, 1}.
        row_weighting: As for :class:`FedAvg`.

    Raises:
        ValueError: If ``mu`` is negative or not finite.

    Example:
        >>> FedProx(mu=1.0).callbacks[0].mu
        1.0

    References:
        Li et al., MLSys 2020, Algorithm 2 and equation 2.

    """

    def __init__(self, mu: float = 0.01, row_weighting: RowWeighting = "global") -> None:
        super().__init__(FedAvg(row_weighting), callbacks=[ProximalTerm(mu)])
