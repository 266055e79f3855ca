"""Interface of the other half of a federation, where server and clients are on different machines."""

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
    """The other half of a federation: to the server, its clients; to a client, its server.

    Attributes:
        has_server: Whether the server half is here, so that callbacks' hooks of the server's side are called.
        population: The clients, as far as they are known here.

    """

    has_server: bool
    population: Population

    def connect(self, server: ServerInterface) -> ServerInterface:
        """Returns the server of the round's messages: ``server`` itself, or a connection to one that is not here."""
        return server

    def cohort(self, drawn: Callable[[], Cohort]) -> Cohort:
        """The round's clients as they are known here; ``drawn`` draws them from the schedule."""
        return drawn()

    @abstractmethod
    def visits_here(self, cohort: Cohort) -> Cohort:
        """The visits of the round that train in this process."""

    @abstractmethod
    def start(self, fit: FederatedFit) -> None:
        """Before the round opens: the optimizers are as the Trainer has them."""

    @abstractmethod
    def exchange(self, round: Round) -> None:
        """After the last visit that trains here, while the round is open."""

    def measure(
        self, server: ServerInterface, visits: Sequence[Visit], send: Callable[[Visit], Broadcast]
    ) -> list[tuple[Client, State]]:
        """Has clients measure the inputs of BatchNorm layers with a model.

        Args:
            server: Counts the reports.
            visits: The clients' visits.
            send: Gives the model to measure, counted.

        Returns:
            Client and what it measured, without clients that cannot; nothing where the server is not here.

        """
        return []

    def ask(
        self,
        fit: FederatedFit,
        question: Mapping[str, Any],
        visits: Sequence[Visit],
        send: Callable[[Visit], Broadcast],
    ) -> Iterator[tuple[Client, ClientUpdate | str]]:
        """Asks clients outside of a round.

        Args:
            fit: The fit; the entries that do not travel are in its module.
            question: What their callback is asked: primitives and plain containers.
            visits: The clients, each with the seed of its draws.
            send: Gives the model to answer with, counted.

        Returns:
            Client and its answer, or the reason why there is none; nothing where the server is not here.

        """
        return iter(())
