"""How to cut a large input, so that what is computed from it stays small."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22
"""Most numbers that are converted at a time: 32 MiB in float64."""

_CACHED_ELEMENTS = 1 << 15


def cache_chunks(value: Tensor) -> tuple[Tensor, ...]:
    """The numbers of a tensor, in pieces whose copies fit into a processor's cache; on other devices in one piece.

    What is computed of one piece after another needs no large memory in between, which costs more than the arithmetic.

    Args:
        value: Any tensor; if it is contiguous, the pieces share its memory.

    Example:
        >>> [len(piece) for piece in cache_chunks(torch.zeros(3, 20_000))]
        [32768, 27232]

    """
    flat = value.reshape(-1)
    if value.device.type != "cpu" or len(flat) <= _CACHED_ELEMENTS:
        return (flat,)
    return torch.split(flat, _CACHED_ELEMENTS)


def chunk_steps(count: int, width: int, positions: int, elements: int | None = None) -> tuple[int, int]:
    """Cuts an input of shape ``(count, width, positions)`` along its first and last dimension.

    Args:
        count: Number of examples.
        width: Number of channels, which stay together.
        positions: Number of pixels of an example.
        elements: Most numbers in a piece, but for a single pixel that has more channels; by default
            ``CHUNK_ELEMENTS``.

    Returns:
        Number of examples in a piece, and number of pixels; all of them if it has several examples.

    Example:
        >>> chunk_steps(100, 4, 10, elements=80), chunk_steps(100, 4, 10, elements=20)
        ((2, 10), (1, 5))

    """
    elements = CHUNK_ELEMENTS if elements is None else elements
    pixels = max(1, min(positions, elements // max(1, width)))
    images = max(1, min(count, elements // max(1, width * positions)))
    return images, pixels
