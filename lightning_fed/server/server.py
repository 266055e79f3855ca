"""The server half of a round: the rule that aggregates updates, and the server that counts and checks them.

Nothing here knows Lightning: feed it messages and it aggregates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Set

from torch import Tensor

from lightning_fed.errors import BadUpdate, OptionError, describe, without_frames
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State
from lightning_fed.model.entries import (
    distance,
    find_fault,
    find_implausible,
    find_non_finite,
    is_running_statistic,
    norm,
)
from lightning_fed.numerics.row_sums import find_bad_rows
from lightning_fed.process_group import SINGLE_PROCESS, ProcessGroup
from lightning_fed.server.aggregator import Aggregator
from lightning_fed.server.interface import RoundReport as RoundReport
from lightning_fed.server.interface import ServerInterface as ServerInterface
from lightning_fed.server.limits import UpdateLimits, find_bad_count

_log = logging.getLogger(__name__)

_FARTHEST = 1e10  # lengths of the model: no training moves it so far, and squares of what is nearer are finite


class Server(ServerInterface):
    """The server: prepares the broadcasts of a round, counts the bytes, checks the updates, aggregates.

    An update that does not fit the broadcast it answers (missing or unexpected entries, other shapes or dtypes, NaN or
    infinite values, negative variances), that no training can have made, or that the rule cannot use, is left out by
    name; the round goes on. So is one at which the rule raises any exception: of a single update it is its client's
    fault. With fewer than ``min_clients`` good updates, or where the aggregate is not plausible, the global model stays
    as it was.

    Args:
        aggregator: The rule.
        min_clients: Least number of good updates that changes the global model.
        limits: Limits of one client's influence.

    Attributes:
        report: What happened in the round.
        state_before: The aggregator's state when the round began.

    Raises:
        ValueError: If ``min_clients`` is not a whole number from 1 on, or steps of models of any shape are limited.

    Example:
        >>> import torch
        >>> from lightning_fed.algorithms import FedAvg
        >>> server = Server(FedAvg())
        >>> server.start_round(0, {"w": torch.tensor([1.0])})
        >>> for client, value in (("a", 2.0), ("b", float("nan"))):
        ...     server.sent(client, server.prepare(client))
        ...     update = ClientUpdate(client, 1, {"w": torch.tensor([value])})
        ...     print(server.count(update) and server.accept(update))
        True
        False
        >>> server.finish_round(), server.report.failed
        ({'w': tensor([2.])}, {'b': "entry 'w' has NaN or infinite values"})

    """

    def __init__(self, aggregator: Aggregator, min_clients: int = 1, limits: UpdateLimits | None = None) -> None:
        super().__init__(aggregator, min_clients, limits)
        if aggregator.resizes and self.limits.max_update_norm is not None:
            raise OptionError(
                f"Expected no `max_update_norm` with {type(aggregator).__name__}: the models of its clients have shapes"
                " of their own, between which there is no step."
            )
        self._expected: dict[Client, State] = {}
        self._rows: dict[Client, State] = {}
        self._sent: dict[Client, State] = {}
        self._waiting: list[tuple[ClientUpdate, State]] = []  # for the median of all steps
        self._names: Set[str] = frozenset()  # of the global model
        self._length = 1.0  # of the global model

    def start_round(self, round: int, state: State) -> None:
        """Starts a round from the shared entries of the global model."""
        self.state_before = dict(self.aggregator.state_dict())
        self.report = RoundReport(round)
        self.errors = {}
        self._expected.clear()
        self._rows.clear()
        self._sent.clear()
        self._waiting = []
        self._names = state.keys()
        self._length = max(1.0, float(norm(state[name] for name in self._trained(state))))
        self.aggregator.start_round(round, state)

    def prepare(self, client: Client, request: Request | None = None) -> Broadcast:
        """Makes the message for a client, and notes what an answer to it must look like.

        Args:
            client: The client's key.
            request: The client's request, which is counted.

        Raises:
            ValueError: If the rule cannot do with rows, or the request does not fit the model.

        """
        request = Request(client) if request is None else request
        self.report.up_bytes += request.nbytes
        broadcast = self.aggregator.respond(request)
        if request.rows:
            self._slice(broadcast, request)
        self._rows[client] = dict(broadcast.rows)
        self._expected[client] = dict(self.aggregator.expected(broadcast))
        self._sent[client] = dict(broadcast.state)
        return broadcast

    def sent(self, client: Client, broadcast: Broadcast) -> None:
        """Counts a message that goes to a client; of a whole model without what the client has already."""
        if broadcast.state.keys() == self._names:
            broadcast.unsent = self.held.held_by(client, broadcast.state, client in self.report.received)
        super().sent(client, broadcast)

    def count(self, update: ClientUpdate) -> bool:
        """Counts an update as it has arrived; its rows are those that the client was sent."""
        self.report.up_bytes += update.nbytes
        update.rows = self._rows.pop(update.client, {})
        return update.client in self._expected or self.fail(update.client, "it sent an update that was not asked for")

    def accept(self, update: ClientUpdate) -> bool:
        """Checks an update that was counted, and hands it to the aggregator, or keeps it until all are there."""
        client = update.client
        expected, sent = self._expected.pop(client), self._sent.pop(client)
        fault = find_bad_count(update.num_samples) or find_fault(update.state, expected, finite=False)
        fault = fault or find_implausible(update.sent) or find_non_finite(update.extras)
        if fault is not None:
            return self.refuse(client, fault)
        length = self._measure(update, sent)
        if not length <= _FARTHEST * self._length:
            return self.refuse(client, f"its step has the length {length:.3g}, and the model {self._length:.3g}")
        self.report.received[client] = update.num_samples
        self.report.metrics[client] = update.metrics
        update.num_samples = self.report.counted[client] = self.limits.counted_samples(update.num_samples)
        if self.limits.goes_by_median:
            self._waiting.append((update, sent))
            return True
        return self._aggregate(update, sent, self.limits.longest([]))

    def fail(self, client: Client, reason: str, error: Exception | None = None) -> bool:
        """Leaves a client out of the round, by name and with the reason in the log; always ``False``."""
        self._expected.pop(client, None)
        self._sent.pop(client, None)
        return super().fail(client, reason, error)

    def end_visits(self, ranks: ProcessGroup = SINGLE_PROCESS) -> None:
        """Marks clients that have not answered as failed, and aggregates updates that were waiting for the others'."""
        for client in list(self._expected):
            self.fail(client, "it never answered")
        if self.limits.goes_by_median:
            norms = [length for part in ranks.gather(list(self.report.norms.values())) for length in part]
            waiting, self._waiting = self._waiting, []
            for update, sent in waiting:
                self._aggregate(update, sent, self.limits.longest(norms))

    def finish_round(self) -> State | None:
        """Aggregates the round; ``None`` where the global model stays as it was."""
        self.end_visits()
        self.aggregator.num_refused = len(self.report.refused)
        for client, reason in self.aggregator.leave_out().items():
            self._take_back(client, reason)
        count = len(self.report.received)
        if count < self.min_clients and not self.aggregator.is_private:
            _log.warning(
                "Round %d: %d good updates, fewer than min_clients=%d: the global model stays as it was.",
                self.report.round,
                count,
                self.min_clients,
            )
            return None
        state = self.aggregator.aggregate()
        fault = find_implausible(state)
        if fault is not None:
            _log.error("Round %d: the aggregate is not used: %s.", self.report.round, fault)
            self.abandon_round()
            return None
        return state

    def abandon_round(self) -> None:
        """Restores the state that the aggregator had when the round began."""
        self.aggregator.load_state_dict(self.state_before)

    def _trained(self, state: State) -> list[str]:
        """The entries whose change is the length of a step: those that train."""
        if self.aggregator.trainable is not None:
            return [name for name in state if name in self.aggregator.trainable]
        return [name for name, value in state.items() if value.is_floating_point() and not is_running_statistic(name)]

    def _measure(self, update: ClientUpdate, sent: State) -> float:
        """The length of a client's step, which is noted; of a model of any shape its own.

        Of an answer that is no model, but numbers of a secure sum, there is none.
        """
        names = [name for name in self._trained(update.state) if not _is_integer(update.state[name])]
        if self.aggregator.resizes:
            return float(norm(update.state[name] for name in names))
        length = distance(update.state, sent, names)
        if length is None:
            return 0.0
        self.report.norms[update.client] = length
        return length

    def _aggregate(self, update: ClientUpdate, sent: State, longest: float) -> bool:
        length = self.report.norms.get(update.client, 0.0)
        if length > longest:
            self.report.clipped[update.client] = length
            _shorten(update.state, sent, self._trained(sent), longest / length)
        try:
            self.aggregator.receive(update)
        except BadUpdate as error:
            return self._take_back(update.client, str(error))
        except Exception as error:
            reason = f"the server cannot use its update: {describe(error)}"
            return self._take_back(update.client, reason, without_frames(error))
        return True

    def _take_back(self, client: Client, reason: str, error: Exception | None = None) -> bool:
        """Leaves out a client whose update was good so far; always ``False``."""
        self.report.received.pop(client, None)
        self.report.metrics.pop(client, None)
        self.report.norms.pop(client, None)
        self.report.clipped.pop(client, None)
        return self.refuse(client, reason, error)

    def _slice(self, broadcast: Broadcast, request: Request) -> None:
        """Replaces entries of a message by the rows that the client asked for."""
        if not self.aggregator.takes_rows:
            raise ValueError(
                f"Expected a rule that can do with some rows of {sorted(request.rows)}, but"
                f" {type(self.aggregator).__name__} needs whole entries: use 'fedavg', for instance."
            )
        for name, rows in request.rows.items():
            table = broadcast.state.get(name)
            fault = "it is not sent" if table is None else find_bad_rows(rows, table)
            if table is None or fault is not None:
                raise ValueError(f"Client {request.client!r} asks for rows of {name!r}, but {fault}.")
            broadcast.state[name] = table[rows.to(table.device)]
            broadcast.rows[name] = rows


def _is_integer(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex())


def _shorten(state: State, start: State, names: Iterable[str], factor: float) -> None:
    for name in names:
        if name in state and state[name].shape == start[name].shape:
            state[name] = start[name] + (state[name] - start[name]) * factor
