"""The server half of a round: what aggregates the clients' updates, and the desk that checks and counts them.

Nothing here knows Lightning: feed it messages and it aggregates.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_fed.errors import BadUpdate
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State
from lightning_fed.model.entries import find_fault, find_non_finite
from lightning_fed.numerics.row_sums import find_bad_rows
from lightning_fed.server.interface import RoundReport as RoundReport
from lightning_fed.server.interface import ServerInterface as ServerInterface

_log = logging.getLogger(__name__)


class Aggregator(ABC):
    """The server's part of a method: makes the broadcasts, receives the updates, makes the new global state.

    Between :meth:`start_round` and :meth:`aggregate` it is a monoid: updates stream in, in any order, and the part that
    another process received joins with :meth:`merge`. Rules that average should hold O(model) memory.

    Example:
        >>> import torch
        >>> from lightning_fed.algorithms import FedAvg
        >>> fedavg = FedAvg()
        >>> fedavg.start_round(0, {"w": torch.tensor([1.0])})
        >>> fedavg.receive(ClientUpdate("a", 1, {"w": torch.tensor([0.0])}))
        >>> fedavg.receive(ClientUpdate("b", 3, {"w": torch.tensor([3.0])}))
        >>> fedavg.aggregate()
        {'w': tensor([2.2500])}

    Attributes:
        resizes: Whether the shapes of entries may change, from client to client and from round to round.
        takes_rows: Whether the rule can do with updates of which some entries are a few rows only
            (:attr:`ClientUpdate.rows <lightning_fed.messages.ClientUpdate>`).
        trainable: Names of the entries that the clients train, for rules that must tell them from others; a fit sets it
            before every round. ``None`` where nobody has said so.

    """

    resizes: bool = False
    takes_rows: bool = False
    trainable: frozenset[str] | None = None

    @abstractmethod
    def start_round(self, round: int, state: State) -> None:
        """Starts a round from the shared entries of the global model; forgets what was received before, of any round.

        Several processes that share a round call it twice: then :meth:`merge` gives back what was received.
        """

    @abstractmethod
    def broadcast(self, client: Client) -> Broadcast:
        """What ``client`` is sent. The tensors are only read by the caller."""

    def respond(self, request: Request) -> Broadcast:
        """What a client is sent, in answer to what it says of itself; rows are the server's to cut out."""
        return self.broadcast(request.client)

    def expected(self, broadcast: Broadcast) -> State:
        """What the answer to a message must look like: names, shapes and dtypes; values do not matter."""
        return broadcast.state

    @abstractmethod
    def receive(self, update: ClientUpdate) -> None:
        """Takes one client's update, already checked. Its tensors belong to the aggregator from now on.

        Raises:
            BadUpdate: If the rule cannot use it; nothing of it is kept, and the client is left out by name.

        """

    @abstractmethod
    def merge(self, other: Aggregator) -> None:
        """Joins what ``other`` has received in the same round."""

    def leave_out(self) -> dict[Client, str]:
        """Whose updates turn out not to fit, now that all are there, and why; nothing of them is kept."""
        return {}

    @abstractmethod
    def aggregate(self) -> State:
        """The new global values of the shared entries, from all updates of the round (at least one).

        Where the round brings no new model yet, the very dictionary that :meth:`start_round` got.
        """

    def plan(self, round: int) -> RoundPlan:
        """What the rule asks of a round, before its cohort is drawn."""
        return RoundPlan()

    def required_callbacks(self) -> Sequence[Any]:
        """Client-side callbacks without which the method does not work; the trainer adds those that are missing."""
        return ()

    def model_of(self, client: Client) -> State | None:
        """The shared entries of the model that serves ``client``; ``None`` where that is the global one.

        Clients that share a model get the same object. Statistics of BatchNorm are written into it after a round.
        """
        return None

    def metrics(self) -> dict[str, float]:
        """Numbers of the round that was just aggregated, for the log: full name to value."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What must survive from round to round (server momentum, prototypes): tensors and primitives.

        Only :meth:`aggregate` changes it, and it puts new tensors in the place of old ones: a round that comes to
        nothing is taken back to what was returned at its start.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - optional, as `state_dict` is
        """Restores what :meth:`state_dict` returned."""


@dataclass(frozen=True)
class RoundPlan:
    """What a rule that takes several rounds for one model asks of a round.

    Args:
        drawn: Index of the round whose cohort is visited again; ``None`` for a cohort of the round's own.
        local_epochs: Passes over a client's data in the round's visits; ``None`` for the federation's.
        present: The clients of that cohort that the rule can still use; ``None`` for all.

    """

    drawn: int | None = None
    local_epochs: int | None = None
    present: frozenset[Client] | None = None


class Server(ServerInterface):
    """One round after another: sends, checks what comes back, counts the bytes, aggregates.

    An update that does not fit the broadcast it answers (missing or unexpected entries, other shapes or dtypes, NaN or
    infinite values), or that the rule cannot use, is left out by name; the round goes on. With fewer than
    ``min_clients`` good updates the global model stays as it was.

    Args:
        aggregator: The rule.
        min_clients: Least number of good updates that changes the global model.

    Attributes:
        report: What happened in the round.
        state_before: The aggregator's state when the round began.

    Raises:
        ValueError: If ``min_clients`` is not a whole number from 1 on.

    Example:
        >>> import torch
        >>> from lightning_fed.algorithms import FedAvg
        >>> server = Server(FedAvg())
        >>> server.start_round(0, {"w": torch.tensor([1.0])})
        >>> message = server.send("a")
        >>> server.receive(ClientUpdate("a", 1, {"w": message.state["w"] + 1}))
        True
        >>> server.send("b").nbytes, server.receive(ClientUpdate("b", 1, {"w": torch.tensor([float("nan")])}))
        (4, False)
        >>> server.finish_round(), server.report.failed
        ({'w': tensor([2.])}, {'b': "entry 'w' has NaN or infinite values"})

    """

    def __init__(self, aggregator: Aggregator, min_clients: int = 1) -> None:
        super().__init__(aggregator, min_clients)
        self._expected: dict[Client, State] = {}
        self._rows: dict[Client, State] = {}

    def start_round(self, round: int, state: State) -> None:
        """Starts a round from the shared entries of the global model."""
        self.state_before = dict(self.aggregator.state_dict())
        self.report = RoundReport(round)
        self._expected.clear()
        self._rows.clear()
        self.aggregator.start_round(round, state)

    def send(
        self,
        client: Client,
        shape: Callable[[Broadcast], None] | None = None,
        request: Request | None = None,
    ) -> Broadcast:
        """The message for one client.

        Args:
            client: The client's key.
            shape: Called with the message before it is counted; may change what this client is sent.
            request: What the client says: rows that it wants of some entries, instead of all, and extras of the method.

        Raises:
            ValueError: If the rule cannot do with rows, or the request does not fit the model.

        """
        request = Request(client) if request is None else request
        self.count_up(request)
        broadcast = self.aggregator.respond(request)
        if request.rows:
            self._slice(broadcast, request)
        self._rows[client] = dict(broadcast.rows)
        expected = self.aggregator.expected(broadcast)
        self._expected[client] = {name: torch.empty_like(value, device="meta") for name, value in expected.items()}
        if shape is not None:
            shape(broadcast)
        self.count_down(broadcast)
        return broadcast

    def receive(self, update: ClientUpdate, unpack: Callable[[ClientUpdate], None] | None = None) -> bool:
        """Checks an update and hands it to the aggregator.

        Args:
            update: The client's answer to its broadcast.
            unpack: Called with the message after it is counted and before it is checked (decompression, say).

        Returns:
            Whether the update was good.

        """
        self.count_up(update)
        expected = self._expected.pop(update.client, None)
        update.rows = self._rows.pop(update.client, {})
        if expected is None:
            return self.fail(update.client, "it sent an update that was not asked for")
        if unpack is not None:
            unpack(update)
        fault = find_fault(update.state, expected) or find_non_finite(update.extras)
        if fault is None and update.num_samples < 1:
            fault = f"it reports {update.num_samples} examples"
        if fault is not None:
            return self.fail(update.client, fault)
        try:
            self.aggregator.receive(update)
        except BadUpdate as error:
            return self.fail(update.client, str(error))
        self.report.received[update.client] = update.num_samples
        self.report.metrics[update.client] = update.metrics
        return True

    def fail(self, client: Client, reason: str) -> bool:
        """Leaves a client out of the round, by name and with the reason in the log; always ``False``."""
        self._expected.pop(client, None)
        return super().fail(client, reason)

    def end_visits(self) -> None:
        """Waits for no more answers."""
        for client in list(self._expected):
            self.fail(client, "it never answered")

    def finish_round(self) -> State | None:
        """The new global values of the shared entries, or ``None`` where the global model stays as it was."""
        self.end_visits()
        for client, reason in self.aggregator.leave_out().items():
            self.report.received.pop(client, None)
            self.report.metrics.pop(client, None)
            self.fail(client, reason)
        count = len(self.report.received)
        if count < self.min_clients:
            _log.warning(
                "Round %d: %d good updates, fewer than min_clients=%d: the global model stays as it was.",
                self.report.round,
                count,
                self.min_clients,
            )
            return None
        state = self.aggregator.aggregate()
        fault = find_non_finite(state)
        if fault is not None:
            _log.error("Round %d: the aggregate is not used: %s.", self.report.round, fault)
            self.abandon_round()
            return None
        return state

    def abandon_round(self) -> None:
        """Takes the aggregator back to where it was when the round began."""
        self.aggregator.load_state_dict(self.state_before)

    def _slice(self, broadcast: Broadcast, request: Request) -> None:
        """Leaves the rows that the client asked for."""
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
