"""Euclidean distances between many samples, by a product of matrices."""

from __future__ import annotations

import torch
from torch import Tensor


def squared_distances(samples: Tensor, references: Tensor, shift: Tensor) -> Tensor:
    """Squared Euclidean distances, in float64.

    A distance that cannot be told from rounding is 0, so that copies of a sample have the distance 0.

    Args:
        samples: Samples, shape ``(m, d)``.
        references: Samples to compare them with, shape ``(n, d)``.
        shift: Vector that is subtracted from all samples first, shape ``(d,)``, float64, such as their mean. The least
            is lost to rounding near 0.

    Returns:
        Distances, shape ``(m, n)``, float64, at least 0.

    Example:
        >>> squared_distances(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]]), torch.zeros(2).double())
        tensor([[25.]], dtype=torch.float64)

    """
    samples, references = samples.double() - shift, references.double() - shift
    lengths = samples.square().sum(1).unsqueeze(1) + references.square().sum(1)
    distances = torch.addmm(lengths, samples, references.T, alpha=-2)
    rounding = 4 * samples.shape[1] * torch.finfo(torch.float64).eps
    return distances.masked_fill_(distances <= lengths.mul_(rounding), 0.0)
