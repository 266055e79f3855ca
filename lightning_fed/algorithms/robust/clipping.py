"""Rules that shorten the clients' steps: by their length, or by their distance from the step of the round before.

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
from lightning_fed.messages import State
from lightning_fed.method import Method, register
from lightning_fed.steps.bounds import MaxMedianNorm, MaxNorm
from lightning_fed.steps.weights import UniformWeights


@register
class NormClipping(Method):
    r"""The mean of the clients' steps, none of which is longer than ``max_norm``.

    .. math:: w_{t+1} = w_t + \frac{1}{n} \sum_i u_i \min\left(1, \frac{C}{\lVert u_i \rVert}\right)

    A client can still pull in a wrong direction, by C / n in a round at most. Running statistics of BatchNorm are
    averaged, and not protected.

    - Sends: 1 model down, 1 up.
    - Keeps: nothing.
    - Costs: the training alone; without ``max_norm`` the server holds a round's updates until all are there.
    - For: updates that are too long, more than those that point elsewhere.

    It is averaging with two update steps: :class:`~lightning_fed.steps.UniformWeights`, and
    :class:`~lightning_fed.steps.MaxNorm` or :class:`~lightning_fed.steps.MaxMedianNorm`, which logs
    ``fed/shortened``.

    Args:
        max_norm: Length C; ``None`` for the median length of the round's steps, of an even number the lower of
            the middle two.

    Raises:
        ValueError: If ``max_norm`` is not positive.

    Example:
        >>> [type(step).__name__ for step in NormClipping(max_norm=2.0).steps]
        ['UniformWeights', 'MaxNorm']

    References:
        Sun et al., 2019, section 3 ("norm thresholding").

    """

    def __init__(self, max_norm: float | None = None) -> None:
        bound = MaxMedianNorm(1.0) if max_norm is None else MaxNorm(max_norm)
        super().__init__("fedavg", steps=[UniformWeights(), bound])


@register
class CenteredClipping(RobustAggregator):
    r"""The step of the round before, moved by the clients' differences from it, which are shortened to ``radius``.

    .. math:: v \leftarrow v + \frac{1}{n} \sum_i (u_i - v) \min\left(1, \frac{\tau}{\lVert u_i - v \rVert}\right),
        \qquad w_{t+1} = w_t + v

    Before the first round v is 0. The paper's clients send momenta, which change little from round to round; with few
    local steps :math:`v` of the round before is a good guess of the next step, too.

    - Sends: 1 model down, 1 up.
    - Keeps: 2 models on the server, the last step in float64.
    - Costs: the training alone; the server holds a round's updates until all are there.
    - For: steps that change little from round to round.

    Args:
        radius: Length :math:`\tau`; ``None`` for the clients' median distance from v, in each iteration.
        iterations: Number of iterations.
        num_malicious: See :class:`RobustAggregator`.

    Raises:
        ValueError: If ``radius`` is not positive, or ``iterations`` is not a whole number from 1 on.

    Note:
        Its ``memory`` is :math:`v`: 8 bytes for every parameter, in checkpoints too.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> from lightning_fed import ClientUpdate
        >>> rule = CenteredClipping(radius=1.0, iterations=1)
        >>> rule.start(RoundInfo(0), {"w": torch.tensor(0.0)})
        >>> for client, value in {"a": 1.0, "b": 0.5, "c": 1e9}.items():
        ...     rule.receive(ClientUpdate(client, 1, {"w": torch.tensor(value)}))
        >>> rule.aggregate()
        {'w': tensor(0.8333)}

    References:
        Karimireddy et al., ICML 2021, equation 5.

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
        """The centre after its iterations, which the rule remembers."""
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
