"""Interface of what carries packets to clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from lightning_fed.backends.flower.packets import Packet
from lightning_fed.messages import Client


class Transport(Protocol):
    """Interface of what carries packets to clients and brings their answers."""

    def ask(
        self, kind: str, packets: Iterable[tuple[Client, Packet]], round: int
    ) -> Iterator[tuple[Client, Packet | str]]:
        """Sends packets and gives the answers in the same order: a packet, or in words why there is none."""

    def forget(self, client: Client) -> None:
        """Looks for a client anew that is not where it was."""
