"""Rules that clip client updates by norm, or by distance from the previous global update.

Sun, Kairouz, Suresh & McMahan, "Can You Really Backdoor Federated Learning?", 2019. https://arxiv.org/abs/1911.07963
Karimireddy, He & Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021.
https://arxiv.org/abs/2012.10333
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fed.algorithms.robust.aggregator import RobustAggregator
from lightning_fed.algorithms.robust.equations import centered_clipping_weights
from lightning_fed.algorithms.robust.steps import Steps, step_between
from lightning_fed.argument_checks import check_count, check_positive
from lightning_fed.bounds import MaxMedianNorm, MaxNorm
from lightning_fed.messages import State
from lightning_fed.method import Method, register
from lightning_fed.steps.weights import UniformWeights


@register
class NormClipping(Method):
    r"""Mean of client updates, each clipped to ``max_norm``.

    .. math:: w_{t+1} = w_t + \frac{1}{n} \sum_i u_i \min\left(1, \frac{C}{\lVert u_i \rVert}\right)

    Here :math:`w_t` is the global model, :math:`u_i` the update of one of n clients, and C ``max_norm``. A malicious
    client can still shift the model by up to C / n per round. BatchNorm's running statistics are averaged without
    clipping. Reference: Sun et al., 2019, section 3 ("norm thresholding").

    - Sends: 1 model down, 1 up.
    - Keeps: nothing.
    - Costs: no additional computation. Without ``max_norm`` the server stores all updates of a round.
    - For: malicious updates with a large norm.

    Consists of the update steps ``UniformWeights`` and ``MaxNorm`` (or ``MaxMedianNorm`` without ``max_norm``).

    Args:
        max_norm: Norm C, positive; by default the median norm in the round.

    Raises:
        ValueError: If ``max_norm`` is not positive.

    Example:
        >>> [type(step).__name__ for step in NormClipping(max_norm=2.0).steps]
        ['UniformWeights', 'MaxNorm']
    """

    def __init__(self, max_norm: float | None = None) -> None:
        bound = MaxMedianNorm(1.0) if max_norm is None else MaxNorm(max_norm)
        super().__init__("fedavg", steps=[UniformWeights(), bound])


@register
class CenteredClipping(RobustAggregator):
    r"""Mean of client updates, each clipped to a maximum distance from the previous global update.

    .. math:: v \leftarrow v + \frac{1}{n} \sum_i (u_i - v) \min\left(1, \frac{\tau}{\lVert u_i - v \rVert}\right),
        \qquad w_{t+1} = w_t + v

    Here :math:`v` is the global update, initially 0, :math:`u_i` the update of one of n clients, and :math:`\tau` the
    ``radius``. The global model is :math:`w_t`. Each round starts from the previous round's :math:`v`. In the paper,
    clients send momenta instead of updates. Reference: Karimireddy et al., ICML 2021, equation 5.

    - Sends: 1 model down, 1 up.
    - Keeps: 2 models on the server (the last update in float64).
    - Costs: no additional computation. The server stores all updates of a round.
    - For: federations with updates that change little between rounds.

    Args:
        radius: Maximum distance :math:`\tau` to :math:`v`, positive; by default the median distance in each iteration.
        iterations: Number of iterations per round.
        num_malicious: See :class:`RobustAggregator`.

    Raises:
        ValueError: If ``radius`` is not positive, or ``iterations`` is not a positive integer.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> from lightning_fed import ClientUpdate
        >>> rule = CenteredClipping(radius=1.0, iterations=1)
        >>> rule.start(RoundInfo(0), {"w": torch.tensor(0.0)})
        >>> for client, value in {"a": 1.0, "b": 0.5, "c": 1e9}.items():
        ...     rule.receive(ClientUpdate(client, 1, {"w": torch.tensor(value)}))
        >>> rule.aggregate()
        {'w': tensor(0.8333)}
    """

    def __init__(
        self,
        radius: float | None = None,
        iterations: int = 3,
        num_malicious: int | None = None,
    ) -> None:
        super().__init__(num_malicious)
        self.radius = None if radius is None else check_positive("radius", radius)
        self.iterations = check_count("iterations", iterations)

    def combine(self, steps: Steps, num_malicious: int) -> tuple[State, Tensor]:
        names = steps.names
        zero = step_between(steps.start, steps.start, names)
        center = {name: self.memory[name].to(zero[name].device) for name in names} if self.memory else zero
        products = steps.products(center)
        length = sum((value.abs().square().sum().cpu() for value in center.values()), torch.zeros(()).double())
        gram = torch.cat([torch.cat([steps.gram, products[:, None]], 1), torch.cat([products, length[None]])[None]])
        weights, factors = centered_clipping_weights(gram, self.radius, self.iterations)
        new = steps.mean(weights[:-1], plus=(float(weights[-1]), center))
        self.memory = step_between(steps.start, new, names)
        return new, factors
