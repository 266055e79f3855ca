"""FLTrust: weights clients by similarity to an update on trusted server data.

Cao, Fang, Liu & Gong, "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping", NDSS 2021.
https://arxiv.org/abs/2012.13995
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fed.algorithms.robust.aggregator import RobustAggregator
from lightning_fed.algorithms.robust.equations import trust_weights
from lightning_fed.algorithms.robust.steps import Steps, step_between
from lightning_fed.messages import Client, State
from lightning_fed.method import register


@register
class FLTrust(RobustAggregator):
    r"""Mean of client updates, weighted by similarity to the update of a trusted client.

    .. math:: w_{t+1} = w_t + \frac{\sum_i t_i \frac{\lVert u_0 \rVert}{\lVert u_i \rVert} u_i}{\sum_i t_i}, \qquad
        t_i = \max(0, \cos(u_i, u_0))

    Here :math:`w_t` is the global model, :math:`u_i` a client update, and :math:`t_i` the client's trust score. A
    trusted client with the server's data joins every round. This client's update :math:`u_0` is not part of the sum. If
    all scores are 0, no parameter changes. If the trusted client fails, the round fails. Reference: Cao et al.,
    NDSS 2021, equations 2 to 4.

    - Sends: 1 model down and 1 up, for every client and the trusted client.
    - Keeps: nothing.
    - Costs: no additional computation. The server stores all updates of a round.
    - For: a server with a small trusted data set.

    Args:
        trusted: Name of the client with the server's data.
        num_malicious: See :class:`RobustAggregator`.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> from lightning_fed import ClientUpdate
        >>> rule = FLTrust(trusted="server")
        >>> rule.start(RoundInfo(0), {"w": torch.tensor([0.0, 0.0])})
        >>> for client, value in {"server": [1.0, 0.0], "a": [3.0, 4.0], "b": [-9.0, 0.0]}.items():
        ...     rule.receive(ClientUpdate(client, 1, {"w": torch.tensor(value)}))
        >>> rule.aggregate()
        {'w': tensor([0.6000, 0.8000])}
    """

    def __init__(
        self,
        trusted: Client,
        num_malicious: int | None = None,
    ) -> None:
        super().__init__(num_malicious)
        self.trusted = trusted
        self.always = (trusted,)

    def combine(self, steps: Steps, num_malicious: int) -> tuple[State, Tensor]:
        trusted = step_between(steps.start, self.updates[self.trusted], steps.names)
        length = sum((value.abs().square().sum().cpu() for value in trusted.values()), torch.zeros(()).double()).sqrt()
        weights, scores = trust_weights(steps.norms, steps.products(trusted), float(length))
        return steps.mean(weights), scores
