"""FedNova: clients that make more steps do not pull further, because their changes are normalised before the average.

Wang, Liu, Liang, Joshi & Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020, equations 8 to 10 and section 4. https://arxiv.org/abs/2007.07481
"""

from __future__ import annotations

import statistics
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_fed.algorithms.proximal_term import ProximalTerm
from lightning_fed.argument_checks import check_nonnegative
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.errors import BadUpdate
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.lightning.internals import callbacks_of, is_step_left_out
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.method import register
from lightning_fed.model.entries import parameter_entries
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.rule import RoundInfo
from lightning_fed.server.averaging import AveragingAggregator

_PREFIX = "length:"
_MOST_TIMES = 100  # times the median of the round, as which a longer length counts


class StepLength(FederatedCallback):
    r"""FedNova's client side: reports how far the steps of a visit go, whatever the gradients were.

    SGD makes of the gradients :math:`g_k` of a visit :math:`x - y_i = \sum_k \alpha_k g_k`. Reported is
    :math:`\lVert a_i \rVert_1 = \sum_k \alpha_k`, for every parameter that travels: one number of float64 each. It is
    found by following the optimizer's own steps with gradients that are all 1:

    .. math:: b_k = \rho b_{k-1} + (1 - \mu d_{k-1}), \qquad d_k = d_{k-1} + \eta_k b_k, \qquad
        \lVert a_i \rVert_1 = d_K

    with the rates :math:`\eta_k` and momentum :math:`\rho` of its parameter group (Nesterov's and dampening too), and
    the strength :math:`\mu` of the Trainer's :class:`~lightning_fed.callbacks.ProximalTerm`. At a constant rate that
    is :math:`\eta` times the paper's :math:`K`, :math:`(K - \rho (1 - \rho^K) / (1 - \rho)) / (1 - \rho)`, and
    :math:`(1 - (1 - \eta \mu)^K) / (\eta \mu)`; the factor :math:`\eta` is the same for all clients and drops out of
    the average. Weight decay is part of the gradient.

    Raises:
        MisconfigurationException: In ``fit``, if an optimizer is not ``torch.optim.SGD``, or has momentum that clients
            keep between rounds (``optimizer_state="keep"``): then gradients of earlier visits are in the change, which
            no length of this visit's steps stands for.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(max_rounds=10, method="fednova", logger=False)  # adds it by itself

    References:
        Wang et al., NeurIPS 2020, section 4.

    """

    supports_vectorize = True
    keeps_privacy = True

    def __init__(self) -> None:
        self._mu = 0.0
        self._buffers: dict[nn.Parameter, float] = {}
        self._lengths: dict[nn.Parameter, list[float]] = {}  # after every step

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuses optimizers whose steps are not sums of the visit's gradients."""
        keeps = find_federation(trainer).options.optimizer_state == "keep"
        terms = (callback for callback in callbacks_of(trainer) if isinstance(callback, ProximalTerm))
        self._mu = sum(term.mu for term in terms)
        for optimizer in trainer.optimizers:
            if not isinstance(optimizer, SGD):
                raise MisconfigurationException(
                    "FedNova divides a client's change by how far its optimizer goes with given gradients, which is"
                    f" defined for torch.optim.SGD (with momentum too), but got {type(optimizer).__name__}. 'fedavg'"
                    " and 'scaffold' go with any optimizer."
                )
            if keeps and any(group["momentum"] for group in optimizer.param_groups):
                raise MisconfigurationException(
                    "FedNova divides a client's change by the length of its visit's steps, but with"
                    " optimizer_state='keep' momentum brings the gradients of earlier visits into it: use"
                    " optimizer_state='reset', or SGD without momentum."
                )

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Starts to count."""
        self._buffers, self._lengths = {}, {}

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Follows the step."""
        if not find_federation(trainer).current_visits or is_step_left_out(trainer, optimizer):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._follow(parameter, group, optimizer.state.get(parameter, {}))

    def _follow(self, parameter: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        lengths = self._lengths.setdefault(parameter, [])
        length = lengths[-1] if lengths else 0.0
        step = gradient = 1.0 - self._mu * length
        if group["momentum"]:
            is_first = state.get("momentum_buffer") is None  # SGD begins with the gradient, undampened
            dampening = 0.0 if is_first else group["dampening"]
            buffer = group["momentum"] * self._buffers.get(parameter, 0.0) + (1 - dampening) * gradient
            self._buffers[parameter] = buffer
            step = gradient + group["momentum"] * buffer if group["nesterov"] else buffer
        lengths.append(length + float(group["lr"]) * step)

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        """Reports the lengths; 0 for a parameter that no step has moved."""
        federation = find_federation(trainer)
        planned = federation.visit
        steps = planned.num_batches // trainer.accumulate_grad_batches  # the group may have made more
        for parameter, name in parameter_entries(module).items():
            if name in update.state and (parameter.requires_grad or parameter in self._lengths):
                lengths = self._lengths.get(parameter, [0.0])
                length = lengths[steps - 1] if len(federation.current_visits) > 1 else lengths[-1]
                update.extras[f"{_PREFIX}{name}"] = torch.tensor(length, dtype=torch.float64)


@register(callbacks=lambda rule: [StepLength(), *([ProximalTerm(rule.mu)] if rule.mu else [])])
class FedNova(AveragingAggregator):
    r"""The average of the clients' changes per unit of their steps, times the mean number of steps.

    .. math:: x \leftarrow x - \tau \sum_i p_i d_i, \qquad d_i = \frac{x - y_i}{\lVert a_i \rVert_1}, \qquad
        \tau = \sum_i p_i \lVert a_i \rVert_1

    where :math:`p_i` is the client's share of the examples and :math:`\lVert a_i \rVert_1` the length of its steps
    (:class:`~lightning_fed.callbacks.StepLength`, which is added to the Trainer). With federated averaging clients that
    make more steps, because they have more data or do not straggle, move the optimum towards their own; here they do
    not. Where all make the same steps the weights equal FedAvg's, bit for bit. It goes with SGD, momentum, and a
    proximal term.

    The paper's server momentum is a server optimizer: ``FedAvgM(momentum=0.9, aggregator="fednova")``. Buffers are
    averaged by examples.

    - Sends: 1 model down, 1 up (and a number per entry).
    - Keeps: nothing.
    - Costs: the training alone.
    - For: clients with unequal numbers of steps: of other sizes, or stragglers; SGD only.

    Args:
        mu: Strength of a proximal term, as in :class:`FedProx`; 0 for none.

    Raises:
        ValueError: If ``mu`` is negative or not finite.

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

    References:
        Wang et al., NeurIPS 2020, equations 8 to 10.

    """

    def __init__(self, mu: float = 0.0) -> None:
        super().__init__()
        self.mu = check_nonnegative("mu", mu)
        self.sums: dict[str, _NormalisedSum] = {}
        self.num_samples = 0

    def weight(self, update: ClientUpdate) -> float:
        """The client's number of examples."""
        return float(update.num_samples)

    def start(self, info: RoundInfo, state: State) -> None:
        """Starts a round from ``state``."""
        super().start(info, state)
        self.sums, self.num_samples = {}, 0

    def receive(self, update: ClientUpdate) -> None:
        """Adds the change, divided by the length of the steps.

        Raises:
            BadUpdate: If there is no length, or one that does not fit the model.

        """
        lengths: dict[str, float] = {}
        for name, value in update.extras.items():
            if name.startswith(_PREFIX):
                entry = name.removeprefix(_PREFIX)
                fits = entry in self._state and value.numel() == 1 and self._state[entry].is_floating_point()
                if not fits or float(value) < 0:
                    raise BadUpdate(f"the length of its steps, {name!r}, does not fit the model")
                lengths[entry] = float(value)
        if not any(lengths.values()):
            raise BadUpdate("it did not say how far its steps go: no step was made, or its callback is missing")
        normalised = lengths.keys() if self._info.trainable is None else self._info.trainable & update.state.keys()
        self.running.add(
            {name: value for name, value in update.state.items() if name not in normalised},
            self.weight(update),
            update.num_samples,
        )
        self.num_samples += update.num_samples
        for name in normalised:
            total = self.sums.setdefault(name, _NormalisedSum())
            if lengths.get(name):  # without a step there is no change
                total.add(update.state[name], float(update.num_samples), lengths[name])

    def merge(self, other: FedNova) -> None:
        """Joins what another aggregator has received."""
        super().merge(other)
        self.num_samples += other.num_samples
        for name, total in other.sums.items():
            self.sums.setdefault(name, _NormalisedSum()).merge(total)

    def aggregate(self) -> State:
        """The global model, moved by the normalised changes."""
        means = self.running.mean(self._state)
        for name, total in self.sums.items():
            means[name] = total.step(self._state[name], self.num_samples)
        return {name: means[name] for name in self._state if name in means}


class _NormalisedSum:
    """Sums of one entry over clients, relative to the length of the first: where all are equal, sums of averaging."""

    def __init__(self) -> None:
        self.first = 0.0
        self.values: Tensor | None = None  # of n_i (a_1 / a_i) y_i
        self.weights = 0.0  # of n_i (a_1 / a_i)
        self.lengths: list[tuple[float, float]] = []  # n_i and a_i

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
        """The entry's new value, from ``start``."""
        if self.values is None:
            return start.clone()
        # A length is its client's word: one that is far beyond the others' does not stretch everybody's steps.
        most = _MOST_TIMES * statistics.median_low(length for _, length in self.lengths)
        mean_length = sum(count * (min(length, most) / self.first) for count, length in self.lengths) / num_samples
        rest = 1 - mean_length * (self.weights / num_samples)
        return cast_back(self.values / num_samples * mean_length + rest * to_float64(start), start)
