"""FedNova: divides client updates by the numbers of local steps before averaging.

Wang, Liu, Liang, Joshi & Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020, equations 8 to 10 and section 4. https://arxiv.org/abs/2007.07481
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import SGD

from lightning_fed.algorithms.channels import Channel, ChannelCallback, ChannelRule, ChannelVisit, Part
from lightning_fed.algorithms.proximal_term import ProximalTerm
from lightning_fed.argument_checks import check_nonnegative
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.errors import BadUpdate
from lightning_fed.lightning.internals import find_callbacks
from lightning_fed.messages import ClientUpdate, State
from lightning_fed.method import register
from lightning_fed.numerics.precision import cast_back, to_float64

_OCTAVES = 2
"""Accepted octaves between a step length and the median with equal numbers of steps: a factor of 4 to 8."""

_BATCH_SIZES = 3
"""Additional octaves with epochs, because honest batch sizes differ: together a factor of 32 to 64."""


@register(callbacks=lambda rule: [ChannelCallback(rule), *([ProximalTerm(rule.mu)] if rule.mu else [])])
class FedNova(ChannelRule):
    r"""Averages client updates per local step, so clients with more steps have no larger influence.

    .. math:: x \leftarrow x - \tau \sum_i p_i \frac{x - y_i}{\ell_i}, \qquad \tau = \sum_i p_i \ell_i

    Here :math:`x` is the global model, :math:`y_i` a client's trained model, and :math:`p_i` the client's share of all
    examples. The length :math:`\ell_i` measures the client's local training. For plain SGD, the length is the sum of
    the learning rates over all steps. With momentum or a proximal term, the client simulates these steps with
    gradient 1. Step k updates the momentum buffer :math:`b_k` and the distance :math:`d_k` from the start, initially 0:

    .. math:: b_k = \rho b_{k-1} + (1 - \mu d_{k-1}), \qquad d_k = d_{k-1} + \eta_k b_k, \qquad \ell_i = d_K

    Here :math:`\rho` is the momentum, :math:`\mu` the strength of the proximal term, :math:`\eta_k` the learning rate,
    and :math:`K` the number of steps. Nesterov momentum and dampening work as in SGD. At a constant rate, the length is
    :math:`\eta` times the paper's :math:`\lVert a_i \rVert_1`. Reference: Wang et al. 2020, equations 8 to 10.

    With equal numbers of steps the result equals FedAvg bit for bit. Buffers are averaged, weighted by examples. The
    paper's server momentum is ``FedAvgM(momentum=0.9, aggregator="fednova")``.

    The server excludes clients with lengths far from the round's median. With ``local_steps``, the limit for the length
    per planned step is a factor of 4 to 8, or 32 to 64 with stragglers. With epochs, the limit of 32 to 64 must be
    exceeded both per epoch and per example. Momentum and per-step schedulers raise the limit of 32 to 64.

    - Sends: 1 model down, 1 up (and one number per parameter).
    - Keeps: nothing.
    - Costs: no additional computation.
    - For: clients with unequal numbers of steps, because of dataset sizes or stragglers; requires SGD.

    Args:
        mu: Strength of a proximal term as in :class:`FedProx`; 0 disables the term.

    Raises:
        MisconfigurationException: In ``fit``, if an optimizer is not ``torch.optim.SGD``, or clients keep the momentum
            between rounds (``optimizer_state="keep"``).

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> import torch
        >>> fednova = FedNova()
        >>> fednova.start(RoundInfo(0), {"w": torch.tensor(1.0)})
        >>> for client, value, steps in (("a", 0.0, 1.0), ("b", 3.0, 4.0)):
        ...     extras = {"length:w": torch.tensor(steps)}
        ...     fednova.receive(ClientUpdate(client, 1, {"w": torch.tensor(value)}, extras))
        >>> fednova.aggregate()  # 1 - 2.5 * (1 / 1 + -2 / 4) / 2
        {'w': tensor(0.3750)}
    """

    channels: ClassVar = {"length": Channel("numbers", up=True, bounds="work")}

    def __init__(self, mu: float = 0.0) -> None:
        super().__init__()
        self.mu = check_nonnegative("mu", mu)
        self._strength = 0.0  # strength, summed over the Trainer's proximal terms

    def check_fit(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        federation = find_federation(trainer)
        keeps, schedule = federation.options.optimizer_state == "keep", federation.schedule
        terms = find_callbacks(trainer, ProximalTerm)
        self._strength = sum(term.mu for term in terms)
        for optimizer in trainer.optimizers:
            if not isinstance(optimizer, SGD):
                raise MisconfigurationException(
                    "FedNova divides a client's update by the accumulated length of its SGD steps. Expected "
                    f"`torch.optim.SGD` (with or without momentum), but got {type(optimizer).__name__}: use 'fedavg' "
                    "or 'scaffold' for other optimizers."
                )
            if keeps and any(group["momentum"] for group in optimizer.param_groups):
                raise MisconfigurationException(
                    "FedNova divides a client's update by the accumulated length of its SGD steps, but with "
                    "optimizer_state='keep' momentum adds gradients from earlier visits to the update: use "
                    "optimizer_state='reset', or SGD without momentum."
                )
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        # With momentum, later steps of a visit count up to 1 / (1 - momentum) times as much as the first.
        unlike, octaves = max(group["momentum"] for group in groups), _OCTAVES + _BATCH_SIZES
        if schedule.local_steps is not None and not schedule.availability.stragglers:
            unlike, octaves = 0.0, _OCTAVES
        elif any(config.interval == "step" for config in trainer.lr_scheduler_configs):
            unlike = 1.0
        self.octaves = octaves + math.ceil(-math.log2(1 - min(unlike, 1 - 2**-5)))

    def follow_step(
        self, record: Any, parameter: nn.Parameter, group: dict[str, Any], state: dict[str, Any], scale: float
    ) -> Any:
        """Simulates an SGD step with gradient 1. Returns momentum buffer and distances from the start, by step."""
        momentum, lengths = record or (0.0, list[float]())  # b_k, and d_1 to d_k, in the equations of `FedNova`
        length = lengths[-1] if lengths else 0.0
        step = gradient = 1.0 - self._strength * length
        if group["momentum"]:
            is_first = state.get("momentum_buffer") is None  # SGD applies no dampening in the first step
            dampening = 0.0 if is_first else group["dampening"]
            buffer = group["momentum"] * momentum + (1 - dampening) * gradient
            momentum = buffer
            step = gradient + group["momentum"] * buffer if group["nesterov"] else buffer
        lengths.append(length + float(group["lr"]) * step)
        return momentum, lengths

    def end_visit(self, visit: ChannelVisit) -> None:
        """Sends a length per parameter: the sum of learning rates, adjusted as in :class:`FedNova`; 0 without steps."""
        for name, parameter in visit.parameters.items():
            if parameter.requires_grad or name in visit.records:
                _, lengths = visit.records.get(name, (0.0, [0.0] * max(1, visit.steps)))
                visit.up["length"][name] = lengths[-1 if visit.row is None else visit.steps - 1]

    def add(self, part: Part, update: ClientUpdate, up: dict[str, dict[str, Any]]) -> None:
        lengths = up["length"]
        if not any(lengths.values()):
            raise BadUpdate("all step lengths are 0: the client's optimizers made no step")
        normalised = lengths.keys() if self._info.trainable is None else self._info.trainable & update.state.keys()
        averaged = {name: value for name, value in update.state.items() if name not in normalised}
        part.running.add(averaged, self.weight(update), update.num_samples)
        for name in normalised:
            total = part.sums.setdefault(name, _NormalisedSum())
            if lengths.get(name):  # without a step the parameter did not change
                total.add(update.state[name], float(update.num_samples), lengths[name])
        self.report(part, update, up)

    def aggregate(self) -> State:
        part = self.join()
        means = part.running.mean(self._state)
        num_samples = sum(report.num_samples for report in part.reports.values())
        for name, total in part.sums.items():
            means[name] = total.step(self._state[name], num_samples)
        return {name: means[name] for name in self._state if name in means}


class _NormalisedSum:
    """Weighted sum of one parameter's updates, each divided by the client's summed learning rates (the length)."""

    def __init__(self) -> None:
        self.first = 0.0  # a_1: for equal lengths all factors are 1, as in FedAvg
        self.values: Tensor | None = None  # sum over n_i (a_1 / a_i) y_i
        self.weights = 0.0  # sum over n_i (a_1 / a_i)
        self.lengths: list[tuple[float, float]] = []  # n_i and a_i by client

    def add(self, value: Tensor, num_samples: float, length: float) -> None:
        self.first = self.first or length
        weight = num_samples * (self.first / length)
        if self.values is None:
            self.values = to_float64(value, copy=True).mul_(weight)
        else:
            self.values.add_(to_float64(value), alpha=weight)
        self.weights += weight
        self.lengths.append((num_samples, length))

    def merge(self, other: _NormalisedSum) -> None:
        if other.values is None:
            return
        self.lengths = self.lengths + other.lengths
        if self.values is None:
            self.first, self.weights, self.values = other.first, other.weights, other.values.clone()
            return
        ratio = self.first / other.first
        self.values.add_(other.values.to(self.values.device), alpha=ratio)
        self.weights += ratio * other.weights

    def step(self, start: Tensor, num_samples: float) -> Tensor:
        if self.values is None:
            return start.clone()
        mean_length = sum(count * (length / self.first) for count, length in self.lengths) / num_samples
        rest = 1 - mean_length * (self.weights / num_samples)
        return cast_back(self.values / num_samples * mean_length + rest * to_float64(start), start)
