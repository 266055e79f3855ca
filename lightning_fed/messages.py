"""The wire: the three messages between the server and a client, which are all that passes between them.

The server sends a :class:`Broadcast`, the client answers with a :class:`ClientUpdate`. Both hold flat dictionaries of
tensors, so that the same two halves run in one process, across processes or over a network, and communication is
counted, not estimated.

Where the broadcast depends on the client, the client sends a :class:`Request` first. It may ask for a few rows of a
large table (the classes of a head, the words of an embedding), and only these rows then travel, in both directions; or
it may tell which parts of the model it has already.

Entries that do not train (parameters without gradient, constant buffers) do not travel where the other side has their
values: they are named in ``unsent``, and filled in by the receiver.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

Client: TypeAlias = str | int
"""A client's stable key."""

State: TypeAlias = dict[str, Tensor]
"""Flat model state: entry name to tensor."""


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Size of the tensors in bytes.

    Example:
        >>> import torch
        >>> tensor_bytes({"weight": torch.zeros(3, 2), "steps": torch.tensor(1)})
        32

    """
    return sum(value.numel() * value.element_size() for value in tensors.values())


def file_name(client: Client) -> str:
    """A client's name as that of a file, whatever characters it has.

    Example:
        >>> len(file_name("ward 3/north"))
        32

    """
    return hashlib.sha256(json.dumps(client).encode()).hexdigest()[:32]


def digest(state: Mapping[str, Tensor]) -> str:
    """Digest of a state's names, types, shapes and values.

    Example:
        >>> digest({"w": torch.ones(2)}) == digest({"w": torch.ones(2)}), digest({}) == digest({"w": torch.ones(2)})
        (True, False)

    """
    hasher = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous().reshape(-1)
        hasher.update(json.dumps([name, str(value.dtype), list(state[name].shape)]).encode())
        if value.numel():
            hasher.update(value.view(torch.uint8).numpy().data)
    return hasher.hexdigest()[:32]


def distinct(tensors: Mapping[str, Tensor]) -> State:
    """The tensors without those that equal an earlier one and need not travel again.

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
    """The entries under names that begin with a prefix.

    Example:
        >>> list(with_prefix({"w": torch.ones(2)}, "control:"))
        ['control:w']

    """
    return {f"{prefix}{name}": value for name, value in state.items()}


def without_prefix(state: Mapping[str, Tensor], prefix: str) -> State:
    """Those of the entries whose names begin with a prefix, under their names without it.

    Example:
        >>> list(without_prefix({"control:w": torch.ones(2), "rows": torch.ones(1)}, "control:"))
        ['w']

    """
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _is_equal(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.device == right.device and torch.equal(left, right)


@dataclass
class Request:
    """Message from a client before its visit: the entries that it wants in part, or has already.

    Args:
        client: The client's key.
        rows: For an entry of the model the rows that the client wants: int64, shape (rows,), strictly increasing, so
            that their order says nothing about the client. Rows that are the same for several entries, as a head's
            weight and bias, are one list on the wire.
        extras: Further tensors of the method, for :meth:`Aggregator.broadcast <lightning_fed.Aggregator.broadcast>`.

    """

    client: Client
    rows: State = field(default_factory=dict)
    extras: State = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the message; equal rows count once."""
        return tensor_bytes(distinct(self.rows)) + tensor_bytes(self.extras)


@dataclass
class Broadcast:
    """Message from the server to one client at the start of its visit.

    Args:
        round: Index of the round, from 0.
        state: Entries of the model that the client starts from.
        extras: Further tensors of the method (control variates, ...).
        rows: For entries that ``state`` holds in part, the indices of their rows: those of the client's
            :class:`Request`, which this message answers. Their bytes are counted there.
        unsent: Names of entries of ``state`` that the client has already, so that they do not travel. The server fills
            it in.

    """

    round: int
    state: State
    extras: State = field(default_factory=dict)
    rows: State = field(default_factory=dict)
    unsent: frozenset[str] = frozenset()

    @property
    def sent(self) -> State:
        """The entries of ``state`` that travel."""
        return {name: value for name, value in self.state.items() if name not in self.unsent}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that travel."""
        return tensor_bytes(self.sent) + tensor_bytes(self.extras)


@dataclass
class ClientUpdate:
    """Message from one client to the server at the end of its visit.

    Args:
        client: The client's key.
        num_samples: Number of the client's local examples, its weight in an average.
        state: Entries of the model as the client trained them (not differences).
        extras: Further tensors of the method (prototypes, statistics, ...).
        metrics: Plain numbers for the log.
        rows: For entries that ``state`` holds in part, the indices of their rows. The server fills in the rows that it
            sent: a client cannot write into rows that it did not ask for.
        unsent: Names of entries of ``state`` that do not train and that the visit has left as the client was sent them,
            so that they do not travel. Their tensors are those of the broadcast: put new ones in their place, do not
            write into them.
        members: On the server: the clients whose updates an update step has joined in this one.

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
        """The clients that it comes from."""
        return self.members or (self.client,)

    @property
    def sent(self) -> State:
        """The entries of ``state`` that travel."""
        return {name: value for name, value in self.state.items() if name not in self.unsent}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that travel."""
        return tensor_bytes(self.sent) + tensor_bytes(self.extras)
