"""Fixed-point arithmetic modulo 2^32 for secure aggregation.

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

# Broadcast extra with the number of clients. Clients derive the ring from this number.
CLIENTS = "secure_sum/clients"

# Broadcast extra with the server's scale, which clients compare with their own scale.
SCALE = "secure_sum/scale"

_SIZE = 2**32
_LEAST_LEVELS = 2**10  # minimum resolution: levels between 0 and the longest update, for each client


@dataclass(frozen=True)
class Ring:
    r"""Encodes weighted client updates as fixed-point numbers: integers modulo :math:`2^{32}`.

    A client's update has at most norm :math:`C` and weight :math:`A`. The update is multiplied by the weight and a
    scale :math:`s`, and rounded randomly without bias. For :math:`N` clients the scale satisfies

    .. math:: N (s A C + 1) \le 2^{31} - 1

    so no sum overflows. Sums are equal bit for bit in any order.

    Args:
        clip: Maximum update norm C.
        clients: Maximum number N of clients in a sum.
        max_weight: Maximum weight A.

    Raises:
        ValueError: If the resolution is too low for the number of clients.

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
                f" of 32-bit integers with weights up to {self.max_weight:,}, but got {self.clients:,} clients: use"
                " fewer clients per round or smaller weights."
            )

    @property
    def scale(self) -> float:
        """Factor from a value to the fixed-point integer, before rounding."""
        return ((_SIZE // 2 - 1) / self.clients - 1) / (self.max_weight * self.clip)

    def extras(self) -> State:
        """Returns the parameters of the encoding, to be sent to all clients."""
        return {
            CLIENTS: torch.tensor(self.clients, dtype=torch.int32),
            SCALE: torch.tensor(self.scale, dtype=torch.float64),
        }

    def longest(self, size: int) -> float:
        """Maximum norm before rounding, for an update of ``size`` numbers. Afterwards the norm is at most ``clip``."""
        length = self.clip - math.sqrt(size) / self.scale
        if length < self.clip / 2:
            raise OptionError(
                f"Expected a rounding error below half of `clip` in a secure sum, but with {size:,} numbers per update,"
                f" {self.clients:,} clients and weights up to {self.max_weight:,} the error can be larger: use a"
                " smaller model, fewer clients per round, or smaller weights (`MaxSamples`)."
            )
        return length

    @torch.no_grad()
    def encode(self, value: Tensor, generator: np.random.Generator) -> Tensor:
        """Encodes a weighted update with norm at most ``max_weight * clip`` as int32, with stochastic rounding."""
        scaled = to_float64(value) * self.scale
        noise = torch.from_numpy(np.asarray(generator.random(tuple(value.shape)))).to(scaled.device)
        return in_ring((scaled + noise).floor().long())

    def add(self, first: Tensor, second: Tensor) -> Tensor:
        return in_ring(first.long() + second.to(first.device).long())

    def decode(self, total: Tensor) -> Tensor:
        return to_float64(total.long()) / self.scale


def ring_form(state: State) -> State:
    """Shapes and dtypes of an encoded update. Floating-point tensors become int32 tensors on the ``meta`` device."""
    return {
        name: torch.empty(value.shape, dtype=torch.int32, device="meta") if value.is_floating_point() else value
        for name, value in state.items()
    }


def in_ring(value: Tensor) -> Tensor:
    """Reduces int64 values modulo 2^32 to the int32 range."""
    half = _SIZE // 2
    return ((value + half) % _SIZE - half).to(torch.int32)
