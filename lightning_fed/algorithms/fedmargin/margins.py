"""FedMargin: attention to clients by how far their class prototypes have moved.

Michieli, Toldo and Ozay, "Federated Learning via Attentive Margin of Semantic Feature Representations", IEEE Internet
of Things Journal 2022. The published text that could be read gives no equation. All equations of this file are a
reconstruction from its description in words; every alternative that fits the words is an option.

With the prototypes of :mod:`lightning_fed.algorithms.fedmargin.prototypes`, a round is: LPM of every client (before and
after its
training), APM of every client (against the aggregate), attention from each of the two, both combined, and the weighted
mean of the models with the result as weights.

References:
    - Crammer, Gilad-Bachrach, Navot and Tishby, "Margin Analysis of the LVQ Algorithm", NIPS 2002 (the hypothesis
      margin).
    - Nova and Estevez, "A review of learning vector quantization classifiers", 2014 (the relative distance).
    - Ji et al., "Learning Private Neural Language Modeling with Attentive Aggregation" (FedAtt), IJCNN 2019 (attention
      by softmax).

"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_fed.algorithms.fedmargin.prototypes import Prototypes, check_same_shape
from lightning_fed.argument_checks import check_option

MarginKind = Literal["semantic", "hypothesis", "relative", "gain"]
ClassReduction = Literal["mean", "sum", "count", "max"]
AttentionKind = Literal["sum", "softmax"]
Combination = Literal["mean", "product", "lpm", "apm"]
MeanMarginKind = Literal["pairs", "nearest"]


@torch.no_grad()
def class_margins(
    query: Prototypes, reference: Prototypes, margin: MarginKind = "semantic", *, fallback: Prototypes | None = None
) -> Tensor:
    r"""The margin of every class between two sets of prototypes.

    All four are a reconstruction: the published text names a margin between prototypes and cites the literature.

    They are made of the hypothesis margin of learning vector quantization: :math:`d^+ = \lVert Q[c] - R[c] \rVert` is
    the distance of a prototype to that of its own class, :math:`d^- = \min_{c' \ne c} \lVert Q[c] - R[c'] \rVert` to
    the nearest one of another class.

    .. math::
        \text{semantic: } \tfrac12 d^+ \qquad
        \text{hypothesis: } \tfrac12 (d^- - d^+) \qquad
        \text{relative: } \frac{d^- - d^+}{d^- + d^+}

    .. math:: \text{gain: } \tfrac12 \min_{c' \ne c} \lVert Q[c] - Q[c'] \rVert
        - \tfrac12 \min_{c' \ne c} \lVert R[c] - R[c'] \rVert

    "semantic" is the hypothesis margin between two prototypes: how far one is from the plane halfway to the other.
    Where both distances are 0, the relative margin is 0.

    Args:
        query: Prototypes Q.
        reference: Prototypes R.
        margin: Kind of margin.
        fallback: For "hypothesis" and "relative", where the other classes come from if the reference has only the class
            itself: the aggregate prototypes.

    Returns:
        Margins, shape ``(C,)``, float64; NaN for a class that one of the sets does not have, or that has no other class
        to be compared with.

    Raises:
        ValueError: If ``margin`` is unknown or the shapes differ.

    Example:
        >>> after = Prototypes(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([5, 0]))
        >>> before = Prototypes(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([5, 7]))
        >>> class_margins(after, before)
        tensor([2.5000,    nan], dtype=torch.float64)

    """
    check_option("margin", margin, get_args(MarginKind))
    check_same_shape(query, reference, *([] if fallback is None else [fallback]))
    shared = query.present & reference.present
    missing = torch.tensor(torch.nan, dtype=torch.float64, device=shared.device)
    if margin == "gain":
        return torch.where(shared, (_nearest_other(query, query) - _nearest_other(reference, reference)) / 2, missing)
    own = torch.linalg.vector_norm(query.means.double() - reference.means.double(), dim=1)
    if margin == "semantic":
        return torch.where(shared, own / 2, missing)
    other = _nearest_other(query, reference)
    if fallback is not None:
        other = torch.where(other.isnan(), _nearest_other(query, fallback), other)
    difference = other - own
    if margin == "hypothesis":
        return torch.where(shared, difference / 2, missing)
    total = other + own
    return torch.where(shared, difference / total.where(total != 0, 1.0), missing)


def local_prototype_margin(
    after: Prototypes,
    before: Prototypes,
    *,
    margin: MarginKind = "semantic",
    class_reduction: ClassReduction = "mean",
    fallback: Prototypes | None = None,
) -> Tensor:
    r"""LPM: how far local training has moved a client's prototypes.

    The equation is a reconstruction of "deviation of on-client prototypes before and after local training".

    .. math:: \mathrm{LPM}_k = \frac{1}{|C_k|} \sum_{c \in C_k} \mathrm{SPM}(p_k^1[c], p_k^0[c])

    Args:
        after: The client's prototypes after its local training.
        before: Those before it, with the downloaded weights on the same samples (or those the client had kept from its
            last participation).
        margin: Margin of a class, see :func:`class_margins`.
        class_reduction: Mean over the classes there are, their sum, the mean weighted by the numbers of feature vectors
            in ``after``, or the largest.
        fallback: Where other classes come from if the client has only one, see :func:`class_margins`.

    Returns:
        The margin, a float64 scalar; NaN if it is defined for no class.

    Raises:
        ValueError: If an option is unknown or the shapes differ.

    Example:
        >>> after = Prototypes(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([5, 5]))
        >>> before = Prototypes(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([5, 5]))
        >>> local_prototype_margin(after, before).item()
        1.5

    """
    return _reduced(class_margins(after, before, margin, fallback=fallback), after.counts, class_reduction)


def aggregate_prototype_margin(
    after: Prototypes,
    reference: Prototypes,
    *,
    margin: MarginKind = "semantic",
    class_reduction: ClassReduction = "mean",
) -> Tensor:
    r"""APM: how far a client's prototypes are from the aggregate ones.

    The equation is a reconstruction of "deviation of aggregate prototypes from local prototypes".

    .. math:: \mathrm{APM}_k = \frac{1}{|C_k \cap \mathrm{dom}\, \bar P|}
        \sum_c \mathrm{SPM}(p_k^1[c], \bar P[c])

    Args:
        after: The client's prototypes after its local training.
        reference: Aggregate prototypes, see :func:`~lightning_fed.algorithms.fedmargin.reference_prototypes`.
        margin: Margin of a class, see :func:`class_margins`; "gain" compares a client with itself, so that here it is
            "hypothesis".
        class_reduction: As in :func:`local_prototype_margin`.

    Returns:
        The margin, a float64 scalar; NaN if it is defined for no class.

    Raises:
        ValueError: If an option is unknown or the shapes differ.

    Example:
        >>> client = Prototypes(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([5, 0]))
        >>> aggregate = Prototypes(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([5, 5]))
        >>> aggregate_prototype_margin(client, aggregate).item()
        2.5

    """
    margins = class_margins(after, reference, "hypothesis" if margin == "gain" else margin)
    return _reduced(margins, after.counts, class_reduction)


@torch.no_grad()
def aggregate_mean_margin(prototypes: Prototypes, kind: MeanMarginKind = "pairs", *, normalize: bool = False) -> Tensor:
    r"""AMM: the mean margin among a set of prototypes.

    The equation is a reconstruction of "the margin among the aggregate set of prototypes".

    .. math:: \mathrm{AMM} = \frac{1}{C' (C' - 1)} \sum_{c \ne c'} \tfrac12 \lVert \bar P[c] - \bar P[c'] \rVert

    over the :math:`C'` classes there are. It grows with the scale of the features, also without better separation.

    Args:
        prototypes: Aggregate prototypes.
        kind: Mean over all pairs, or over the classes' distances to their nearest other class.
        normalize: Whether to divide by the mean length of the prototypes.

    Returns:
        The margin, a float64 scalar; NaN with fewer than two classes.

    Raises:
        ValueError: If ``kind`` is unknown.

    Example:
        >>> prototypes = Prototypes(torch.tensor([[0.0, 0.0], [6.0, 8.0], [3.0, 4.0]]), torch.tensor([1, 1, 1]))
        >>> aggregate_mean_margin(prototypes).item(), aggregate_mean_margin(prototypes, "nearest").item()
        (3.3333333333333335, 2.5)

    """
    check_option("kind", kind, get_args(MeanMarginKind))
    means = prototypes.means[prototypes.present].double()
    if len(means) < 2:
        return torch.tensor(torch.nan, dtype=torch.float64, device=means.device)
    distances = _distances(means, means)
    if kind == "pairs":
        margin = distances.sum() / (len(means) * (len(means) - 1)) / 2
    else:
        margin = distances.fill_diagonal_(torch.inf).amin(1).mean() / 2
    return margin / torch.linalg.vector_norm(means, dim=1).mean() if normalize else margin


@torch.no_grad()
def margin_attention(
    margins: Tensor, kind: AttentionKind = "sum", *, temperature: float = 1.0, standardize: bool = True
) -> Tensor:
    r"""Attention to the clients of a round from their margins: the larger, the more.

    The equation is a reconstruction of "as prototypes deviate from reference prototypes in terms of margin, higher
    attention is applied".

    .. math:: \text{sum: } a_k = \frac{v_k}{\sum_j v_j} \qquad
        \text{softmax: } a_k = \frac{e^{v_k / T}}{\sum_j e^{v_j / T}}

    For "sum" negative margins count as 0 (only "semantic" ones are never negative), and the scale of the features does
    not matter. A margin that is missing is replaced by the mean of the others, after negative ones became 0. Equal
    margins, all of them 0 or all missing give every client exactly one over their number.

    Args:
        margins: One margin per client, shape ``(K,)``; NaN for one that is missing.
        kind: Ratio, or softmax as in FedAtt.
        temperature: :math:`T`, greater than 0, for "softmax".
        standardize: Whether "softmax" divides the margins by the mean of their absolute values first. Without it the
            result depends on the scale of the features and is close to one client alone for large ones.

    Returns:
        Attention, shape ``(K,)``, float64, not negative, with sum 1.

    Raises:
        ValueError: If there is no client, a margin is infinite, ``kind`` is unknown or ``temperature`` is out of its
            range.

    Example:
        >>> margin_attention(torch.tensor([3.0, 1.0, torch.nan]))
        tensor([0.5000, 0.1667, 0.3333], dtype=torch.float64)

    """
    check_option("kind", kind, get_args(AttentionKind))
    if not 0 < temperature < float("inf"):
        raise ValueError(f"Expected `temperature` to be greater than 0 and finite, but got {temperature}.")
    if margins.ndim != 1 or not len(margins):
        raise ValueError(f"Expected `margins` to be one number per client, but got the shape {tuple(margins.shape)}.")
    values = margins.double()
    if values.isinf().any():
        raise ValueError(f"Expected `margins` to be finite or missing (NaN), but got {margins.tolist()}.")
    if kind == "sum":
        values = values.clamp(min=0)
    # The mean of equal values need not be exactly that value: it is taken of what they are above the smallest.
    known = values[~values.isnan()]
    least = known.min() if len(known) else values.new_zeros(())
    mean = least + (known - least).mean() if len(known) else least
    values = values.where(~values.isnan(), mean)
    if kind == "sum":
        return _normalized(_relative(values))
    if standardize:
        scale = values.abs().mean()
        values = values / scale.where(scale > 0, 1.0)
    return torch.softmax(values / temperature, dim=0)


@torch.no_grad()
def combine_attention(
    local: Tensor, aggregate: Tensor, combine: Combination = "mean", *, num_samples: Sequence[int] | None = None
) -> Tensor:
    r"""The weights of the clients' models, from the attention by LPM and by APM.

    How the two are combined is a reconstruction: the published text uses both jointly.

    .. math:: \text{mean: } a_k = \tfrac12 (a^L_k + a^A_k) \qquad
        \text{product: } a_k = \frac{a^L_k a^A_k}{\sum_j a^L_j a^A_j}

    .. math:: w_{t+1} = w_t + \eta \sum_k a_k (w_k - w_t)

    Equal attention gives equal weights, exactly: FairAvg; with ``num_samples``, exactly the shares of the examples:
    FedAvg.

    Args:
        local: Attention by LPM :math:`a^L`, shape ``(K,)``, see :func:`margin_attention`.
        aggregate: Attention by APM :math:`a^A`, shape ``(K,)``.
        combine: Mean of both, product, or one of them alone. A product that is 0 for every client gives equal weights.
        num_samples: Number of examples of every client, by which the weights are multiplied before they are made to sum
            to 1 again; ``None`` for weights by attention alone.

    Returns:
        Weights, shape ``(K,)``, float64, not negative, with sum 1.

    Raises:
        ValueError: If ``combine`` is unknown or the numbers of clients differ.

    Example:
        >>> local, aggregate = torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75])
        >>> combine_attention(local, aggregate).tolist()
        [0.5, 0.5]
        >>> combine_attention(local, aggregate, num_samples=[30, 10]).tolist()
        [0.75, 0.25]

    """
    check_option("combine", combine, get_args(Combination))
    if local.ndim != 1 or not len(local) or local.shape != aggregate.shape:
        raise ValueError(
            "Expected `local` and `aggregate` to be one number per client each, but got the shapes"
            f" {tuple(local.shape)} and {tuple(aggregate.shape)}."
        )
    local, aggregate = local.double(), aggregate.double()
    if combine == "mean":
        weights = (local + aggregate) / 2
    elif combine == "product":
        weights = _normalized(_relative(local) * _relative(aggregate))
    else:
        weights = local if combine == "lpm" else aggregate
    if num_samples is None:
        return weights
    if len(num_samples) != len(weights) or min(num_samples) < 0:
        raise ValueError(
            f"Expected `num_samples` to be {len(weights)} numbers of examples, one per client and none negative, but"
            f" got {num_samples}."
        )
    return _normalized(_relative(weights) * weights.new_tensor(list(num_samples)))


def _relative(values: Tensor) -> Tensor:
    """Values over the largest: equal ones become exactly 1, also where all are 0."""
    largest = values.max()
    return values / largest if largest > 0 else torch.ones_like(values)


def _normalized(values: Tensor) -> Tensor:
    """Values over their sum; uniform if all are 0."""
    total = values.sum()
    return values / total if total > 0 else torch.full_like(values, 1 / len(values))


def _reduced(margins: Tensor, counts: Tensor, reduction: ClassReduction) -> Tensor:
    """One number of the margins of the classes that have one."""
    check_option("class_reduction", reduction, get_args(ClassReduction))
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


def _nearest_other(query: Prototypes, reference: Prototypes) -> Tensor:
    """Distance to the nearest prototype of another class in the reference; NaN where there is none."""
    distances = _distances(query.means.double(), reference.means.double())
    distances = distances.where(reference.present, torch.inf).fill_diagonal_(torch.inf)
    nearest = distances.amin(1)
    return nearest.where(query.present & nearest.isfinite(), torch.nan)


def _distances(queries: Tensor, references: Tensor) -> Tensor:
    """All distances, from differences and not from products: prototypes may be close together and far from 0."""
    return torch.cdist(queries, references, compute_mode="donot_use_mm_for_euclid_dist")
