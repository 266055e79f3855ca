"""FedSeg's loss, for clients that label some classes only: a pixel without a label is of one of the other classes.

Miao, Yang, Fan & Yang, "FedSeg: Class-Heterogeneous Federated Learning for Semantic Segmentation", CVPR 2023, the
modified cross-entropy; https://github.com/lightas/FedSeg. The paper's contrastive loss is not here.
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
    r"""Cross-entropy in which a pixel without a label counts as one of the classes that the client does not label.

    .. math:: \ell = - \frac{1}{|P|} \Bigl( \sum_{x \in P,\, y_x \in C} \log p_{y_x}(x)
        + \sum_{x \in P,\, y_x \notin C} \log \sum_{c \notin C} p_c(x) \Bigr)

    :math:`C` are the classes that the client labels. Where clients label different classes, what is foreground for one
    is background for another. With cross-entropy every client pulls the pixels without a label to its own idea of
    background, or ignores them; here the client says no more than it knows: that they are none of its classes. Where
    it labels all classes, pixels without a label are left out, and the loss is cross-entropy.

    Args:
        logits: Shape ``(N, num_classes, *size)``.
        target: Classes from 0 on, or ``unlabelled``; integers of shape ``(N, *size)``.
        unlabelled: Target of pixels without a label.
        classes: :math:`C`; ``None`` for those in ``target``, as in the authors' program.

    Returns:
        The mean over the pixels that count, shape ``()``, in float32 at least; 0 where none does.

    Raises:
        ValueError: If ``target`` has a class that is not in ``classes``, or not among the logits.

    Example:
        >>> logits = torch.zeros(1, 4, 1, 2)  # four classes with probability 1/4 each
        >>> target = torch.tensor([[[0, 255]]])
        >>> round(absent_class_loss(logits, target).exp().item() ** 2, 4)  # 1 / (1/4 * 3/4)
        5.3333

    References:
        Miao et al., CVPR 2023, the loss for foreground-background inconsistency.

    """
    num_classes = logits.shape[1]
    is_labelled = target != unlabelled
    seen = target[is_labelled].unique().tolist()  # type: ignore[no-untyped-call]
    known = set(range(num_classes)) if classes is None else set(classes) & set(range(num_classes))
    if not known.issuperset(seen):
        raise ValueError(f"Expected `target` to have classes of {sorted(known)} or {unlabelled}, but got {seen}.")
    labels = torch.tensor(sorted(seen if classes is None else known), dtype=torch.int64, device=logits.device)
    is_absent = torch.ones(num_classes, dtype=torch.bool, device=logits.device).index_fill_(0, labels, False)
    log_shares = at_least_float32(logits).log_softmax(1)  # a sum over pixels is beyond float16
    values = log_shares.gather(1, torch.where(is_labelled, target, 0).long().unsqueeze(1)).squeeze(1)
    counts = is_labelled
    if is_absent.any():
        values = torch.where(is_labelled, values, log_shares[:, is_absent].logsumexp(1))
        counts = torch.ones_like(is_labelled)
    total = torch.where(counts, -values, 0).sum()
    return total / counts.sum().clamp(min=1)
