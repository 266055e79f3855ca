"""Server interface and round report."""

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
    """Results of a round.

    Args:
        round: Index of the round, from 0.
        received: Local examples by client, for good updates.
        counted: Counted examples by client, for good updates.
        failed: Reason by excluded client.
        metrics: Clients' metrics.
        norms: Euclidean norm of (local - global) over the trained entries, by client, computed by the server. Clients
            with other shapes are missing.
        up_bytes: Bytes in received updates, good or not.
        down_bytes: Bytes in broadcasts.
        refused: Reason by client, for the clients in ``failed`` that sent a bad answer.
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
        """Joins the reports of one round from several processes.

        ``positions`` holds each client's position in the cohort: the joined report lists clients in this order.
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
    """Interface of the server for a round: the server itself, or a connection from a client's machine.

    For every client in a round: :meth:`prepare`, :meth:`sent`, :meth:`count`, :meth:`accept`; then
    :meth:`finish_round`. The caller may change messages in between.

    Args:
        chain: The rule with the steps around it; a client's machine does not aggregate.
        min_clients: Least number of good updates for a new global model.

    Attributes:
        report: Report for the current or last round.
        state_before: The chain's state before the round.
        errors: Exceptions from updates in this process, without tracebacks.
        held: Record about untrained entries at the clients.
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
        return self.chain.rule

    @abstractmethod
    def start_round(self, info: RoundInfo, state: State) -> None:
        """Starts a round from the global model's shared entries."""

    @abstractmethod
    def prepare(self, client: Client, request: Request | None = None) -> Broadcast:
        """Prepares the message for a client; the caller may change the message before :meth:`sent`."""

    def sent(self, client: Client, broadcast: Broadcast) -> None:
        """Counts a message to a client in its final form."""
        self.report.down_bytes += broadcast.nbytes

    @abstractmethod
    def count(self, update: ClientUpdate) -> bool:
        """Counts a received update; ``False`` excludes a client with an unrequested update."""

    @abstractmethod
    def accept(self, update: ClientUpdate) -> bool:
        """Checks and aggregates an update after :meth:`count`; ``False`` excludes the client."""

    @abstractmethod
    def finish_round(self) -> State | None:
        """Aggregates the round: the new global values of the shared entries, or ``None``."""

    def start_chain(self) -> None:  # noqa: B027 - optional
        """Starts the round in the chain; called again before the chain merges updates from several processes."""

    def end_visits(self) -> None:  # noqa: B027 - optional
        """Marks clients without an answer as failed."""

    def abandon_round(self) -> None:  # noqa: B027 - optional
        """Restores the chain's state before the round."""

    def fail(self, client: Client, reason: str, error: Exception | None = None) -> bool:
        """Excludes a client from the round, and logs the reason; always ``False``."""
        self.report.failed[client] = reason
        if error is not None:
            self.errors[client] = error
        _log.warning("Round %d: client %r is left out: %s.", round_number(self.report.round), client, reason)
        return False

    def refuse(self, client: Client, reason: str, error: Exception | None = None) -> bool:
        """Excludes a client with a bad answer; always ``False``."""
        self.report.refused[client] = reason
        return self.fail(client, reason, error)
