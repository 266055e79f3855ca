"""Converts and resizes class labels of examples or pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lightning_fed.argument_checks import check_count

# Label of void pixels: a number, `"auto"` for 255 (unless 255 is a class), or `None`.
VoidLabel: TypeAlias = int | Literal["auto"] | None

_VOID_OF_8_BITS = 255


def class_indices(
    labels: Tensor, num_classes: int, ignore_index: VoidLabel = "auto", exclude_classes: Sequence[int] = ()
) -> Tensor:
    """Converts labels to class indices.

    Void pixels, which have no class, and pixels of excluded classes get the index ``num_classes``. ``ignore_index`` is
    the label of void pixels, see :func:`void_label`.

    Raises:
        ValueError: If a label or an option is out of range.

    Example:
        >>> class_indices(torch.tensor([0, 1, 2, 255]), num_classes=3, exclude_classes=[0]).tolist()
        [3, 1, 2, 3]
    """
    check_count("num_classes", num_classes)
    ignore_index = void_label(ignore_index, num_classes)
    if ignore_index is not None and 0 <= ignore_index < num_classes:
        raise ValueError(
            f"Expected `ignore_index` outside the classes (0 to {num_classes - 1}), but got {ignore_index}: pass"
            " `ignore_index=None`, and exclude classes with `exclude_classes`."
        )
    for excluded in exclude_classes:
        if not 0 <= excluded < num_classes:
            raise ValueError(f"Expected `exclude_classes` to be in 0 to {num_classes - 1}, but got {excluded}.")
    labels = labels.long()
    is_counted = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
    outside = is_counted & ((labels < 0) | (labels >= num_classes))
    if outside.any():
        raise ValueError(
            f"Expected `labels` to be in 0 to {num_classes - 1} or `ignore_index` ({ignore_index}), but got"
            f" {int(labels[outside][0])}."
        )
    for excluded in exclude_classes:
        is_counted &= labels != excluded
    return torch.where(is_counted, labels, num_classes)


def void_label(ignore_index: VoidLabel, num_classes: int) -> int | None:
    """Returns the label of void pixels, or ``None``. ``"auto"`` stands for 255, unless 255 is a class."""
    if ignore_index != "auto":
        return ignore_index
    return _VOID_OF_8_BITS if num_classes <= _VOID_OF_8_BITS else None


def resize_labels(labels: Tensor, size: Sequence[int]) -> Tensor:
    r"""Resizes label maps ``(N, *label_size)`` to ``(N, *size)`` by nearest neighbour.

    Unlike ``torch.nn.functional.interpolate(mode="nearest")``, large labels are not rounded.

    Example:
        >>> resize_labels(torch.tensor([[[0, 0, 1, 1], [255, 255, 1, 0]]]), (1, 2)).tolist()
        [[[0, 1]]]
    """
    for dim, length in enumerate(size, start=1):
        if labels.shape[dim] != length:
            index = torch.arange(length, device=labels.device) * labels.shape[dim] // length
            labels = labels.index_select(dim, index)
    return labels
