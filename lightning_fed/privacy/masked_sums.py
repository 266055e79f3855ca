"""Interface for sums over masked vectors, and encoding of numbers as 256-bit integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers: TypeAlias = NDArray[Any]
"""Python integers, shape (count,), dtype object."""

BYTES, WORDS = 32, 8
"""Bytes, and words (int32), of a number."""

FEWEST = 5
"""Minimum number of clients in a sum over answers to a question."""

_SCALE = 2.0**100
_LARGEST = 2.0**130  # a sum of 2^25 such numbers stays below 2^255


class MaskedSum(Protocol):
    """Sum of clients' masked vectors, before the masks are subtracted. ``least`` is the minimum number of vectors."""

    @property
    def least(self) -> int: ...

    def zeros(self) -> NDArray[Any]: ...

    def subtract(self, masks: NDArray[Any]) -> None: ...

    def discard(self, reason: str) -> None: ...


def encode(values: Sequence[float]) -> Tensor:
    """Encodes numbers as 256-bit integers with resolution 2^-100.

    Returns a tensor with shape (count, 8): eight int32 words for each number.

    Raises:
        ValueError: If a number is NaN, infinite, or above 2^130.

    Example:
        >>> total = to_numbers(encode([0.5, -3.0])) + to_numbers(encode([0.25, 1e9]))
        >>> decode(to_words(total))
        [0.75, 999999997.0]
    """
    if not all(abs(value) <= _LARGEST for value in values):
        raise ValueError(f"Expected finite numbers up to 2^130 for a secure sum, but got {list(values)!s:.100}.")
    return to_words(np.array([round(value * _SCALE) for value in values], dtype=object))


def decode(words: Tensor) -> list[float]:
    """Converts a sum of results of :func:`encode` to floating-point numbers."""
    return [number / 2**100 for number in to_numbers(words)]


def to_numbers(words: Tensor | bytes) -> Numbers:
    """Reads integers from -2^255 to 2^255 - 1. Each integer has eight int32 words, or 32 bytes."""
    data = words if isinstance(words, bytes) else words.contiguous().numpy().astype("<i4").tobytes()
    parts = [data[start : start + BYTES] for start in range(0, len(data), BYTES)]
    return np.array([int.from_bytes(part, "little", signed=True) for part in parts], dtype=object)


def to_words(numbers: Numbers) -> Tensor:
    """Writes integers modulo 2^256 as eight int32 words each, shape (count, 8)."""
    data = b"".join((int(number) % 2 ** (8 * BYTES)).to_bytes(BYTES, "little") for number in numbers)
    return torch.from_numpy(np.frombuffer(data, "<i4").astype(np.int32)).reshape(-1, WORDS)
