"""Transport over Flower's grid: nodes, messages, answers and time limits."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from lightning_fed.argument_checks import check_count
from lightning_fed.backends.wire.packets import (
    HELLO,
    Packet,
    PacketError,
    find_bad_size,
    is_client,
    one_line,
    read_packet,
    unreadable,
    write_packet,
)
from lightning_fed.backends.wire.transport import Answer, Deadline, Transport
from lightning_fed.data.population import client_keys
from lightning_fed.errors import describe
from lightning_fed.messages import Client

_log = logging.getLogger(__name__)

_STYPE = "lightning-fed"
_ARRAY = 40 * 2**20  # bytes per array
_RETRY_SECONDS = 10.0  # seconds until the next request to a node without a valid list of clients
_HELLO_SECONDS = 20.0  # seconds for a new node to list the clients
_COLLECTION = 3600.0  # seconds after the time limit for reading answers that arrived in time


def split_bytes(data: bytes) -> list[memoryview]:
    """Splits a packet's bytes into several arrays, to save memory in Flower."""
    return [memoryview(data)[start : start + _ARRAY] for start in range(0, max(len(data), 1), _ARRAY)]


def to_records(packet: Packet) -> RecordDict:
    """Converts a packet (JSON text and tensor bytes) to a Flower ``RecordDict``."""
    arrays = {
        str(i): Array(dtype="uint8", shape=(len(part),), stype=_STYPE, data=bytes(part))
        for i, part in enumerate(split_bytes(packet.data))
    }
    return RecordDict({"packet": ConfigRecord({"text": packet.text}), "tensors": ArrayRecord(arrays)})


def from_records(content: RecordDict) -> Packet:
    """Converts a Flower ``RecordDict`` to a packet. Raises ``PacketError`` if text or tensors are missing."""
    try:
        text, record = content["packet"]["text"], content["tensors"]
        arrays = [record[str(i)] for i in range(len(record))]
    except (KeyError, TypeError) as error:
        raise PacketError("the message is not from lightning-fed") from error
    parts = [array.data for array in arrays if isinstance(array, Array) and array.stype == _STYPE]
    if not isinstance(text, str) or not parts or len(parts) < len(arrays):
        raise PacketError("the message is not from lightning-fed")
    return Packet(text, parts[0] if len(parts) == 1 else b"".join(parts))


