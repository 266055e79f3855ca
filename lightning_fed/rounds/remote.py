"""Interface to the other half of a federation, with server and clients on different machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightning_fed.data.population import Population
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.rounds.round import Round
from lightning_fed.server.interface import ServerInterface
from lightning_fed.server.schedule import Cohort, Visit


class RemoteSide(ABC):
    """The other half of a federation: a server's clients, or a client's server.

    Attributes:
        has_server: Whether the server half is in this process, with the callbacks' server hooks.
        population: The clients known to this process.
    """

    has_server: bool
    population: Population

    def connect(self, server: ServerInterface) -> ServerInterface:
        """Returns the server for the round's messages: ``server``, or a connection to a remote one."""
        return server

    def cohort(self, drawn: Callable[[], Cohort]) -> Cohort:
        """The round's clients in this process; ``drawn`` draws all clients from the schedule."""
        return drawn()

    @abstractmethod
    def visits_here(self, cohort: Cohort) -> Cohort:
        """The visits with training in this process."""

    @abstractmethod
    def start(self, fit: FederatedFit) -> None:
        """Called before the round opens, with the Trainer's optimizers."""

    @abstractmethod
    def exchange(self, round: Round) -> None:
        """Called in the open round, after the last visit in this process."""

    def measure(
        self, server: ServerInterface, visits: Sequence[Visit], send: Callable[[Visit], Broadcast]
    ) -> list[tuple[Client, State]]:
        """Measures BatchNorm inputs on the clients; ``send`` prepares and counts the message with the model.

        Clients that cannot measure are excluded. On a client's machine the result is empty.
        """
        return []

    def ask(
        self,
        fit: FederatedFit,
        question: Mapping[str, Any],
        visits: Sequence[Visit],
        send: Callable[[Visit], Broadcast],
    ) -> Iterator[tuple[Client, ClientUpdate | str]]:
        """Asks clients outside a round, and yields answers, or reasons for missing answers.

        The fit's module holds the entries that are not transmitted. ``question`` consists of primitives and plain
        containers. A client's machine yields nothing.
        """
        return iter(())
