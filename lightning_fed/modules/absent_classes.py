"""FedSeg's loss for clients that label only some classes.

Miao, Yang, Fan & Yang, "FedSeg: Class-Heterogeneous Federated Learning for Semantic Segmentation", CVPR 2023, the
modified cross-entropy; https://github.com/lightas/FedSeg. The paper's contrastive loss is not included.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from lightning_fed.numerics.precision import at_least_float32

__all__ = ["absent_class_loss"]


def absent_class_loss(
    logits: Tensor, target: Tensor, unlabelled: int = 255, classes: Collection[int] | None = None
) -> Tensor:
    r"""Cross-entropy in which an unlabelled pixel may have any class that the client does not label.

    .. math:: \ell = - \frac{1}{|P|} \Bigl( \sum_{x \in P,\, y_x \in C} \log p_{y_x}(x)
        + \sum_{x \in P,\, y_x \notin C} \log \sum_{c \notin C} p_c(x) \Bigr)

    :math:`P` are the pixels, :math:`y_x` is the target at pixel x, :math:`p_c(x)` the probability of class c, and
    :math:`C` are the client's labelled classes. If all classes are labelled, unlabelled pixels are skipped. Reference:
    Miao et al., CVPR 2023, the loss for foreground-background inconsistency.

    Args:
        logits: Shape ``(N, num_classes, *size)``.
        target: Class indices or ``unlabelled``, shape ``(N, *size)``.
        unlabelled: Target of unlabelled pixels.
        classes: The client's labelled classes :math:`C`; by default, the classes in ``target``, as in the authors'
            program.

    Raises:
        ValueError: If ``target`` contains a class outside ``classes`` or the logits.

    Example:
        >>> logits = torch.zeros(1, 4, 1, 2)  # four classes with probability 1/4 each
        >>> target = torch.tensor([[[0, 255]]])
        >>> round(absent_class_loss(logits, target).exp().item() ** 2, 4)  # 1 / (1/4 * 3/4)
        5.3333
    """
    num_classes = logits.shape[1]
    is_labelled = target != unlabelled
    seen = target[is_labelled].unique().tolist()  # type: ignore[no-untyped-call]
    known = set(range(num_classes)) if classes is None else set(classes) & set(range(num_classes))
    if not known.issuperset(seen):
        raise ValueError(f"Expected `target` to contain only {sorted(known)} or {unlabelled}, but got {seen}.")
    labels = torch.tensor(sorted(seen if classes is None else known), dtype=torch.int64, device=logits.device)
    is_absent = torch.ones(num_classes, dtype=torch.bool, device=logits.device).index_fill_(0, labels, False)
    log_shares = at_least_float32(logits).log_softmax(1)  # a sum over pixels would overflow float16
    values = log_shares.gather(1, torch.where(is_labelled, target, 0).long().unsqueeze(1)).squeeze(1)
    counts = is_labelled
    if is_absent.any():
        values = torch.where(is_labelled, values, log_shares[:, is_absent].logsumexp(1))
        counts = torch.ones_like(is_labelled)
    total = torch.where(counts, -values, 0).sum()
    return total / counts.sum().clamp(min=1)
