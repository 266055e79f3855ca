"""Segmentation scores by class, over all pixels of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.classification import multiclass_stat_scores, multilabel_stat_scores

from lightning_fed.argument_checks import check_count, check_option


class SegmentationScores(Metric):
    r"""Intersection over union and Dice by class, their means, and the fraction of correct pixels.

    .. math:: \mathrm{IoU}_c = \frac{|P_c \cap T_c|}{|P_c \cup T_c|}, \qquad
              \mathrm{Dice}_c = \frac{2 |P_c \cap T_c|}{|P_c| + |T_c|}

    :math:`P_c` are the pixels predicted as class c in all batches, and :math:`T_c` the pixels labelled as class c. A
    class without such pixels has no score, and is excluded from the means. If ``ignore_index`` is a class, this class
    has no score, but predictions of this class count as wrong. If no class has a score, the means are omitted.

    Args:
        num_classes: Number of classes; 1 for ``"binary"``.
        mode: ``"multiclass"`` for one class per pixel, ``"multilabel"`` for several, ``"binary"`` for a single class.
        ignore_index: Label of ignored pixels; ``None`` if no pixel is ignored.
        class_names: Class names in the result; by default, class indices.
        per_class: Whether the result contains the scores of every class.
        **kwargs: Arguments for ``torchmetrics.Metric``.

    Raises:
        ValueError: If an argument is invalid, or two classes have the same name.

    Example:
        >>> scores = SegmentationScores(3, class_names=["sky", "road", "car"])
        >>> logits = torch.eye(3)[[0, 1, 1, 1]].T.reshape(1, 3, 1, 4)  # sky, road, road, road
        >>> scores.update(logits, torch.tensor([[[0, 0, 1, 255]]]))
        >>> values = {name: round(value.item(), 2) for name, value in scores.compute().items()}
        >>> values["miou"], values["iou/sky"], values["iou/road"], "iou/car" in values
        (0.5, 0.5, 0.5, False)
    """

    higher_is_better = True
    full_state_update = False
    counts: Tensor  # pixels by class: true and false positives, true and false negatives, class size

    def __init__(
        self,
        num_classes: int,
        mode: Literal["multiclass", "binary", "multilabel"] = "multiclass",
        ignore_index: int | None = 255,
        class_names: Sequence[str] | None = None,
        per_class: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_classes = check_count("num_classes", num_classes)
        check_option("mode", mode, ("multiclass", "binary", "multilabel"))
        if class_names is not None and len(class_names) != num_classes:
            raise ValueError(f"Expected `class_names` to hold {num_classes} names, but got {len(class_names)}.")
        if class_names is not None and len(set(class_names)) != num_classes:
            raise ValueError(f"Expected `class_names` to differ from one another, but got {list(class_names)}.")
        self.mode, self.ignore_index, self.per_class = mode, ignore_index, per_class
        self.class_names = tuple(class_names or map(str, range(num_classes)))
        self.add_state("counts", torch.zeros(num_classes, 5, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Adds a batch of predictions and labels.

        Args:
            logits: Outputs ``(N, C, H, W)``. In mode ``"binary"`` or ``"multilabel"``, values above 0 predict a class.
            target: Class indices, shape ``(N, H, W)``. In these two modes, 0 and 1 in the shape of ``logits``.
        """
        options: dict[str, Any] = {"average": "none", "ignore_index": self.ignore_index, "validate_args": False}
        if self.mode == "multiclass":
            self.counts += multiclass_stat_scores(logits, target, self.num_classes, **options)
            return
        target = target.reshape(logits.shape)
        unknown = target[(target != 0) & (target != 1) & (target != self.ignore_index)]
        if len(unknown):
            raise ValueError(
                f"Expected masks of 0 and 1, or {self.ignore_index} for ignored pixels, with mode={self.mode!r}, but "
                f"got {int(unknown[0])}: convert masks of 0 and 255 with `mask > 0`."
            )
        counts = multilabel_stat_scores((logits > 0).long(), target.long(), self.num_classes, **options)
        self.counts += counts.reshape(self.num_classes, 5)

    def compute(self) -> dict[str, Tensor]:
        """Returns ``miou``, ``mdice``, ``pixel_acc``, and for present classes ``iou/<name>`` and ``dice/<name>``."""
        both, false_positives, true_negatives, false_negatives, _ = self.counts.T  # integers are exact on all devices
        wrong = false_positives + false_negatives
        has_score = both + wrong > 0
        right, total = both.sum(), (both + false_negatives).sum()
        if self.mode != "multiclass":
            right, total = right + true_negatives.sum(), total + (true_negatives + false_positives).sum()
        elif self.ignore_index is not None and 0 <= self.ignore_index < self.num_classes:
            has_score[self.ignore_index] = False
        iou, dice = both / (both + wrong).clamp_min(1), 2 * both / (2 * both + wrong).clamp_min(1)
        scores: dict[str, Tensor] = {}
        if bool(has_score.any()):
            scores |= {"miou": iou[has_score].mean(), "mdice": dice[has_score].mean()}
        if int(total):
            scores["pixel_acc"] = right / total
        if self.per_class:
            for label in torch.nonzero(has_score).flatten().tolist():
                scores |= {f"iou/{self.class_names[label]}": iou[label], f"dice/{self.class_names[label]}": dice[label]}
        return scores
