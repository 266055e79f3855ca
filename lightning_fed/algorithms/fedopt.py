"""Adaptive optimizers on the server.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar & McMahan, "Adaptive Federated Optimization", ICLR 2021, Algorithm
2. https://arxiv.org/abs/2003.00295
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.algorithms.server_optimizer import ServerOptimizer
from lightning_fed.argument_checks import check_option, check_positive, check_share
from lightning_fed.method import Method, register
from lightning_fed.rule import Aggregator

SecondMoment: TypeAlias = Literal["adagrad", "adam", "yogi"]


class AdaptiveOptimizer(Optimizer):
    r"""Adagrad, Adam and Yogi as defined in the FedOpt paper, for use in :class:`ServerOptimizer`.

    .. math:: m_t = \beta_1 m_{t-1} + (1 - \beta_1) \Delta_t, \qquad
        w_{t+1} = w_t + \eta \frac{m_t}{\sqrt{v_t} + \tau}

    .. math::
        \text{adagrad: } v_t = v_{t-1} + \Delta_t^2 \qquad
        \text{adam: } v_t = \beta_2 v_{t-1} + (1 - \beta_2) \Delta_t^2 \\
        \text{yogi: } v_t = v_{t-1} - (1 - \beta_2) \Delta_t^2 \, \mathrm{sign}(v_{t-1} - \Delta_t^2)

    Here :math:`w_t` is the model, :math:`\Delta_t` the mean client update (the negative gradient), :math:`m_t` the
    first moment, and :math:`v_t` the second. The initial values are :math:`m_{-1} = 0` and :math:`v_{-1} = \tau^2`.
    Unlike in ``torch.optim.Adam``, the moments have no bias correction. Reference: Reddi et al., ICLR 2021, Algorithm
    2.

    Args:
        params: Parameters or parameter groups, as in PyTorch.
        lr: Learning rate :math:`\eta`.
        beta1: Decay :math:`\beta_1` for the first moment.
        beta2: Decay :math:`\beta_2` for the second moment; unused by Adagrad.
        tau: Constant :math:`\tau`. A smaller value is more adaptive.
        second_moment: Formula for the second moment.

    Example:
        >>> w = torch.tensor(1.0, requires_grad=True)
        >>> optimizer = AdaptiveOptimizer([w], lr=0.1)
        >>> w.grad = torch.tensor(-1.25)
        >>> optimizer.step()
        >>> round(w.item(), 6)
        1.099203
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        second_moment: SecondMoment = "adam",
    ) -> None:
        for name, value in (("lr", lr), ("tau", tau)):
            check_positive(name, value)
        for name, value in (("beta1", beta1), ("beta2", beta2)):
            check_share(name, value)
        check_option("second_moment", second_moment, SecondMoment)
        options = {"lr": lr, "beta1": beta1, "beta2": beta2, "tau": tau, "second_moment": second_moment}
        super().__init__(params, options)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "mean": torch.zeros_like(parameter),
                    "square": torch.full_like(parameter, tau**2),
                }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    moments = self.state[parameter]
                    moments["mean"].lerp_(-parameter.grad, 1 - group["beta1"])
                    _second_moment(moments["square"], parameter.grad.square(), group["second_moment"], group["beta2"])
                    scale = moments["square"].sqrt().add_(group["tau"])
                    parameter.addcdiv_(moments["mean"], scale, value=group["lr"])
        return loss


def _second_moment(moment: Tensor, square: Tensor, kind: SecondMoment, beta2: float) -> None:
    if kind == "adagrad":
        moment.add_(square)
    elif kind == "adam":
        moment.lerp_(square, 1 - beta2)
    else:
        moment.sub_((1 - beta2) * square * torch.sign(moment - square))


