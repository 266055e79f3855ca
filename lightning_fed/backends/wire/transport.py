"""Carrier of packets: from a network the two halves need the transport of a packet and an answer."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lightning_fed.argument_checks import check_count
from lightning_fed.backends.site.signatures import sign
from lightning_fed.backends.wire.packets import Packet, is_answer
from lightning_fed.console import round_number
from lightning_fed.messages import Client

_log = logging.getLogger(__name__)

_LOOK = 2.0  # seconds between looks at whether a client is still connected

_WAITING = 3600.0  # seconds for which an order may wait in the network, beyond the time limit

Answer = Packet | str
"""A packet, or in words why there is none."""


@dataclass(frozen=True)
class Deadline:
    """Time that the clients of a round have for their answers.

    Args:
        seconds: Seconds in which all must have answered.
        min_clients: Number of answers after which the other clients have only ``rest`` seconds left; ``None`` if they
            always have all the time.
        rest: Those seconds.
        reconnect: Seconds for the return of a client after a lost connection.

    Raises:
        ValueError: If a number is out of its range.

    Example:
        >>> Deadline(3600, min_clients=3, rest=60)
        Deadline(seconds=3600, min_clients=3, rest=60, reconnect=60.0)

    """

    seconds: float = 3600.0
    min_clients: int | None = None
    rest: float = 0.0
    reconnect: float = 60.0

    def __post_init__(self) -> None:
        if self.min_clients is not None:
            check_count("min_clients", self.min_clients)
        if not self.seconds > 0 or not self.rest >= 0 or not self.reconnect >= 0:
            raise ValueError(f"Expected positive times, but got {self}.")


class Transport(ABC):
    """Carrier of packets to clients, which gives their answers in the order of the packets.

    A network says how one packet is sent, and how one answer is looked for. How long a round waits, in which order
    answers are used, and what becomes of those that come too late is the same on all networks.

    Args:
        deadline: Time that clients have, or its seconds.
        poll: Seconds between looks at whether an answer has come.
        key: Signs every packet; ``None`` for packets without a signature.

    Attributes:
        sent: Bytes of the tensors in all packets that were sent.
        received: Bytes of the tensors in all packets that came back.
        late: Number of answers that came when their round had gone on without them.

    """

    def __init__(self, deadline: Deadline | float, poll: float = 0.1, key: Ed25519PrivateKey | None = None) -> None:
        self._deadline = deadline if isinstance(deadline, Deadline) else Deadline(deadline)
        self._poll, self._key = poll, key
        self.sent = self.received = self.late = 0
        self._left: dict[str, tuple[Client, int]] = {}  # messages whose round has gone on without an answer

    @abstractmethod
    def meet(self, expected: int | Sequence[Client], patience: float) -> Sequence[Client]:
        """Waits for the federation's clients, and gives their keys, in the order of a mapping of clients.

        Args:
            expected: Their keys, or their number.
            patience: Seconds to wait.

        Raises:
            TimeoutError: If some are not there in time.

        """

    @abstractmethod
    def discover(self) -> None:
        """Looks for connections that have come or gone, without waiting."""

    @abstractmethod
    def push(self, client: Client, kind: str, packet: Packet, round: int) -> str | None:
        """Sends a packet, and gives the message's name; ``None`` if the client is not connected."""

    @abstractmethod
    def pull(self, name: str) -> Answer | None:
        """The answer to a message; ``None`` as long as it has not come."""

    @abstractmethod
    def connection(self, client: Client) -> int | str | None:
        """Name of the client's connection; ``None`` while there is none."""

    @abstractmethod
    def forget(self, client: Client) -> None:
        """Looks for a client anew that is not where it was."""

    def signed(self, kind: str, packet: Packet) -> Packet:
        """Signs a packet if the server has a key.

        Args:
            kind: The type of the message.
            packet: The packet.

        """
        if self._key is None:
            return packet
        seconds = self._deadline.seconds + _WAITING
        return Packet(sign(kind, packet.text, packet.data, self._key, seconds), packet.data)

    def ask(
        self,
        kind: str,
        packets: Iterable[tuple[Client, Packet]],
        round: int,
        again: Callable[[Client], Packet] | None = None,
    ) -> Iterator[tuple[Client, Answer]]:
        """Sends packets and gives the answers in the same order.

        Answers wait in the network until it is their turn, so that no more than one is in memory, and sums are added up
        in the same order in every run. With ``min_clients`` they are fetched as they come, and wait in temporary files.

        Args:
            kind: The type of the messages.
            packets: Clients and their packets; taken one at a time.
            round: The round.
            again: Makes a client's packet anew, for one that comes back by another connection than the one that was
                lost; ``None`` if clients are not asked twice.

        """
        self.discover()
        self._count_late()
        end, limit = time.monotonic() + self._deadline.seconds, f"{self._deadline.seconds:.0f} s"
        open_messages: dict[Client, _Message] = {}
        ready: dict[Client, Callable[[], Answer]] = {}
        order: list[Client] = []
        for client, packet in packets:
            order.append(client)
            name = self.push(client, kind, self.signed(kind, packet), round)
            self.sent += len(packet.data)
            if name is None:
                ready[client] = lambda: "it is not connected"
            else:
                open_messages[client] = _Message(client, name, self.connection(client))
            del packet  # a large model is not in memory while its answer is waited for
        count = 0
        for client in order:
            while client not in ready:
                in_turn = self._deadline.min_clients is None
                for message in [open_messages[client]] if in_turn else list(open_messages.values()):
                    answer = self.pull(message.name)
                    if answer is None:
                        answer = self._miss(message, kind, round, again)
                    if answer is None:
                        continue
                    del open_messages[message.client]
                    ready[message.client] = _held(answer) if in_turn else put_aside(answer)
                    counts = isinstance(answer, Packet) and is_answer(answer)
                    count += counts
                    if counts and count == self._deadline.min_clients:
                        end = min(end, time.monotonic() + self._deadline.rest)
                        limit = f"{self._deadline.rest:.0f} s after {count} others"
                if client in ready:
                    break
                if time.monotonic() > end:
                    self._left[open_messages.pop(client).name] = client, round
                    ready[client] = _held(f"it did not answer within {limit}")
                else:
                    time.sleep(self._poll)
            answer = ready.pop(client)()
            self.received += len(answer.data) if isinstance(answer, Packet) else 0
            yield client, answer
            del answer  # nor the last answer, while the next one is

    def _miss(
        self, message: _Message, kind: str, round: int, again: Callable[[Client], Packet] | None
    ) -> Answer | None:
        """Looks after a client that has not answered, and says when it is given up.

        One whose connection is back goes on with the message that it has; one that has another connection was started
        again, and is sent the message again.
        """
        now = time.monotonic()
        if now - message.looked < _LOOK:
            return None
        message.looked = now
        connection = self.connection(message.client)
        if connection == message.connection:
            message.lost = None
            return None
        message.lost = now if message.lost is None else message.lost
        if connection is not None and again is not None:
            packet = again(message.client)
            name = self.push(message.client, kind, self.signed(kind, packet), round)
            if name is not None:
                _log.info(
                    "Round %d: client %r was started again, and is asked again.", round_number(round), message.client
                )
                self.sent += len(packet.data)
                self._left[message.name] = message.client, round
                message.name, message.connection, message.lost = name, connection, None
                return None
        if now - message.lost < self._deadline.reconnect:
            return None
        self._left[message.name] = message.client, round
        return "its connection was lost"

    def _count_late(self) -> None:
        """Counts the answers that have come since their rounds went on."""
        for name, (client, round) in list(self._left.items()):
            answer = self.pull(name)
            if answer is not None:
                del self._left[name]
            if isinstance(answer, Packet):
                self.late += 1
                words = "The answer of client %r to round %d came too late, and is dropped."
                _log.warning(words, client, round_number(round))


