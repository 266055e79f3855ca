"""Principal component analysis.

Pearson, "On lines and planes of closest fit to systems of points in space", 1901; by singular value decomposition.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fed.argument_checks import check_count


class PrincipalAxes(NamedTuple):
    """A projection to a plane or another subspace.

    ``center`` has shape ``(d,)``. The orthonormal ``axes`` have shape ``(k, d)``, float64.
    """

    center: Tensor
    axes: Tensor

    def project(self, points: Tensor) -> Tensor:
        """Projects points, shape ``(n, d)``, onto the axes. Returns coordinates, shape ``(n, k)``, float64."""
        return (points.double() - self.center) @ self.axes.T

    def turned_to(self, reference: PrincipalAxes) -> PrincipalAxes:
        """Rotates the axes within the subspace towards the ``reference`` axes (Schoenemann 1966)."""
        left, _, right = torch.linalg.svd(reference.axes @ self.axes.T)
        return PrincipalAxes(self.center, left @ right @ self.axes)


@torch.no_grad()
def principal_axes(points: Tensor, count: int = 2) -> PrincipalAxes:
    r"""Computes the mean of points and the orthonormal directions of largest variance.

    .. math:: X - \mathbf{1} \bar x^\top = U S V^\top

    Here :math:`X` are the points, with mean :math:`\bar x`. The axes are the first columns of :math:`V` in this
    singular value decomposition. Axes without variance are zeros.

    Args:
        points: Points, shape ``(n, d)``, with equal weights.
        count: Number of axes :math:`k`.

    Raises:
        ValueError: If ``points`` have a wrong shape or are empty, or ``count`` is below 1.

    Example:
        >>> view = principal_axes(torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]]))
        >>> (view.project(torch.tensor([[3.0, 4.0], [9.0, 12.0]])) + 0.0).round(decimals=6)
        tensor([[ 0.,  0.],
                [10.,  0.]], dtype=torch.float64)
    """
    if points.ndim != 2 or len(points) < 1:
        raise ValueError(f"Expected `points` of shape (n, d) with n of at least 1, but got {tuple(points.shape)}.")
    check_count("count", count)
    values = points.double()
    center = values.mean(0)
    _, spreads, directions = torch.linalg.svd(values - center, full_matrices=False)
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    directions = directions * largest.sign()
    rounding = max(points.shape) * torch.finfo(torch.float64).eps * values.abs().max()
    directions = directions[spreads > rounding][:count]
    axes = values.new_zeros(count, points.shape[1])
    axes[: len(directions)] = directions
    return PrincipalAxes(center, axes)