class FlowerTransport(Transport):
    """Sends packets over Flower's message interface. Asks each new node for the names of its clients.

    ``bound`` maps a client to the only permitted node, by public key or by Flower's node number. By default, the first
    node that names a client serves the client.
    """

    def __init__(
        self,
        grid: Grid,
        deadline: Deadline | float,
        poll: float = 0.1,
        bound: Mapping[Client, int | str] | None = None,
        key: Ed25519PrivateKey | None = None,
    ) -> None:
        super().__init__(deadline, poll, key)
        self._grid = grid
        keys = None if bound is None else {client: read_node_key(node) for client, node in bound.items()}
        self._keys, self._bound = keys, None if bound is None else dict[Client, int | None]()
        self._nodes: dict[int, list[Client]] = {}
        self._hello_messages: dict[int, tuple[str, float]] = {}  # message and deadline of the request for client names
        self._retry_times: dict[int, float] = {}  # time of the next request for client names

    def await_clients(self, expected: int | Sequence[Client], patience: float) -> Sequence[Client]:
        deadline = time.monotonic() + patience
        wanted = None if isinstance(expected, int) else set(expected)
        while True:
            self.discover()
            known = {client for clients in self._nodes.values() for client in clients}
            if (len(known) >= expected) if isinstance(expected, int) else known >= (wanted or set()):
                break
            if time.monotonic() > deadline:
                missing = (
                    f"{len(known)} of {expected} are connected"
                    if wanted is None
                    else f"the missing clients are {wanted - known}"
                )
                raise TimeoutError(f"The clients of the federation did not connect within {patience:.0f} s: {missing}.")
            time.sleep(self._poll)
        chosen = client_keys(dict.fromkeys(known if wanted is None else wanted))
        if isinstance(expected, int) and len(chosen) > expected:
            raise TimeoutError(f"Expected {expected} clients, but {len(chosen)} are connected: {list(chosen)}.")
        return chosen

    def push(self, client: Client, kind: str, packet: Packet, round: int) -> str | None:
        node = self._find_node(client)
        # Messages stay valid beyond the time limit, because the round may still wait for an earlier client when an
        # answer arrives.
        return None if node is None else self._push(node, kind, packet, f"{round}", self.deadline.seconds + _COLLECTION)

    def pull(self, name: str) -> Answer | None:
        try:
            message = next(iter(self._grid.pull_messages([name])), None)
        except Exception as error:  # Flower cannot assemble the message of the node
            self._grid.get_node_ids()  # also raises if the connection fails
            return unreadable(error)
        if message is None:
            return None
        if message.has_error():
            return one_line(f"Flower reports: {message.error.reason or f'error {message.error.code}'}")
        try:
            return from_records(message.content)
        except Exception as error:
            return unreadable(error)

    def connection(self, client: Client) -> int | None:
        self.discover()
        return self._node_of(client)

    def forget(self, client: Client) -> None:
        node = self._node_of(client)
        if node is not None:
            # The node has restarted, possibly with the data of other clients.
            del self._nodes[node]
            self.discover()

    def _push(self, node: int, kind: str, packet: Packet, group: str, ttl: float) -> str | None:
        message = Message(to_records(packet), node, kind, ttl=ttl, group_id=group)
        return next(iter(self._grid.push_messages([message])), None)

    def _node_of(self, client: Client) -> int | None:
        return next((node for node, clients in self._nodes.items() if client in clients), None)

    def _find_node(self, client: Client) -> int | None:
        # A new node may take over the client, and gets some time to answer.
        while (node := self._node_of(client)) is None:
            if all(until < time.monotonic() for _, until in self._hello_messages.values()):
                return None
            time.sleep(self._poll)
            self.discover()
        return node

    def discover(self) -> None:
        connected = self._find_nodes()
        for node in [node for node in self._nodes if node not in connected]:
            _log.warning("The node of the clients %s has disconnected.", self._nodes.pop(node))
        now = time.monotonic()
        for node in connected - self._nodes.keys() - self._hello_messages.keys():
            if self._retry_times.get(node, now) > now:
                continue
            sent = self._push(
                node, HELLO, self.signed(HELLO, write_packet("hello", {})), "hello", self.deadline.seconds
            )
            if sent is not None:
                self._hello_messages[node] = sent, now + min(_HELLO_SECONDS, self.deadline.seconds)
        for node, (sent, _) in list(self._hello_messages.items()):
            answer = self.pull(sent)
            if answer is not None:
                del self._hello_messages[node]
                self._register(node, answer)
            elif node not in connected:
                del self._hello_messages[node]

    def _find_nodes(self) -> set[int]:
        if self._keys is None:
            return set(self._grid.get_node_ids())
        numbers: dict[int | bytes, int] = {}
        for node in self._grid.get_nodes():
            numbers |= {node.node_id: node.node_id, node.public_key: node.node_id}
        self._bound = {client: numbers.get(node) for client, node in self._keys.items()}
        return {node for node in self._bound.values() if node is not None}

    def _register(self, node: int, answer: Answer) -> None:
        try:
            bad_size = answer if isinstance(answer, str) else find_bad_size(answer, {})
            if bad_size is not None:
                raise PacketError(bad_size)
            assert not isinstance(answer, str)
            header, _ = read_packet(answer, "hello")
            clients = header.get("clients")
            # The log shows the client names.
            if not isinstance(clients, list) or not all(is_client(key) and str(key).isprintable() for key in clients):
                raise PacketError(f"the list is {clients!r}"[:200])
        except Exception as error:  # the content is untrusted
            _log.warning("Node %d sent no valid list of clients: %s.", node, one_line(describe(error)))
            self._retry_times[node] = time.monotonic() + _RETRY_SECONDS
            return
        if self._bound is not None:
            unbound = [client for client in clients if self._bound.get(client) != node]
            if unbound:
                _log.warning(
                    "Node %d lists the clients %s, but these clients are bound to other nodes: ignored.",
                    node,
                    unbound[:10],
                )
            clients = [client for client in clients if self._bound.get(client) == node]
        duplicates = [client for client in clients if self._node_of(client) is not None]
        if duplicates:
            _log.warning(
                "Node %d lists the clients %s of another node: ignored until the other node disconnects.",
                node,
                duplicates,
            )
        self._nodes[node] = clients
        _log.info("Node %d serves the clients %s.", node, json.dumps(self._nodes[node]))


def read_node_key(node: int | str) -> int | bytes:
    """Converts a node's public key (text of a ``.pub`` file) to Flower's format. Returns a node number unchanged."""
    if not isinstance(node, str):
        return check_count("a client's node", node, lowest=0)
    try:
        return load_ssh_public_key(node.encode()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(
            f"Expected a node's public key (the text of its `.pub` file), but got {node[:60]!r}."
        ) from error
