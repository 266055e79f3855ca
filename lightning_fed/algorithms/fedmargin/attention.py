"""Attention to clients from their margins, and the weights of their models (FedMargin, a reconstruction).

Michieli, Toldo and Ozay, "Federated Learning via Attentive Margin of Semantic Feature Representations", IEEE Internet
of Things Journal 2022. The published text that could be read gives no equation. All equations of this file are a
reconstruction from its description in words, with options for different readings of it. Attention by softmax
is that of Ji et al., "Learning Private Neural Language Modeling with Attentive Aggregation" (FedAtt), IJCNN 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_fed.argument_checks import check_option

AttentionKind = Literal["sum", "softmax"]
Combination = Literal["mean", "product", "lpm", "apm"]


@torch.no_grad()
def margin_attention(margins: Tensor, kind: AttentionKind = "sum") -> Tensor:
    r"""Attention to the clients of a round from their margins: the larger, the more.

    The equation is a reconstruction of "as prototypes deviate from reference prototypes in terms of margin, higher
    attention is applied".

    .. math:: \text{sum: } a_k = \frac{v_k}{\sum_j v_j} \qquad
        \text{softmax: } a_k = \frac{e^{v_k / s}}{\sum_j e^{v_j / s}}

    For "sum" negative margins count as 0 (only "semantic" ones are never negative). For "softmax" :math:`s` is the mean
    of the margins' absolute values. With both, the scale of the features does not matter. A margin that is missing is
    replaced by the mean of the others, after negative ones became 0 for "sum". Equal margins, all of them 0 or all
    missing give every client exactly one over their number.

    Args:
        margins: One margin per client, shape ``(K,)``; NaN for one that is missing.
        kind: Ratio, or softmax as in FedAtt.

    Returns:
        Attention, shape ``(K,)``, float64, not negative, with sum 1.

    Raises:
        ValueError: If there is no client, a margin is infinite or ``kind`` is unknown.

    Example:
        >>> margin_attention(torch.tensor([3.0, 1.0, torch.nan]))
        tensor([0.5000, 0.1667, 0.3333], dtype=torch.float64)

    """
    check_option("kind", kind, AttentionKind)
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
        return _normalized(_over_largest(values))
    scale = values.abs().mean()
    return torch.softmax(values / scale.where(scale > 0, 1.0), dim=0)


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
    check_option("combine", combine, Combination)
    if local.ndim != 1 or not len(local) or local.shape != aggregate.shape:
        raise ValueError(
            "Expected `local` and `aggregate` to be one number per client each, but got the shapes"
            f" {tuple(local.shape)} and {tuple(aggregate.shape)}."
        )
    local, aggregate = local.double(), aggregate.double()
    if combine == "mean":
        weights = (local + aggregate) / 2
    elif combine == "product":
        weights = _normalized(_over_largest(local) * _over_largest(aggregate))
    else:
        weights = local if combine == "lpm" else aggregate
    if num_samples is None:
        return weights
    if len(num_samples) != len(weights) or min(num_samples) < 0:
        raise ValueError(
            f"Expected `num_samples` to be {len(weights)} numbers of examples, one per client and none negative, but"
            f" got {num_samples}."
        )
    return _normalized(_over_largest(weights) * weights.new_tensor(list(num_samples)))


def _over_largest(values: Tensor) -> Tensor:
    """Values over the largest: equal ones become exactly 1, also where all are 0."""
    largest = values.max()
    return values / largest if largest > 0 else torch.ones_like(values)


def _normalized(values: Tensor) -> Tensor:
    """Values over their sum; uniform if all are 0."""
    total = values.sum()
    return values / total if total > 0 else torch.full_like(values, 1 / len(values))
