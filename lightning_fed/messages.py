"""The wire: what a server and a client say to each other, and nothing else.

A :class:`Broadcast` goes down, a :class:`ClientUpdate` goes up. Both hold flat dictionaries of tensors, so that the
same two halves run in one process, across processes or over a network, and communication is counted, not estimated.

Where the broadcast depends on the client, it says so in a :class:`Request` before: of a large table (the classes of a
head, the words of an embedding) it may want a few rows only, which alone travel then, in both directions; or it says
what it has already.
"""

from __future__ import annotations

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


def distinct(tensors: Mapping[str, Tensor]) -> State:
    """Without those that are equal to an earlier one, which need not travel again.

    Example:
        >>> import torch
        >>> rows = torch.tensor([3, 8])
        >>> list(distinct({"head.weight": rows, "head.bias": rows.clone(), "words.weight": torch.tensor([0])}))
        ['head.weight', 'words.weight']

    """
    found: State = {}
    for name, value in tensors.items():
        if not any(value is other or _is_equal(value, other) for other in found.values()):
            found[name] = value
    return found


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


@dataclass
class Request:
    """What a client says before its visit: where it does not want all of an entry, or has some of the model.

    Args:
        client: The client's key.
        rows: For an entry of the model the rows that the client wants: int64, shape (rows,), strictly increasing, so
            that their order says nothing about the client. Rows that are the same for several entries, as a head's
            weight and bias, are one list on the wire.
        extras: Whatever else the method says, for :meth:`Aggregator.respond <lightning_fed.Aggregator.respond>`.

    """

    client: Client
    rows: State = field(default_factory=dict)
    extras: State = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the message, of equal rows once."""
        return tensor_bytes(distinct(self.rows)) + tensor_bytes(self.extras)


@dataclass
class Broadcast:
    """What the server sends to one client at the start of its visit.

    Args:
        round: Index of the round, from 0.
        state: Entries of the model that the client starts from.
        extras: Whatever else the method sends (control variates, ...).
        rows: For entries of which ``state`` holds some rows only, which: those of the client's :class:`Request`, which
            this message answers. They are counted there.

    """

    round: int
    state: State
    extras: State = field(default_factory=dict)
    rows: State = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the message."""
        return tensor_bytes(self.state) + tensor_bytes(self.extras)


@dataclass
class ClientUpdate:
    """What one client sends back at the end of its visit.

    Args:
        client: The client's key.
        num_samples: Number of the client's local examples, its weight in an average.
        state: Entries of the model as the client trained them (not differences).
        extras: Whatever else the method sends (prototypes, statistics, ...).
        metrics: Plain numbers for the log.
        rows: For entries of which ``state`` holds some rows only, which. The server fills it in with what it sent: a
            client cannot write into rows that it did not ask for.

    """

    client: Client
    num_samples: int
    state: State
    extras: State = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    rows: State = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the message."""
        return tensor_bytes(self.state) + tensor_bytes(self.extras)
