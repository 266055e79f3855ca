"""Discrepancy between the features of two models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.metrics.functional.discrepancy import (
    Bandwidth,
    Estimator,
    check_numbers,
    classwise_maximum_mean_discrepancy,
    maximum_mean_discrepancy,
)


class MaximumMeanDiscrepancy(Metric):
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

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    # Flat, and labels as floats: a process without data then has an empty state of the same type and dimensions.
    features: list[Tensor] | Tensor
    reference: list[Tensor] | Tensor
    labels: list[Tensor] | Tensor
    reference_labels: list[Tensor] | Tensor
    num_features: Tensor

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
        super().__init__(**kwargs)
        check_option("estimator", estimator, get_args(Estimator))
        check_numbers(bandwidth, scales, chunk_size)
        if num_classes is not None:
            check_count("num_classes", num_classes)
        self.num_classes = num_classes
        self.bandwidth: float | Bandwidth = bandwidth
        self.estimator: Estimator = estimator
        self.scales = tuple(scales)
        self.squared = squared
        self.chunk_size = chunk_size
        for name in ("features", "reference", "labels", "reference_labels"):
            self.add_state(name, [], dist_reduce_fx="cat")
        self.add_state("num_features", torch.zeros((), dtype=torch.int64), dist_reduce_fx="max")

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
            width = int(self.num_features) or features.shape[-1]
            if values.ndim != 2 or values.shape[1] != width:
                raise ValueError(f"Expected `{name}` of shape (n, {width}), but got {tuple(values.shape)}.")
        if self.num_classes is not None:
            self._check_type(self.num_classes)
            if labels is None:
                raise ValueError("Expected `labels`, because `num_classes` is given, but got None.")
            reference_labels = labels if reference_labels is None else reference_labels
            pairs = (("labels", labels, features), ("reference_labels", reference_labels, reference))
            for name, values, samples in pairs:
                if values.shape != samples.shape[:1]:
                    raise ValueError(f"Expected `{name}` of shape ({len(samples)},), but got {tuple(values.shape)}.")
            self._append("labels", labels)
            self._append("reference_labels", reference_labels)
        self._append("features", features)
        self._append("reference", reference)
        self.num_features = torch.full_like(self.num_features, features.shape[1])

    def compute(self) -> Tensor:
        """The discrepancy; NaN if there was no sample, or no class that both sets have."""
        width = int(self.num_features)
        if width == 0:
            return torch.tensor(torch.nan, dtype=self.dtype, device=self.device)
        features, reference = self._gathered("features").view(-1, width), self._gathered("reference").view(-1, width)
        options: dict[str, Any] = {
            "bandwidth": self.bandwidth,
            "estimator": self.estimator,
            "scales": self.scales,
            "squared": self.squared,
            "chunk_size": self.chunk_size,
        }
        if self.num_classes is None:
            value = maximum_mean_discrepancy(features, reference, **options)
            return value.to(self.dtype).to(self.device)
        self._check_type(self.num_classes)  # again: it may have been set since
        labels, reference_labels = self._gathered("labels"), self._gathered("reference_labels")
        values = classwise_maximum_mean_discrepancy(
            features, reference, labels, reference_labels, self.num_classes, **options
        )
        return values.nanmean().to(self.dtype).to(self.device)

    def _check_type(self, num_classes: int) -> None:
        """Makes sure that whole numbers up to the last class are exact in the metric's type."""
        if num_classes - 1 > 2 / torch.finfo(self.dtype).eps:
            raise ValueError(
                f"Expected a type that tells {num_classes} classes (`num_classes`) apart, but got {self.dtype}: labels"
                " are kept in the metric's type."
            )

    def _append(self, name: str, values: Tensor) -> None:
        getattr(self, name).append(values.detach().to(self.dtype).flatten())

    def _gathered(self, name: str) -> Tensor:
        return dim_zero_cat(getattr(self, name))
