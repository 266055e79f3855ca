"""Aggregate mean margin (AMM), FedMargin's metric for the distance between classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fed.algorithms.fedmargin.margins import MeanMarginKind, aggregate_mean_margin
from lightning_fed.algorithms.fedmargin.prototypes import (
    class_prototypes,
    class_sums,
)
from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.features.label_maps import VoidLabel, class_indices, void_label
from lightning_fed.numerics.float64_states import Float64States


class AggregateMeanMargin(Float64States):
    r"""Computes half the mean distance between class prototypes.

    A prototype is the mean feature vector of a class.

    .. math:: \mathrm{AMM} = \frac{1}{C' (C' - 1)} \sum_{c \ne c'} \tfrac12 \lVert p[c] - p[c'] \rVert

    Here :math:`C'` is the number of observed classes, and :math:`p[c]` the prototype of class :math:`c`.

    Args:
        num_classes: Number of classes :math:`C`.
        num_features: Length :math:`d` of a feature vector (channels of a feature map).
        kind: ``"pairs"`` averages over all pairs of classes, ``"nearest"`` only over nearest neighbours.
        normalize: Whether to divide by the mean norm of the prototypes.
        ignore_index: Label for void pixels, or ``None``. The default is 255, unless 255 is a class.
        exclude_classes: Classes to exclude, such as a background.
        **kwargs: Arguments for ``torchmetrics.Metric``.

    Example:
        >>> import torch
        >>> margin = AggregateMeanMargin(num_classes=3, num_features=2)
        >>> margin.update(torch.tensor([[0.0, 0.0], [6.0, 8.0]]), torch.tensor([0, 1]))
        >>> margin.update(torch.tensor([[3.0, 4.0], [3.0, 4.0]]), torch.tensor([2, 2]))
        >>> margin.compute()
        tensor(3.3333)
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    float64_states = ("sums", "counts")

    sums: Tensor
    counts: Tensor

    def __init__(
        self,
        num_classes: int,
        num_features: int,
        *,
        kind: MeanMarginKind = "pairs",
        normalize: bool = False,
        ignore_index: VoidLabel = "auto",
        exclude_classes: Sequence[int] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_option("kind", kind, MeanMarginKind)
        check_count("num_features", num_features)
        class_indices(torch.zeros(0, dtype=torch.int64), num_classes, ignore_index, exclude_classes)
        self.num_classes = num_classes
        self.num_features = num_features
        self.kind = kind
        self.normalize = normalize
        self.ignore_index = void_label(ignore_index, num_classes)
        self.exclude_classes = tuple(exclude_classes)
        self.add_state("sums", torch.zeros(num_classes, num_features, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("counts", torch.zeros(num_classes, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, features: Tensor, labels: Tensor) -> None:
        """Adds features ``(N, d)`` or ``(N, d, *size)``, with labels ``(N,)`` or label maps ``(N, *label_size)``."""
        if features.ndim > 1 and features.shape[1] != self.num_features:
            raise ValueError(f"Expected {self.num_features} features (`num_features`), but got {features.shape[1]}.")
        sums, counts = class_sums(
            features,
            labels,
            self.num_classes,
            ignore_index=self.ignore_index,
            exclude_classes=self.exclude_classes,
        )
        self.sums = self.sums + sums
        self.counts = self.counts + counts

    def compute(self) -> Tensor:
        """Returns the mean margin; NaN for fewer than two classes."""
        prototypes = class_prototypes(self.sums, self.counts, dtype=torch.float64)
        return aggregate_mean_margin(prototypes, self.kind, normalize=self.normalize).to(self.dtype).to(self.device)
