"""Margins between class prototypes (feature means by class), as reconstructed from the FedMargin paper.

The local margin (LPM) compares a client's prototypes before and after training. The aggregate margin (APM) compares a
client's prototypes with all clients' prototypes. The mean margin (AMM) measures distances between the prototypes of
different classes. Sources: Crammer, Gilad-Bachrach, Navot and Tishby, "Margin Analysis of the LVQ Algorithm", NIPS 2002
(hypothesis margin); Nova and Estevez, "A review of learning vector quantization classifiers", 2014 (relative distance).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lightning_fed.algorithms.fedmargin.prototypes import Prototypes, check_same_shape
from lightning_fed.argument_checks import check_option

MarginKind = Literal["semantic", "hypothesis", "relative", "gain"]
ClassReduction = Literal["mean", "sum", "count", "max"]
MeanMarginKind = Literal["pairs", "nearest"]


@torch.no_grad()
def class_margins(
    query: Prototypes, reference: Prototypes, margin: MarginKind = "semantic", *, fallback: Prototypes | None = None
) -> Tensor:
    r"""Computes the margin of each class between two sets of prototypes.

    :math:`Q[c]` and :math:`R[c]` are the prototypes (feature means) of class :math:`c` in both sets. The distance to
    the same class is :math:`d^+ = \lVert Q[c] - R[c] \rVert`. The distance to the nearest other class is
    :math:`d^- = \min_{c' \ne c} \lVert Q[c] - R[c'] \rVert`.

    .. math::
        \text{semantic: } \tfrac12 d^+ \qquad
        \text{hypothesis: } \tfrac12 (d^- - d^+) \qquad
        \text{relative: } \frac{d^- - d^+}{d^- + d^+}

    .. math:: \text{gain: } \tfrac12 \min_{c' \ne c} \lVert Q[c] - Q[c'] \rVert
        - \tfrac12 \min_{c' \ne c} \lVert R[c] - R[c'] \rVert

    These formulas reconstruct the FedMargin paper, after margins in learning vector quantization.

    Args:
        query: Prototypes :math:`Q`.
        reference: Prototypes :math:`R`.
        margin: Kind of margin.
        fallback: Prototypes of other classes for :math:`d^-`, used if ``reference`` has only one class.

    Returns:
        Margins, shape ``(C,)``, float64; NaN for missing classes.

    Raises:
        ValueError: If ``margin`` is unknown or shapes differ.

    Example:
        >>> after = Prototypes(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([5, 0]))
        >>> before = Prototypes(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([5, 7]))
        >>> class_margins(after, before)
        tensor([2.5000,    nan], dtype=torch.float64)
    """
    check_option("margin", margin, MarginKind)
    check_same_shape(query, reference, *([] if fallback is None else [fallback]))
    shared = query.present & reference.present
    missing = torch.tensor(torch.nan, dtype=torch.float64, device=shared.device)
    if margin == "gain":
        gain = _distance_to_other_classes(query, query) - _distance_to_other_classes(reference, reference)
        return torch.where(shared, gain / 2, missing)
    same_class = torch.linalg.vector_norm(query.means.double() - reference.means.double(), dim=1)
    if margin == "semantic":
        return torch.where(shared, same_class / 2, missing)
    nearest = _distance_to_other_classes(query, reference)
    if fallback is not None:
        nearest = torch.where(nearest.isnan(), _distance_to_other_classes(query, fallback), nearest)
    difference = nearest - same_class
    if margin == "hypothesis":
        return torch.where(shared, difference / 2, missing)
    total = nearest + same_class
    return torch.where(shared, difference / total.where(total != 0, 1.0), missing)


def local_prototype_margin(
    after: Prototypes,
    before: Prototypes,
    *,
    margin: MarginKind = "semantic",
    class_reduction: ClassReduction = "mean",
    fallback: Prototypes | None = None,
) -> Tensor:
    r"""Computes a client's local prototype margin (LPM), between prototypes before and after training.

    The equation is a reconstruction. The paper only says "deviation of on-client prototypes before and after local
    training".

    .. math:: \mathrm{LPM}_k = \frac{1}{|C_k|} \sum_{c \in C_k} \mathrm{SPM}(p_k^1[c], p_k^0[c])

    Args:
        after: Prototypes :math:`p_k^1` of client :math:`k` after training, for the client's classes :math:`C_k`.
        before: Prototypes :math:`p_k^0` before training.
        margin: Kind of the margin SPM of one class, see :func:`class_margins`.
        class_reduction: Reduction over classes. ``"count"`` is a mean weighted by the counts in ``after``.
        fallback: Additional prototypes for a client with a single class, see :func:`class_margins`.

    Returns:
        A float64 scalar; NaN without a common class.

    Raises:
        ValueError: If an option is unknown or shapes differ.

    Example:
        >>> after = Prototypes(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([5, 5]))
        >>> before = Prototypes(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([5, 5]))
        >>> local_prototype_margin(after, before).item()
        1.5
    """
    return _over_classes(class_margins(after, before, margin, fallback=fallback), after.counts, class_reduction)


def aggregate_prototype_margin(
    after: Prototypes,
    reference: Prototypes,
    *,
    margin: MarginKind = "semantic",
    class_reduction: ClassReduction = "mean",
) -> Tensor:
    r"""Computes a client's aggregate prototype margin (APM), between local and aggregate prototypes.

    The equation is a reconstruction. The paper states only "deviation of aggregate prototypes from local prototypes".

    .. math:: \mathrm{APM}_k = \frac{1}{|C_k|} \sum_{c \in C_k} \mathrm{SPM}(p_k^1[c], \bar P[c])

    Here :math:`C_k` are client k's classes with an aggregate prototype. Without such a class the result is NaN.

    Args:
        after: The client's prototypes :math:`p_k^1` after local training.
        reference: Prototypes :math:`\bar P`, see :func:`~lightning_fed.algorithms.fedmargin.reference_prototypes`.
        margin: Formula for the margin SPM in each class, see :func:`class_margins`. "gain" is replaced by "hypothesis",
            because "gain" compares a client's prototypes before and after training.
        class_reduction: Same as in :func:`local_prototype_margin`.

    Raises:
        ValueError: If an option is unknown or shapes differ.

    Example:
        >>> client = Prototypes(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([5, 0]))
        >>> aggregate = Prototypes(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([5, 5]))
        >>> aggregate_prototype_margin(client, aggregate).item()
        2.5
    """
    # "gain" compares prototypes from the same client
    margins = class_margins(after, reference, "hypothesis" if margin == "gain" else margin)
    return _over_classes(margins, after.counts, class_reduction)


@torch.no_grad()
def aggregate_mean_margin(prototypes: Prototypes, kind: MeanMarginKind = "pairs", *, normalize: bool = False) -> Tensor:
    r"""Computes the aggregate mean margin (AMM), half the mean distance between class prototypes.

    The equation is a reconstruction. The paper states only "the margin among the aggregate set of prototypes".

    .. math:: \mathrm{AMM} = \frac{1}{C' (C' - 1)} \sum_{c \ne c'} \tfrac12 \lVert \bar P[c] - \bar P[c'] \rVert

    Here :math:`C'` is the number of classes with a prototype. With fewer than two, the result is NaN.

    Args:
        prototypes: Aggregate prototypes :math:`\bar P`.
        kind: ``"pairs"`` averages over all pairs of classes, ``"nearest"`` only over nearest neighbours.
        normalize: Whether to divide by the mean norm of the prototypes.

    Raises:
        ValueError: If ``kind`` is unknown.

    Example:
        >>> prototypes = Prototypes(torch.tensor([[0.0, 0.0], [6.0, 8.0], [3.0, 4.0]]), torch.tensor([1, 1, 1]))
        >>> [round(aggregate_mean_margin(prototypes, kind).item(), 6) for kind in ("pairs", "nearest")]
        [3.333333, 2.5]
    """
    check_option("kind", kind, MeanMarginKind)
    means = prototypes.means[prototypes.present].double()
    if len(means) < 2:
        return torch.tensor(torch.nan, dtype=torch.float64, device=means.device)
    distances = _distances(means, means)
    if kind == "pairs":
        margin = distances.sum() / (len(means) * (len(means) - 1)) / 2
    else:
        margin = distances.fill_diagonal_(torch.inf).amin(1).mean() / 2
    return margin / torch.linalg.vector_norm(means, dim=1).mean() if normalize else margin


def _over_classes(margins: Tensor, counts: Tensor, reduction: ClassReduction) -> Tensor:
    check_option("class_reduction", reduction, ClassReduction)
    defined = ~margins.isnan()
    margins, counts = margins[defined], counts[defined]
    if not len(margins):
        return torch.tensor(torch.nan, dtype=torch.float64, device=margins.device)
    if reduction == "mean":
        return margins.mean()
    if reduction == "sum":
        return margins.sum()
    if reduction == "count":
        return (margins * counts).sum() / counts.sum()
    return margins.max()


def _distance_to_other_classes(query: Prototypes, reference: Prototypes) -> Tensor:
    # NaN if no other class exists
    distances = _distances(query.means.double(), reference.means.double())
    distances = distances.where(reference.present, torch.inf).fill_diagonal_(torch.inf)
    nearest = distances.amin(1)
    return nearest.where(query.present & nearest.isfinite(), torch.nan)


def _distances(queries: Tensor, references: Tensor) -> Tensor:
    # differences instead of products, because prototypes may be close together and far from 0
    return torch.cdist(queries, references, compute_mode="donot_use_mm_for_euclid_dist")
