"""Interface of the server, and the report of a round."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_fed.argument_checks import check_count
from lightning_fed.console import round_number
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State
from lightning_fed.rule import Aggregator, RoundInfo
from lightning_fed.server.held_entries import HeldEntries
from lightning_fed.steps.chain import Chain

_log = logging.getLogger(__name__)


@dataclass
class RoundReport:
    """Report of a round.

    Args:
        round: Index of the round, from 0.
        received: Number of local examples of every client whose update was aggregated.
        counted: Number of examples that counted of every client whose update was good.
        failed: Reason for every client that was left out.
        metrics: Numbers that the clients sent along.
        norms: Length of every good client's step: the Euclidean norm of (local - global) over the entries that train,
            as the server computes it; without clients whose models have other shapes.
        up_bytes: Bytes of the updates that arrived, whether used or not.
        down_bytes: Bytes of the broadcasts.
        refused: Those of ``failed`` whose answer came, and was refused for what it held, with the reason.

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
        """Joins the reports of several processes that shared a round.

        Args:
            parts: Their reports.
            positions: Position of every client in the cohort: the order in which one process would report.

        Example:
            >>> parts = RoundReport(0, {"b": 3}, up_bytes=8), RoundReport(0, {"a": 1}, {"c": "lost"}, up_bytes=4)
            >>> joined = RoundReport.joined(parts, {"a": 0, "b": 1, "c": 2})
            >>> joined.received, joined.failed, joined.up_bytes
            ({'a': 1, 'b': 3}, {'c': 'lost'}, 12)

        """
        report = cls(parts[0].round)
        for name in ("received", "counted", "failed", "refused", "metrics", "norms"):
            joint = {client: value for part in parts for client, value in getattr(part, name).items()}
            ordered = sorted(joint, key=lambda client: positions.get(client, len(positions)))
            setattr(report, name, {client: joint[client] for client in ordered})
        report.up_bytes = sum(part.up_bytes for part in parts)
        report.down_bytes = sum(part.down_bytes for part in parts)
        return report


class ServerInterface(ABC):
    """Interface of the server as a round sees it: the server itself, or, on a client's machine, a connection to it.

    For every client of a round: :meth:`prepare`, :meth:`sent`, :meth:`count`, :meth:`accept`; then
    :meth:`finish_round`. In between the caller may change what is on its way.

    Args:
        chain: The server's rule and the steps around it; on a client's machine nothing is aggregated.
        min_clients: Least number of good updates that changes the global model.

    Attributes:
        chain: The chain.
        report: Report of the round that is under way, or was last.
        state_before: The chain's state when the round began.
        errors: Exceptions by which updates of the round have failed here, without tracebacks.
        held: Record of the entries without gradient that clients have already.

    Raises:
        ValueError: If ``min_clients`` is not a whole number from 1 on.

    """

    def __init__(self, chain: Chain, min_clients: int = 1) -> None:
        self.chain = chain
        self.min_clients = check_count("min_clients", min_clients)
        self.errors: dict[Client, Exception] = {}
        self.report = RoundReport(round=-1)
        self.state_before: dict[str, Any] = {}
        self.held = HeldEntries()

    @property
    def rule(self) -> Aggregator:
        """The rule."""
        return self.chain.rule

    @abstractmethod
    def start_round(self, info: RoundInfo, state: State) -> None:
        """Starts a round from the shared entries of the global model."""

    @abstractmethod
    def prepare(self, client: Client, request: Request | None = None) -> Broadcast:
        """Makes the message for a client, which may be changed before it is sent.

        Args:
            client: The client's key.
            request: The client's request: rows that it wants of some entries, instead of all, and extras of the method.

        """

    def sent(self, client: Client, broadcast: Broadcast) -> None:
        """Counts a message that goes to a client, as it is now."""
        self.report.down_bytes += broadcast.nbytes

    @abstractmethod
    def count(self, update: ClientUpdate) -> bool:
        """Counts an update as it has arrived.

        Returns:
            Whether it was asked for; if not, the client is left out.

        """

    @abstractmethod
    def accept(self, update: ClientUpdate) -> bool:
        """Checks an update that was counted, and aggregates it.

        Returns:
            Whether it was good, as far as is known here; if not, the client is left out.

        """

    @abstractmethod
    def finish_round(self) -> State | None:
        """Aggregates the round: the new global values of the shared entries, or ``None`` where there are none."""

    def start_chain(self) -> None:  # noqa: B027 - optional
        """Starts the round in the chain; once more where it is to join what several processes have received."""

    def end_visits(self) -> None:  # noqa: B027 - optional
        """Marks clients that have not answered as failed."""

    def abandon_round(self) -> None:  # noqa: B027 - optional
        """Restores the state that the chain had when the round began."""

    def fail(self, client: Client, reason: str, error: Exception | None = None) -> bool:
        """Leaves a client out of the round, by name and with the reason in the log; always ``False``.

        Args:
            client: The client.
            reason: The reason in words.
            error: The exception by which its update failed here, if there was one.

        """
        self.report.failed[client] = reason
        if error is not None:
            self.errors[client] = error
        _log.warning("Round %d: client %r is left out: %s.", round_number(self.report.round), client, reason)
        return False

    def refuse(self, client: Client, reason: str, error: Exception | None = None) -> bool:
        """Leaves a client out for what its answer held, likewise; always ``False``.

        Args:
            client: The client.
            reason: The reason in words.
            error: The exception by which its update failed here, if there was one.

        """
        self.report.refused[client] = reason
        return self.fail(client, reason, error)
