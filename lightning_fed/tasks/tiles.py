"""Prediction of logits for large images, computed on overlapping tiles."""

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
    """Runs a network on overlapping tiles, and joins the logits, shape ``(N, K, H, W)``.

    In overlaps, logits are averaged, with weights decreasing linearly towards a tile's edges. Images smaller than a
    tile are padded. ``overlap`` is the minimum common share of neighbouring tiles, in [0, 1).

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
    if side <= size:
        return [0]
    count = 1 + math.ceil((side - size) / max(1, math.floor(size * (1 - overlap))))
    return [round(index * (side - size) / (count - 1)) for index in range(count)]


def _ramp(size: int) -> Tensor:
    places = torch.arange(size) + 1.0
    return torch.minimum(places, places.flip(0)) / size
