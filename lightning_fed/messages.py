"""The three messages between server and client, with flat dictionaries of tensors.

The server sends a :class:`Broadcast`, and the client answers with a :class:`ClientUpdate`. A client may first send a
:class:`Request`, to exchange only some rows of a large weight, or to send extra tensors to the aggregation rule.

Untrained entries are not sent if the receiver already has the values. ``unsent`` contains their names.
"""

from __future__ import annotations

import hashlib
import json
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

Client: TypeAlias = str | int
"""A client's name (str) or number (int)."""

State: TypeAlias = dict[str, Tensor]
"""Flat model state: tensor by entry name."""

MOST_SAMPLES = 10**12  # larger reported numbers of examples are rejected


def plain_keys(clients: Iterable[Client]) -> list[Client]:
    """Converts client names to Python strings and integers, for example from NumPy scalars."""
    # NumPy scalars do not load with `weights_only=True`.
    return [str(client) if isinstance(client, str) else int(client) for client in clients]


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Total size of all tensors in bytes."""
    return sum(value.numel() * value.element_size() for value in tensors.values())


def file_name(client: Client) -> str:
    """Converts a client's name or number to a safe file name."""
    return hashlib.sha256(json.dumps(client).encode()).hexdigest()[:32]


def digest(state: Mapping[str, Tensor]) -> str:
    """Hexadecimal hash of the names, dtypes, shapes and values in a state."""
    hasher = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous().reshape(-1)
        hasher.update(json.dumps([name, str(value.dtype), list(state[name].shape)]).encode())
        if value.numel():
            hasher.update(value.view(torch.uint8).numpy().data)
    return hasher.hexdigest()[:32]


def distinct(tensors: Mapping[str, Tensor]) -> State:
    """Removes tensors equal to an earlier tensor in the dictionary.

    Example:
        >>> import torch
        >>> rows = torch.tensor([3, 8])
        >>> list(distinct({"head.weight": rows, "head.bias": rows.clone(), "words.weight": torch.tensor([0])}))
        ['head.weight', 'words.weight']
    """
    unique: State = {}
    for name, value in tensors.items():
        if not any(value is earlier or _is_equal(value, earlier) for earlier in unique.values()):
            unique[name] = value
    return unique


def with_prefix(state: Mapping[str, Tensor], prefix: str) -> State:
    """Adds a prefix to all entry names of a state."""
    return {f"{prefix}{name}": value for name, value in state.items()}


def without_prefix(state: Mapping[str, Tensor], prefix: str) -> State:
    """Selects the entries whose names start with ``prefix``, and removes the prefix from the names."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _is_equal(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.device == right.device and torch.equal(left, right)


@dataclass
class Request:
    """Request for the global model, sent by a client before training.

    Args:
        client: The client's name or number.
        rows: Requested rows of a parameter, by name: row indices, int64, shape ``(rows,)``, strictly increasing.
        extras: Additional tensors for the aggregation rule's
            :meth:`Aggregator.broadcast <lightning_fed.Aggregator.broadcast>`.
    """

    client: Client
    rows: State = field(default_factory=dict)
    extras: State = field(default_factory=dict)


@dataclass
class Broadcast:
    """Message from the server to a client before local training.

    Args:
        round: Index of the round that starts with this model, from 0. Asynchronous training may send an earlier round's
            model.
        state: Parameters and buffers of the model at the start of local training.
        extras: Further tensors by name, such as control variates.
        rows: For parameters sent with only some rows: the row indices from the client's :class:`Request`.
        unsent: Names in ``state`` not sent, because the client already has the values. Set by the server.
    """

    round: int
    state: State
    extras: State = field(default_factory=dict)
    rows: State = field(default_factory=dict)
    unsent: frozenset[str] = frozenset()


@dataclass
class ClientUpdate:
    """Message from one client to the server after local training.

    Args:
        client: The client's name or number.
        num_samples: Number of local examples, the client's weight in an average.
        state: Parameters and buffers after the training (not differences).
        extras: Further tensors by name, such as prototypes.
        metrics: Numbers to log.
        rows: For parameters sent with only some rows: the row indices. Set by the server from the broadcast.
        unsent: Names of untrained tensors in ``state``, equal to the broadcast and not sent. Do not change these
            tensors in place.
        members: Clients whose updates are summed in this update; only set by update steps on the server.
    """

    client: Client
    num_samples: int
    state: State
    extras: State = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    rows: State = field(default_factory=dict)
    unsent: frozenset[str] = frozenset()
    members: tuple[Client, ...] = ()

    @property
    def clients(self) -> tuple[Client, ...]:
        """Clients in this update: several for a summed update, otherwise one."""
        return self.members or (self.client,)


def sent_entries(message: Broadcast | ClientUpdate) -> State:
    """Entries of the message's ``state`` except ``unsent``, the entries already known to the receiver."""
    return {name: value for name, value in message.state.items() if name not in message.unsent}


def message_bytes(message: Request | Broadcast | ClientUpdate) -> int:
    """Size in bytes of a message's tensors. Row indices shared by several entries count once."""
    entries = distinct(message.rows) if isinstance(message, Request) else sent_entries(message)
    return tensor_bytes(entries) + tensor_bytes(message.extras)


def find_bad_count(num_samples: object) -> str | None:
    """Describes why ``num_samples`` is invalid. Returns ``None`` for a valid number."""
    is_whole = isinstance(num_samples, numbers.Integral) and not isinstance(num_samples, bool)
    if is_whole and 1 <= num_samples <= MOST_SAMPLES:  # type: ignore[operator]
        return None
    return f"the client reports {num_samples!r:.100} examples"
