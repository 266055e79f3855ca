"""Messages as text and bytes: a JSON header, followed by the raw memory of all tensors. Messages are never pickled.

The tensors form one byte string, so a network can send them in chunks.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fed.errors import describe
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State, distinct, sent_entries
from lightning_fed.server.schedule import Visit

VERSION = 8
"""Version of the message format. A message with another version is an error."""

_MANY = 2**53  # largest integer that a float represents exactly
_LARGEST = 2**48  # maximum number of elements in a tensor
_LARGE = 2**20  # bytes; larger entries are not copied
_LONGEST_NAME = 1000
_MOST_DIMENSIONS = 64  # PyTorch's limit
_HIGHEST_RATE = 1e6  # upper limit for plausible learning rates
_TEXT = 2**20, 2**11  # bytes in a header: constant part, and per entry
_DATA = 2**26, 8  # bytes in a reply's tensors: constant part, and per byte of the model

VISIT, REQUEST, STATISTICS, QUESTION, HELLO = "train", "query.request", "evaluate", "evaluate.question", "query"
"""Message types: query for an update, for requested rows, for BatchNorm statistics, for a callback's answer, and for a
node's clients."""

with warnings.catch_warnings():  # PyTorch warns once about read-only memory
    warnings.simplefilter("ignore")
    torch.frombuffer(b"0", dtype=torch.uint8)

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


NOT_HERE = "the client's data are not on this node"
"""Fault if the node does not serve the client."""

NOT_HELD = "the client does not store the entries omitted from the message"
"""Fault if the client's entries differ from the server's record. The server then sends all entries."""


class PacketError(ValueError):
    """Raised for an invalid message, with a reason in one line. The reason may quote received data."""

    def __init__(self, reason: str) -> None:
        super().__init__(one_line(reason))


@dataclass(frozen=True)
class Packet:
    """A message: JSON header, and the concatenated bytes of all tensors (``data``, whose size is logged)."""

    text: str
    data: bytes = b""


