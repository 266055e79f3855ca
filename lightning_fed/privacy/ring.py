"""Fixed-point numbers in the ring of whole numbers modulo 2^32, in which sums of secret vectors are made.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017.
https://eprint.iacr.org/2017/281
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_fed.errors import OptionError
from lightning_fed.messages import State
from lightning_fed.numerics.precision import to_float64

CLIENTS = "secure_sum/clients"
"""Name of the number of clients in a broadcast, with which they have the ring."""

SCALE = "secure_sum/scale"
"""Name of the server's scale in a broadcast, which must be that of the client's own federation."""

_SIZE = 2**32
_LEAST_LEVELS = 2**10  # between 0 and the longest step, for each client


@dataclass(frozen=True)
class Ring:
    r"""Whole numbers modulo :math:`2^{32}` that stand for the entries of steps, in units of one over a scale.

    A client's vector is :math:`a u`, with its weight :math:`a \le A` and its step :math:`\lVert u \rVert \le C`,
    rounded at random to one of the two units next to every entry, so that it is right in the mean. Of :math:`N` clients

    .. math:: N (s A C + 1) \le 2^{31} - 1

    holds for the scale :math:`s`, so that no sum leaves the ring, whoever they are. Sums are bit-equal in any order.

    Args:
        clip: Length C of the steps.
        clients: Largest number N of clients in a sum.
        max_weight: Largest weight A.

    Raises:
        ValueError: If so many clients leave too few units for each of them.

    Example:
        >>> ring = Ring(clip=1.0, clients=10)
        >>> halves = [ring.encode(torch.tensor([0.25, -0.5]), np.random.default_rng(seed)) for seed in range(2)]
        >>> ring.decode(ring.add(*halves)).round(decimals=6)
        tensor([ 0.5000, -1.0000], dtype=torch.float64)

    """

    clip: float
    clients: int
    max_weight: int = 1

    def __post_init__(self) -> None:
        levels = (_SIZE // 2 - 1) / self.clients / self.max_weight
        if levels < _LEAST_LEVELS:
            raise OptionError(
                f"Expected at most {(_SIZE // 2 - 1) // _LEAST_LEVELS // self.max_weight:,} clients in a secure sum"
                f" with weights of up to {self.max_weight:,}, but got {self.clients:,}: of 32 bits too few are left for"
                " each."
            )

    @property
    def scale(self) -> float:
        """Number of units in 1."""
        return ((_SIZE // 2 - 1) / self.clients - 1) / (self.max_weight * self.clip)

    def extras(self) -> State:
        """Entries of a broadcast from which a client has the ring, and knows that the server has the same."""
        return {
            CLIENTS: torch.tensor(self.clients, dtype=torch.int32),
            SCALE: torch.tensor(self.scale, dtype=torch.float64),
        }

    def longest(self, size: int) -> float:
        """Length of a step that rounding makes no longer than ``clip``.

        Args:
            size: Number of its entries, each of which rounding moves by less than a unit over the weight.

        Raises:
            ValueError: If there is not even half of it left.

        """
        length = self.clip - math.sqrt(size) / self.scale
        if length < self.clip / 2:
            raise OptionError(
                f"Expected a smaller model or fewer clients in a secure sum, but the rounding of {size:,} entries can"
                f" be as long as half the clip, with {self.clients:,} clients and weights of up to {self.max_weight:,}."
            )
        return length

    @torch.no_grad()
    def encode(self, value: Tensor, generator: np.random.Generator) -> Tensor:
        """The entries of a weighted step in the ring, int32, rounded at random.

        Args:
            value: The entries, of any shape, of a vector no longer than ``max_weight`` times ``clip``.
            generator: Draws the rounding.

        """
        scaled = to_float64(value) * self.scale
        drawn = torch.from_numpy(np.asarray(generator.random(tuple(value.shape)))).to(scaled.device)
        return in_ring((scaled + drawn).floor().long())

    def add(self, one: Tensor, other: Tensor) -> Tensor:
        """The sum in the ring, int32."""
        return in_ring(one.long() + other.to(one.device).long())

    def decode(self, total: Tensor) -> Tensor:
        """The numbers that a sum stands for, float64."""
        return to_float64(total.long()) / self.scale


def ring_form(state: State) -> State:
    """Form of a client's answer: int32 in the place of floating-point entries; values do not matter."""
    return {
        name: torch.empty(value.shape, dtype=torch.int32, device="meta") if value.is_floating_point() else value
        for name, value in state.items()
    }


def in_ring(value: Tensor) -> Tensor:
    """Whole numbers modulo 2^32, as int32."""
    half = _SIZE // 2
    return ((value + half) % _SIZE - half).to(torch.int32)
