"""Logits of large images, tile by tile, without seams."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fed.argument_checks import check_share


@torch.no_grad()
def tiled_logits(
    network: Callable[[Tensor], Tensor], images: Tensor, tile: tuple[int, int], overlap: float = 0.25
) -> Tensor:
    """Runs a network on overlapping tiles of images, and joins its logits.

    Where tiles overlap, their logits are averaged with weights that fall off linearly towards a tile's edges, where a
    network sees least of what surrounds a pixel: so there is no seam. Tiles lie evenly, and those at the rim
    end with the image. Images that are smaller than a tile are continued by their last pixels, and the logits cut back.

    Args:
        network: Maps images ``(N, C, h, w)`` of the tile's size to logits ``(N, K, h, w)``.
        images: Shape ``(N, C, H, W)``.
        tile: Height and width of the tiles in pixels.
        overlap: Least share of a tile that it has in common with its neighbour, in [0, 1).

    Returns:
        Logits of shape ``(N, K, H, W)``.

    Raises:
        ValueError: If the overlap is out of its range, or the network's outputs have another size than its inputs.

    Example:
        >>> images = torch.arange(60.0).reshape(1, 1, 6, 10)
        >>> torch.allclose(tiled_logits(lambda tile: 2 * tile, images, (4, 4)), 2 * images)
        True

    """
    check_share("overlap", overlap)
    height, width = images.shape[-2:]
    missing = [max(0, size - side) for size, side in zip(tile, (height, width), strict=True)]
    padded = F.pad(images, (0, missing[1], 0, missing[0]), mode="replicate") if any(missing) else images
    tops, lefts = (_starts(side, size, overlap) for side, size in zip(padded.shape[-2:], tile, strict=True))
    ramp = _ramp(tile[0])[:, None] * _ramp(tile[1])
    total: Tensor | None = None
    weights = padded.new_zeros(padded.shape[-2:])
    for top, left in product(tops, lefts):
        area = slice(top, top + tile[0]), slice(left, left + tile[1])
        logits = network(padded[..., *area])
        if logits.shape[-2:] != tuple(tile):
            raise ValueError(f"Expected logits of {tile[0]} x {tile[1]} pixels, but got {tuple(logits.shape)}.")
        if total is None:
            total = logits.new_zeros(*logits.shape[:-2], *padded.shape[-2:])
            weights, ramp = weights.to(logits), ramp.to(logits)
        total[..., *area] += ramp * logits
        weights[area] += ramp
    assert total is not None
    return (total / weights)[..., :height, :width]


def _starts(side: int, size: int, overlap: float) -> list[int]:
    """First pixels of tiles that cover a side, evenly, from its first pixel to its last."""
    if side <= size:
        return [0]
    count = 1 + math.ceil((side - size) / max(1, math.floor(size * (1 - overlap))))
    return [round(index * (side - size) / (count - 1)) for index in range(count)]


def _ramp(size: int) -> Tensor:
    """Weights along a side of a tile, which rise linearly to its middle."""
    places = torch.arange(size) + 1.0
    return torch.minimum(places, places.flip(0)) / size
