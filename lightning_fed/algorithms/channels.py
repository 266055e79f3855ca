"""Rules that exchange additional tensors with the clients, such as control variates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.algorithms.gradient_terms import add_to_gradient
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.data.population import PlannedVisit
from lightning_fed.errors import BadUpdate, BadUpdates
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.lightning.internals import gradient_scale, is_step_left_out
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State, with_prefix, without_prefix
from lightning_fed.method import COMPANIONS
from lightning_fed.model.entries import parameter_entries
from lightning_fed.numerics.precision import at_least_float32, to_float64
from lightning_fed.numerics.trees import move_beside
from lightning_fed.numerics.weighted_mean import WeightedMean
from lightning_fed.rule import AveragingAggregator, RoundInfo

_OCTAVES = 7
"""Largest accepted number with ``bounds="above"``: about 2 ** 7 times the round's median."""


@dataclass(frozen=True)
class Channel:
    """Describes one kind of additional values in messages, such as SCAFFOLD's control variates.

    Args:
        form: ``"entry"`` for one tensor per model parameter, in float32 or float64. ``"numbers"`` for one number per
            parameter, and ``"number"`` for a single number. Numbers are float64 scalars, at least 0.
        up: Whether clients send the values. The server averages tensors, and stores each client's numbers.
        down: Whether the server sends the tensors with the global model.
        memory: Whether clients keep the tensors between rounds.
        server: Whether the server keeps the tensors between rounds.
        bounds: Check of clients' numbers on the server. ``"above"`` excludes clients with a number above about 128
            times the round's median. ``"work"`` is for numbers that grow with the amount of training, such as step
            counts, and uses the limit :attr:`ChannelRule.octaves`. ``"none"`` disables the check.
    """

    form: Literal["entry", "numbers", "number"] = "entry"
    up: bool = False
    down: bool = False
    memory: bool = False
    server: bool = False
    bounds: Literal["none", "above", "work"] = "none"

    def read(self, title: str, update: ClientUpdate, state: State) -> dict[str, Any]:
        """Returns the additional values described by this object in a client's update, by parameter name.

        ``title`` is the channel's name. ``state`` has the valid shapes. Missing or invalid values raise ``BadUpdate``.
        """
        alone = {"": update.extras[title]} if title in update.extras else {}
        sent = alone if self.form == "number" else without_prefix(update.extras, f"{title}:")
        if not sent:
            raise BadUpdate(
                f"the client sent no {title!r}: the client made no step, or the Trainer lacks the method's callback"
            )
        for name, value in sent.items():
            entry = torch.zeros(()) if self.form == "number" else state.get(name)
            fits = entry is not None and entry.is_floating_point()
            if fits and entry is not None and self.form == "entry":
                fits = value.shape == entry.shape and value.dtype == at_least_float32(entry).dtype
            elif value.numel() != 1 or float(value) < 0:
                fits = False
            if not fits:
                place = f" for the entry {name!r}" if name else ""
                form = "a tensor of the entry's shape" if self.form == "entry" else "one number of at least 0"
                raise BadUpdate(f"the client sent an invalid {title!r}{place}: expected {form}")
        return dict(sent) if self.form == "entry" else {name: float(value) for name, value in sent.items()}


class Report(NamedTuple):
    """Additional numbers in a client's update, for each :class:`Channel` and model parameter (by name).

    ``numbers[channel][parameter]`` is one number. If the channel has ``bounds``, ``octaves[channel, parameter]`` has
    the number's binary exponent, or with ``"work"`` the exponents of two quotients (:attr:`ChannelRule.octaves`).
    """

    num_samples: int
    numbers: dict[str, dict[str, float]]
    octaves: dict[tuple[str, str], tuple[int, ...]]


@dataclass
class Part:
    """Sums over the updates from a group of clients with similar additional numbers (see :class:`Channel`).

    The server can judge numbers only after the round's last update, and cannot remove one client from a sum. Clients
    with equal :attr:`Report.octaves` therefore share a ``Part``, and the server omits implausible parts. ``running`` is
    the mean model. ``means`` has the mean tensors by channel. Subclasses of :class:`ChannelRule` can add ``sums``.
    """

    running: WeightedMean = field(default_factory=WeightedMean)
    means: dict[str, WeightedMean] = field(default_factory=dict)
    sums: dict[str, Any] = field(default_factory=dict)
    reports: dict[Client, Report] = field(default_factory=dict)

    def merge(self, other: Part) -> None:
        self.running.merge(other.running)
        for title, mean in other.means.items():
            self.means.setdefault(title, WeightedMean()).merge(mean)
        for name, total in other.sums.items():
            self.sums.setdefault(name, type(total)()).merge(total)
        self.reports |= other.reports


