"""FedBuff and FedAsync: the server updates the model without waiting for slow clients.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek & Huba, "Federated Learning with Buffered Asynchronous Aggregation",
AISTATS 2022. https://arxiv.org/abs/2106.06639

Xie, Koyejo & Gupta, "Asynchronous Federated Optimization", 2019. https://arxiv.org/abs/1903.03934
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch

from lightning_fed.algorithms.asynchronous.arrivals import (
    Arrival,
    Durations,
    Order,
    RecordedOrder,
    VirtualOrder,
)
from lightning_fed.algorithms.asynchronous.callback import AsynchronousRounds
from lightning_fed.argument_checks import check_count, check_nonnegative, check_option, check_positive
from lightning_fed.data.population import Population
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State, digest
from lightning_fed.method import COMPANIONS, register
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.rule import AveragingAggregator, RoundInfo, trained_entries
from lightning_fed.server.schedule import Cohort, Schedule

Staleness: TypeAlias = float | Sequence[float]
"""Exponent of the polynomial weight, or slope and limit of the hinge weight."""


class AsynchronousRule(AveragingAggregator):
    r"""Base class of asynchronous aggregation rules.

    A round ends after ``buffer`` updates. At most ``clients_per_round`` clients train at a time, by default all. When
    an update arrives, an idle client starts from the newest global model. The sender can start again in the next round.

    If a client starts in round :math:`r` and the update arrives in round :math:`v`, the update has the staleness
    :math:`\tau = v - r` and the weight :math:`s(\tau)`. Rounds without a new global model also increase the staleness.
    In a simulation, clients train from the model of round :math:`r` with the learning rate of round :math:`v`.

    Args:
        buffer: Number of updates per round.
        staleness: Exponent :math:`a` of the weight :math:`s(\tau) = (1 + \tau)^{-a}`; 0 for equal weights. With a pair
            :math:`(a, b)` the weight is 1 for :math:`\tau \le b`, otherwise :math:`1 / (a (\tau - b) + 1)`.
        durations: Simulated durations, from sending the model to receiving the update.
        record: Path to a new file for recording the arrival order.
        replay: Path to a file written with ``record``. Updates arrive in this order instead of the simulated order.
    """

    has_versions = True

    def __init__(
        self,
        buffer: int,
        staleness: Staleness = 0.5,
        durations: Durations | None = None,
        record: str | None = None,
        replay: str | None = None,
    ) -> None:
        super().__init__()
        self.buffer = check_count("buffer", buffer)
        self.staleness = _check_staleness(staleness)
        self.durations = Durations() if durations is None else durations
        if record is not None and replay is not None:
            raise ValueError(f"Expected only one of `record` and `replay`, but got {record!r} and {replay!r}.")
        self.record, self.replay = record, replay
        self.order: Order = VirtualOrder(self.durations, self.buffer) if replay is None else RecordedOrder(replay)
        self.arrived: dict[Client, Arrival] = {}
        self.digests: dict[Client, str] = {}
        self._versions: dict[int, State] = {}
        self._planned: dict[int, Sequence[Arrival]] = {}

    @abstractmethod
    def reference(self, start: State) -> State:
        """Returns the model to subtract from a client's trained model.

        FedBuff returns ``start``, the client's model before training. FedAsync returns the current global model.
        """

    def factor(self, staleness: int) -> float:
        """Returns an update's weight. ``staleness`` counts the rounds since the client's start."""
        if isinstance(self.staleness, float):
            return float((1 + staleness) ** -self.staleness)
        slope, limit = self.staleness
        return 1 / (slope * max(0.0, staleness - limit) + 1)

    def draw_cohort(self, round: int, schedule: Schedule, population: Population) -> Cohort:
        arrivals = self._planned[round] = self.order.arrivals(round, schedule, population)
        visits = [schedule.visit_of(arrival.version, arrival.client) for arrival in arrivals]
        return Cohort(tuple(replace(visit, round=round) for visit in visits))

    def start(self, info: RoundInfo, state: State) -> None:
        super().start(info, state)
        arrivals = self._planned.get(info.round, ())
        self.arrived, self.digests = {arrival.client: arrival for arrival in arrivals}, {}
        self._planned = {info.round: arrivals}
        self._forget(info.round)
        stored = self._versions.items()
        self._versions = {
            version: {name: value.to(state[name].device) for name, value in model.items()} for version, model in stored
        }
        self._versions[info.round] = state

    def broadcast(self, request: Request) -> Broadcast:
        version = self._version_of(request.client)
        return Broadcast(version, dict(self._model(version)))

    @torch.no_grad()
    def receive(self, update: ClientUpdate) -> None:
        if self.record is not None or self.replay is not None:
            self.digests[update.client] = digest(update.state)
        version = self._version_of(update.client)
        start, factor = self._model(version), self.factor(self._info.round - version)
        if factor != 1 or start is not self._state:
            update = replace(update, state=self._move(update.state, start, factor))
        super().receive(update)

    def merge(self, other: Any) -> None:
        super().merge(other)
        self.digests |= other.digests

    def aggregate(self) -> State:
        state = {name: cast_back(value, self._state[name]) for name, value in super().aggregate().items()}
        self._forget(self._info.round + 1)
        return state

    def metrics(self) -> dict[str, float]:
        staleness = [self._info.round - arrival.version for arrival in self.arrived.values()]
        return {
            "fed/staleness/mean": sum(staleness) / max(1, len(staleness)),
            "fed/staleness/max": max(staleness, default=0),
            "fed/version": self._info.round + 1,
            **({"fed/virtual_seconds": self.order.clock.seconds} if isinstance(self.order, VirtualOrder) else {}),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"versions": dict(self._versions), "order": self.order.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._versions = dict(state["versions"])
        self.order.load_state_dict(state["order"])

    def _version_of(self, client: Client) -> int:
        if client in self.arrived:
            return self.arrived[client].version
        return self.order.flying.get(client, self._info.round)

    def _model(self, version: int) -> State:
        # A round without a new model is not stored: the next round starts from the same model.
        return self._versions[min(known for known in self._versions if known >= version)]

    def _forget(self, round: int) -> None:
        versions = self._versions
        needed = {min((known for known in versions if known >= v), default=v) for v in self.order.versions(round)}
        self._versions = {version: model for version, model in versions.items() if version in needed}

    def _move(self, state: State, start: State, factor: float) -> State:
        moved = dict(state)
        trained = trained_entries(self._info, state)
        reference = {**self._state, **{name: self.reference(start)[name] for name in trained}}
        for name, value in state.items():
            if value is start.get(name):  # unsent
                moved[name] = self._state[name]
            elif value.is_floating_point() or value.is_complex():
                change = to_float64(value) - to_float64(reference[name])
                moved[name] = to_float64(self._state[name]) + factor * change
        return moved


@register
class FedBuff(AsynchronousRule):
    r"""Computes a new global model after every ``buffer`` client updates (Nguyen et al., 2022).

    .. math:: x_{v+1} = x_v + \frac{1}{K} \sum_{j=1}^{K} s(\tau_j) (y_j - x_{v - \tau_j}), \qquad
        s(\tau) = (1 + \tau)^{-1/2}

    Here :math:`x_v` is the global model, and :math:`y_j` a client's trained model. The staleness :math:`\tau_j` is the
    number of rounds since the client's start. Running statistics move towards the client's values, as in
    :class:`FedAsync`. If the buffer size equals the number of clients, a round equals a synchronous round bit for bit.
    For a server step size other than 1 use ``Method("fedbuff", steps=[ServerOptimizer("SGD", lr=0.5)])``. See
    :class:`AsynchronousRule`.

    - Sends: 1 model down, 1 up.
    - Keeps: on the server each global model from which a client still trains.
    - Costs: no additional computation.
    - For: clients with different speeds.

    Args:
        buffer: Number of updates per round, :math:`K`.
        staleness: Exponent :math:`a` in :math:`s(\tau) = (1 + \tau)^{-a}`, or a pair, see :class:`AsynchronousRule`.
        weighting: ``"uniform"`` for equal client weights, as in the paper, or ``"examples"`` for numbers of examples.
        durations: Simulated durations of local training.
        record: Path to a new file for recording the arrival order.
        replay: Path to a file with a recorded order.

    Example:
        >>> from lightning_fed import Federation
        >>> federation = Federation(FedBuff(buffer=4, durations=Durations(spread=0.5)), clients_per_round=8)
    """

    def __init__(
        self,
        buffer: int = 2,
        staleness: Staleness = 0.5,
        weighting: Literal["uniform", "examples"] = "uniform",
        durations: Durations | None = None,
        record: str | None = None,
        replay: str | None = None,
    ) -> None:
        super().__init__(buffer, staleness, durations, record, replay)
        check_option("weighting", weighting, ("uniform", "examples"))
        self.weighting = weighting

    def weight(self, update: ClientUpdate) -> float:
        return 1.0 if self.weighting == "uniform" else float(update.num_samples)

    def reference(self, start: State) -> State:
        return start


@register
class FedAsync(AsynchronousRule):
    r"""Mixes each arriving client model into the global model (Xie, Koyejo & Gupta, 2019).

    .. math:: x_{v+1} = (1 - \alpha_\tau) x_v + \alpha_\tau y, \qquad \alpha_\tau = \alpha s(\tau)

    Here :math:`x_v` is the global model, and :math:`y` a client's trained model. The staleness :math:`\tau` is the
    number of rounds since the client's start, and :math:`s(\tau) = (1 + \tau)^{-a}`. Every arriving client model ends a
    round. To validate less often, set the Trainer's ``check_val_every_n_epoch``. The paper's proximal term is
    :class:`~lightning_fed.callbacks.ProximalTerm`. See :class:`AsynchronousRule`.

    - Sends: 1 model down, 1 up.
    - Keeps: on the server each global model from which a client still trains.
    - Costs: no additional computation.
    - For: comparisons with the paper. FedBuff is better if many clients train at a time.

    Args:
        alpha: Weight :math:`\alpha` of a client model without staleness, in (0, 1].
        staleness: Exponent :math:`a`. For two numbers the formula differs, see :class:`AsynchronousRule`.
        durations: Simulated durations of local training.
        record: Path to a new file for recording the arrival order.
        replay: Path to a file with a recorded order.

    Example:
        >>> import torch
        >>> from lightning_fed import ClientUpdate
        >>> from lightning_fed.rule import RoundInfo
        >>> rule = FedAsync(alpha=0.5)
        >>> rule.start(RoundInfo(0), {"w": torch.tensor(1.0)})
        >>> rule.receive(ClientUpdate("a", 9, {"w": torch.tensor(2.0)}))
        >>> rule.aggregate()
        {'w': tensor(1.5000)}
    """

    def __init__(
        self,
        alpha: float = 0.6,
        staleness: Staleness = 0.5,
        durations: Durations | None = None,
        record: str | None = None,
        replay: str | None = None,
    ) -> None:
        super().__init__(1, staleness, durations, record, replay)
        self.alpha = check_positive("alpha", alpha)
        if self.alpha > 1:
            raise ValueError(f"Expected `alpha` to be at most 1, but got {alpha}.")

    def factor(self, staleness: int) -> float:
        return self.alpha * super().factor(staleness)

    def weight(self, update: ClientUpdate) -> float:
        return 1.0

    def reference(self, start: State) -> State:
        return self._state


def _check_staleness(value: Staleness) -> float | tuple[float, float]:
    if not isinstance(value, Sequence):
        return check_nonnegative("staleness", value)
    if len(value) != 2:
        raise ValueError(f"Expected `staleness` to be a number (exponent) or two (slope, limit), but got {value!r}.")
    return check_nonnegative("staleness", value[0]), check_nonnegative("staleness", value[1])


COMPANIONS[AsynchronousRule] = lambda rule: [AsynchronousRounds(rule)]  # type: ignore[type-abstract]
