"""The server's rules: the port from a round's messages to the new global state.

A rule is a monoid between its :meth:`~Aggregator.start` and its :meth:`~Aggregator.aggregate`. What happens to an
update between a client's training and the rule is the business of :mod:`lightning_fed.steps`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

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


class RuleCapabilities:
    """Optional parts of a rule: features read the declarations here, and a rule overrides the declarations it changes.

    Attributes:
        accepts_rows: An update may contain a few rows of an entry (:attr:`ClientUpdate.rows`). Such a rule implements
            :meth:`held_rows`.
        resizes: Shapes of entries change from client to client or from round to round. Such a rule implements
            :meth:`expected`.
        has_clusters: The rule keeps several models. Such a rule implements :meth:`model_of`.

    """

    accepts_rows: ClassVar[bool] = False
    resizes: ClassVar[bool] = False
    has_clusters: ClassVar[bool] = False

    def held_rows(self) -> Mapping[str, Tensor]:
        """Rows held by clients in the aggregated round, by entry: int64, shape ``(rows,)``.

        An entry is missing if one client held the whole entry.
        """
        return {}

    def plan(self, round: int) -> RoundPlan:
        """Plans the clients of a round, before the server draws the cohort."""
        return RoundPlan()

    def expected(self, broadcast: Broadcast) -> State:
        """Form of the answer to a message: names, shapes and dtypes; values do not matter."""
        return broadcast.state

    def model_of(self, client: Client) -> State | None:
        """Shared entries of the client's model; ``None`` for the global model.

        Clients with the same model get the same object. The server writes BatchNorm statistics into the tensors after a
        round.
        """
        return None

    def tolerated(self, count: int) -> int:
        """Number of clients among ``count`` that may send arbitrary updates.

        Pooled BatchNorm statistics exclude as many reports.
        """
        return 0


class Aggregator(RuleCapabilities, ABC):
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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
