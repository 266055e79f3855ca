"""Federated averaging with a proximal term in local training.

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
    r"""Federated averaging with a proximal term in local training.

    .. math:: \min_w F_k(w) + \frac{\mu}{2} \lVert w - w_t \rVert^2, \qquad
        w_{t+1} = \sum_k \frac{n_k}{\sum_j n_j} w_k

    Here :math:`F_k` is client k's loss, :math:`w_k` the trained model, :math:`w_t` the global model and :math:`n_k` the
    number of examples. :class:`~lightning_fed.callbacks.ProximalTerm` also works with other methods. By default,
    unfinished training of slow clients counts, as in the paper (``partial_work="keep"``). Reference: Li et al.,
    MLSys 2020, Algorithm 2.

    - Sends: 1 model down, 1 up.
    - Keeps: nothing.
    - Costs: no additional computation.
    - For: heterogeneous clients with long local training, and slow clients.

    Args:
        mu: Strength :math:`\mu`. 0 gives FedAvg. The authors tune :math:`\mu` in {0.001, 0.01, 0.1, 0.5, 1}.
        row_weighting: Divisor for a row's summed change, see :class:`FedAvg`.

    Raises:
        ValueError: If ``mu`` is negative or not finite.

    Example:
        >>> FedProx(mu=1.0).callbacks[0].mu
        1.0
    """

    def __init__(self, mu: float = 0.01, row_weighting: RowWeighting = "global") -> None:
        super().__init__(FedAvg(row_weighting), callbacks=[ProximalTerm(mu)])
