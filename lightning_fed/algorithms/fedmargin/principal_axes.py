"""Principal component analysis: the plane in which points are most spread out.

Pearson, "On lines and planes of closest fit to systems of points in space", 1901; by the singular value decomposition.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fed.argument_checks import check_count


class PrincipalAxes(NamedTuple):
    """A centre and axes that points are projected on.

    Attributes:
        center: The origin, shape ``(d,)``, float64.
        axes: Directions of length 1, orthogonal to each other, shape ``(k, d)``, float64; zeros where there is none.

    """

    center: Tensor
    axes: Tensor

    def project(self, points: Tensor) -> Tensor:
        """Coordinates of points of shape ``(n, d)``: shape ``(n, k)``, float64."""
        return (points.double() - self.center) @ self.axes.T

    def turned_to(self, reference: PrincipalAxes) -> PrincipalAxes:
        """The same plane and centre, with axes turned (and mirrored) in it to be nearest to those of ``reference``.

        The orthogonal Procrustes problem (Schoenemann, "A generalized solution of the orthogonal Procrustes problem",
        1966).
        """
        left, _, right = torch.linalg.svd(reference.axes @ self.axes.T)
        return PrincipalAxes(self.center, left @ right @ self.axes)


@torch.no_grad()
def principal_axes(points: Tensor, count: int = 2) -> PrincipalAxes:
    r"""The directions in which points are most spread out, around their mean.

    .. math:: X - \mathbf{1} \bar x^\top = U S V^\top

    The axes are the first columns of :math:`V`. The sign of an axis is that with which its entry of largest absolute
    value is positive. Where the points have no spread left, the axes are zeros.

    Args:
        points: Points, shape ``(n, d)``; every one counts the same.
        count: Number of axes :math:`k`.

    Returns:
        Centre and axes.

    Raises:
        ValueError: If ``points`` are not of this shape, there are none, or ``count`` is below 1.

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
