"""The server's rules: the port from a round's messages to the new global state.

A rule is a monoid between its :meth:`~Aggregator.start` and its :meth:`~Aggregator.aggregate`. What happens to an
update between a client's training and the rule is the business of :mod:`lightning_fed.steps`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State


@dataclass
class RoundInfo:
    """Facts of a round that the server gives to its rule and to the update steps.

    Args:
        round: Index of the round, from 0.
        clients: All clients of the federation, as far as they are known here.
        trainable: Names of the entries that train; ``None`` where nobody has said so.
        untrained: Names of the parameters without gradient, which a visit most often leaves as they are.
        sliced: Names of the entries of which a client may hold some rows only.
        seed: Seed of the federation: what a step draws comes from (seed, round, client).
        refused: Clients whose answers the server has refused for what they held, with the reason; grows in the round.

    """

    round: int
    clients: Sequence[Client] = ()
    trainable: frozenset[str] | None = None
    untrained: frozenset[str] = frozenset()
    sliced: frozenset[str] = frozenset()
    seed: int = 0
    refused: Mapping[Client, str] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the clients, who may be millions and whom every process knows."""
        return {**vars(self), "clients": (), "refused": {}}


@dataclass(frozen=True)
class RoundPlan:
    """Wishes of a rule for a round, before its cohort is drawn.

    Args:
        drawn: Index of the round whose cohort is visited again; ``None`` for a cohort of the round's own.
        present: The clients of that cohort that the rule can still use; ``None`` for all.
        always: Clients that take part beside those that are drawn, with all of their work.

    """

    drawn: int | None = None
    present: frozenset[Client] | None = None
    always: Sequence[Client] = ()


class Aggregator(ABC):
    """The server's part of a method: makes the broadcasts, receives the updates, makes the new global state.

    Between :meth:`start` and :meth:`aggregate` it is a monoid: updates stream in, in any order, and the part that
    another process received joins with :meth:`merge`. Rules that average should hold O(model) memory.

    Example:
        >>> import torch
        >>> from lightning_fed.algorithms import FedAvg
        >>> fedavg = FedAvg()
        >>> fedavg.start(RoundInfo(0), {"w": torch.tensor([1.0])})
        >>> fedavg.receive(ClientUpdate("a", 1, {"w": torch.tensor([0.0])}))
        >>> fedavg.receive(ClientUpdate("b", 3, {"w": torch.tensor([3.0])}))
        >>> fedavg.aggregate()
        {'w': tensor([2.2500])}

    """

    @abstractmethod
    def start(self, info: RoundInfo, state: State) -> None:
        """Starts a round from the shared entries of the global model; forgets what was received before, of any round.

        Several processes that share a round call it twice: then :meth:`merge` gives back what was received.
        """

    @abstractmethod
    def broadcast(self, request: Request) -> Broadcast:
        """Makes the message for a client, in answer to its request; the server cuts out the rows.

        The tensors are only read by the caller.
        """

    @abstractmethod
    def receive(self, update: ClientUpdate) -> None:
        """Takes one client's update, already checked, or a sum of several that an update step has made.

        Its tensors belong to the rule from now on, but for those named in ``update.unsent``: they are the broadcast's,
        and only to be read.

        Raises:
            BadUpdate: If the rule cannot use it; nothing of it is kept, and the client is left out by name.

        """

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Joins what another rule of the same kind has received in the same round."""

    @abstractmethod
    def aggregate(self) -> State | None:
        """The new global values of the shared entries, from all updates of the round (at least one).

        Returns:
            The state; ``None`` where the rule takes several rounds for one model, and this was not the last of them.

        Raises:
            BadUpdates: If clients turn out not to fit, now that all updates are there. The rule has forgotten them, and
                is asked again if enough others are left.

        """

    def metrics(self) -> dict[str, float]:
        """Numbers of the round that was just aggregated, for the log: full name to value."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State that survives from round to round (server momentum, prototypes): tensors and primitives.

        Only :meth:`aggregate` changes it, and it puts new tensors in the place of old ones: a round that comes to
        nothing is taken back to what was returned at its start.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - optional, as `state_dict` is
        """Restores what :meth:`state_dict` returned."""


class RowAggregator(Aggregator):
    """A rule for updates of which some entries may be a few rows only (:attr:`ClientUpdate.rows`)."""

    @abstractmethod
    def held_rows(self) -> Mapping[str, Tensor]:
        """Rows held by clients in the aggregated round, by entry: int64, shape ``(rows,)``.

        An entry is missing if one client held the whole entry.
        """


class PlanningAggregator(Aggregator):
    """A rule that has a say in which clients train, and for how long."""

    @abstractmethod
    def plan(self, round: int) -> RoundPlan:
        """The rule's wishes for a round, before its cohort is drawn."""


class ResizingAggregator(Aggregator):
    """A rule under which shapes of entries change, from client to client or from round to round."""

    @abstractmethod
    def expected(self, broadcast: Broadcast) -> State:
        """Form of the answer to a message: names, shapes and dtypes; values do not matter."""


class ClusteredAggregator(Aggregator):
    """A rule that keeps several models."""

    @abstractmethod
    def model_of(self, client: Client) -> State | None:
        """The shared entries of the model that serves ``client``; ``None`` where that is the global one.

        Clients that share a model get the same object. Statistics of BatchNorm are written into it after a round.
        """


def model_of(rule: Aggregator, client: Client) -> State | None:
    """The shared entries of the model that serves a client; ``None`` where that is the global one."""
    return rule.model_of(client) if isinstance(rule, ClusteredAggregator) else None


class TolerantAggregator(Aggregator):
    """A rule under which some clients may send anything."""

    @abstractmethod
    def tolerated(self, count: int) -> int:
        """Number of such clients among ``count``; measured statistics of BatchNorm are pooled without as many."""
