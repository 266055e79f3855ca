"""k-means with the k-means++ start, on tensors.

Arthur & Vassilvitskii, "k-means++: The Advantages of Careful Seeding", SODA 2007; Lloyd, "Least Squares Quantization in
PCM", IEEE Transactions on Information Theory 1982.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


@torch.no_grad()
def k_means(
    points: Tensor, num_centers: int, weights: Tensor, generator: np.random.Generator, max_steps: int = 100
) -> tuple[Tensor, Tensor]:
    r"""Groups points around centres; the first centres are points that are far from one another.

    .. math:: \Pr(\text{next first centre} = x) \propto \min_g \lVert x - c_g \rVert^2

    Then, until nothing changes, every point goes to its nearest centre, and every centre to the weighted mean of its
    points; one without points stays where it is.

    Args:
        points: Shape ``(N, d)``.
        num_centers: Number of centres, at most N.
        weights: Weight of each point in a mean, shape ``(N,)``.
        generator: Draws the first centres.
        max_steps: Largest number of steps.

    Returns:
        Index of every point's centre, shape ``(N,)``, and index of the point that each centre was first, shape
        ``(num_centers,)``.

    Raises:
        ValueError: If there are fewer points than centres.

    Example:
        >>> points = torch.tensor([[0.0], [8.0], [0.2], [7.8]])
        >>> assignments, _ = k_means(points, 2, torch.ones(4), np.random.default_rng(0))
        >>> bool(assignments[0] == assignments[2]), bool(assignments[0] == assignments[1])
        (True, False)

    """
    if len(points) < num_centers:
        raise ValueError(f"Expected at least as many points as centres, but got {len(points)} and {num_centers}.")
    points = points.double()
    first = [int(generator.integers(len(points)))]
    while len(first) < num_centers:
        squares = _squares(points, points[first]).amin(1).cpu().numpy()
        squares[first] = 0
        if squares.sum() == 0:  # all others lie on a centre
            squares = np.ones(len(points))
            squares[first] = 0
        mass = squares.cumsum()
        first.append(int(np.searchsorted(mass / mass[-1], generator.random(), side="right")))
    centers, assignments = points[first], None
    for _ in range(max_steps):
        before, assignments = assignments, _squares(points, centers).argmin(1)
        if before is not None and torch.equal(before, assignments):
            break
        for place in sorted(set(assignments.tolist())):
            share_of = weights.double().to(points.device) * (assignments == place)
            centers[place] = (share_of[:, None] * points).sum(0) / share_of.sum()
    assert assignments is not None
    return assignments, torch.tensor(first)


def _squares(points: Tensor, centers: Tensor) -> Tensor:
    """Squared distances, shape ``(N, G)``; differences are taken first, as large norms would drown small distances."""
    return torch.stack([(points - center).square().sum(1) for center in centers], 1)
