"""The wire: what a server and a client say to each other, and nothing else.

A :class:`Broadcast` goes down, a :class:`ClientUpdate` goes up. Both hold flat dictionaries of tensors, so that the
same two halves run in one process, across processes or over a network, and communication is counted, not estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

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


@dataclass
class Broadcast:
    """What the server sends to one client at the start of its visit.

    Args:
        round: Index of the round, from 0.
        state: Entries of the model that the client starts from.
        extras: Whatever else the method sends (control variates, class ids, ...).

    """

    round: int
    state: State
    extras: State = field(default_factory=dict)

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

    """

    client: Client
    num_samples: int
    state: State
    extras: State = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the message."""
        return tensor_bytes(self.state) + tensor_bytes(self.extras)
