"""Retrieval metrics: precision among an image's nearest neighbours. Images of the same class are relevant.

"Efficient image representation learning with federated sampled softmax" (FedSS), equation 9: MAP@R with a fixed R. With
R equal to the number of other images in the class, the metric equals MAP@R in Musgrave, Belongie and Lim, "A Metric
Learning Reality Check", ECCV 2020, section 3.2. Neighbours are searched in blocks, to save memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.metrics.functional import distances
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
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
) -> Tensor:
    r"""MAP@R: mean fraction of images with the query's class among the R nearest images; near images weigh more.

    .. math:: \mathrm{MAP@R} = \frac{1}{Q} \sum_q \frac{1}{R} \sum_{i=1}^{R} \mathrm{rel}_i
        \frac{\sum_{j \le i} \mathrm{rel}_j}{i}

    with :math:`\mathrm{rel}_i` = 1 if the i-th nearest image has the query's class. Every image is a query once, and is
    excluded from its own neighbours. With a fixed R, a perfect model reaches 1 only if every class has more than R
    images: with five images per class, MAP@10 is at most 0.4.

    Among equally distant images, images of other classes are ranked first, so a model with constant output gets score
    0. The result is NaN if an embedding is not finite, or every query is skipped.

    Args:
        embeddings: Query embeddings, shape ``(n, d)``.
        labels: Classes, shape ``(n,)``, integers.
        r: Number R, at least 1, equal for all queries as in FedSS (missing neighbours are irrelevant), or "relevant"
            for the number of other images in the query's class (a query without such images is skipped).
        metric: Distance for the nearest neighbours: angle, or Euclidean distance.
        gallery: Embeddings of the images to search, shape ``(m, d)``; if ``None``, all other queries.
        gallery_labels: Classes of the images to search, shape ``(m,)``.

    Raises:
        ValueError: If shapes are inconsistent, no query is given, labels are not integers, or an option is invalid.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> mean_average_precision_at_r(embeddings, torch.tensor([0, 0, 1, 1]), r="relevant").item()
        1.0
    """
    check_r(r)
    search = _Search(embeddings, labels, metric, gallery, gallery_labels)
    relevant = search.relevant()
    largest = int(relevant.max()) if r == "relevant" else r
    if not search.is_finite or largest == 0:
        return torch.tensor(torch.nan, dtype=torch.float64, device=relevant.device)
    depths = relevant if r == "relevant" else torch.full_like(relevant, r)
    ranks = torch.arange(1, largest + 1, device=relevant.device)
    total = torch.zeros((), dtype=torch.float64, device=relevant.device)
    for hits, depth in zip(search.hits(largest), torch.split(depths, distances.CHUNK), strict=True):
        hits = hits & (ranks <= depth.unsqueeze(1))
        precisions = hits.cumsum(1).double() / ranks
        total += ((hits * precisions).sum(1) / depth.clamp_min(1)).sum()
    return total / (depths > 0).sum()


@torch.no_grad()
def relevant_neighbors(embeddings: Tensor, labels: Tensor, k: int, **options: Any) -> Tensor:
    """Marks which of the k nearest neighbours have the query's class: bool, shape ``(n, k)``, nearest first.

    The mean of the first column is the precision at 1; the mean of ``any(1)`` is the recall at k.

    Args:
        embeddings: Query embeddings, as in :func:`mean_average_precision_at_r`, with the same rule for equal distances.
        labels: Classes, as in :func:`mean_average_precision_at_r`.
        k: Number of neighbours, at least 1; missing neighbours are irrelevant.
        **options: `metric`, `gallery` and `gallery_labels`.

    Raises:
        ValueError: As in :func:`mean_average_precision_at_r`, or if an embedding is not finite.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.9, 0.5], [0.1, 1.0]])
        >>> hits = relevant_neighbors(embeddings, torch.tensor([0, 0, 1, 1]), k=2)
        >>> hits[:, 0].double().mean().item(), hits.any(1).double().mean().item()
        (0.75, 0.75)
    """
    check_count("k", k)
    search = _Search(embeddings, labels, **options)
    if not search.is_finite:
        raise ValueError("Expected finite embeddings, but got NaN or infinite values.")
    return torch.cat(list(search.hits(k)))


def check_r(r: int | Literal["relevant"]) -> None:
    """Checks that R is a positive integer or "relevant"."""
    if isinstance(r, str):
        if r != "relevant":
            raise ValueError(f"Expected `r` to be an integer or 'relevant', but got {r!r}.")
    else:
        check_count("r", r)


class _Search:
    """Checked arguments for a retrieval metric: query embeddings, embeddings to search, and labels."""

    def __init__(
        self,
        embeddings: Tensor,
        labels: Tensor,
        metric: RetrievalMetric = "cosine",
        gallery: Tensor | None = None,
        gallery_labels: Tensor | None = None,
    ) -> None:
        check_option("metric", metric, RetrievalMetric)
        if (gallery is None) != (gallery_labels is None):
            raise ValueError("Expected `gallery` and `gallery_labels` together, but got one of them.")
        _check("embeddings", embeddings, "labels", labels)
        self.is_among_queries = gallery is None
        if gallery is None or gallery_labels is None:
            gallery, gallery_labels = embeddings, labels
        else:
            _check("gallery", gallery, "gallery_labels", gallery_labels)
            if gallery.shape[1] != embeddings.shape[1]:
                raise ValueError(
                    f"Expected `gallery` of shape (m, {embeddings.shape[1]}), but got {tuple(gallery.shape)}."
                )
        self.queries, self.images = embeddings, gallery
        self.metric = metric
        device = to_float64(embeddings[:0]).device
        self.labels, self.image_labels = (part.to(device, torch.int64) for part in (labels, gallery_labels))
        self.is_finite = all(bool(part.isfinite().all()) for part in (embeddings, gallery))
        # removes a common offset, which would reduce precision
        self._shift = distances.center(gallery if metric == "euclidean" else torch.zeros_like(gallery[:1]))

    def relevant(self) -> Tensor:
        classes, counts = torch.unique(self.image_labels, return_counts=True)
        indices = torch.searchsorted(classes, self.labels).clamp_max(len(classes) - 1)
        same_class: Tensor = counts[indices] * (classes[indices] == self.labels)
        return same_class - int(self.is_among_queries)

    def hits(self, k: int) -> Iterator[Tensor]:
        """Yields for each block of queries a mask over the k nearest images: true for images in the query's class."""
        for first in range(0, len(self.queries), distances.CHUNK):
            queries = self._comparable(self.queries, first)
            labels = self.labels[first : first + distances.CHUNK, None]
            nearest = labels.new_full((len(queries), k), _LAST, dtype=torch.int32)
            for start in range(0, len(self.images), distances.CHUNK):
                block = distances.squared_distances(queries, self._comparable(self.images, start), self._shift)
                # Non-negative floats have the same order as their bit patterns. The last bit marks relevant images, so
                # that irrelevant images come first among equally distant images.
                keys = block.float().view(torch.int32)
                keys = (keys & ~1) | (labels == self.image_labels[start : start + distances.CHUNK])
                if self.is_among_queries and start == first:  # equal blocks
                    keys.fill_diagonal_(_LAST)
                nearest = torch.cat([nearest, keys], 1).topk(k, largest=False).values
            yield (nearest & 1).bool()

    def _comparable(self, embeddings: Tensor, start: int) -> Tensor:
        chunk = to_float64(embeddings[start : start + distances.CHUNK])
        return F.normalize(chunk, dim=1) if self.metric == "cosine" else chunk


def _check(name: str, embeddings: Tensor, label_name: str, labels: Tensor) -> None:
    if embeddings.ndim != 2 or not len(embeddings):
        raise ValueError(f"Expected `{name}` of shape (n, d) with n at least 1, but got {tuple(embeddings.shape)}.")
    if labels.shape != embeddings.shape[:1]:
        raise ValueError(f"Expected `{label_name}` of shape ({len(embeddings)},), but got {tuple(labels.shape)}.")
    if labels.is_floating_point():
        raise ValueError(f"Expected `{label_name}` to be integers, but got {labels.dtype}.")
