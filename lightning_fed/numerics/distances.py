"""Euclidean distances between many samples, by a product of matrices."""

from __future__ import annotations

import torch
from torch import Tensor


def squared_distances(samples: Tensor, others: Tensor, shift: Tensor) -> Tensor:
    """Squared Euclidean distances, in float64.

    What cannot be told from rounding is 0, so that copies of a sample have no distance.

    Args:
        samples: Samples, shape ``(m, d)``.
        others: Samples to compare them with, shape ``(n, d)``.
        shift: Taken from all of them first, shape ``(d,)``, float64: their mean, say. Near 0 least is lost to rounding.

    Returns:
        Distances, shape ``(m, n)``, float64, at least 0.

    Example:
        >>> squared_distances(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]]), torch.zeros(2).double())
        tensor([[25.]], dtype=torch.float64)

    """
    samples, others = samples.double() - shift, others.double() - shift
    lengths = samples.square().sum(1).unsqueeze(1) + others.square().sum(1)
    distances = torch.addmm(lengths, samples, others.T, alpha=-2)
    rounding = 4 * samples.shape[1] * torch.finfo(torch.float64).eps
    return distances.masked_fill_(distances <= lengths.mul_(rounding), 0.0)
