"""FedAwS: class vectors are kept apart.

Yu, Rawat, Menon & Kumar, "Federated Learning with Only Positive Labels", ICML 2020, equations 7 and 8.
https://arxiv.org/abs/2004.10342
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_fed.argument_checks import check_count, check_positive
from lightning_fed.numerics.chunks import chunk_steps
from lightning_fed.numerics.precision import at_least_float32


def spreadout_margin(weight: Tensor, margin: float = 0.9) -> Tensor:
    r"""Sum of the class vectors' margin violations over all ordered pairs (equation 7).

    .. math:: \sum_{c} \sum_{c' \ne c} \max \left( 0,\, \nu - d(w_c, w_{c'}) \right)^2, \qquad
        d(u, u') = 1 - \frac{u^\top u'}{\lVert u \rVert \lVert u' \rVert}

    It takes all pairs of classes, in pieces: memory is that of the weight, time grows with the square of the number of
    classes. A vector of zeros has distance 1 from all others.

    Args:
        weight: One vector per class, shape ``(n, d)``, of any length: gradients pass through the normalisation.
        margin: :math:`\nu`, greater than 0.

    Returns:
        A scalar, float32 at least.

    Raises:
        ValueError: If ``weight`` is not a matrix, or ``margin`` is not greater than 0.

    Example:
        >>> round(spreadout_margin(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])).item(), 4)
        1.48

    References:
        Yu et al., ICML 2020, equation 7.

    """
    check_positive("margin", margin)
    unit = _unit_rows(weight)

    def piece(unit: Tensor, classes: Tensor) -> Tensor:
        short = (margin - (1 - unit[classes] @ unit.T)).clamp_min(0)
        return short.scatter(1, classes[:, None], 0).square().sum()

    return _summed(piece, unit, torch.arange(len(unit), device=unit.device), len(unit))


def spreadout_top_k(weight: Tensor, classes: Tensor, k: int, comparison: Tensor | None = None) -> Tensor:
    r"""Squared distance of class vectors to their nearest ones, with a minus (equation 8).

    .. math:: \sum_{c \in C} \sum_{c' \in N_k(c)} - d(w_c, w_{c'})^2, \qquad
        d(u, u') = 1 - \frac{u^\top u'}{\lVert u \rVert \lVert u' \rVert}

    where :math:`N_k(c)` are the *k* classes of the comparison nearest to *c*, without *c* itself: constant in the
    gradient, which moves both ends of a distance. Similarities are computed in pieces. A vector of zeros has distance 1
    from all others.

    Args:
        weight: One vector per class, shape ``(n, d)``, of any length: gradients pass through the normalisation.
        classes: :math:`C`, int64, shape ``(classes,)``.
        k: Number of neighbours, at least 1; all, where the comparison has fewer.
        comparison: The classes that can be neighbours, int64, shape ``(m,)``, each once; ``None`` for all.

    Returns:
        A scalar, float32 at least.

    Raises:
        ValueError: If ``weight`` is not a matrix, or ``k`` is not a whole number from 1 on.

    Example:
        >>> weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
        >>> round(spreadout_top_k(weight, torch.arange(3), k=1).item(), 4)
        -0.24

    References:
        Yu et al., ICML 2020, equation 8.

    """
    k = check_count("k", k)
    unit = _unit_rows(weight)
    others = torch.arange(len(unit), device=unit.device) if comparison is None else comparison.to(unit.device)

    def piece(unit: Tensor, pairs: Tensor) -> Tensor:
        ends = unit[pairs[:, 0]], unit[pairs[:, 1]]
        return -(1 - (ends[0] * ends[1]).sum(1)).square().sum()

    return _summed(piece, unit, _nearest(unit, classes.to(unit.device), others, k), unit.shape[1])


@torch.no_grad()
def _nearest(unit: Tensor, classes: Tensor, others: Tensor, k: int) -> Tensor:
    """Every class with each of its nearest others, shape ``(pairs, 2)``."""
    table, pairs = unit[others].T, []
    for some in torch.split(classes, chunk_steps(len(classes), len(others), 1)[0]):
        similarity = (unit[some] @ table).masked_fill_(some[:, None] == others, -torch.inf)
        found, places = similarity.topk(min(k, len(others)), dim=1)
        both = torch.stack([some[:, None].expand_as(places), others[places]], 2)
        pairs.append(both[found > -torch.inf])
    return torch.cat(pairs)


def _unit_rows(weight: Tensor) -> Tensor:
    """Rows of length 1; rows of zeros stay what they are, with gradients as if their length were 1."""
    if weight.ndim != 2:
        raise ValueError(f"Expected `weight` of shape (n, d), but got {tuple(weight.shape)}.")
    weight = at_least_float32(weight)
    length = torch.linalg.vector_norm(weight, dim=1, keepdim=True)
    unit: Tensor = weight / length.where(length > 0, 1.0)
    return unit


def _summed(piece: Callable[[Tensor, Tensor], Tensor], unit: Tensor, items: Tensor, width: int) -> Tensor:
    """Sum over pieces of the items, of which only one is in memory at a time, also for the gradient."""
    total: Tensor = unit.sum() * 0
    for some in torch.split(items, chunk_steps(len(items), width, 1)[0]):
        total = total + checkpoint(piece, unit, some, use_reentrant=False, preserve_rng_state=False)
    return total
