"""The interface of the server's rules: from a round's broadcasts and updates to the new global state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State
from lightning_fed.server.schedule import SecretSampling


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
        is_private: Whether the new state is all that may be known of a round's clients: a round may have none, and the
            log says nothing of them but what :meth:`metrics` returns.
        takes_rows: Whether the rule can do with updates of which some entries are a few rows only
            (:attr:`ClientUpdate.rows <lightning_fed.messages.ClientUpdate>`).
        always: Clients that take part in every round, beside those that are drawn, with all of their work.
        trainable: Names of the entries that the clients train, for rules that must tell them from others; a fit sets it
            before every round. ``None`` where nobody has said so.
        untrained: Names of the parameters without gradient, which a visit most often leaves as they are; set likewise.
        num_clients: Number of all clients of the federation, for rules that keep something of each; set likewise.
        num_refused: Number of the round's answers that the server has refused for what they held; the server sets it
            before :meth:`leave_out`.

    """

    resizes: bool = False
    is_private: bool = False
    takes_rows: bool = False
    always: Sequence[Client] = ()
    trainable: frozenset[str] | None = None
    untrained: frozenset[str] = frozenset()
    num_clients: int | None = None
    num_refused: int = 0

    @abstractmethod
    def start_round(self, round: int, state: State) -> None:
        """Starts a round from the shared entries of the global model; forgets what was received before, of any round.

        Several processes that share a round call it twice: then :meth:`merge` gives back what was received.
        """

    @abstractmethod
    def broadcast(self, client: Client) -> Broadcast:
        """Makes the message for a client. The tensors are only read by the caller."""

    def respond(self, request: Request) -> Broadcast:
        """Makes the message for a client, in answer to its request; the server cuts out the rows."""
        return self.broadcast(request.client)

    def expected(self, broadcast: Broadcast) -> State:
        """Form of the answer to a message: names, shapes and dtypes; values do not matter."""
        return broadcast.state

    @abstractmethod
    def receive(self, update: ClientUpdate) -> None:
        """Takes one client's update, already checked.

        Its tensors belong to the aggregator from now on, but for those named in ``update.unsent``: they are the
        broadcast's, and only to be read.

        Raises:
            BadUpdate: If the rule cannot use it; nothing of it is kept, and the client is left out by name.

        """

    @abstractmethod
    def merge(self, other: Aggregator) -> None:
        """Joins what ``other`` has received in the same round."""

    def leave_out(self) -> dict[Client, str]:
        """Clients whose updates turn out not to fit, now that all are there, and why; nothing of them is kept."""
        return {}

    @abstractmethod
    def aggregate(self) -> State:
        """The new global values of the shared entries, from all updates of the round (at least one).

        Where the round brings no new model yet, the very dictionary that :meth:`start_round` got.
        """

    def plan(self, round: int) -> RoundPlan:
        """The rule's wishes for a round, before its cohort is drawn."""
        return RoundPlan()

    def sampling(self) -> SecretSampling | None:
        """The draw of the rounds' clients, where it is not the schedule's own."""
        return None

    def required_callbacks(self) -> Sequence[Any]:
        """Client-side callbacks without which the method does not work; the trainer adds those that are missing."""
        return ()

    def model_of(self, client: Client) -> State | None:
        """The shared entries of the model that serves ``client``; ``None`` where that is the global one.

        Clients that share a model get the same object. Statistics of BatchNorm are written into it after a round.
        """
        return None

    def tolerated(self, count: int) -> int:
        """Number of clients that may send anything, among as many; BatchNorm's measured statistics are pooled without.

        Args:
            count: Number of clients that have measured them.

        """
        return 0

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


@dataclass(frozen=True)
class RoundPlan:
    """Wishes for a round of a rule that takes several rounds for one model.

    Args:
        drawn: Index of the round whose cohort is visited again; ``None`` for a cohort of the round's own.
        present: The clients of that cohort that the rule can still use; ``None`` for all.

    """

    drawn: int | None = None
    present: frozenset[Client] | None = None
