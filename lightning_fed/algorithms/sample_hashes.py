"""Hashes of samples, to find samples with equal content."""

from __future__ import annotations

import torch
from torch import Tensor

# The constants of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014), as
# signed numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


@torch.no_grad()
def sample_hashes(samples: Tensor) -> Tensor:
    """Computes a 64-bit hash for each of N samples.

    The result is int64 with shape ``(N,)``. Among n different samples, two have the same hash with a probability near
    n^2 / 2^65. The hash is not cryptographic.

    Example:
        >>> samples = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
        >>> first, second, third = sample_hashes(samples).tolist()
        >>> first == third, first == second
        (True, False)
    """
    rows = samples.detach().flatten(1).contiguous() if samples.ndim > 1 else samples.detach().reshape(-1, 1)
    if rows.is_complex():
        rows = torch.view_as_real(rows).flatten(1)
    if rows.storage_offset() * rows.element_size() % 8:  # int64 needs aligned memory
        rows = rows.clone()
    row_bytes = rows.shape[1] * rows.element_size()
    size = next(size for size in (8, 4, 2, 1) if row_bytes % size == 0)
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[size]
    mixed = rows.view(torch.uint8).view(kind).to(torch.int64)
    mixed = mixed + torch.arange(1, mixed.shape[1] + 1, device=mixed.device) * _GOLDEN
    mixed ^= mixed >> 30
    mixed *= _FIRST
    mixed ^= mixed >> 27
    mixed *= _SECOND
    mixed ^= mixed >> 31
    return mixed.sum(1)  # an integer sum does not depend on the order