@register
class FedAdagrad(Method):
    """Federated averaging with Adagrad on the server.

    :class:`AdaptiveOptimizer` contains the equations. Reference: Reddi et al., ICLR 2021.

    - Sends: 1 model down, 1 up.
    - Keeps: 4 models on the server (two moments in float64).
    - Costs: no additional computation.
    - For: sparse gradients, as in embeddings.

    Args:
        lr: Server learning rate. The authors try powers of ten for server and client rate.
        beta1: Decay for the first moment; the authors use 0.
        tau: Constant in the denominator. A smaller value is more adaptive.
        aggregator: The averaging method, by name or as an object. The paper uses ``"fairavg"``.
        lazy_rows: Whether untrained rows stay unchanged, see :class:`ServerOptimizer`.

    Example:
        >>> FedAdagrad(lr=0.01).steps[0].optimizer_kwargs["lr"]
        0.01
    """

    def __init__(
        self,
        lr: float = 0.1,
        beta1: float = 0.0,
        tau: float = 1e-3,
        aggregator: str | Method | Aggregator = "fedavg",
        lazy_rows: bool = False,
    ) -> None:
        options = {"lr": lr, "beta1": beta1, "tau": tau, "second_moment": "adagrad"}
        super().__init__(aggregator, steps=[ServerOptimizer(AdaptiveOptimizer, lazy_rows, **options)])


@register
class FedAdam(Method):
    """Federated averaging with Adam on the server.

    :class:`AdaptiveOptimizer` contains the equations. Unlike ``torch.optim.Adam``, this Adam has no bias correction.
    Reference: Reddi et al., ICLR 2021.

    - Sends: 1 model down, 1 up.
    - Keeps: 4 models on the server (two moments in float64).
    - Costs: no additional computation.
    - For: parameters with updates on different scales, as in language models.

    Args:
        lr: Server learning rate. The authors try powers of ten for server and client rate.
        beta1: Decay for the first moment.
        beta2: Decay for the second moment.
        tau: Constant in the denominator. A smaller value is more adaptive.
        aggregator: The averaging method, by name or as an object. The paper uses ``"fairavg"``.
        lazy_rows: Whether untrained rows stay unchanged, see :class:`ServerOptimizer`.

    Example:
        >>> fedadam = FedAdam().steps[0]
        >>> fedadam.optimizer_kwargs["beta1"], fedadam.optimizer_kwargs["beta2"]
        (0.9, 0.99)
    """

    def __init__(
        self,
        lr: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        aggregator: str | Method | Aggregator = "fedavg",
        lazy_rows: bool = False,
    ) -> None:
        options = {"lr": lr, "beta1": beta1, "beta2": beta2, "tau": tau, "second_moment": "adam"}
        super().__init__(aggregator, steps=[ServerOptimizer(AdaptiveOptimizer, lazy_rows, **options)])


@register
class FedYogi(Method):
    """Federated averaging with Yogi on the server.

    Unlike in Adam, the second moment changes at most by a fraction of the squared update per round.
    :class:`AdaptiveOptimizer` contains the equations. Reference: Reddi et al., ICLR 2021.

    - Sends: 1 model down, 1 up.
    - Keeps: 4 models on the server (two moments in float64).
    - Costs: no additional computation.
    - For: the uses of FedAdam, if FedAdam's step sizes vary too much.

    Args:
        lr: Server learning rate. The authors try powers of ten for server and client rate.
        beta1: Decay for the first moment.
        beta2: Decay for the second moment.
        tau: Constant in the denominator. A smaller value is more adaptive.
        aggregator: The averaging method, by name or as an object. The paper uses ``"fairavg"``.
        lazy_rows: Whether untrained rows stay unchanged, see :class:`ServerOptimizer`.

    Example:
        >>> [type(step).__name__ for step in FedYogi(aggregator="fairavg").steps]
        ['UniformWeights', 'ServerOptimizer']
    """

    def __init__(
        self,
        lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        aggregator: str | Method | Aggregator = "fedavg",
        lazy_rows: bool = False,
    ) -> None:
        options = {"lr": lr, "beta1": beta1, "beta2": beta2, "tau": tau, "second_moment": "yogi"}
        super().__init__(aggregator, steps=[ServerOptimizer(AdaptiveOptimizer, lazy_rows, **options)])
