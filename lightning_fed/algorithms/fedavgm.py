"""Federated averaging with momentum on the server.

Hsu, Qi & Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019.
https://arxiv.org/abs/1909.06335
"""

from __future__ import annotations

import torch

from lightning_fed.algorithms.server_optimizer import ServerOptimizer
from lightning_fed.argument_checks import check_positive, check_share
from lightning_fed.method import Method, register
from lightning_fed.rule import Aggregator


@register
class FedAvgM(Method):
    r"""Federated averaging with momentum on the server.

    .. math:: v_{t+1} = \beta v_t + (w_t - \bar w), \qquad w_{t+1} = w_t - \alpha v_{t+1}, \qquad v_0 = 0

    Here :math:`w_t` is the global model, :math:`\bar w` the mean client model, and :math:`v_t` the momentum. The method
    uses :class:`ServerOptimizer` with ``torch.optim.SGD``. With equal client updates in every round, the model
    moves :math:`1 / (1 - \beta)` times as far as with averaging. Reference: Hsu et al., 2019, "FedAvgM".

    - Sends: 1 model down, 1 up.
    - Keeps: 2 models on the server.
    - Costs: no additional computation.
    - For: clients with different label distributions, and rounds with few clients.

    Args:
        lr: Server learning rate :math:`\alpha`.
        momentum: Momentum :math:`\beta`; the authors tune :math:`\beta` in {0, 0.7, 0.9, 0.97, 0.99, 0.997}.
        nesterov: Whether to use Nesterov momentum.
        aggregator: Federated method for :math:`\bar w`, by name or as an object.
        lazy_rows: Whether rows without training in a round stay unchanged, see :class:`ServerOptimizer`.
    """

    def __init__(
        self,
        lr: float = 1.0,
        momentum: float = 0.9,
        nesterov: bool = False,
        aggregator: str | Method | Aggregator = "fedavg",
        lazy_rows: bool = False,
    ) -> None:
        check_positive("lr", lr)
        check_share("momentum", momentum)
        step = ServerOptimizer(torch.optim.SGD, lazy_rows, lr=lr, momentum=momentum, nesterov=nesterov)
        super().__init__(aggregator, steps=[step])
