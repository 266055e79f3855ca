"""Server side of a round: checks and aggregates updates, and counts bytes."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from lightning_fed.console import round_number
from lightning_fed.errors import BadUpdate, BadUpdates, describe, without_frames
from lightning_fed.messages import (
    Broadcast,
    Client,
    ClientUpdate,
    Request,
    State,
    find_bad_count,
    message_bytes,
    plain_keys,
    sent_entries,
)
from lightning_fed.model.entries import distance, find_fault, find_implausible, identical_entries, norm
from lightning_fed.numerics.row_sums import find_bad_rows
from lightning_fed.rule import Aggregator, RoundInfo, trained_entries
from lightning_fed.steps.chain import Chain

_log = logging.getLogger(__name__)

_FARTHEST = 1e10  # limit for model norms: larger than any training reaches, and finite when squared
_ALWAYS = -1  # the round of an entry with its initial value


@dataclass
class RoundReport:
    """Results of a round on the server: clients, exclusions, metrics and bytes.

    Args:
        round: Index of the round, from 0.
        received: Number of local examples by client, for valid updates.
        counted: Each valid client's weight in the average, in examples.
        failed: Maps each excluded client to the reason: a failed training, or a missing or invalid update.
        metrics: Values from :attr:`ClientUpdate.metrics`, by client.
        norms: Euclidean norm of local minus global model, over the trained tensors, by client.
        up_bytes: Bytes in received updates, valid or not.
        down_bytes: Bytes in broadcasts.
        refused: The entries of ``failed`` for clients with an invalid update.
    """

    round: int
    received: dict[Client, int] = field(default_factory=dict)
    counted: dict[Client, int] = field(default_factory=dict, kw_only=True)
    failed: dict[Client, str] = field(default_factory=dict)
    metrics: dict[Client, dict[str, float]] = field(default_factory=dict)
    norms: dict[Client, float] = field(default_factory=dict)
    up_bytes: int = 0
    down_bytes: int = 0
    refused: dict[Client, str] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Sequence[RoundReport], positions: Mapping[Client, int]) -> RoundReport:
        report = cls(parts[0].round)
        for name in ("received", "counted", "failed", "refused", "metrics", "norms"):
            joint = {client: value for part in parts for client, value in getattr(part, name).items()}
            ordered = sorted(joint, key=lambda client: positions.get(client, len(positions)))
            setattr(report, name, {client: joint[client] for client in ordered})
        report.up_bytes = sum(part.up_bytes for part in parts)
        report.down_bytes = sum(part.down_bytes for part in parts)
        return report


class HeldEntries:
    """Records the untrained tensors already on each client, to avoid sending a tensor twice.

    At first, all clients have the initial tensors. A valid update shows that the client received the round's tensors. A
    tensor is sent again only after a change. ``values`` contains the untrained tensors in the current or last round.

    Example:
        >>> import torch
        >>> held, weight = HeldEntries(), torch.ones(1)
        >>> held.start_round(0, {"w": weight})
        >>> held.start_round(1, {"w": weight + 1})
        >>> held.record_clients(1, ["a"])
        >>> held.held_by("a", {"w": weight + 1}), held.held_by("b", {"w": weight + 1})
        (frozenset({'w'}), frozenset())
    """

    def __init__(self) -> None:
        self.values: State = {}
        self._since: dict[str, int] = {}
        self._rounds: dict[Client, int] = {}
        self._is_new = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._since)

    def restore(self, entries: Mapping[str, Tensor]) -> None:
        self.values = {
            name: self.values[name].to(entries[name].device) if name in self.values else entries[name].detach().clone()
            for name in self._since
            if name in entries
        }

    def start_round(self, round: int, state: State) -> None:
        unchanged = identical_entries(self.values, state)
        since = {name: self._since.get(name, round) if name in unchanged else round for name in state}
        self._since = dict.fromkeys(state, _ALWAYS) if self._is_new else since
        self.values, self._is_new = state, False
        oldest = min((start for start in self._since.values() if start != _ALWAYS), default=None)
        self._rounds = {} if oldest is None else {key: last for key, last in self._rounds.items() if last >= oldest}

    def held_by(self, client: Client, state: Mapping[str, Tensor], has_present: bool = False) -> frozenset[str]:
        last = self._rounds.get(client, _ALWAYS)
        held = {name: self.values[name] for name, start in self._since.items() if has_present or last >= start}
        return identical_entries(held, state)

    def record_clients(self, round: int, clients: Iterable[Client]) -> None:
        if any(start != _ALWAYS for start in self._since.values()):
            self._rounds |= dict.fromkeys(clients, round)

    def state_dict(self, entries: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        entries = {} if entries is None else entries
        now = {name: entries[name].to(value.device) for name, value in self.values.items() if name in entries}
        changed = now.keys() - identical_entries(self.values, now)
        since = {name: start for name, start in self._since.items() if name not in changed}
        # `since`: round of a tensor's last change. `rounds`: last round with a valid update, for each of the `clients`.
        state = {"since": since, "clients": plain_keys(self._rounds), "rounds": list(self._rounds.values())}
        return {} if self._is_new else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._since, self.values = dict(state.get("since", {})), {}
        self._is_new = not state
        self._rounds = dict(zip(state.get("clients", ()), state.get("rounds", ()), strict=True))


class ServerInterface(ABC):
    """Interface of the server in a round: the server itself, or a connection from a client's machine.

    For every client, the caller calls :meth:`prepare` and :meth:`sent` for the broadcast, and :meth:`count` and
    :meth:`accept` for the update. Finally :meth:`finish_round` aggregates.

    Args:
        chain: The aggregation rule with update steps.
        min_clients: Minimum number of valid updates for a new global model.

    Attributes:
        report: Report on the current or last round.
        state_before: The chain's state before the round.
        errors: Exceptions caused by updates in this process, by client.
        held: Records the untrained tensors (such as parameters without gradient) already on each client.
    """

    def __init__(self, chain: Chain, min_clients: int = 1) -> None:
        self.chain = chain
        self.min_clients = min_clients
        self.errors: dict[Client, Exception] = {}
        self.report = RoundReport(round=-1)
        self.state_before: dict[str, Any] = {}
        self.held = HeldEntries()

    @property
    def rule(self) -> Aggregator:
        return self.chain.rule

    @abstractmethod
    def start_round(self, info: RoundInfo, state: State) -> None:
        """Starts a round. ``state`` contains the global model's tensors shared with the clients."""

    @abstractmethod
    def prepare(self, client: Client, request: Request | None = None) -> Broadcast:
        """Returns the broadcast for a client. Callbacks may change the broadcast before :meth:`sent`."""

    def sent(self, client: Client, broadcast: Broadcast) -> None:
        """Counts the bytes of a broadcast to a client, after all callbacks have changed the broadcast."""
        self.report.down_bytes += message_bytes(broadcast)

    @abstractmethod
    def count(self, update: ClientUpdate) -> bool:
        """Counts an update's bytes. Returns ``False`` if the client received no broadcast."""

    @abstractmethod
    def accept(self, update: ClientUpdate) -> bool:
        """Checks an update, and adds a valid update to the aggregation. Returns whether the update is valid."""

    @abstractmethod
    def finish_round(self) -> State | None:
        """Aggregates the updates. Returns the new global tensors, or ``None`` to keep the old model."""

    def start_chain(self) -> None:  # noqa: B027 - optional
        """Resets the aggregation rule, and the steps that change updates (``UpdateStep``).

        Called at the start of a round. With several processes, called again before updates are merged.
        """

    def end_visits(self) -> None:  # noqa: B027 - optional
        """Marks clients without a received update as failed."""

    def abandon_round(self) -> None:  # noqa: B027 - optional
        """Ends the round without an aggregate, and restores the earlier state of the rule and the update steps."""

    def fail(self, client: Client, reason: str, error: Exception | None = None) -> bool:
        """Excludes a client from the round, and logs the reason. Always returns ``False``."""
        self.report.failed[client] = reason
        if error is not None:
            self.errors[client] = error
        _log.warning("Round %d: client %r is excluded: %s.", round_number(self.report.round), client, reason)
        return False

    def refuse(self, client: Client, reason: str, error: Exception | None = None) -> bool:
        self.report.refused[client] = reason
        return self.fail(client, reason, error)


