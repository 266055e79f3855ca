"""Messages of a secure sum: keys, shares and unmasking."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from lightning_fed.backends.wire.packets import (
    Fault,
    Packet,
    PacketError,
    find_bad_place,
    is_client,
    one_line,
    read_packet,
    write_packet,
)
from lightning_fed.backends.wire.secure_sum_protocol import PUBLIC, SEALED, SECRET
from lightning_fed.messages import Client

SUM = "query.sum"
"""Message type of a secure sum."""

Stage = Literal["keys", "shares", "open", "unmask"]

OPENED, NOT_OPENED = b"\1", b"\0"
"""Flags for opened and unreadable shares."""

_MOST_CLIENTS = 10_000
_MANY = 2**53
_TEXT = 2**12, 2**8  # characters in a reply: constant part, and per row


@dataclass(frozen=True)
class SumRequest:
    """Server's request to a client for one step of a secure sum.

    ``stage`` is the step, and ``peers`` are the clients in this step. The steps are:

    - ``"keys"``: publish the client's public keys.
    - ``"shares"``: split the client's secrets into one encrypted share per peer. ``rows`` are the peers' public keys.
      Any ``least`` shares restore a secret.
    - ``"open"``: decrypt the peers' shares in ``rows``.
    - ``"unmask"``: send one share per peer to the server, to remove the masks from the sum. ``survivors`` marks the
      peers with an update in the sum.
    """

    stage: Stage
    run: str
    round: int
    client: Client
    least: int = 0
    peers: tuple[Client, ...] = ()
    survivors: tuple[bool, ...] = ()
    rows: tuple[bytes, ...] = ()


ROW_BYTES: Mapping[Stage, int] = {"keys": 0, "shares": PUBLIC, "open": SEALED, "unmask": 0}
"""Bytes per row in a request."""

REPLY_BYTES: Mapping[Stage, int] = {"keys": PUBLIC, "shares": SEALED, "open": len(OPENED), "unmask": SECRET}
"""Bytes per row in a reply. Rows by step: the client's keys (one row); encrypted shares for the peers, with zeros for
the client; flags for opened shares; one released share per peer."""


def write_sum_request(request: SumRequest) -> Packet:
    """Creates a packet from the server's request for a step of a secure sum."""
    header = {name: value for name, value in vars(request).items() if name != "rows"}
    return write_packet("sum", header, rows={"rows": _to_tensor(request.rows, ROW_BYTES[request.stage])})


def read_sum_request(packet: Packet) -> SumRequest:
    """Reads the server's request for a step of a secure sum. Raises ``PacketError`` for an invalid request."""
    header, tensors = read_packet(packet, "sum")
    if set(header) != {"stage", "run", "round", "client", "least", "peers", "survivors"}:
        raise PacketError("the request has missing or unknown fields")
    stage, peers, survivors = header["stage"], header["peers"], header["survivors"]
    if stage not in get_args(Stage):
        raise PacketError(f"the request names the unknown step {stage!r:.100} of a secure sum")
    bad_place = find_bad_place(header["run"], header["client"], header["round"])
    if bad_place is not None:
        raise PacketError(bad_place)
    if type(header["least"]) is not int or not 0 <= header["least"] < _MANY:
        raise PacketError(
            f"the field `least` (shares needed to unmask the sum) has the invalid value {header['least']!r:.100}"
        )
    if not isinstance(peers, list) or len(peers) > _MOST_CLIENTS or not all(map(is_client, peers)):
        raise PacketError("the request's list of clients is invalid")
    if len(set(peers)) < len(peers) or bool(peers) != (stage != "keys"):
        raise PacketError(
            f"the request's list of {len(peers)} clients has duplicates, or a wrong length for the step {stage!r}"
        )
    expected = len(peers) if stage == "unmask" else 0
    if not isinstance(survivors, list) or len(survivors) != expected or {*map(type, survivors)} - {bool}:
        raise PacketError("the field `survivors` must have one bool per client for 'unmask', and be empty otherwise")
    rows = _to_rows(tensors, len(peers) if ROW_BYTES[stage] else 0, ROW_BYTES[stage])
    return SumRequest(**{**header, "peers": tuple(peers), "survivors": tuple(survivors), "rows": rows})


def write_sum_reply(request: SumRequest, rows: tuple[bytes, ...]) -> Packet:
    """Packs a client's answer in one step of a secure sum. ``REPLY_BYTES`` describes the ``rows`` in each step."""
    header = {"client": request.client, "stage": request.stage}
    return write_packet("sum", header, rows={"rows": _to_tensor(rows, REPLY_BYTES[request.stage])})


def read_sum_reply(packet: Packet, request: SumRequest) -> tuple[bytes, ...] | Fault:
    """Reads a client's answer in a secure sum. Refuses answers with a wrong size."""
    count, size = (1 if request.stage == "keys" else len(request.peers)), REPLY_BYTES[request.stage]
    if len(packet.data) > count * size or len(packet.text) > _TEXT[0] + _TEXT[1] * count:
        raise PacketError(
            f"the client's answer is too large: {len(packet.text)} characters and {len(packet.data)} bytes"
        )
    header, tensors = read_packet(packet, "sum", "fault", client=request.client)
    if header["kind"] == "fault":
        return Fault(request.client, one_line(str(header.get("reason"))))
    if header.get("stage") != request.stage:
        raise PacketError(f"the client answers the step {header.get('stage')!r:.100} instead of {request.stage!r}")
    return _to_rows(tensors, count, size)


def context_of(run: str, round: int) -> bytes:
    """Encodes run and round as bytes. Keys and masks derived with these bytes are valid in only one round."""
    return json.dumps([run, round]).encode()


def _to_tensor(rows: tuple[bytes, ...], size: int) -> torch.Tensor:
    data = bytearray(b"".join(rows))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
    return flat.reshape(len(rows), size)


def _to_rows(tensors: Mapping[str, Mapping[str, Any]], count: int, size: int) -> tuple[bytes, ...]:
    if tensors.keys() != {"rows"} or tensors["rows"].keys() != {"rows"}:
        raise PacketError("the message must contain exactly one tensor, with the name 'rows'")
    value: torch.Tensor = tensors["rows"]["rows"]
    if value.dtype != torch.uint8 or value.shape != torch.Size([count, size]):
        raise PacketError(
            f"the message's tensor 'rows' has dtype {value.dtype} and shape {list(value.shape)} instead of "
            f"torch.uint8 and {[count, size]}"
        )
    return tuple(row.numpy().tobytes() for row in value)
