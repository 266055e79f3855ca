"""Splits large tensors into chunks, to keep intermediate results small."""

from __future__ import annotations

# Elements per float64 conversion: 32 MiB.
CHUNK_ELEMENTS = 1 << 22


def chunk_steps(count: int, width: int, positions: int, elements: int | None = None) -> tuple[int, int]:
    """Returns the numbers of examples and pixels per chunk.

    The input has ``count`` examples, ``width`` channels and ``positions`` pixels. A chunk contains all channels, and
    either whole examples or some pixels in one example. Chunks have at most ``elements`` values, or a single pixel.

    Example:
        >>> chunk_steps(100, 4, 10, elements=80), chunk_steps(100, 4, 10, elements=20)
        ((2, 10), (1, 5))
    """
    elements = CHUNK_ELEMENTS if elements is None else elements
    pixels = max(1, min(positions, elements // max(1, width)))
    images = max(1, min(count, elements // max(1, width * positions)))
    return images, pixels