class _Expected(NamedTuple):
    form: State
    sent: State
    rows: State


class Server(ServerInterface):
    """Prepares broadcasts, counts bytes, checks updates and aggregates.

    The server excludes clients with invalid or implausible updates. With fewer than ``min_clients`` valid updates, or
    an implausible aggregate, the global model does not change.

    Example:
        >>> import torch
        >>> from lightning_fed.algorithms import FedAvg
        >>> server = Server(Chain(FedAvg()))
        >>> server.start_round(RoundInfo(0), {"w": torch.tensor([1.0])})
        >>> for client, value in (("a", 2.0), ("b", float("nan"))):
        ...     server.sent(client, server.prepare(client))
        ...     update = ClientUpdate(client, 1, {"w": torch.tensor([value])})
        ...     print(server.count(update) and server.accept(update))
        True
        False
        >>> server.finish_round(), server.report.failed
        ({'w': tensor([2.])}, {'b': "entry 'w' has NaN or infinite values"})
    """

    def __init__(self, chain: Chain, min_clients: int = 1) -> None:
        super().__init__(chain, min_clients)
        self._expected: dict[Client, _Expected] = {}
        self._state: State = {}
        self._info = RoundInfo(-1)
        self._length = 1.0  # norm of the global model

    def start_round(self, info: RoundInfo, state: State) -> None:
        self.state_before = dict(self.chain.state_dict())
        self.report = RoundReport(info.round)
        self.errors = {}
        self._expected.clear()
        self._info, self._state = info, state
        self._length = max(1.0, float(norm(state[name] for name in trained_entries(info, state))))
        self.start_chain()

    def start_chain(self) -> None:
        self.chain.start(replace(self._info, refused=self.report.refused), self._state)

    def prepare(self, client: Client, request: Request | None = None) -> Broadcast:
        """Returns the broadcast for a client.

        Raises an error if requested rows do not exist, or the aggregation rule only supports whole tensors.
        """
        request = Request(client) if request is None else request
        self.report.up_bytes += message_bytes(request)
        broadcast = self.rule.broadcast(request)
        if request.rows:
            self._slice(broadcast, request)
        form = dict(self.chain.form(broadcast))
        # The client's update must have this form.
        self._expected[client] = _Expected(form, dict(broadcast.state), dict(broadcast.rows))
        return broadcast

    def sent(self, client: Client, broadcast: Broadcast) -> None:
        if broadcast.state.keys() == self._state.keys():
            broadcast.unsent |= self.held.held_by(client, broadcast.state, client in self.report.received)
        if client in self._expected:
            self.chain.on_send(client, broadcast)
        super().sent(client, broadcast)

    def count(self, update: ClientUpdate) -> bool:
        """Counts an update's bytes. Returns ``False`` if the update was not requested."""
        self.report.up_bytes += message_bytes(update)
        expected = self._expected.get(update.client)
        # From the broadcast, so a client cannot change rows that were not sent.
        update.rows = {} if expected is None else expected.rows
        return expected is not None or self.fail(update.client, "the client sent an update that was not requested")

    def accept(self, update: ClientUpdate) -> bool:
        client = update.client
        form, sent, _ = self._expected.pop(client)
        fault = find_bad_count(update.num_samples) or find_fault(update.state, form)
        fault = fault or find_implausible(update.extras)
        if fault is not None:
            return self.refuse(client, fault)
        self.report.received[client] = update.num_samples
        self.report.metrics[client] = update.metrics
        self.report.counted[client] = self.chain.counted(update.num_samples)
        try:
            self.chain.receive(update, sent, self._inspect)
        except BadUpdate as error:
            return self._take_back(client, str(error))
        except Exception as error:
            reason = f"the client's update raised {describe(error)} on the server"
            return self._take_back(client, reason, without_frames(error))
        return True

    def fail(self, client: Client, reason: str, error: Exception | None = None) -> bool:
        self._expected.pop(client, None)
        return super().fail(client, reason, error)

    def end_visits(self) -> None:
        for client in list(self._expected):
            self.fail(client, "the client never answered")

    def finish_round(self) -> State | None:
        """Aggregates the updates of a round. Returns the new global tensors.

        Returns ``None`` with too few valid updates or an implausible aggregate. Returns the unchanged global model if
        the aggregation rule computes no new model in this round.
        """
        self.end_visits()
        state = self._aggregate()
        if state is None:
            return None
        fault = find_implausible(state)
        if fault is not None:
            _log.error("Round %d: the aggregate is discarded: %s.", round_number(self.report.round), fault)
            self.abandon_round()
            return None
        return state

    def abandon_round(self) -> None:
        self.chain.load_state_dict(self.state_before)

    def _aggregate(self) -> State | None:
        while True:
            count = len(self.report.received)
            if count < self.min_clients and self.chain.reveals != "model":
                _log.warning(
                    "Round %d: %d valid updates, fewer than min_clients=%d, so the global model does not change.",
                    round_number(self.report.round),
                    count,
                    self.min_clients,
                )
                self.abandon_round()
                return None
            try:
                state = self.chain.aggregate()
            except BadUpdates as error:
                for client, reason in error.reasons.items():
                    for left_out in [client] if client in self.report.received else list(self.report.received):
                        self._take_back(left_out, reason)
            else:
                return self._state if state is None else state

    def _inspect(self, update: ClientUpdate, sent: State) -> None:
        fault = find_implausible(sent_entries(update))
        if fault is not None:
            raise BadUpdate(fault)
        names = [name for name in trained_entries(self._info, update.state) if not _is_integer(update.state[name])]
        if self.rule.resizes:  # models of other shapes have no difference
            length = float(norm(update.state[name] for name in names))
        else:
            length = distance(update.state, sent, names) or 0.0
            self.report.norms[update.client] = length
        if not length <= _FARTHEST * self._length:
            raise BadUpdate(f"the client's update has norm {length:.3g}, far above the model's norm {self._length:.3g}")

    def _take_back(self, client: Client, reason: str, error: Exception | None = None) -> bool:
        report = self.report
        for entries in (report.received, report.metrics, report.counted, report.norms):
            entries.pop(client, None)
        return self.refuse(client, reason, error)

    def _slice(self, broadcast: Broadcast, request: Request) -> None:
        if not self.rule.accepts_rows:
            raise ValueError(
                f"Expected a rule for single rows, because a client requests some rows of {sorted(request.rows)}, but "
                f"{type(self.rule).__name__} needs whole entries (all rows): use 'fedavg', for instance."
            )
        for name, rows in request.rows.items():
            table = broadcast.state.get(name)
            fault = "the entry is not sent" if table is None else find_bad_rows(rows, table)
            if table is None or fault is not None:
                raise ValueError(f"Client {request.client!r} requests rows of {name!r}, but {fault}.")
            broadcast.state[name] = table[rows.to(table.device)]
            broadcast.rows[name] = rows


def _is_integer(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex())
