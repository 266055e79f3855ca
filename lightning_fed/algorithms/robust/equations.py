"""Equations of the robust rules, in float64.

The updates of n clients form a matrix with one row per client. Rules that select or weight whole clients need only the
Gram matrix (n x n inner products) and return weights. Coordinate-wise rules process chunks of columns.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# ---------------------------------------------------------------------------------------------------------------------
# Distances
# ---------------------------------------------------------------------------------------------------------------------


def squared_distances(gram: Tensor) -> Tensor:
    """Squared Euclidean distances between n updates.

    ``gram`` contains the inner products between all updates, shape ``(n, n)``.

    Example:
        >>> rows = torch.tensor([[0.0, 0.0], [3.0, 4.0]]).double()
        >>> squared_distances(rows @ rows.T)
        tensor([[ 0., 25.],
                [25.,  0.]], dtype=torch.float64)
    """
    lengths = gram.diagonal()
    distances = (lengths.unsqueeze(0) + lengths.unsqueeze(1) - 2 * gram).clamp_min(0)
    return distances.fill_diagonal_(0)


# ---------------------------------------------------------------------------------------------------------------------
# Rules that select clients
# ---------------------------------------------------------------------------------------------------------------------


def krum_scores(distances: Tensor, num_malicious: int) -> Tensor:
    """Krum's score for each client.

    For n clients and f = ``num_malicious``, the score is the sum of the squared distances to the nearest n - f - 2
    other clients, at least one. ``distances`` contains the squared distances, shape ``(n, n)``. Reference: Blanchard,
    El Mhamdi, Guerraoui & Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS
    2017, section 4.

    Example:
        >>> rows = torch.tensor([[0.0], [1.0], [2.0], [3.0], [9.0]]).double()
        >>> krum_scores(squared_distances(rows @ rows.T), num_malicious=1)
        tensor([ 5.,  2.,  2.,  5., 85.], dtype=torch.float64)
    """
    size = len(distances)
    distances_to_others = distances + torch.diag(distances.new_full((size,), float("inf")))
    neighbors = min(size - 1, max(1, size - num_malicious - 2))
    return distances_to_others.sort(dim=1).values[:, :neighbors].sum(1)


def krum_order(distances: Tensor, num_malicious: int) -> list[int]:
    """Returns the clients' indices, sorted by Krum's score with the lowest first.

    ``distances`` contains squared distances between client updates, shape ``(n, n)``. Clients with equal scores are
    sorted by the distances to the other clients, nearest first.

    Example:
        >>> rows = torch.tensor([[0.0], [1.0], [5.0]]).double()
        >>> krum_order(squared_distances(rows @ rows.T), num_malicious=0)
        [1, 0, 2]
    """
    scores = krum_scores(distances, num_malicious).tolist()
    neighbors = distances.sort(dim=1).values.tolist()
    return sorted(range(len(scores)), key=lambda client: (scores[client], neighbors[client]))


def bulyan_choice(distances: Tensor, num_malicious: int) -> Tensor:
    """Selects n - 2 f among n clients by repeated use of Krum.

    Returns the sorted indices. Here f is ``num_malicious``, and ``distances`` contains squared distances between
    updates. Reference: El Mhamdi, Guerraoui & Rouault, "The Hidden Vulnerability of Distributed Learning in Byzantium",
    ICML 2018, section 4.

    Example:
        >>> rows = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0], [8.0], [100.0]]).double()
        >>> bulyan_choice(squared_distances(rows @ rows.T), num_malicious=1)
        tensor([0, 1, 2, 3, 4])
    """
    remaining = krum_order(distances, num_malicious)
    chosen = []
    for _ in range(len(distances) - 2 * num_malicious):
        scores = krum_scores(distances[remaining][:, remaining], num_malicious).tolist()
        chosen.append(remaining.pop(scores.index(min(scores))))
    return torch.tensor(sorted(chosen), dtype=torch.int64)


# ---------------------------------------------------------------------------------------------------------------------
# Rules that weight clients
# ---------------------------------------------------------------------------------------------------------------------


def geometric_median_weights(
    gram: Tensor, smoothing: float = 1e-6, max_iterations: int = 10_000, tolerance: float = 1e-10
) -> Tensor:
    r"""Computes client weights for which the weighted mean of the updates is the geometric median.

    .. math:: v \leftarrow \frac{\sum_i w_i u_i}{\sum_i w_i}, \qquad w_i = \frac{1}{\max(\nu, \lVert v - u_i \rVert)}

    Here :math:`u_i` are the updates, :math:`w_i` the weights, and :math:`v` is the estimated median. The returned
    weights have the sum 1. Reference: Pillutla, Kakade & Harchaoui, "Robust Aggregation for Federated Learning", IEEE
    Transactions on Signal Processing 2022, Algorithm 2.

    Args:
        gram: Inner products between n updates, shape ``(n, n)``.
        smoothing: Lower bound :math:`\nu` for distances.
        max_iterations: Maximum number of iterations.
        tolerance: Largest relative change of the weights at which the iterations stop.

    Example:
        >>> rows = torch.tensor([[1.0], [4.0], [7.0]]).double()
        >>> geometric_median_weights(rows @ rows.T) @ rows
        tensor([4.0000], dtype=torch.float64)
    """
    # Small initial weights for distant clients speed up convergence.
    spread = squared_distances(gram).sqrt().median(dim=1).values
    weights = _normalized(1 / spread.clamp_min(smoothing))
    lengths = gram.diagonal()
    for _ in range(max_iterations):
        products = gram @ weights
        distances = (lengths - 2 * products + weights @ products).clamp_min(0).sqrt()
        updated = _normalized(1 / distances.clamp_min(smoothing))
        is_settled = bool(((updated - weights).abs() <= tolerance * updated).all())
        weights = updated
        if is_settled:
            break
    return weights


def clipping_weights(norms: Tensor, radius: float | None = None) -> Tensor:
    r"""Factors :math:`\min(1, C / \lVert u_i \rVert)`, shape ``(n,)``, that clip updates :math:`u_i` to the norm C.

    C is ``radius``, by default the median of ``norms``. Reference: Sun, Kairouz, Suresh & McMahan, "Can You Really
    Backdoor Federated Learning?", 2019, section 3.

    Example:
        >>> clipping_weights(torch.tensor([0.0, 1.0, 4.0]), radius=2.0)
        tensor([1.0000, 1.0000, 0.5000])
    """
    limit = _median(norms) if radius is None else norms.new_tensor(radius)
    return torch.where(norms > limit, limit / norms, torch.ones_like(norms))


def centered_clipping_weights(gram: Tensor, radius: float | None, iterations: int) -> tuple[Tensor, Tensor]:
    r"""Computes the weights of client updates in centered clipping.

    .. math:: v \leftarrow v + \frac{1}{n} \sum_i (u_i - v) \min\left(1, \frac{\tau}{\lVert u_i - v \rVert}\right)

    Here :math:`u_i` are the n updates. The new centre :math:`v` is the weighted sum of the updates and the old centre.
    Reference: Karimireddy, He & Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021, eq. 5.

    Args:
        gram: Inner products between the n updates and, last, the old centre, shape ``(n + 1, n + 1)``.
        radius: Maximum distance :math:`\tau` to the centre; by default the median distance in each iteration.
        iterations: Number of iterations.

    Returns:
        Weights of the n updates and the old centre, shape ``(n + 1,)``, and the n clipping factors.

    Example:
        >>> rows = torch.tensor([[1.0], [3.0], [0.0]]).double()  # two clients, and the center
        >>> weights, _ = centered_clipping_weights(rows @ rows.T, radius=1.0, iterations=1)
        >>> weights @ rows
        tensor([1.], dtype=torch.float64)
    """
    size = len(gram) - 1
    weights = torch.zeros_like(gram[0])
    weights[-1] = 1.0
    factors = torch.ones_like(gram[0, :size])
    lengths = gram.diagonal()
    for _ in range(iterations):
        products = gram @ weights
        distances = (lengths - 2 * products + weights @ products).clamp_min(0).sqrt()
        factors = clipping_weights(distances[:size], radius)
        weights = weights * (1 - factors.mean())
        weights[:size] += factors / size
    return weights, factors


def trust_weights(norms: Tensor, products: Tensor, trusted_norm: float) -> tuple[Tensor, Tensor]:
    r"""Computes FLTrust's weights of client updates, and the clients' trust scores.

    .. math:: g = \frac{\sum_i t_i \frac{\lVert u_0 \rVert}{\lVert u_i \rVert} u_i}{\sum_i t_i}, \qquad
        t_i = \max(0, \cos(u_i, u_0))

    Here :math:`g` is the weighted mean, :math:`t_i` a trust score, :math:`u_i` a client update, and :math:`u_0` the
    trusted client's update. ``norms`` contains the norms of the client updates, and ``products`` the inner products
    with :math:`u_0`. Both have the shape ``(n,)``. Reference: Cao, Fang, Liu & Gong, "FLTrust: Byzantine-robust
    Federated Learning via Trust Bootstrapping", NDSS 2021, equations 2 to 4.

    Example:
        >>> weights, scores = trust_weights(torch.tensor([2.0, 1.0]), torch.tensor([2.0, -1.0]), trusted_norm=1.0)
        >>> weights, scores
        (tensor([0.5000, 0.0000]), tensor([1., 0.]))
    """
    norm_products = norms * trusted_norm
    scores = torch.where(norm_products > 0, products / norm_products, torch.zeros_like(norm_products)).clamp(0, 1)
    total = float(scores.sum())
    if total == 0:
        return torch.zeros_like(scores), scores
    return torch.where(norms > 0, scores * trusted_norm / (norms * total), torch.zeros_like(norms)), scores


# ---------------------------------------------------------------------------------------------------------------------
# Coordinate-wise rules
# ---------------------------------------------------------------------------------------------------------------------


def trimmed_mean(rows: Tensor, num_trimmed: int) -> tuple[Tensor, Tensor]:
    """Coordinate-wise mean of n updates without the f smallest and f largest values.

    ``rows`` contains one update per row, shape ``(n, k)``, and f is ``num_trimmed``. Also returns how many coordinates
    each client contributed. Reference: Yin, Chen, Ramchandran & Bartlett, "Byzantine-Robust Distributed Learning:
    Towards Optimal Statistical Rates", ICML 2018, definitions 1 and 2.

    Example:
        >>> trimmed_mean(torch.tensor([[0.0, 9.0], [2.0, 1.0], [50.0, 2.0]]).double(), num_trimmed=1)
        (tensor([2., 2.], dtype=torch.float64), tensor([0., 1., 1.], dtype=torch.float64))
    """
    if not num_trimmed:
        return rows.mean(0), rows.new_full((len(rows),), rows.shape[1])
    middle_values = rows.sort(dim=0).values[num_trimmed : len(rows) - num_trimmed]
    is_kept = (rows >= middle_values[0]) & (rows <= middle_values[-1])
    return middle_values.mean(0), is_kept.sum(1).to(rows.dtype)


def mean_around_median(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Coordinate-wise mean of the ``count`` values nearest to the median, shape ``(k,)``.

    ``rows`` contains one update per row, shape ``(n, k)``. Also returns how many coordinates each client contributed,
    shape ``(n,)``.

    Example:
        >>> mean_around_median(torch.tensor([[0.0], [2.0], [3.0], [50.0]]).double(), count=2)
        (tensor([2.5000], dtype=torch.float64), tensor([0., 1., 1., 0.], dtype=torch.float64))
    """
    middle, _ = trimmed_mean(rows, (len(rows) - 1) // 2)
    nearest = (rows - middle).abs().argsort(dim=0, stable=True)[:count]
    is_kept = torch.zeros_like(rows).scatter_(0, nearest, 1.0)
    return rows.gather(0, nearest).mean(0), is_kept.sum(1)


# ---------------------------------------------------------------------------------------------------------------------
# Before a rule: mixtures of client updates
# ---------------------------------------------------------------------------------------------------------------------


def nearest_neighbor_mixing(gram: Tensor, num_malicious: int) -> Tensor:
    """Returns the matrix, shape ``(n, n)``, that replaces each update by the mean of the nearest n - f.

    ``gram`` contains the inner products between n updates, and f is ``num_malicious``. The mean includes the update
    itself. Reference: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot & Stephan, "Fixing by Mixing: A Recipe for Optimal
    Byzantine ML under Heterogeneity", AISTATS 2023, Algorithm 2 ("NNM").

    Example:
        >>> rows = torch.tensor([[0.0], [1.0], [9.0]]).double()
        >>> (nearest_neighbor_mixing(rows @ rows.T, num_malicious=1) @ rows).flatten().tolist()
        [0.5, 0.5, 5.0]
    """
    distances = squared_distances(gram).fill_diagonal_(-1.0)
    count = len(gram) - num_malicious
    nearest = distances.argsort(dim=1, stable=True)[:, :count]
    return torch.zeros_like(gram).scatter_(1, nearest, 1 / count)


def bucketing(size: int, bucket_size: int, generator: np.random.Generator) -> Tensor:
    """Returns the matrix, shape ``(ceil(n / s), n)``, that averages updates in random groups of s clients.

    Here n is ``size``, and s is ``bucket_size``. The last group may be smaller. Reference: Karimireddy, He & Jaggi,
    "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", ICLR 2022, Algorithm 1.

    Example:
        >>> bucketing(3, 2, np.random.default_rng(0)).sum(1)
        tensor([1., 1.], dtype=torch.float64)
    """
    order = generator.permutation(size)
    groups = [order[start : start + bucket_size] for start in range(0, size, bucket_size)]
    mixing = torch.zeros(len(groups), size, dtype=torch.float64)
    for row, group in enumerate(groups):
        mixing[row, group.tolist()] = 1 / len(group)
    return mixing


def adaptive_clipping(gram: Tensor, num_malicious: int) -> Tensor:
    r"""Returns a diagonal matrix of clipping factors for n updates.

    Clipping reduces the :math:`\lfloor 2 f (n - f) / n \rfloor` largest norms to the next largest norm. Here f is
    ``num_malicious``; ``gram`` contains the updates' inner products. Reference: Allouah, Guerraoui, Gupta, Jellouli,
    Rizk & Stephan, "Adaptive Gradient Clipping for Robust Federated Learning", ICLR 2025, Algorithm 2 ("ARC").

    Example:
        >>> rows = torch.tensor([[1.0], [-2.0], [8.0]]).double()
        >>> (adaptive_clipping(rows @ rows.T, num_malicious=1) @ rows).flatten().tolist()
        [1.0, -2.0, 2.0]
    """
    norms = gram.diagonal().sqrt()
    num_clipped = 2 * num_malicious * (len(gram) - num_malicious) // len(gram)
    limit = norms.sort().values[len(gram) - num_clipped - 1]
    return torch.diag(clipping_weights(norms, float(limit)))


def _normalized(weights: Tensor) -> Tensor:
    return weights / weights.sum()


def _median(values: Tensor) -> Tensor:
    # mean of the middle two values for even numbers
    return trimmed_mean(values.unsqueeze(1), (len(values) - 1) // 2)[0][0]
