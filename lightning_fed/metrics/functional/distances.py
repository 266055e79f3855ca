"""Pairwise Euclidean distances, computed in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fed.numerics.precision import to_float64

CHUNK = 1024
"""Number of samples per block of distances."""


def blocks_of(samples: Tensor) -> tuple[Tensor, ...]:
    """Splits samples into blocks of ``CHUNK`` rows."""
    return torch.split(samples, CHUNK)


def center(samples: Tensor) -> Tensor:
    """Mean over samples of shape ``(n, d)``, in float64."""
    return torch.stack([to_float64(chunk).sum(0) for chunk in blocks_of(samples)]).sum(0) / len(samples)


def squared_distances(samples: Tensor, references: Tensor, shift: Tensor) -> Tensor:
    """Computes squared distances, shape ``(m, n)``, between rows of ``samples`` and ``references``.

    ``shift``, such as the mean, is subtracted from all rows to reduce rounding errors.

    Example:
        >>> squared_distances(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]]), torch.zeros(2).double())
        tensor([[25.]], dtype=torch.float64)
    """
    samples, references = samples.double() - shift, references.double() - shift
    lengths = samples.square().sum(1).unsqueeze(1) + references.square().sum(1)
    distances = torch.addmm(lengths, samples, references.T, alpha=-2)
    rounding = 4 * samples.shape[1] * torch.finfo(torch.float64).eps
    return distances.masked_fill_(distances <= lengths.mul_(rounding), 0.0)
