"""FedAwS: regularisers that separate class vectors (equations 7 and 8)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_fed.argument_checks import check_count, check_positive
from lightning_fed.numerics.chunks import chunk_steps
from lightning_fed.numerics.precision import at_least_float32


def spreadout_margin(weight: Tensor, margin: float = 0.9) -> Tensor:
    r"""Penalises pairs of class vectors with a cosine distance below a margin.

    .. math:: \sum_{c} \sum_{c' \ne c} \max \left( 0,\, \nu - d(w_c, w_{c'}) \right)^2, \qquad
        d(u, u') = 1 - \frac{u^\top u'}{\lVert u \rVert \lVert u' \rVert}

    Here :math:`w_c` is the vector for class :math:`c`, and :math:`d` the cosine distance. Reference: Yu et al., ICML
    2020, equation 7.

    Args:
        weight: One vector per class, shape ``(classes, features)``.
        margin: Margin :math:`\nu`, greater than 0.

    Raises:
        ValueError: If ``weight`` is not a matrix, or ``margin`` is not positive.

    Example:
        >>> round(spreadout_margin(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])).item(), 4)
        1.48
    """
    check_positive("margin", margin)
    unit = _unit_rows(weight)

    def chunk_sum(unit: Tensor, classes: Tensor) -> Tensor:
        short = (margin - (1 - unit[classes] @ unit.T)).clamp_min(0)
        return short.scatter(1, classes[:, None], 0).square().sum()

    return _sum_chunks(chunk_sum, unit, torch.arange(len(unit), device=unit.device), len(unit))


def spreadout_top_k(weight: Tensor, classes: Tensor, k: int, comparison: Tensor | None = None) -> Tensor:
    r"""Computes the negative sum of squared cosine distances between nearest class vectors.

    .. math:: \sum_{c \in C} \sum_{c' \in N_k(c)} - d(w_c, w_{c'})^2, \qquad
        d(u, u') = 1 - \frac{u^\top u'}{\lVert u \rVert \lVert u' \rVert}

    Here :math:`w_c` is the vector for class :math:`c`, and :math:`N_k(c)` contains the :math:`k` classes nearest to
    :math:`c`. The gradient moves both vectors in each pair. Reference: Yu et al., ICML 2020, equation 8.

    Args:
        weight: One vector per class, shape ``(classes, features)``.
        classes: Classes :math:`C` to separate, int64, shape ``(num_selected,)``.
        k: Number of nearest classes, at least 1.
        comparison: Candidates for nearest classes, int64, shape ``(m,)``, without duplicates; by default all classes.

    Raises:
        ValueError: If ``weight`` is not a matrix, or ``k`` is not a positive integer.

    Example:
        >>> weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
        >>> round(spreadout_top_k(weight, torch.arange(3), k=1).item(), 4)
        -0.24
    """
    k = check_count("k", k)
    unit = _unit_rows(weight)
    candidates = torch.arange(len(unit), device=unit.device) if comparison is None else comparison.to(unit.device)

    def chunk_sum(unit: Tensor, pairs: Tensor) -> Tensor:
        ends = unit[pairs[:, 0]], unit[pairs[:, 1]]
        return -(1 - (ends[0] * ends[1]).sum(1)).square().sum()

    return _sum_chunks(chunk_sum, unit, _nearest(unit, classes.to(unit.device), candidates, k), unit.shape[1])


@torch.no_grad()
def _nearest(unit: Tensor, classes: Tensor, candidates: Tensor, k: int) -> Tensor:
    table, pairs = unit[candidates].T, []
    for chunk in torch.split(classes, chunk_steps(len(classes), len(candidates), 1)[0]):
        similarity = (unit[chunk] @ table).masked_fill_(chunk[:, None] == candidates, -torch.inf)
        similarities, positions = similarity.topk(min(k, len(candidates)), dim=1)
        neighbours = torch.stack([chunk[:, None].expand_as(positions), candidates[positions]], 2)
        pairs.append(neighbours[similarities > -torch.inf])
    return torch.cat(pairs)


def _unit_rows(weight: Tensor) -> Tensor:
    if weight.ndim != 2:
        raise ValueError(f"Expected `weight` of shape (n, d), but got {tuple(weight.shape)}.")
    weight = at_least_float32(weight)
    length = torch.linalg.vector_norm(weight, dim=1, keepdim=True)
    # A zero row stays zero; gradients are computed as if its length were 1.
    unit: Tensor = weight / length.where(length > 0, 1.0)
    return unit


def _sum_chunks(chunk_sum: Callable[[Tensor, Tensor], Tensor], unit: Tensor, items: Tensor, width: int) -> Tensor:
    total: Tensor = unit.sum() * 0
    for chunk in torch.split(items, chunk_steps(len(items), width, 1)[0]):
        # The backward pass recomputes each chunk, so only one chunk is in memory.
        total = total + checkpoint(chunk_sum, unit, chunk, use_reentrant=False, preserve_rng_state=False)
    return total
