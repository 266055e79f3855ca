"""Classes used by a FedSS client in one round (section 3)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_fed.algorithms.fedss.losses import Objective, log_correction
from lightning_fed.argument_checks import check_option
from lightning_fed.numerics.row_sums import is_increasing


class ForeignLabelError(ValueError):
    """Raised for a training label that is not among the client's positive classes."""


@dataclass(frozen=True, eq=False)
class SampledClasses:
    """Classes in a client's last layer in one round.

    Args:
        classes: Class indices, int64, strictly increasing, shape ``(S,)``.
        is_positive: Mask of the client's own classes, bool, shape ``(S,)``. The other classes are drawn negatives.
        objective: The client's loss, see :func:`~lightning_fed.algorithms.fedss.sampled_softmax_loss`.

    Raises:
        ValueError: If the classes are unsorted, no class is positive, or the objective is unknown.

    Example:
        >>> held = SampledClasses(torch.tensor([2, 5, 7]), torch.tensor([True, True, False]))
        >>> held.relabel(torch.tensor([5, -100, 2]))
        tensor([   1, -100,    0])
    """

    classes: Tensor
    is_positive: Tensor
    objective: Objective = "fedss"

    def __post_init__(self) -> None:
        check_option("objective", self.objective, Objective)
        _check_increasing("classes", self.classes)
        if self.is_positive.dtype != torch.bool or self.is_positive.shape != self.classes.shape:
            raise ValueError(
                f"Expected `is_positive` to be of type bool and shape {tuple(self.classes.shape)}, but got"
                f" {self.is_positive.dtype} of shape {tuple(self.is_positive.shape)}."
            )
        if not self.is_positive.any():
            raise ValueError("Expected at least one of the client's classes in `is_positive`, but got none.")

    @property
    def needs_target(self) -> bool:
        """True for the objective "negonly": the classes in an example's softmax then depend on the label."""
        return self.objective == "negonly"

    def check_among(self, num_classes: int) -> None:
        """Raises an error for a class outside ``range(num_classes)``. The objective "full" requires all classes."""
        lowest, highest = int(self.classes[0]), int(self.classes[-1])
        if lowest < 0 or highest >= num_classes:
            raise ValueError(f"Expected `classes` to be from 0 to {num_classes - 1}, but got {lowest} to {highest}.")
        if self.objective == "full" and len(self.classes) != num_classes:
            raise ValueError(
                f"Expected all {num_classes} classes for the objective 'full', but got {len(self.classes)}."
            )

    def correction(self, num_classes: int) -> float:
        num_positives = int(self.is_positive.sum())
        return log_correction(num_positives, len(self.classes) - num_positives, num_classes)

    def subset(self, columns: Tensor) -> SampledClasses:
        """Returns a copy with the classes at ``columns``. The sorted indices must include the client's own classes."""
        _check_increasing("columns", columns)
        count = len(self.classes)
        if len(columns) and (columns[0] < 0 or columns[-1] >= count):
            raise ValueError(
                f"Expected `columns` to be from 0 to {count - 1}, but got {int(columns[0])} to {int(columns[-1])}."
            )
        left_out = int(self.is_positive.sum()) - int(self.is_positive[columns].sum())
        if left_out:
            raise ValueError(f"Expected `columns` to contain all of the client's classes, but {left_out} are missing.")
        return replace(self, classes=self.classes[columns], is_positive=self.is_positive[columns])

    def relabel(self, target: Tensor) -> Tensor:
        """Converts class labels to indices into ``classes``, int64. Negative labels do not change.

        Raises:
            ForeignLabelError: If a label is not among the client's classes.
        """
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            raise ValueError(f"Expected `target` to contain integer class labels, but got {target.dtype}.")
        labels = target.to(torch.int64)
        classes, is_positive = self.classes.to(labels.device), self.is_positive.to(labels.device)
        columns = torch.searchsorted(classes, labels.contiguous()).clamp(max=len(classes) - 1)
        is_known = (classes[columns] == labels) & is_positive[columns]
        wrong = torch.unique(labels[(labels >= 0) & ~is_known])
        if len(wrong):
            raise ForeignLabelError(
                f"Expected `target` to contain only the client's classes, but got {wrong.tolist()}."
            )
        return torch.where(labels >= 0, columns, labels)


def _check_increasing(name: str, values: Tensor) -> None:
    if values.ndim != 1 or values.dtype != torch.int64 or not is_increasing(values):
        raise ValueError(
            f"Expected `{name}` to be a 1D int64 tensor with strictly increasing values, but got {values.dtype} of "
            f"shape {tuple(values.shape)}."
        )
