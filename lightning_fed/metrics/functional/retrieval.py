"""Retrieval metrics: precision among an image's nearest neighbours.

"Efficient image representation learning with federated sampled softmax" (FedSS), equation 9: MAP@R with a fixed R. With
R equal to the number of other images in the class, the metric equals MAP@R in Musgrave, Belongie and Lim, "A Metric
Learning Reality Check", ECCV 2020, section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.metrics.functional.distances import blocks_of, center, squared_distances
from lightning_fed.numerics.precision import to_float64

RetrievalMetric = Literal["cosine", "euclidean"]

_LAST = 0x7FFFFFFE  # larger than any distance, and even: marks an irrelevant image


@torch.no_grad()
def mean_average_precision_at_r(
    embeddings: Tensor,
    labels: Tensor,
    r: int | Literal["relevant"] = 10,
    *,
    metric: RetrievalMetric = "cosine",
) -> Tensor:
    r"""Computes MAP@R, the mean average precision among each image's R nearest neighbours.

    .. math:: \mathrm{MAP@R} = \frac{1}{Q} \sum_q \frac{1}{R} \sum_{i=1}^{R} \mathrm{rel}_i
        \frac{\sum_{j \le i} \mathrm{rel}_j}{i}

    Each of the :math:`Q` images is a query among all other images. :math:`\mathrm{rel}_i` is 1 if the i-th nearest
    image has the query's class, otherwise 0. With a fixed R, a score of 1 requires more than R images in every class.

    Among equally distant images, images of other classes come first. The result is NaN if an embedding is not
    finite, or if every query is skipped.

    Args:
        embeddings: Image embeddings, shape ``(n, d)``.
        labels: Classes, shape ``(n,)``, integers.
        r: Number R of neighbours, at least 1. With "relevant", R is the number of other images in the query's class,
            and a query without such images is skipped.
        metric: Distance between embeddings: angle, or Euclidean distance.

    Raises:
        ValueError: If shapes are inconsistent, labels are not integers, or an option is invalid.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> mean_average_precision_at_r(embeddings, torch.tensor([0, 0, 1, 1]), r="relevant").item()
        1.0
    """
    check_r(r)
    check_option("metric", metric, RetrievalMetric)
    if embeddings.ndim != 2 or not len(embeddings):
        raise ValueError(f"Expected `embeddings` of shape (n, d) with n at least 1, but got {tuple(embeddings.shape)}.")
    if labels.shape != embeddings.shape[:1]:
        raise ValueError(f"Expected `labels` of shape ({len(embeddings)},), but got {tuple(labels.shape)}.")
    if labels.is_floating_point():
        raise ValueError(f"Expected `labels` to be integers, but got {labels.dtype}.")
    labels = labels.to(to_float64(embeddings[:0]).device, torch.int64)
    _, classes, counts = torch.unique(labels, return_inverse=True, return_counts=True)
    relevant = counts[classes] - 1
    largest = int(relevant.max()) if r == "relevant" else r
    if not bool(embeddings.isfinite().all()) or largest == 0:
        return torch.tensor(torch.nan, dtype=torch.float64, device=relevant.device)
    depths = relevant if r == "relevant" else torch.full_like(relevant, r)
    ranks = torch.arange(1, largest + 1, device=relevant.device)
    total = torch.zeros((), dtype=torch.float64, device=relevant.device)
    blocks = _find_hits(embeddings, labels, metric, largest)
    for hits, depth in zip(blocks, blocks_of(depths), strict=True):
        hits = hits & (ranks <= depth.unsqueeze(1))
        precisions = hits.cumsum(1).double() / ranks
        total += ((hits * precisions).sum(1) / depth.clamp_min(1)).sum()
    return total / (depths > 0).sum()


def check_r(r: int | Literal["relevant"]) -> None:
    """Checks that R is a positive integer or "relevant"."""
    if isinstance(r, str):
        if r != "relevant":
            raise ValueError(f"Expected `r` to be an integer or 'relevant', but got {r!r}.")
    else:
        check_count("r", r)


def _find_hits(embeddings: Tensor, labels: Tensor, metric: RetrievalMetric, k: int) -> Iterator[Tensor]:
    """Yields a mask ``(images, k)`` for each block of images: whether the k nearest others have the same class."""
    # The mean removes a common offset, which would reduce precision.
    shift = center(embeddings if metric == "euclidean" else torch.zeros_like(embeddings[:1]))

    def comparable(block: Tensor) -> Tensor:
        return F.normalize(to_float64(block), dim=1) if metric == "cosine" else to_float64(block)

    blocks = [blocks_of(part) for part in (embeddings, labels)]
    for first, (queries, classes) in enumerate(zip(*blocks, strict=True)):
        nearest = classes.new_full((len(queries), k), _LAST, dtype=torch.int32)
        for place, (images, image_classes) in enumerate(zip(*blocks, strict=True)):
            block = squared_distances(comparable(queries), comparable(images), shift)
            # Non-negative floats have the same order as their bit patterns. The last bit marks relevant images, so
            # that irrelevant images come first among equally distant images.
            keys = (block.float().view(torch.int32) & ~1) | (classes[:, None] == image_classes)
            if place == first:
                keys.fill_diagonal_(_LAST)
            nearest = torch.cat([nearest, keys], 1).topk(k, largest=False).values
        yield (nearest & 1).bool()