@dataclass(frozen=True)
class TrainRequest:
    """Message that asks a client to train. Sent with the global model.

    Args:
        run: Name of the fit.
        visit: The local training to execute.
        kept: Round in which the client stored the state to start from; -1 without stored state.
        needed: Round number. The client deletes states from earlier rounds, except the newest. 0 deletes nothing.
        seed: Seed for the construction of the model.
        frozen: Hash of the frozen model tensors, to compare with the client's frozen tensors.
        hyperparameters: Optimizer options, and initial states of per-step schedulers and loss scaler.
        asked: Hash of the client's request for parameter rows; empty without a request.
        held: Hash of the model tensors omitted from this message, because the client stores these; may be empty.
        keeps: Whether the client must store this message's model tensors for later messages.
        peers: Clients in the secure sum, including this client; ``None`` without a secure sum.
        head: Number and digest of the last log line that the site has reported to the server; ``None`` without a line.
        start: Number that grows with each start of the server. Clients refuse requests from earlier starts.
        question: Question from a callback on the server. The client answers instead of training. ``None`` for training.
    """

    run: str
    visit: Visit
    kept: int
    needed: int
    seed: int
    frozen: str
    hyperparameters: dict[str, Any]
    asked: str = ""
    held: str = ""
    keeps: bool = False
    peers: Sequence[Client] | None = None
    head: Sequence[Any] | None = None
    start: int = 0
    question: dict[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """Client's report on local training, sent with the update.

    ``after`` contains the step count of every per-step scheduler (``"steps"``) and the loss scaler's state
    (``"scaler"``). ``keeps`` is true if the client stored state for the next round. ``unsent`` counts the unchanged
    tensors omitted from the update. ``head`` is the number and digest of the last line in the site's message log, or
    ``None`` without such a log.
    """

    steps: int = 0
    after: dict[str, Any] | None = None
    keeps: bool = False
    unsent: int = 0
    head: Sequence[Any] | None = None


@dataclass(frozen=True)
class Fault:
    """Reason for a missing answer. For an exception, only the class is sent, because the text may be private."""

    client: Client
    reason: str


# --- packets --------------------------------------------------------------------------------------------------------


def write_packet(kind: str, header: Mapping[str, Any], **tensors: State) -> Packet:
    """Creates a packet from a header (plain containers) and tensors. ``tensors`` maps group names to named tensors."""
    table: dict[str, list[tuple[str, str, list[int]]]] = {}
    parts = []
    for group, state in tensors.items():
        table[group] = []
        for name, value in state.items():
            dtype = str(value.dtype).removeprefix("torch.")
            if dtype not in _DTYPES or value.layout != torch.strided:
                raise PacketError(f"entry {name!r} with dtype {value.dtype} and {value.layout} cannot be sent")
            table[group].append((name, dtype, list(value.shape)))
            flat = value.detach().cpu().contiguous().reshape(-1)
            parts.append(flat.view(torch.uint8).numpy().data if flat.numel() else b"")  # no copy
    text = json.dumps({"version": VERSION, "kind": kind, "header": dict(header), "tensors": table})
    return Packet(text, b"".join(parts))


def read_packet(packet: Packet, *kinds: str, client: Client | None = None) -> tuple[dict[str, Any], dict[str, State]]:
    """Reads a packet's header and tensors. Refuses a packet with a kind other than ``kinds``."""
    try:
        content = json.loads(packet.text)
        version, kind, header, table = (content[name] for name in ("version", "kind", "header", "tensors"))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise PacketError("the message is not from lightning-fed") from error
    if version != VERSION:
        raise PacketError(
            f"the message has version {version!r} instead of {VERSION}: install the same release on all machines"
        )
    if kind not in kinds or not isinstance(header, dict) or not isinstance(table, dict):
        raise PacketError(f"the message has the kind {kind!r} instead of {' or '.join(map(repr, kinds))}")
    if client is not None and (header.get("client") != client or isinstance(header.get("client"), bool)):
        raise PacketError(f"the answer is from client {header.get('client')!r:.100}, but another client was asked")
    start, tensors = 0, {}
    for group, rows in table.items():
        tensors[group] = state = dict[str, Tensor]()
        for row in rows if isinstance(rows, list) else [None]:
            name, dtype, shape, size = _checked(row)
            if start + size > len(packet.data):
                raise PacketError(f"entry {name!r} needs more bytes than the message contains")
            if name in state:
                raise PacketError(f"entry {name!r} appears twice")
            state[name] = _tensor_at(packet.data, start, size, dtype, group == "state").reshape(shape)
            start += size
    if start != len(packet.data):
        raise PacketError(f"the message's entries need {start} bytes, but the message contains {len(packet.data)}")
    return (header if len(kinds) == 1 else {**header, "kind": kind}), tensors


def _tensor_at(data: bytes, start: int, size: int, dtype: torch.dtype, is_model: bool) -> Tensor:
    # Large model entries share the packet's memory, because a packet is read only once. Other tensors are copied,
    # because a small tensor, or a tensor stored beyond the round, would keep the whole packet in memory.
    if size == 0:
        return torch.zeros(0, dtype=dtype)
    if is_model and size >= _LARGE and start % dtype.itemsize == 0:
        return torch.frombuffer(data, dtype=dtype, count=size // dtype.itemsize, offset=start)
    return torch.frombuffer(bytearray(memoryview(data)[start : start + size]), dtype=dtype)


def _checked(row: Any) -> tuple[str, torch.dtype, list[int], int]:
    if not (isinstance(row, list) and len(row) == 3 and _is_name(row[0]) and _is_shape(row[2])):
        raise PacketError(f"the message's tensor table has the invalid row {row!r}")
    name, dtype, shape = row
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise PacketError(f"the message's entry {name!r} has the invalid dtype {dtype!r}")
    return name, _DTYPES[dtype], shape, math.prod(shape) * _DTYPES[dtype].itemsize


def is_answer(packet: Packet) -> bool:
    """True for a client's answer; false for a :class:`Fault` and for invalid JSON.

    Example:
        >>> is_answer(write_packet("update", {})), is_answer(write_fault(Fault("ann", "no"))), is_answer(Packet("{"))
        (True, False, False)
    """
    if len(packet.text) > _TEXT[1]:  # the text of a fault is short
        return True
    try:
        return bool(json.loads(packet.text)["kind"] != "fault")
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def is_client(key: object) -> bool:
    """True if a value is a valid client name: a string, or an integer below 2^63.

    Example:
        >>> is_client("ann"), is_client(3), is_client(True), is_client(None)
        (True, True, False, False)
    """
    return abs(key) < 2**63 if type(key) is int else _is_name(key)


def find_bad_place(run: object, client: object, round: object) -> str | None:
    """Describes an invalid run name, client or round in a message, or returns ``None``.

    Example:
        >>> find_bad_place("0a", "ann", 3), find_bad_place("../0a", "ann", 3)
        (None, "the run '../0a' is invalid")
    """
    if not isinstance(run, str) or not re.fullmatch("[0-9a-f]{1,64}", run):  # used as a folder name
        return f"the run {run!r:.100} is invalid"
    if not is_client(client):
        return f"the client {client!r:.100} is invalid"
    return None if type(round) is int and 0 <= round < _MANY else f"the round {round!r:.100} is invalid"


def is_head(head: object) -> bool:
    """True if a value is ``None``, or the number and digest of a line in a site's message log.

    Example:
        >>> is_head([3, 64 * "a"]), is_head(None), is_head([0, ""])
        (True, True, False)
    """
    if not (isinstance(head, list) and len(head) == 2):
        return head is None
    number, digest = head
    return type(number) is int and 0 < number < _MANY and bool(re.fullmatch("[0-9a-f]{64}", str(digest)))


def _is_name(name: object) -> bool:
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in name)  # logs cannot encode surrogates


def _is_shape(shape: object) -> bool:
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        return False
    if not all(type(length) is int and 0 <= length < _LARGEST for length in shape):
        return False
    # The other dimensions of an empty tensor must also be limited.
    size: int = math.prod(max(length, 1) for length in shape)
    return size < _LARGEST


# --- messages of the federation -----------------------------------------------------------------------------------


def write_train_request(kind: str, train_request: TrainRequest, broadcast: Broadcast | None = None) -> Packet:
    """Creates a message (packet) with the request to train, optionally with the broadcast."""
    tensors = {} if broadcast is None else {"state": sent_entries(broadcast), "extras": broadcast.extras}
    return write_packet(kind, vars(train_request) | {"visit": asdict(train_request.visit)}, **tensors)


def read_train_request(packet: Packet, kind: str) -> tuple[TrainRequest, Broadcast]:
    """Reads a packet from :func:`write_train_request`. Returns an empty broadcast if none was sent."""
    header, tensors = read_packet(packet, kind)
    try:
        visit = Visit(**header.pop("visit"))
        train_request = TrainRequest(visit=visit, **header)
        _check_train_request(train_request)
    except (TypeError, KeyError, ValueError) as error:
        raise PacketError(f"the train request is invalid: {error}") from error
    return train_request, Broadcast(visit.round, tensors.get("state", {}), tensors.get("extras", {}))


_TYPES: dict[str, Any] = {
    **dict.fromkeys(("frozen", "asked", "held"), str),
    **{"keeps": bool, "hyperparameters": dict, "peers": list | None, "question": dict | None, "head": list | None},
}  # fields of a train request


def _check_train_request(train_request: TrainRequest) -> None:
    visit = train_request.visit
    bad_place = find_bad_place(train_request.run, visit.client, visit.round)
    if bad_place is not None:
        raise TypeError(bad_place)
    numbers = (
        ("kept", train_request.kept, -1), ("needed", train_request.needed, 0), ("seed", train_request.seed, 0),
        ("start", train_request.start, 0),
        ("visit's seed", visit.seed, 0), ("epochs", visit.epochs, 1),
        ("steps", 1 if visit.steps is None else visit.steps, 1),
    )  # fmt: skip
    for name, number, lowest in numbers:
        if type(number) is not int or not lowest <= number < _MANY:
            raise TypeError(f"the field {name} has the invalid value {number!r}")
    if visit.seed >= 2**32:
        raise TypeError(f"the seed {visit.seed} of the visit is invalid")
    if visit.portion is not None and not (isinstance(visit.portion, int | float) and 0 <= visit.portion < 1):
        raise TypeError(f"the visit's `portion` must be None or a number in [0, 1), but is {visit.portion!r}")
    for name, kind in _TYPES.items():
        if not isinstance(getattr(train_request, name), kind):
            raise TypeError(f"the field {name} has the invalid value {getattr(train_request, name)!r:.100}")
    if not all(map(is_client, train_request.peers or ())):
        raise TypeError(
            f"the field `peers` must contain names or numbers of clients, but is {train_request.peers!r:.100}"
        )
    bad_rate = find_bad_rate(train_request.hyperparameters)
    if bad_rate is not None:
        raise TypeError(bad_rate)


def find_bad_rate(numbers: object, highest: float = math.inf, name: str = "") -> str | None:
    """Describes the first learning rate out of range, or returns ``None``. Checks numbers with ``lr`` in their name.

    Example:
        >>> find_bad_rate({"groups": [[{"lr": 0.1, "momentum": 0.9}]], "schedulers": [{"base_lrs": [-1.0]}]})
        "'base_lrs' is -1.0"
    """
    if isinstance(numbers, Mapping):
        parts = ((value, f"{name}.{key}" if "lr" in name else str(key)) for key, value in numbers.items())
    elif isinstance(numbers, list | tuple):
        parts = ((value, name) for value in numbers)
    elif "lr" in name and isinstance(numbers, int | float) and not isinstance(numbers, bool):
        return None if 0 <= numbers <= min(highest, _HIGHEST_RATE) else f"{name!r} is {numbers}"
    else:
        return None
    return next((fault for value, key in parts if (fault := find_bad_rate(value, highest, key)) is not None), None)


def find_bad_size(packet: Packet, model: State) -> str | None:
    """Describes an answer that is larger than any valid update to ``model``, or returns ``None``."""
    size = sum(value.numel() * value.element_size() for value in model.values())
    longest, largest = _TEXT[0] + _TEXT[1] * len(model), _DATA[0] + _DATA[1] * size
    if len(packet.text) > longest or len(packet.data) > largest:
        return (
            f"the client's answer has {len(packet.text)} characters and {len(packet.data)} bytes, but the "
            f"limits are {longest} and {largest}"
        )
    return None


def write_request(request: Request) -> Packet:
    """Creates a packet with a client's request for parameter rows."""
    lists = distinct(request.rows)
    same = {name: next(key for key in lists if torch.equal(lists[key], rows)) for name, rows in request.rows.items()}
    return write_packet("request", {"client": request.client, "same": same}, rows=lists, extras=request.extras)


def write_update(update: ClientUpdate, answer: Answer) -> Packet:
    """Creates a packet from a client's update."""
    header = {name: getattr(update, name) for name in ("client", "num_samples", "metrics")} | asdict(answer)
    return write_packet("update", header, state=sent_entries(update), extras=update.extras)


def write_fault(fault: Fault) -> Packet:
    """Creates a message (packet) with the reason for a client's missing answer."""
    return write_packet("fault", asdict(fault))


def read_reply(packet: Packet, client: Client) -> Request | tuple[ClientUpdate, Answer] | Fault:
    """Reads a client's message. Raises ``PacketError`` if invalid."""
    header, tensors = read_packet(packet, "request", "update", "fault", client=client)
    try:
        if header["kind"] == "fault":
            return Fault(client, one_line(str(header["reason"])))
        if header["kind"] == "request":
            lists = tensors["rows"]
            return Request(client, {name: lists[key] for name, key in header["same"].items()}, tensors["extras"])
        metrics = {name: float(value) for name, value in header["metrics"].items() if isinstance(value, int | float)}
        num_samples, steps, unsent = header["num_samples"], header["steps"], header["unsent"]
        if any(type(number) is not int or not 0 <= number < _MANY for number in (num_samples, steps, unsent)):
            raise PacketError(
                f"the client sends invalid counts: {num_samples!r} examples, {steps!r} steps, {unsent!r} unsent entries"
            )
        update = ClientUpdate(client, num_samples, tensors["state"], tensors["extras"], metrics)
        if not is_head(header["head"]):
            raise PacketError(f"the site record's last line (number, digest) is invalid: {header['head']!r:.100}")
        return update, Answer(steps, header["after"], header["keeps"] is True, unsent, header["head"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise (
            error if isinstance(error, PacketError) else PacketError(f"the answer's header is invalid: {error!r}")
        ) from error


def unreadable(error: Exception) -> str:
    """Formats an error from reading a client's answer, as the reason for excluding the client."""
    return one_line(
        f"the client's answer cannot be read: {error if isinstance(error, PacketError) else describe(error)}"
    )


def one_line(text: str) -> str:
    """Formats received text as one line for the log."""
    line = " ".join("".join(character if character.isprintable() else " " for character in text[:2000]).split())
    return line if len(line) <= 500 else f"{line[:500]}..."