@dataclass
class ChannelVisit:
    """One client's local training in a round, with a method's additional values (see :class:`Channel`).

    Attributes:
        parameters: Parameters shared with the server.
        start: The received model.
        down: Additional tensors from the server, by name in :attr:`ChannelRule.channels` and parameter name.
        memory: Tensors kept on the client between rounds, by the same names.
        up: Values for the server, by the same names.
        records: Last result of :meth:`ChannelRule.follow_step`, by parameter name.
        row: The client's index, if several clients train together on stacked tensors.
        steps: Number of optimizer steps.
    """

    trainer: L.Trainer
    module: L.LightningModule
    planned: PlannedVisit
    parameters: dict[str, nn.Parameter]
    start: State
    down: dict[str, State]
    memory: dict[str, State]
    up: dict[str, dict[str, Any]]
    records: dict[str, Any] = field(default_factory=dict)
    row: int | None = None
    steps: int = 0


class ChannelRule(AveragingAggregator):
    """Base class of averaging rules with additional values in messages.

    :attr:`channels` describes these values by name. A client calls :meth:`follow_step` in every optimizer step, and
    :meth:`end_visit` after local training. The server calls :meth:`finish` after the round's last update.

    Attributes:
        octaves: Limit for channels with ``bounds="work"``, such as step counts. The server divides a client's number by
            each of the two values in ``work``, and finds each quotient's median in the round. A client is excluded if
            both quotients are larger than about ``2 ** octaves`` times the medians, or both smaller by this factor.
        work: Two values per client: epochs, and epochs times examples. With ``local_steps``, both are numbers of steps.

    Example:
        >>> class LastGradient(ChannelRule):
        ...     channels = {"last": Channel(up=True)}
        ...
        ...     def follow_step(self, record, parameter, group, state, scale):
        ...         return parameter.grad / scale
        ...
        ...     def end_visit(self, visit):
        ...         visit.up["last"] = visit.records
        ...
        ...     def finish(self, state, part):
        ...         self.gradient = part.means["last"].mean()
        ...         return state
    """

    channels: ClassVar[Mapping[str, Channel]] = {}
    keeps_privacy: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, State] = {title: {} for title, one in self.channels.items() if one.down or one.server}
        self.parts: dict[tuple[Any, ...], Part] = {}
        self.octaves = _OCTAVES
        self.work: dict[Client, tuple[float, float]] = {}

    # Client side

    def check_fit(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Raises an error before the fit if the method does not support the settings or the module."""

    def begin_visit(self, visit: ChannelVisit) -> State:
        """Returns terms to add to the gradients in this round, by parameter name."""
        return {}

    def follow_step(
        self, record: Any, parameter: nn.Parameter, group: dict[str, Any], state: dict[str, Any], scale: float
    ) -> Any:
        """Called in every optimizer step for each parameter, for example to sum gradients.

        The gradient does not yet include the term from :meth:`begin_visit`. Divide the gradient by ``scale``, the loss
        scale of mixed precision. ``record`` is the previous step's result, at first ``None``. ``visit.records`` has the
        last results after training. ``group`` and ``state`` are the parameter's optimizer group and optimizer state.
        """
        return record

    def correct(self, parameter: nn.Parameter, correction: Tensor) -> Tensor:
        """Returns the term to add to a parameter's gradient, by default ``correction``."""
        return correction

    def end_visit(self, visit: ChannelVisit) -> None:
        """Called on the client after training, to set the values to send (``visit.up``) and keep (``visit.memory``)."""

    # The server

    def begin_round(self, trainer: L.Trainer) -> None:
        """Called on the server at the start of a round, for example to read the learning rate."""

    def weight(self, update: ClientUpdate) -> float:
        return float(update.num_samples)

    def start(self, info: RoundInfo, state: State) -> None:
        super().start(info, state)
        self.parts = {}
        # Round 0 starts a new run, and the rule object may come from an earlier run.
        self.tensors = {
            title: {} if info.round == 0 else move_beside(tensors, state) for title, tensors in self.tensors.items()
        }

    def broadcast(self, request: Request) -> Broadcast:
        broadcast = super().broadcast(request)
        for title, channel in self.channels.items():
            if channel.down:
                broadcast.extras |= with_prefix(self.tensors[title], f"{title}:")
        return broadcast

    def receive(self, update: ClientUpdate) -> None:
        up = {title: one.read(title, update, self._state) for title, one in self.channels.items() if one.up}
        key = tuple(self._octaves(update, up).items())
        part = self.parts.get(key, Part())
        self.add(part, update, up)
        self.parts[key] = part

    def add(self, part: Part, update: ClientUpdate, up: dict[str, dict[str, Any]]) -> None:
        """Adds a client's update to the running sums ``part``.

        ``up`` contains the update's additional values, by channel and parameter name. An override must refuse an
        invalid update before any change to ``part``.
        """
        self.add_to(part.running, update, self.weight(update))
        for title, values in up.items():
            if title in self.channels and self.channels[title].form == "entry":
                mean = part.means.setdefault(title, WeightedMean())
                mean.add({name: to_float64(value) for name, value in values.items()}, 1.0, update.num_samples)
        self.report(part, update, up)

    def report(self, part: Part, update: ClientUpdate, up: dict[str, dict[str, Any]]) -> None:
        numbers = {t: values for t, values in up.items() if t not in self.channels or self.channels[t].form != "entry"}
        part.reports[update.client] = Report(update.num_samples, numbers, self._octaves(update, up))

    def merge(self, other: ChannelRule) -> None:
        for key, part in other.parts.items():
            self.parts.setdefault(key, Part()).merge(part)

    def join(self) -> Part:
        """Combines the sums from all updates in the round into one :class:`Part`.

        Raises ``BadUpdates`` if clients sent implausible numbers. The next call excludes these clients.
        """
        self._exclude()
        if len(self.parts) == 1:
            (joined,) = self.parts.values()
        else:
            joined = Part()
            for part in self.parts.values():
                joined.merge(part)
        self.running = joined.running
        return joined

    def aggregate(self) -> State:
        part = self.join()
        return self.finish(super().aggregate(), part)

    def finish(self, state: State, part: Part) -> State:
        """Returns the new global model, by default ``state``, the mean of the client models.

        Overrides may modify ``state`` in place. ``part.means[name].mean()`` returns a channel's mean tensors, if sent.
        """
        return state

    def share(self, part: Part) -> float:
        return part.running.count / (len(self._info.clients) or part.running.count)

    def state_dict(self) -> dict[str, Any]:
        return {title: dict(tensors) for title, tensors in self.tensors.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = {title: dict(state.get(title, {})) for title in self.tensors}

    def _octaves(self, update: ClientUpdate, up: dict[str, dict[str, Any]]) -> dict[tuple[str, str], tuple[int, ...]]:
        work = self.work.get(update.client, (1.0, float(update.num_samples)))
        return {
            (title, name): tuple(_octave(value / size) for size in ((1.0,) if channel.bounds == "above" else work))
            for title, channel in self.channels.items()
            if channel.bounds != "none"
            for name, value in up[title].items()
        }

    def _exclude(self) -> None:
        reports = {client: report for part in self.parts.values() for client, report in part.reports.items()}
        reasons = {}
        for title, name in dict.fromkeys(place for report in reports.values() for place in report.octaves):
            bounded = {
                client: report.octaves[title, name]
                for client, report in reports.items()
                if report.numbers[title].get(name)
            }
            is_above = self.channels[title].bounds == "above"
            most = _OCTAVES if is_above else self.octaves
            medians = [statistics.median_low(view) for view in zip(*bounded.values(), strict=True)]
            for client, octaves in bounded.items():
                offsets = [octave - median for octave, median in zip(octaves, medians, strict=True)]
                if min(offsets) > most or (max(offsets) < -most and not is_above):
                    value = reports[client].numbers[title][name]
                    middle = f"the round's median of about {value / 2.0 ** offsets[0]:g}"
                    reasons[client] = f"the client's {title!r} of {value:g} is far from {middle}"
        if reasons:
            self.parts = {key: part for key, part in self.parts.items() if not reasons.keys() & part.reports.keys()}
            raise BadUpdates(reasons)


def _octave(value: float) -> int:
    return math.frexp(value or 5e-324)[1]  # 0 has no exponent


class ChannelCallback(FederatedCallback):
    """Calls the hooks of a :class:`ChannelRule`, and adds the rule's tensors to messages."""

    supports_vectorize = True

    def __init__(self, rule: ChannelRule, /) -> None:
        self.rule = rule
        self.keeps_privacy = rule.keeps_privacy
        self._visits: dict[int, ChannelVisit] = {}  # by position
        self._corrections: dict[int, State] = {}
        self._stacks: dict[str, Tensor] = {}
        self._names: dict[nn.Parameter, str] = {}
        self._records: dict[str, Any] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.rule.check_fit(trainer, pl_module)

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.rule.work = {}
        self.rule.begin_round(trainer)

    def on_server_receive(self, trainer: L.Trainer, module: L.LightningModule, update: ClientUpdate) -> None:
        if not any(channel.bounds == "work" for channel in self.rule.channels.values()):
            return
        # Update steps may later change the client's number of examples.
        visit = next(one for one in find_federation(trainer).cohort.visits if one.client == update.client)
        epochs = float(visit.epochs if visit.steps is None else visit.steps)
        examples = update.num_samples * (visit.portion or 1.0) if visit.steps is None else 1.0
        self.rule.work[update.client] = epochs, epochs * examples

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        federation = find_federation(trainer)
        self._names = {value: name for value, name in parameter_entries(module).items() if name in broadcast.state}
        self._records = {}
        planned, channels = federation.visit, self.rule.channels
        parameters = {name: parameter for parameter, name in self._names.items()}
        down, memory = (
            {
                title: {
                    name: value.to(parameters[name].device)
                    for name, value in without_prefix(tensors, f"{title}:").items()
                    if name in parameters
                }
                for title in channels
            }
            for tensors in (broadcast.extras, federation.client_memory)
        )
        up: dict[str, dict[str, Any]] = {title: {} for title in channels}
        visit = ChannelVisit(trainer, module, planned, parameters, broadcast.state, down, memory, up)
        self._visits[planned.position] = visit
        self._corrections[planned.position] = self.rule.begin_visit(visit)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        visits = find_federation(trainer).current_visits
        if not visits or is_step_left_out(trainer, optimizer):
            return
        scale = gradient_scale(trainer, optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or parameter not in self._names:
                    continue
                name, state = self._names[parameter], optimizer.state.get(parameter, {})
                self._records[name] = self.rule.follow_step(self._records.get(name), parameter, group, state, scale)
                correction = self._correction(name, visits)
                if correction is not None:
                    add_to_gradient(parameter.grad, self.rule.correct(parameter, correction), scale)

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        federation = find_federation(trainer)
        planned, visits = federation.visit, federation.current_visits
        visit = self._visits[planned.position]
        visit.records = self._records
        if len(visits) > 1:
            visit.row = next(row for row, one in enumerate(visits) if one is planned)
        visit.steps = planned.num_batches // trainer.accumulate_grad_batches  # vectorised visits may take more steps
        self.rule.end_visit(visit)
        for title, channel in self.rule.channels.items():
            if channel.up and channel.form == "entry":
                update.extras |= with_prefix(visit.up[title], f"{title}:")
            elif channel.up:
                numbers = {n: torch.tensor(value, dtype=torch.float64) for n, value in visit.up[title].items()}
                update.extras |= {f"{title}:{name}" if name else title: value for name, value in numbers.items()}
            if channel.memory:
                federation.client_memory.update(with_prefix(visit.memory[title], f"{title}:"))

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        position = find_federation(trainer).visit.position
        self._visits.pop(position, None)
        self._corrections.pop(position, None)
        if not self._visits:
            self._stacks, self._names, self._records = {}, {}, {}

    def _correction(self, name: str, visits: Sequence[PlannedVisit]) -> Tensor | None:
        rows = [self._corrections.get(planned.position, {}).get(name) for planned in visits]
        if len(rows) == 1:
            return rows[0]
        if name not in self._stacks:
            like = next((row for row in rows if row is not None), None)
            if like is None:
                return None
            self._stacks[name] = torch.stack([torch.zeros_like(like) if row is None else row for row in rows])
        return self._stacks[name]


COMPANIONS[ChannelRule] = lambda rule: [ChannelCallback(rule)]
