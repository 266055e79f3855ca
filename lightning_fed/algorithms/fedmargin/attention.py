"""Client weights (attention) from margins between class prototypes, reconstructed from FedMargin's paper.

Softmax attention follows Ji et al., "Learning Private Neural Language Modeling with Attentive Aggregation", IJCNN 2019.
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
    r"""Computes client weights from prototype margins.

    A margin compares a client's class prototypes (mean features) with reference prototypes. Larger margins give larger
    weights. The formulas reconstruct the paper's text "as prototypes deviate [...], higher attention is applied".

    .. math:: \text{sum: } a_k = \frac{v_k}{\sum_j v_j} \qquad
        \text{softmax: } a_k = \frac{e^{v_k / s}}{\sum_j e^{v_j / s}}

    Here :math:`a_k` is client k's weight, :math:`v_k` the margin, and :math:`s` the mean absolute margin. "sum"
    replaces negative margins by 0. Missing margins are replaced by the mean of the other margins.

    Args:
        margins: Prototype margin for each client, shape ``(K,)``; NaN if missing.
        kind: ``"sum"``, or ``"softmax"`` as in FedAtt.

    Returns:
        Weights with sum 1, shape ``(K,)``, float64.

    Raises:
        ValueError: If ``margins`` is empty, a margin is infinite or ``kind`` is unknown.

    Example:
        >>> margin_attention(torch.tensor([3.0, 1.0, torch.nan]))
        tensor([0.5000, 0.1667, 0.3333], dtype=torch.float64)
    """
    check_option("kind", kind, AttentionKind)
    if margins.ndim != 1 or not len(margins):
        raise ValueError(f"Expected `margins` to have one number per client, but got shape {tuple(margins.shape)}.")
    values = margins.double()
    if values.isinf().any():
        raise ValueError(f"Expected `margins` to be finite or missing (NaN), but got {margins.tolist()}.")
    if kind == "sum":
        values = values.clamp(min=0)
    # The mean of differences from the minimum is exact for equal values.
    present_margins = values[~values.isnan()]
    smallest = present_margins.min() if len(present_margins) else values.new_zeros(())
    mean = smallest + (present_margins - smallest).mean() if len(present_margins) else smallest
    values = values.where(~values.isnan(), mean)
    if kind == "sum":
        return _normalized(_over_largest(values))
    scale = values.abs().mean()
    return torch.softmax(values / scale.where(scale > 0, 1.0), dim=0)


@torch.no_grad()
def combine_attention(
    local: Tensor, aggregate: Tensor, combine: Combination = "mean", *, num_samples: Sequence[int] | None = None
) -> Tensor:
    r"""Combines two sets of client weights into one.

    The paper states only that both are used jointly.

    .. math:: \text{mean: } a_k = \tfrac12 (a^L_k + a^A_k) \qquad
        \text{product: } a_k = \frac{a^L_k a^A_k}{\sum_j a^L_j a^A_j}

    The weights are used in :class:`~lightning_fed.algorithms.FedMargin`:
    :math:`w_{t+1} = w_t + \eta \sum_k a_k (w_k - w_t)`. If both sets weight all clients equally, so does the result,
    exactly (FairAvg). With ``num_samples``, the result is then proportional to the numbers of examples (FedAvg).

    Args:
        local: Weights :math:`a^L` from local prototype margins (LPM), shape ``(K,)``, see :func:`margin_attention`.
        aggregate: Weights :math:`a^A` from aggregate prototype margins (APM), shape ``(K,)``.
        combine: Mean or product of both weights, or only one.
        num_samples: Number of examples for each client. If given, the weights are multiplied by these numbers.

    Returns:
        Weights with sum 1, shape ``(K,)``, float64.

    Raises:
        ValueError: If ``combine`` is unknown or the numbers of clients differ.

    Example:
        >>> local, aggregate = torch.tensor([0.75, 0.25]), torch.tensor([0.25, 0.75])
        >>> combine_attention(local, aggregate).tolist()
        [0.5, 0.5]
    """
    check_option("combine", combine, Combination)
    if local.ndim != 1 or not len(local) or local.shape != aggregate.shape:
        raise ValueError(
            f"Expected `local` and `aggregate` to have one number per client, but got shapes {tuple(local.shape)} and "
            f"{tuple(aggregate.shape)}."
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
            f"Expected `num_samples` to contain {len(weights)} non-negative numbers of examples, one per client, but "
            f"got {num_samples}."
        )
    return _normalized(_over_largest(weights) * weights.new_tensor(list(num_samples)))


def _over_largest(values: Tensor) -> Tensor:
    # gives exactly 1 for equal values, also if all are 0
    largest = values.max()
    return values / largest if largest > 0 else torch.ones_like(values)


def _normalized(values: Tensor) -> Tensor:
    # uniform if all values are 0
    total = values.sum()
    return values / total if total > 0 else torch.full_like(values, 1 / len(values))
