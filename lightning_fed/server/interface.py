"""Where a round's messages go, and what is written down of them."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_fed.argument_checks import check_count
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State

if TYPE_CHECKING:
    from lightning_fed.server.server import Aggregator

_log = logging.getLogger(__name__)


@dataclass
class RoundReport:
    """What happened in a round.

    Args:
        round: Index of the round, from 0.
        received: Number of local examples of every client whose update was aggregated.
        failed: Reason for every client that was left out.
        metrics: Numbers that the clients sent along.
        up_bytes: Bytes of the updates that arrived, whether used or not.
        down_bytes: Bytes of the broadcasts.

    """

    round: int
    received: dict[Client, int] = field(default_factory=dict)
    failed: dict[Client, str] = field(default_factory=dict)
    metrics: dict[Client, dict[str, float]] = field(default_factory=dict)
    up_bytes: int = 0
    down_bytes: int = 0

    @classmethod
    def joined(cls, parts: Sequence[RoundReport], places: Mapping[Client, int]) -> RoundReport:
        """The report of a round that several processes shared.

        Args:
            parts: Their reports.
            places: Client to its place in the cohort: the order in which one process would report.

        Example:
            >>> one, other = RoundReport(0, {"b": 3}, up_bytes=8), RoundReport(0, {"a": 1}, {"c": "lost"}, up_bytes=4)
            >>> joined = RoundReport.joined([one, other], {"a": 0, "b": 1, "c": 2})
            >>> joined.received, joined.failed, joined.up_bytes
            ({'a': 1, 'b': 3}, {'c': 'lost'}, 12)

        """
        whole = cls(parts[0].round)
        for name in ("received", "failed", "metrics"):
            joint = {client: value for part in parts for client, value in getattr(part, name).items()}
            ordered = sorted(joint, key=lambda client: places.get(client, len(places)))
            setattr(whole, name, {client: joint[client] for client in ordered})
        whole.up_bytes = sum(part.up_bytes for part in parts)
        whole.down_bytes = sum(part.down_bytes for part in parts)
        return whole


class ServerInterface(ABC):
    """Where the messages of a round's visits go: the server, or, on a client's machine, the way to it.

    Args:
        aggregator: The server's rule; on a client's machine it says what the method is, and aggregates nothing.
        min_clients: Least number of good updates that changes the global model.

    Attributes:
        report: What happened in the round.
        state_before: The aggregator's state when the round began.

    Raises:
        ValueError: If ``min_clients`` is not a whole number from 1 on.

    """

    def __init__(self, aggregator: Aggregator, min_clients: int = 1) -> None:
        self.aggregator = aggregator
        self.min_clients = check_count("min_clients", min_clients)
        self.report = RoundReport(round=-1)
        self.state_before: dict[str, Any] = {}

    @abstractmethod
    def start_round(self, round: int, state: State) -> None:
        """Starts a round from the shared entries of the global model."""

    @abstractmethod
    def send(
        self,
        client: Client,
        shape: Callable[[Broadcast], None] | None = None,
        request: Request | None = None,
    ) -> Broadcast:
        """The message for one client; ``shape`` is called where the server makes it."""

    @abstractmethod
    def receive(self, update: ClientUpdate, unpack: Callable[[ClientUpdate], None] | None = None) -> bool:
        """Takes the client's answer; whether it was good, as far as is known here."""

    @abstractmethod
    def finish_round(self) -> State | None:
        """The new global values of the shared entries; ``None`` where the model stays as it was."""

    def end_visits(self) -> None:  # noqa: B027 - optional
        """Waits for no more answers."""

    def abandon_round(self) -> None:  # noqa: B027 - optional
        """Takes everything back to where it was when the round began."""

    def fail(self, client: Client, reason: str) -> bool:
        """Leaves a client out of the round, by name and with the reason in the log; always ``False``."""
        self.report.failed[client] = reason
        _log.warning("Round %d: client %r is left out: %s.", self.report.round, client, reason)
        return False

    def count_down(self, message: Broadcast) -> None:
        """Counts a message that went down."""
        self.report.down_bytes += message.nbytes

    def count_up(self, message: ClientUpdate | Request) -> None:
        """Counts a message that came up."""
        self.report.up_bytes += message.nbytes
