"""Interface of a network: all that the two halves need of one is that it brings a packet and its answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from lightning_fed.backends.wire.packets import Packet
from lightning_fed.messages import Client


class Transport(Protocol):
    """Interface of what carries packets to clients and brings their answers."""

    def meet(self, expected: int | Sequence[Client], patience: float) -> Sequence[Client]:
        """Waits for the federation's clients, and gives their keys; they are as many as expected, or those.

        Raises:
            TimeoutError: If some are not there in time, in seconds.

        """

    def ask(
        self, kind: str, packets: Iterable[tuple[Client, Packet]], round: int
    ) -> Iterator[tuple[Client, Packet | str]]:
        """Sends packets and gives the answers in the same order: a packet, or in words why there is none."""

    def forget(self, client: Client) -> None:
        """Looks for a client anew that is not where it was."""
