"""Maximum mean discrepancy between the features of two models, as a metric."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.metrics.functional.discrepancy import (
    Bandwidth,
    Estimator,
    check_bandwidth,
    classwise_maximum_mean_discrepancy,
    maximum_mean_discrepancy,
)
from lightning_fed.metrics.pooled_samples import PooledSamples


class MaximumMeanDiscrepancy(PooledSamples):
    r"""Maximum mean discrepancy between a model's features and reference features.

    FedMargin uses features of a centrally trained model as reference. All features stay in memory until
    :meth:`compute`. For the equations see :func:`~lightning_fed.metrics.functional.maximum_mean_discrepancy`.

    Args:
        num_classes: Number of classes, to average the discrepancies within each class. By default, classes are ignored.
        bandwidth: Kernel width :math:`\sigma`: a number, or the median distance between reference samples ("median") or
            between all samples ("pooled").
        estimator: "biased" also compares each sample with itself; "unbiased" does not.
        squared: Whether to return :math:`\mathrm{MMD}^2` instead of the square root.
        **kwargs: Arguments for ``torchmetrics.Metric``.

    Raises:
        ValueError: If an argument is unknown or outside the allowed range.

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
        squared: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(("features", "reference"), ("labels", "reference_labels"), **kwargs)
        check_option("estimator", estimator, Estimator)
        check_bandwidth(bandwidth)
        if num_classes is not None:
            check_count("num_classes", num_classes)
        self.num_classes = num_classes
        self._options: dict[str, Any] = {
            "bandwidth": bandwidth,
            "estimator": estimator,
            "squared": squared,
        }

    @torch.no_grad()
    def update(
        self,
        features: Tensor,
        reference: Tensor,
        labels: Tensor | None = None,
        reference_labels: Tensor | None = None,
    ) -> None:
        """Adds a batch of features from both models.

        Args:
            features: The model's features, shape ``(m, d)``.
            reference: Reference features, shape ``(n, d)``, usually for the same samples.
            labels: Classes, shape ``(m,)``; required if ``num_classes`` is set, otherwise ignored.
            reference_labels: Reference classes, shape ``(n,)``; by default ``labels``.
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
        """Returns the discrepancy; NaN if samples or common classes are missing."""
        width = int(self.num_features)
        if width == 0:
            return torch.tensor(torch.nan, dtype=self.dtype, device=self.device)
        features, reference = self.gathered("features").view(-1, width), self.gathered("reference").view(-1, width)
        if self.num_classes is None:
            value = maximum_mean_discrepancy(features, reference, **self._options)
            return value.to(self.dtype).to(self.device)
        self._check_type(self.num_classes)  # checked again, because the dtype may have changed
        labels, reference_labels = self.gathered("labels"), self.gathered("reference_labels")
        values = classwise_maximum_mean_discrepancy(
            features, reference, labels, reference_labels, self.num_classes, **self._options
        )
        return values.nanmean().to(self.dtype).to(self.device)

    def _check_type(self, num_classes: int) -> None:
        if num_classes - 1 > 2 / torch.finfo(self.dtype).eps:
            raise ValueError(
                f"Expected a dtype that can represent {num_classes} different classes (`num_classes`), but got "
                f"{self.dtype}: labels are stored in the metric's dtype."
            )
