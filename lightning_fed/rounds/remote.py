"""The seam at which a federation is taken apart: one half of a round is here, the other on another machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lightning_fed.data.population import Population
from lightning_fed.messages import Broadcast, Client, State
from lightning_fed.server.interface import ServerInterface
from lightning_fed.server.schedule import Cohort, Visit

if TYPE_CHECKING:
    from lightning_fed.rounds.loop import RoundLoop


class RemoteSide(ABC):
    """The other half of a federation: to the server, its clients; to a client, its server.

    Attributes:
        has_server: Whether the server half is here, so that callbacks' hooks of the server's side are called.
        population: The clients, as far as they are known here.

    """

    has_server: bool
    population: Population

    @abstractmethod
    def interface(self, server: ServerInterface) -> ServerInterface:
        """Where the round's messages go, instead of a server that is not here."""

    @abstractmethod
    def cohort(self, drawn: Callable[[], Cohort]) -> Cohort:
        """The round as it is known here; ``drawn`` gives what the schedule says."""

    @abstractmethod
    def visits_here(self, cohort: Cohort) -> Cohort:
        """Those of the round's visits that train in this process."""

    @abstractmethod
    def start(self, loop: RoundLoop) -> None:
        """Before the round opens: the optimizers are as the Trainer has them."""

    @abstractmethod
    def exchange(self, loop: RoundLoop) -> None:
        """After the last visit that trains here, while the round is open."""

    @abstractmethod
    def measure(
        self, server: ServerInterface, visits: Sequence[Visit], send: Callable[[Visit], Broadcast]
    ) -> list[tuple[Client, State]]:
        """What goes into BatchNorm layers when clients run their data once through a model.

        Args:
            server: Counts the reports.
            visits: The clients' visits.
            send: Gives the model to measure, counted.

        Returns:
            Client and what it measured, without clients that cannot.

        """
