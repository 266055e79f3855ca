"""Messages as text and bytes: a header in JSON, then the tensors' memory as it is. Nothing is pickled.

A large model is one run of bytes, which a network can cut into chunks; one of many small entries is not many objects.
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
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State, distinct
from lightning_fed.server.schedule import Visit

VERSION = 6
"""Version of the messages. Halves of different versions do not understand each other, and say so."""

_MANY = 2**53  # whole numbers that a float holds exactly
_LARGEST = 2**48  # numbers in a tensor
_LARGE = 2**20  # bytes of an entry that is not copied
_LONGEST_NAME = 1000
_MOST_DIMENSIONS = 64  # that PyTorch has
_HIGHEST_RATE = 1e6  # learning rates above it are no one's
_TEXT = 2**20, 2**11  # bytes of a header, and for every entry
_DATA = 2**26, 8  # bytes of a reply's tensors, and for every byte of the model

VISIT, REQUEST, STATISTICS, QUESTION, HELLO = "train", "query.request", "evaluate", "evaluate.question", "query"
"""Types of messages. A client is asked for an update, the rows of its request, statistics of its BatchNorm
layers, or what a callback asks; a node is asked for its clients."""

with warnings.catch_warnings():  # PyTorch says once that it can write into bytes
    warnings.simplefilter("ignore")
    torch.frombuffer(b"0", dtype=torch.uint8)

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


NOT_HERE = "its data are not at this node"
"""The fault of a client that is asked for at the wrong node."""

NOT_HELD = "it does not have the entries that it was not sent"
"""The fault of a client that holds other values than the server counts on: it is asked again, with all of them."""


class PacketError(ValueError):
    """Reason why received data are no message of this package, as one line: what came may be in it.

    Args:
        reason: The reason.

    """

    def __init__(self, reason: str) -> None:
        super().__init__(one_line(reason))


@dataclass(frozen=True)
class Packet:
    """A message in the form in which it travels.

    Args:
        text: The header: JSON.
        data: The tensors' bytes, one after another. Their number counts as communication.

    """

    text: str
    data: bytes = b""


@dataclass(frozen=True)
class TrainRequest:
    """Request to train that goes with the broadcast: the visit, and the state from which the client goes on.

    Args:
        run: Name of the fit. States that a client kept in another one are not used.
        visit: The visit.
        kept: Index of the round of the client's last good update with kept state; -1 before.
        needed: First round from which the server may resume: of the versions of earlier rounds only the newest is still
            needed.
        seed: Seed of the federation, with which the model is built.
        frozen: Digest of the entries that never travel, which both halves must have alike.
        hyperparameters: Those of the round's optimizers, and the start of per-step schedulers and the loss scale.
        asked: Digest of the client's request, if there was one.
        held: Digest of the entries that are not sent because the client should have them; empty if there are none.
        keeps: Whether the client is to keep what it is sent, because it will not be sent all of it again.
        peers: In a secure sum the clients with which it masks its update, itself among them; ``None`` without one.
        question: A callback's question, outside of a round; ``None`` in one.

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
    question: dict[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """Report of a client beside its update.

    Args:
        steps: Optimizer steps that it has done.
        after: How far the visit took what goes on from it: ``"steps"`` of every per-step scheduler, and the state of
            the loss scale as ``"scaler"``.
        keeps: The client has kept state of the visit for its next one.
        unsent: Number of entries that the update leaves out, because they are as the client was sent them.

    """

    steps: int = 0
    after: dict[str, Any] | None = None
    keeps: bool = False
    unsent: int = 0


@dataclass(frozen=True)
class Fault:
    """Reason why there is no answer.

    Args:
        client: The client.
        reason: The reason as text: our own words, and of an exception its class.

    """

    client: Client
    reason: str


# --- packets --------------------------------------------------------------------------------------------------------


def write_packet(kind: str, header: Mapping[str, Any], **tensors: State) -> Packet:
    """Makes a packet.

    Args:
        kind: Its kind.
        header: Primitives and plain containers.
        tensors: Groups of tensors by name.

    Raises:
        PacketError: If an entry cannot travel.

    Example:
        >>> packet = write_packet("hello", {"round": 3}, state={"w": torch.tensor([1.0])})
        >>> read_packet(packet, "hello")
        ({'round': 3}, {'state': {'w': tensor([1.])}})

    """
    table: dict[str, list[tuple[str, str, list[int]]]] = {}
    parts = []
    for group, state in tensors.items():
        table[group] = []
        for name, value in state.items():
            dtype = str(value.dtype).removeprefix("torch.")
            if dtype not in _DTYPES or value.layout != torch.strided:
                raise PacketError(f"entry {name!r} is {value.dtype} with layout {value.layout}, which cannot travel")
            table[group].append((name, dtype, list(value.shape)))
            flat = value.detach().cpu().contiguous().reshape(-1)
            parts.append(flat.view(torch.uint8).numpy().data if flat.numel() else b"")  # the memory itself
    text = json.dumps({"version": VERSION, "kind": kind, "header": dict(header), "tensors": table})
    return Packet(text, b"".join(parts))


def read_packet(packet: Packet, *kinds: str, client: Client | None = None) -> tuple[dict[str, Any], dict[str, State]]:
    """Header and tensors of a packet of one of some kinds; with several, the header says which as ``"kind"``.

    Raises:
        PacketError: If it is none, is of another version or not of the client, or its table does not fit its bytes.

    """
    try:
        content = json.loads(packet.text)
        version, kind, header, table = (content[name] for name in ("version", "kind", "header", "tensors"))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise PacketError("it is no message of lightning-fed") from error
    if version != VERSION:
        raise PacketError(f"it is of version {version!r} instead of {VERSION}: install the same release everywhere")
    if kind not in kinds or not isinstance(header, dict) or not isinstance(table, dict):
        raise PacketError(f"it is {kind!r} instead of {' or '.join(map(repr, kinds))}")
    if client is not None and (header.get("client") != client or isinstance(header.get("client"), bool)):
        raise PacketError(f"it answers for client {header.get('client')!r:.100}")
    start, tensors = 0, {}
    for group, rows in table.items():
        tensors[group] = state = dict[str, Tensor]()
        for row in rows if isinstance(rows, list) else [None]:
            name, dtype, shape, size = _checked(row)
            if start + size > len(packet.data):
                raise PacketError(f"entry {name!r} needs more bytes than there are")
            if name in state:
                raise PacketError(f"entry {name!r} is there twice")
            state[name] = _tensor_at(packet.data, start, size, dtype, group == "state").reshape(shape)
            start += size
    if start != len(packet.data):
        raise PacketError(f"its entries have {start} bytes, but it has {len(packet.data)}")
    return (header if len(kinds) == 1 else {**header, "kind": kind}), tensors


def _tensor_at(data: bytes, start: int, size: int, dtype: torch.dtype, is_model: bool) -> Tensor:
    """Tensor of some bytes of a packet: of a model's large entry that memory itself, else a copy.

    The memory is the tensor's alone, as nobody reads a packet twice. A small tensor, or one that is kept beyond its
    round, would hold the whole packet.
    """
    if size == 0:
        return torch.zeros(0, dtype=dtype)
    if is_model and size >= _LARGE and start % dtype.itemsize == 0:
        return torch.frombuffer(data, dtype=dtype, count=size // dtype.itemsize, offset=start)
    return torch.frombuffer(bytearray(memoryview(data)[start : start + size]), dtype=dtype)


def _checked(row: Any) -> tuple[str, torch.dtype, list[int], int]:
    if not (isinstance(row, list) and len(row) == 3 and _is_name(row[0]) and _is_shape(row[2])):
        raise PacketError(f"its table has {row!r}, which is no entry")
    name, dtype, shape = row
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise PacketError(f"its entry {name!r} has the type {dtype!r}")
    return name, _DTYPES[dtype], shape, math.prod(shape) * _DTYPES[dtype].itemsize


def is_answer(packet: Packet) -> bool:
    """True for what may be an answer; false for a fault, and for what is too short to be read as anything else.

    Example:
        >>> is_answer(write_packet("update", {})), is_answer(write_fault(Fault("ann", "no"))), is_answer(Packet("{"))
        (True, False, False)

    """
    if len(packet.text) > _TEXT[1]:
        return True
    try:
        return bool(json.loads(packet.text)["kind"] != "fault")
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def is_client(key: object) -> bool:
    """True for what can be a client's key.

    Example:
        >>> is_client("ann"), is_client(3), is_client(True), is_client(None)
        (True, True, False, False)

    """
    return abs(key) < 2**63 if type(key) is int else _is_name(key)


def find_bad_place(run: object, client: object, round: object) -> str | None:
    """Describes what is wrong with the run, the client and the round of a message; ``None`` if nothing is.

    Example:
        >>> find_bad_place("0a", "ann", 3), find_bad_place("../0a", "ann", 3)
        (None, "the run is '../0a'")

    """
    if not isinstance(run, str) or not re.fullmatch("[0-9a-f]{1,64}", run):  # a folder
        return f"the run is {run!r:.100}"
    if not is_client(client):
        return f"the client is {client!r:.100}"
    return None if type(round) is int and 0 <= round < _MANY else f"the round is {round!r:.100}"


def _is_name(name: object) -> bool:
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in name)  # which no log could write


def _is_shape(shape: object) -> bool:
    """True for the lengths of a tensor's dimensions; also those of an empty tensor must have a product."""
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        return False
    if not all(type(length) is int and 0 <= length < _LARGEST for length in shape):
        return False
    size: int = math.prod(max(length, 1) for length in shape)
    return size < _LARGEST


# --- the federation's messages ---------------------------------------------------------------------------------------


def write_train_request(kind: str, train_request: TrainRequest, broadcast: Broadcast | None = None) -> Packet:
    """Makes the packet of a train request, with the broadcast if there is one."""
    tensors = {} if broadcast is None else {"state": broadcast.sent, "extras": broadcast.extras}
    return write_packet(kind, vars(train_request) | {"visit": asdict(train_request.visit)}, **tensors)


def read_train_request(packet: Packet, kind: str) -> tuple[TrainRequest, Broadcast]:
    """Reads the packet of :func:`write_train_request`; the broadcast has no tensors where there was none.

    Raises:
        PacketError: If it is no such message.

    """
    header, tensors = read_packet(packet, kind)
    try:
        visit = Visit(**header.pop("visit"))
        train_request = TrainRequest(visit=visit, **header)
        _check_train_request(train_request)
    except (TypeError, KeyError, ValueError) as error:
        raise PacketError(f"its train request does not have the fields of one: {error}") from error
    return train_request, Broadcast(visit.round, tensors.get("state", {}), tensors.get("extras", {}))


_TYPES: dict[str, Any] = {
    **dict.fromkeys(("frozen", "asked", "held"), str),
    **{"keeps": bool, "hyperparameters": dict, "peers": list | None, "question": dict | None},
}  # of a train request's fields


def _check_train_request(train_request: TrainRequest) -> None:
    visit = train_request.visit
    bad_place = find_bad_place(train_request.run, visit.client, visit.round)
    if bad_place is not None:
        raise TypeError(bad_place)
    numbers = (
        ("kept", train_request.kept, -1), ("needed", train_request.needed, 0), ("seed", train_request.seed, 0),
        ("visit's seed", visit.seed, 0), ("epochs", visit.epochs, 1),
        ("steps", 1 if visit.steps is None else visit.steps, 1),
    )  # fmt: skip
    for name, number, lowest in numbers:
        if type(number) is not int or not lowest <= number < _MANY:
            raise TypeError(f"{name} is {number!r}")
    if visit.seed >= 2**32:
        raise TypeError(f"visit's seed is {visit.seed}")
    if visit.portion is not None and not (isinstance(visit.portion, int | float) and 0 <= visit.portion < 1):
        raise TypeError(f"portion is {visit.portion!r}")
    for name, kind in _TYPES.items():
        if not isinstance(getattr(train_request, name), kind):
            raise TypeError(f"{name} is {getattr(train_request, name)!r:.100}")
    if not all(map(is_client, train_request.peers or ())):
        raise TypeError(f"peers is {train_request.peers!r:.100}")
    bad_rate = find_bad_rate(train_request.hyperparameters)
    if bad_rate is not None:
        raise TypeError(bad_rate)


def find_bad_rate(numbers: object, highest: float = math.inf, name: str = "") -> str | None:
    """Describes a learning rate that is negative, not finite or too high; ``None`` if there is none.

    Args:
        numbers: Options of optimizers and states of schedulers, of any depth: what has ``lr`` in its name is a rate.
        highest: Highest rate that is allowed.
        name: Name of the numbers.

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
    """Fault of a reply that is too large to be one, before anything of it is read; ``None`` if it is not.

    Args:
        packet: The reply.
        model: The entries of the model that its client was sent, or that the round began with.

    """
    size = sum(value.numel() * value.element_size() for value in model.values())
    longest, largest = _TEXT[0] + _TEXT[1] * len(model), _DATA[0] + _DATA[1] * size
    if len(packet.text) > longest or len(packet.data) > largest:
        return (
            f"its answer has {len(packet.text)} characters and {len(packet.data)} bytes, and no more than {longest} and"
            f" {largest} are read"
        )
    return None


def write_request(request: Request) -> Packet:
    """Makes the packet of a client's request; rows that several entries share travel once."""
    lists = distinct(request.rows)
    same = {name: next(key for key in lists if torch.equal(lists[key], rows)) for name, rows in request.rows.items()}
    return write_packet("request", {"client": request.client, "same": same}, rows=lists, extras=request.extras)


def write_update(update: ClientUpdate, answer: Answer) -> Packet:
    """Makes the packet of a client's update."""
    header = {name: getattr(update, name) for name in ("client", "num_samples", "metrics")} | asdict(answer)
    return write_packet("update", header, state=update.sent, extras=update.extras)


def write_fault(fault: Fault) -> Packet:
    """Makes the packet of a fault."""
    return write_packet("fault", asdict(fault))


def read_reply(packet: Packet, client: Client) -> Request | tuple[ClientUpdate, Answer] | Fault:
    """Reads a client's answer: a request, an update, or a fault.

    Args:
        packet: The packet.
        client: The client that was asked.

    Raises:
        PacketError: If it is none of them, or another client's.

    """
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
            raise PacketError(f"it reports {num_samples!r} examples, {steps!r} steps and {unsent!r} entries left out")
        update = ClientUpdate(client, num_samples, tensors["state"], tensors["extras"], metrics)
        return update, Answer(steps, header["after"], header["keeps"] is True, unsent)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise (error if isinstance(error, PacketError) else PacketError(f"it has no good header: {error!r}")) from error


def unreadable(error: Exception) -> str:
    """Words on an answer that cannot be read, whatever was raised."""
    return one_line(f"its answer cannot be read: {error if isinstance(error, PacketError) else describe(error)}")


def one_line(text: str) -> str:
    """Received text as one line of a log."""
    line = " ".join("".join(character if character.isprintable() else " " for character in text[:2000]).split())
    return line if len(line) <= 500 else f"{line[:500]}..."
