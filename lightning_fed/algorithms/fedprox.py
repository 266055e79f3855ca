"""Federated averaging of clients that are pulled towards the model they got.

Li, Sahu, Zaheer, Sanjabi, Talwalkar & Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm
2. https://arxiv.org/abs/1812.06127
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_fed.algorithms.proximal_term import ProximalTerm
from lightning_fed.messages import ClientUpdate
from lightning_fed.method import register
from lightning_fed.numerics.row_sums import RowWeighting
from lightning_fed.server.averaging import AveragingAggregator


@register
class FedProx(AveragingAggregator):
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
        >>> import torch
        >>> fedprox = FedProx(mu=1.0)
        >>> fedprox.start_round(0, {"w": torch.tensor(1.0)})
        >>> fedprox.receive(ClientUpdate("a", 1, {"w": torch.tensor(0.0)}))
        >>> fedprox.receive(ClientUpdate("b", 3, {"w": torch.tensor(3.0)}))
        >>> fedprox.aggregate(), fedprox.required_callbacks()[0].mu
        ({'w': tensor(2.2500)}, 1.0)

    References:
        Li et al., MLSys 2020, Algorithm 2 and equation 2.

    """

    def __init__(self, mu: float = 0.01, row_weighting: RowWeighting = "global") -> None:
        super().__init__(row_weighting)
        if not 0 <= mu < float("inf"):
            raise ValueError(f"Expected `mu` to be finite and at least 0, but got {mu}.")
        self.mu = mu

    def weight(self, update: ClientUpdate) -> float:
        """The client's number of examples."""
        return float(update.num_samples)

    def required_callbacks(self) -> Sequence[Any]:
        """The proximal term."""
        return [ProximalTerm(self.mu)]
