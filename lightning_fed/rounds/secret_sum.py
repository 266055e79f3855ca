"""Interface of rules that use clients' updates in their sum alone, so that clients on other machines can mask them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import lightning as L

from lightning_fed.messages import State
from lightning_fed.rounds.federated_callback import FederatedCallback


class SecretSum(ABC):
    """The server's sum of a round: of whole numbers modulo 2^32, as int32.

    Attributes:
        total: The sum so far, by entry, extras of the updates among them; with the masks that are in it.
        least: Fewest clients of which the sum may be read.

    """

    total: State
    least: int

    @abstractmethod
    def subtract(self, masks: State) -> None:
        """Takes masks off the sum."""

    @abstractmethod
    def discard(self, reason: str) -> None:
        """Gives up the sum, which nobody can read; its clients are left out for the reason."""


class SummedUpdates(FederatedCallback, ABC):
    """Base of the callback of a rule that uses clients' updates in their sum alone.

    Its updates have int32 in the place of the floating-point entries that train, and in their extras; all else is as
    the client was sent it.

    Attributes:
        threshold: Share of a round's clients, more than half, of which the sum may be read.

    """

    threshold: float

    @abstractmethod
    def secret_sum(self, trainer: L.Trainer) -> SecretSum:
        """The sum of the round that is under way, on the server."""

    @abstractmethod
    def least_clients(self, count: int) -> int:
        """Fewest clients of which the sum may be read, of so many in a round."""


def find_summed_updates(callbacks: Iterable[object]) -> SummedUpdates | None:
    """The callback of a rule that uses updates in their sum alone, if there is one."""
    return next((callback for callback in callbacks if isinstance(callback, SummedUpdates)), None)
