"""Division of large inputs into chunks, so that intermediate results stay small."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22
"""Most numbers that are converted at a time: 32 MiB in float64."""

_CACHED_ELEMENTS = 1 << 15


def cache_chunks(value: Tensor) -> tuple[Tensor, ...]:
    """The flattened tensor in chunks that fit into a processor's cache; on other devices than the CPU in one chunk.

    A computation that takes one chunk after another needs no large intermediate tensors, whose memory traffic costs
    more than the arithmetic.

    Args:
        value: Any tensor; if it is contiguous, the chunks share its memory.

    Example:
        >>> [len(chunk) for chunk in cache_chunks(torch.zeros(3, 20_000))]
        [32768, 27232]

    """
    flat = value.reshape(-1)
    if value.device.type != "cpu" or len(flat) <= _CACHED_ELEMENTS:
        return (flat,)
    return torch.split(flat, _CACHED_ELEMENTS)


def chunk_steps(count: int, width: int, positions: int, elements: int | None = None) -> tuple[int, int]:
    """Sizes of the chunks of an input of shape ``(count, width, positions)``, along its first and last dimension.

    Args:
        count: Number of examples.
        width: Number of channels, which stay together.
        positions: Number of pixels of an example.
        elements: Most numbers in a chunk, except where a single pixel has more channels; by default
            ``CHUNK_ELEMENTS``.

    Returns:
        Number of examples in a chunk, and number of pixels; all pixels if it has several examples.

    Example:
        >>> chunk_steps(100, 4, 10, elements=80), chunk_steps(100, 4, 10, elements=20)
        ((2, 10), (1, 5))

    """
    elements = CHUNK_ELEMENTS if elements is None else elements
    pixels = max(1, min(positions, elements // max(1, width)))
    images = max(1, min(count, elements // max(1, width * positions)))
    return images, pixels
