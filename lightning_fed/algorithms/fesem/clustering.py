"""Clusters model states by k-means, for FeSEM.

Arthur & Vassilvitskii, "k-means++: The Advantages of Careful Seeding", SODA 2007; Lloyd, "Least Squares Quantization in
PCM", IEEE Transactions on Information Theory 1982.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_fed.numerics.chunks import CHUNK_ELEMENTS
from lightning_fed.numerics.precision import to_float64


@torch.no_grad()
def k_means(
    points: Tensor,
    num_centers: int,
    weights: Tensor,
    generator: np.random.Generator,
    num_starts: int = 10,
    max_steps: int = 100,
) -> tuple[Tensor, Tensor]:
    r"""Clusters points by k-means, with k-means++ initialisation.

    .. math:: \Pr(\text{next initial centre} = x) \propto \min_g \lVert x - c_g \rVert^2

    The initial centres are points drawn one after another with this probability, given the earlier centres :math:`c_g`.
    Then two steps alternate until convergence. Each point is assigned to the nearest centre, and each centre moves to
    the weighted mean of its points. The best of several results is returned.

    Returns:
        The cluster index of each point, and the index of the point at each cluster's initial centre.

    Args:
        points: Shape ``(N, d)``.
        num_centers: Number of centres, at most N.
        weights: Weight for each point, shape ``(N,)``.
        generator: Generator for drawing the initial centres.
        num_starts: Number of random initialisations.
        max_steps: Maximum number of steps per initialisation.

    Raises:
        ValueError: If ``points`` has fewer rows than ``num_centers``.

    Example:
        >>> points = torch.tensor([[0.0], [8.0], [0.2], [7.8]])
        >>> assignments, _ = k_means(points, 2, torch.ones(4), np.random.default_rng(0))
        >>> bool(assignments[0] == assignments[2]), bool(assignments[0] == assignments[1])
        (True, False)
    """
    if len(points) < num_centers:
        raise ValueError(f"Expected at least as many points as centres, but got {len(points)} and {num_centers}.")
    points, weights = to_float64(points), to_float64(weights)
    best: tuple[float, Tensor, Tensor] | None = None
    for _ in range(num_starts):
        first = _draw_distant_points(points, num_centers, generator)
        spread, assignments = _lloyd(points, points[first], weights, max_steps)
        if best is None or spread < best[0] * (1 - 1e-9):  # the first of several equal starts
            best = spread, assignments, torch.tensor(first)
    assert best is not None
    return best[1], best[2]


@torch.no_grad()
def embed(states: Sequence[Mapping[str, Tensor]], names: Iterable[str]) -> Tensor:
    """Maps N states to N points, float64 ``(N, N)``, preserving Euclidean distances over the tensors ``names``."""
    products = torch.zeros(len(states), len(states), dtype=torch.float64)
    for name in names:
        rows = [state[name].detach().flatten() for state in states]
        step = max(1, CHUNK_ELEMENTS // len(rows))
        for start in range(0, len(rows[0]), step):
            part = torch.stack([to_float64(row[start : start + step]) for row in rows])
            part -= part.mean(0)
            products += (part @ part.T).cpu()
    values, vectors = torch.linalg.eigh(products)
    points: Tensor = vectors * values.clamp_min(0).sqrt()
    return points


def _draw_distant_points(points: Tensor, count: int, generator: np.random.Generator) -> list[int]:
    first = [int(generator.integers(len(points)))]
    while len(first) < count:
        squares = _squared_distances(points, points[first]).amin(1).cpu().numpy()
        squares[first] = 0
        if squares.sum() == 0:  # every remaining point equals a centre
            squares = np.ones(len(points))
            squares[first] = 0
        mass = squares.cumsum()
        first.append(int(np.searchsorted(mass / mass[-1], generator.random(), side="right")))
    return first


def _lloyd(points: Tensor, centers: Tensor, weights: Tensor, max_steps: int) -> tuple[float, Tensor]:
    squares = _squared_distances(points, centers)
    assignments = squares.argmin(1)
    for _ in range(max_steps):
        for index in sorted(set(assignments.tolist())):
            share = weights * (assignments == index)
            centers[index] = (share[:, None] * points).sum(0) / share.sum()
        squares = _squared_distances(points, centers)
        before, assignments = assignments, squares.argmin(1)
        if torch.equal(before, assignments):
            break
    return float((weights * squares.amin(1)).sum()), assignments


def _squared_distances(points: Tensor, centers: Tensor) -> Tensor:
    # Subtract first: large norms would hide small distances.
    return torch.stack([(points - center).square().sum(1) for center in centers], 1)
