"""Retrieval by nearest neighbours among embeddings, as a torchmetrics metric."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fed.argument_checks import check_option
from lightning_fed.metrics.functional.retrieval import RetrievalMetric, check_r, mean_average_precision_at_r
from lightning_fed.metrics.pooled_samples import PooledSamples


class MeanAveragePrecisionAtR(PooledSamples):
    r"""Mean average precision among each image's R nearest neighbours (MAP@R).

    .. math:: \mathrm{MAP@R} = \frac{1}{Q} \sum_q \frac{1}{R} \sum_{i=1}^{R} \mathrm{rel}_i
        \frac{\sum_{j \le i} \mathrm{rel}_j}{i}

    Each of the Q images is a query among all other images. :math:`\mathrm{rel}_i` is 1 if the i-th nearest image has
    the same class, otherwise 0 (FedSS, equation 9). All embeddings stay in memory until :meth:`compute`.

    Args:
        r: Number R of neighbours; with "relevant", the number of other images in the same class.
        metric: Distance between embeddings: angle, or Euclidean distance.
        **kwargs: Arguments for ``torchmetrics.Metric``.

    Raises:
        ValueError: If an argument is unknown or outside the allowed range.

    Example:
        >>> import torch
        >>> map_at_r = MeanAveragePrecisionAtR(r="relevant")
        >>> map_at_r.update(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([970, 981]))
        >>> map_at_r.update(torch.tensor([[1.0, 0.1], [1.0, 0.9]]), torch.tensor([970, 981]))
        >>> map_at_r.compute()
        tensor(0.7500)
    """

    higher_is_better = True

    def __init__(
        self,
        r: int | Literal["relevant"] = 10,
        *,
        metric: RetrievalMetric = "cosine",
        **kwargs: Any,
    ) -> None:
        super().__init__(("embeddings",), ("labels",), **kwargs)
        check_r(r)
        check_option("metric", metric, RetrievalMetric)
        self.r = r
        self.metric = metric

    @torch.no_grad()
    def update(self, embeddings: Tensor, labels: Tensor) -> None:
        """Adds embeddings ``(n, d)`` and integer labels ``(n,)``. The metric's dtype must hold the labels exactly."""
        self.check_vectors("embeddings", embeddings, embeddings.shape[-1])
        if labels.shape != embeddings.shape[:1]:
            raise ValueError(f"Expected `labels` of shape ({len(embeddings)},), but got {tuple(labels.shape)}.")
        labels_in_type = labels.to(self.dtype)
        if labels.is_floating_point() or not bool((labels_in_type.long() == labels).all()):
            raise ValueError(f"Expected `labels` to be integers that {self.dtype} holds exactly, but got {labels}.")
        self.append(embeddings=embeddings, labels=labels_in_type)

    def compute(self) -> Tensor:
        """Returns MAP@R, or NaN without a valid query or with infinite or NaN embeddings."""
        width = int(self.num_features)
        if width == 0:
            return torch.tensor(torch.nan, dtype=self.dtype, device=self.device)
        embeddings, labels = self.gathered("embeddings").view(-1, width), self.gathered("labels").long()
        value = mean_average_precision_at_r(embeddings, labels, self.r, metric=self.metric)
        return value.to(self.device, self.dtype)
