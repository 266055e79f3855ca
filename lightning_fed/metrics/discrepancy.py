"""Discrepancy between the features of two models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.metrics.functional.discrepancy import (
    Bandwidth,
    Estimator,
    check_numbers,
    classwise_maximum_mean_discrepancy,
    maximum_mean_discrepancy,
)
from lightning_fed.metrics.pooled_samples import PooledSamples


class MaximumMeanDiscrepancy(PooledSamples):
    r"""Maximum mean discrepancy between the features of a model and those of a reference, as of central training.

    See :func:`~lightning_fed.metrics.functional.maximum_mean_discrepancy`. The kernel and its bandwidth are a
    reconstruction.
    All features are kept until :meth:`compute`, in the metric's type (float32 unless ``set_dtype`` says otherwise):
    20,000 of length 512 are 41 MB per set. Processes gather them.

    ``forward`` computes the discrepancy of the batch as well; where only that of all data is wanted, :meth:`update`
    is faster, and does not mind batches of one sample.

    Args:
        num_classes: Number of classes, for the mean over the classes of the discrepancies within each (of those that
            both sets have; :meth:`update` then needs labels); ``None`` for the discrepancy of all samples.
        bandwidth: :math:`\sigma`; "median" for the median distance between two samples of the reference, "pooled" for
            that between two of all samples, or a number.
        estimator: With or without the samples' kernels with themselves.
        scales: Factors of the bandwidth whose kernels are added up.
        squared: Whether to return :math:`\mathrm{MMD}^2`, else :math:`\sqrt{\max(\mathrm{MMD}^2, 0)}`.
        chunk_size: Number of samples of either set whose distances are computed at a time.
        **kwargs: Arguments of ``torchmetrics.Metric``.

    Raises:
        ValueError: If an argument is unknown or out of its range.

    Example:
        >>> import torch
        >>> discrepancy = MaximumMeanDiscrepancy(squared=True)
        >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> discrepancy.update(x[:2], x[:2] + 1)
        >>> discrepancy.update(x[2:], x[2:] + 1)
        >>> discrepancy.compute()
        tensor(0.7579)

    """

    higher_is_better = False

    def __init__(
        self,
        *,
        num_classes: int | None = None,
        bandwidth: float | Bandwidth = "median",
        estimator: Estimator = "biased",
        scales: Sequence[float] = (1.0,),
        squared: bool = False,
        chunk_size: int = 1024,
        **kwargs: Any,
    ) -> None:
        super().__init__(("features", "reference"), ("labels", "reference_labels"), **kwargs)
        check_option("estimator", estimator, Estimator)
        check_numbers(bandwidth, scales, chunk_size)
        if num_classes is not None:
            check_count("num_classes", num_classes)
        self.num_classes = num_classes
        self._options: dict[str, Any] = {
            "bandwidth": bandwidth,
            "estimator": estimator,
            "scales": tuple(scales),
            "squared": squared,
            "chunk_size": chunk_size,
        }

    @torch.no_grad()
    def update(
        self,
        features: Tensor,
        reference: Tensor,
        labels: Tensor | None = None,
        reference_labels: Tensor | None = None,
    ) -> None:
        """Adds a batch.

        Args:
            features: Features of the model, shape ``(m, d)``.
            reference: Features of the reference, shape ``(n, d)``: mostly those of the same samples.
            labels: Classes, shape ``(m,)``; needed if ``num_classes`` is given, else not looked at.
            reference_labels: Classes of the reference's samples, shape ``(n,)``; by default ``labels``.

        Raises:
            ValueError: If shapes do not fit, labels are missing, or the metric's type does not tell the classes apart.

        """
        for name, values in (("features", features), ("reference", reference)):
            self.check_vectors(name, values, features.shape[-1])
        if self.num_classes is not None:
            self._check_type(self.num_classes)
            if labels is None:
                raise ValueError("Expected `labels`, because `num_classes` is given, but got None.")
            reference_labels = labels if reference_labels is None else reference_labels
            pairs = (("labels", labels, features), ("reference_labels", reference_labels, reference))
            for name, values, samples in pairs:
                if values.shape != samples.shape[:1]:
                    raise ValueError(f"Expected `{name}` of shape ({len(samples)},), but got {tuple(values.shape)}.")
            self.append(labels=labels, reference_labels=reference_labels)
        self.append(features=features, reference=reference)

    def compute(self) -> Tensor:
        """The discrepancy; NaN if there was no sample, or no class that both sets have."""
        width = int(self.num_features)
        if width == 0:
            return torch.tensor(torch.nan, dtype=self.dtype, device=self.device)
        features, reference = self.gathered("features").view(-1, width), self.gathered("reference").view(-1, width)
        if self.num_classes is None:
            value = maximum_mean_discrepancy(features, reference, **self._options)
            return value.to(self.dtype).to(self.device)
        self._check_type(self.num_classes)  # again: it may have been set since
        labels, reference_labels = self.gathered("labels"), self.gathered("reference_labels")
        values = classwise_maximum_mean_discrepancy(
            features, reference, labels, reference_labels, self.num_classes, **self._options
        )
        return values.nanmean().to(self.dtype).to(self.device)

    def _check_type(self, num_classes: int) -> None:
        """Makes sure that whole numbers up to the last class are exact in the metric's type."""
        if num_classes - 1 > 2 / torch.finfo(self.dtype).eps:
            raise ValueError(
                f"Expected a type that tells {num_classes} classes (`num_classes`) apart, but got {self.dtype}: labels"
                " are kept in the metric's type."
            )
