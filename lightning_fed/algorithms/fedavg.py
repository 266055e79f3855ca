"""Federated averaging, weighted by the clients' examples.

McMahan, Moore, Ramage, Hampson & Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, Algorithm 1. https://arxiv.org/abs/1602.05629
"""

from __future__ import annotations

from torch import Tensor

from lightning_fed.messages import ClientUpdate
from lightning_fed.method import register
from lightning_fed.rule import AveragingAggregator


@register
class FedAvg(AveragingAggregator):
    r"""Averages the clients' models, weighted by numbers of examples (McMahan et al., AISTATS 2017).

    .. math:: w_{t+1} = \sum_k \frac{n_k}{\sum_j n_j} w_k

    Here :math:`w_k` is a client's trained model, and :math:`n_k` the client's number of examples.

    - Sends: 1 model down, 1 up.
    - Keeps: nothing.
    - Costs: no additional computation.
    - For: any federation; the baseline for other methods.

    Args:
        row_weighting: How to average a tensor if clients train only some rows. ``"global"`` divides the sum of a row's
            weighted changes by the weight of all clients, ``"per_row"`` by the weight of the clients with this row.

    Raises:
        ValueError: If ``row_weighting`` is unknown.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> import torch
        >>> fedavg = FedAvg()
        >>> fedavg.start(RoundInfo(0), {"w": torch.tensor(1.0)})
        >>> fedavg.receive(ClientUpdate("a", 1, {"w": torch.tensor(0.0)}))
        >>> fedavg.receive(ClientUpdate("b", 3, {"w": torch.tensor(3.0)}))
        >>> fedavg.aggregate()
        {'w': tensor(2.2500)}
    """

    accepts_rows = True

    def weight(self, update: ClientUpdate) -> float:
        return float(update.num_samples)

    def held_rows(self) -> dict[str, Tensor]:
        return self.running.held_rows()