@dataclass
class _Message:
    """Message that waits for its answer.

    Args:
        client: Its client.
        name: Its name in the network.
        connection: Name of the connection by which it was sent.
        looked: When the client's connection was looked at.
        lost: Since when it is lost; ``None`` if it is not.

    """

    client: Client
    name: str
    connection: int | str | None
    looked: float = -_LOOK
    lost: float | None = None


def _held(answer: Answer) -> Callable[[], Answer]:
    return lambda: answer


def put_aside(answer: Answer) -> Callable[[], Answer]:
    """Puts an answer's bytes into a temporary file, and gives what reads them; with a full disk they stay in memory.

    The file is gone when it is read, or when nobody can read it any more.
    """
    if isinstance(answer, str):
        return _held(answer)
    file = None
    try:
        text, file = answer.text, tempfile.TemporaryFile()  # noqa: SIM115 - closed when it is read
        file.write(answer.data)
        file.flush()
    except OSError as error:
        _log.warning("An answer waits in memory, because it cannot be written: %s.", error)
        if file is not None:
            with contextlib.suppress(OSError):  # it cannot be flushed
                file.close()
        return _held(answer)

    def read() -> Answer:
        with file:
            file.seek(0)
            return Packet(text, file.read())

    weakref.finalize(read, file.close)
    return read
