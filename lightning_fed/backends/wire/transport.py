"""Interface of a network transport, which delivers packets to clients and returns the answers."""

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

_LOOK = 2.0  # seconds between checks for lost connections

_WAITING = 3600.0  # extra seconds for which a signed order stays valid, and a late answer is counted

Answer = Packet | str
"""A packet, or the reason for a missing packet."""


@dataclass(frozen=True)
class Deadline:
    """Time limit for the answers of clients in a round.

    Args:
        seconds: Seconds for all answers.
        min_clients: Number of answers before the shorter limit ``rest`` starts; ``None``: no shorter limit.
        rest: Seconds for the remaining clients after ``min_clients`` answers.
        reconnect: Seconds for a disconnected client to reconnect.

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
            raise ValueError(f"Expected `seconds` above 0, `rest` and `reconnect` of at least 0, but got {self}.")


class Transport(ABC):
    """Sends packets to clients, and yields the answers in packet order.

    Subclasses implement sending and polling for a network. This class implements time limits and the order of answers.
    ``sent`` and ``received`` count bytes; ``late`` counts answers after the end of the round.
    """

    def __init__(self, deadline: Deadline | float, poll: float = 0.1, key: Ed25519PrivateKey | None = None) -> None:
        self.deadline = deadline if isinstance(deadline, Deadline) else Deadline(deadline)
        self._poll, self._key = poll, key
        self.sent = self.received = self.late = 0
        self._unanswered: dict[str, tuple[Client, int, float]] = {}  # messages without an answer in time

    @abstractmethod
    def await_clients(self, expected: int | Sequence[Client], patience: float) -> Sequence[Client]:
        """Waits until ``expected`` clients are connected. Returns names, or raises ``TimeoutError``."""

    def discover(self) -> None:  # noqa: B027 - optional
        """Updates the list of connected clients, on a network that does not report connections. Returns immediately."""

    @abstractmethod
    def push(self, client: Client, kind: str, packet: Packet, round: int) -> str | None:
        """Sends a packet. Returns a name for the message, or ``None`` if the client is disconnected."""

    @abstractmethod
    def pull(self, name: str) -> Answer | None:
        """Returns the answer to the message with the name ``name``, or ``None`` if the answer has not arrived."""

    @abstractmethod
    def connection(self, client: Client) -> int | str | None:
        """Returns a name for the client's current network connection, or ``None`` if the client is disconnected."""

    def forget(self, client: Client) -> None:  # noqa: B027 - optional
        """Removes the assignment of a node to a client."""

    def signed(self, kind: str, packet: Packet) -> Packet:
        if self._key is None:
            return packet
        seconds = self.deadline.seconds + _WAITING
        return Packet(sign(kind, packet.text, packet.data, self._key, seconds), packet.data)

    def ask(
        self,
        kind: str,
        packets: Iterable[tuple[Client, Packet]],
        round: int,
        again: Callable[[Client], Packet] | None = None,
    ) -> Iterator[tuple[Client, Answer]]:
        """Sends packets to clients, and yields the answers in the order of the packets.

        ``kind`` is the message type. ``packets`` are consumed one at a time. If a client restarts before the answer,
        the function ``again`` creates a new packet for this client.
        """
        self.discover()
        self._count_late()
        end, limit = time.monotonic() + self.deadline.seconds, f"{self.deadline.seconds:.0f} s"
        open_messages: dict[Client, Message] = {}
        ready: dict[Client, Callable[[], Answer]] = {}
        order: list[Client] = []
        for client, packet in packets:
            order.append(client)
            message = self.send(client, kind, packet, round)
            if message is None:
                ready[client] = lambda: "the client is not connected"
            else:
                open_messages[client] = message
            del packet  # frees a large model while waiting for answers
        count = 0
        for client in order:
            while client not in ready:
                in_turn = self.deadline.min_clients is None
                for message in [open_messages[client]] if in_turn else list(open_messages.values()):
                    answer = self._fetch(message, again)
                    if answer is None:
                        continue
                    del open_messages[message.client]
                    ready[message.client] = _constant(answer) if in_turn else put_aside(answer)
                    counts = isinstance(answer, Packet) and is_answer(answer)
                    del answer  # frees the answer before the next one
                    count += counts
                    if counts and count == self.deadline.min_clients:
                        end = min(end, time.monotonic() + self.deadline.rest)
                        limit = f"{self.deadline.rest:.0f} s after {count} other answers"
                if client in ready:
                    break
                if time.monotonic() > end:
                    reason = self._give_up(open_messages.pop(client), f"the client did not answer within {limit}")
                    ready[client] = _constant(reason)
                else:
                    time.sleep(self._poll)
            answer = ready.pop(client)()
            self.received += len(answer.data) if isinstance(answer, Packet) else 0
            yield client, answer
            del answer  # frees the answer before reading the next one

    def send(self, client: Client, kind: str, packet: Packet, round: int) -> Message | None:
        name = self.push(client, kind, self.signed(kind, packet), round)
        if name is None:
            return None
        self.sent += len(packet.data)
        return Message(client, kind, round, name, self.connection(client), time.monotonic())

    def await_any(
        self, messages: dict[Client, Message], again: Callable[[Client], Packet], seconds: float
    ) -> tuple[Client, Answer] | None:
        """Waits for the next answer to one of ``messages``. Returns the client and the answer.

        Removes the answered message from ``messages``. If a client loses the connection or misses the deadline, the
        answer is a text with the reason. If a client restarts, the function ``again`` creates a new packet for this
        client. Returns ``None`` if no client answers within ``seconds``.
        """
        self._count_late()
        end = time.monotonic() + seconds
        while True:
            for message in messages.values():
                answer = self._fetch(message, again)
                if answer is None and time.monotonic() > message.sent_at + self.deadline.seconds:
                    answer = self._give_up(message, f"the client did not answer within {self.deadline.seconds:.0f} s")
                if answer is not None:
                    del messages[message.client]
                    self.received += len(answer.data) if isinstance(answer, Packet) else 0
                    return message.client, answer
            if time.monotonic() > end:
                return None
            time.sleep(self._poll)

    def _fetch(self, message: Message, again: Callable[[Client], Packet] | None) -> Answer | None:
        answer = self.pull(message.name)
        return self._miss(message, again) if answer is None else answer

    def _miss(self, message: Message, again: Callable[[Client], Packet] | None) -> Answer | None:
        """Checks whether a client can still answer. Returns ``None`` to keep waiting, otherwise the reason to give up.

        If the client has restarted, sends a new packet from the function ``again``.
        """
        now = time.monotonic()
        if now - message.checked_at < _LOOK:
            return None
        message.checked_at = now
        connection = self.connection(message.client)
        if connection == message.connection:
            message.lost_at = None
            return None
        message.lost_at = now if message.lost_at is None else message.lost_at
        if connection is not None and again is not None:
            new = self.send(message.client, message.kind, again(message.client), message.round)
            if new is not None:
                _log.info(
                    "Round %d: client %r restarted, so the server sends the message again.",
                    round_number(message.round),
                    message.client,
                )
                self._give_up(message)
                message.name, message.connection, message.lost_at = new.name, connection, None
                return None
        if now - message.lost_at < self.deadline.reconnect:
            return None
        return self._give_up(message, "the client's connection was lost")

    def _give_up(self, message: Message, reason: str = "") -> str:
        self._unanswered[message.name] = message.client, message.round, time.monotonic()
        return reason

    def _count_late(self) -> None:
        end = time.monotonic() - self.deadline.seconds - _WAITING
        for name, (client, round, since) in list(self._unanswered.items()):
            answer = self.pull(name)
            if answer is not None or since < end:
                del self._unanswered[name]
            if isinstance(answer, Packet):
                self.late += 1
                words = "Dropped the late answer of client %r to round %d."
                _log.warning(words, client, round_number(round))
            del answer  # frees the answer before the next one


@dataclass
class Message:
    """A message with a pending answer."""

    client: Client
    kind: str
    round: int
    name: str
    connection: int | str | None
    sent_at: float
    checked_at: float = -_LOOK
    lost_at: float | None = None


def _constant(answer: Answer) -> Callable[[], Answer]:
    return lambda: answer


def put_aside(answer: Answer) -> Callable[[], Answer]:
    """Writes an answer to a temporary file. Returns a function to read the answer.

    The file is deleted after reading, or with the last reference to the function.
    """
    if isinstance(answer, str):
        return _constant(answer)
    file = None
    try:
        text, file = answer.text, tempfile.TemporaryFile()  # noqa: SIM115 - closed after the read
        file.write(answer.data)
        file.flush()
    except OSError as error:
        _log.warning("An answer stays in memory, because a temporary file cannot be written: %s.", error)
        if file is not None:
            with contextlib.suppress(OSError):  # a failed flush
                file.close()
        return _constant(answer)

    def read() -> Answer:
        with file:
            file.seek(0)
            return Packet(text, file.read())

    weakref.finalize(read, file.close)
    return read
