"""Splits large tensors into chunks, to keep intermediate results small."""

from __future__ import annotations

# Elements per float64 conversion: 32 MiB.
CHUNK_ELEMENTS = 1 << 22


def chunk_steps(count: int, width: int, positions: int, elements: int | None = None) -> tuple[int, int]:
    """Returns the numbers of examples and of pixels per chunk, for an input with shape (examples, channels, pixels).

    A chunk contains all channels. A chunk with several examples contains all pixels of these examples. ``elements`` is
    the maximum size of a chunk, by default ``CHUNK_ELEMENTS``. A chunk with a single pixel may be larger.

    Example:
        >>> chunk_steps(100, 4, 10, elements=80), chunk_steps(100, 4, 10, elements=20)
        ((2, 10), (1, 5))
    """
    elements = CHUNK_ELEMENTS if elements is None else elements
    pixels = max(1, min(positions, elements // max(1, width)))
    images = max(1, min(count, elements // max(1, width * positions)))
    return images, pixels
