"""Robust rules in plain NumPy on a matrix with one row per client, written from specs/robust.md and the papers.

This file does not import the package. The references loop over clients and coordinates, the package uses inner
products.
"""

import numpy as np


def distance(left, right):
    return float(np.sqrt(sum((a - b) ** 2 for a, b in zip(left, right, strict=True))))


def median_reference(rows):
    columns = []
    for column in rows.T:
        ordered, middle = sorted(column), len(column) // 2
        columns.append(ordered[middle] if len(column) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)
    return np.array(columns)


def trimmed_mean_reference(rows, f):
    return np.array([np.mean(sorted(column)[f : len(column) - f]) for column in rows.T])


def scores_reference(rows, f):
    scores = []
    for i, row in enumerate(rows):
        nearest = sorted(distance(row, rows[j]) ** 2 for j in range(len(rows)) if j != i)
        scores.append(sum(nearest[: max(1, len(rows) - f - 2)]))
    return scores


def krum_order_reference(rows, f):
    """Mutual nearest neighbours tie; the client with the nearer second neighbour comes first."""
    neighbors = [sorted(distance(row, other) ** 2 for other in rows) for row in rows]
    return sorted(range(len(rows)), key=list(zip(scores_reference(rows, f), neighbors, strict=True)).__getitem__)


def krum_reference(rows, f):
    return rows[krum_order_reference(rows, f)[0]]


def multi_krum_reference(rows, f, m=None):
    return np.mean([rows[i] for i in krum_order_reference(rows, f)[: len(rows) - f if m is None else m]], axis=0)


def bulyan_reference(rows, f):
    left, chosen = [rows[i] for i in krum_order_reference(rows, f)], []
    while len(chosen) < len(rows) - 2 * f:  # ties go to the lower score among all clients
        chosen.append(left.pop(int(np.argmin(scores_reference(np.array(left), f)))))
    middle, columns = median_reference(np.array(chosen)), []
    for column, center in zip(np.array(chosen).T, middle, strict=True):
        columns.append(np.mean(sorted(column, key=lambda value: abs(value - center))[: len(rows) - 4 * f]))
    return np.array(columns)


def geometric_median_reference(rows, smoothing=1e-6, iterations=100_000):
    center = rows.mean(0)
    for _ in range(iterations):
        weights = [1 / max(smoothing, distance(row, center)) for row in rows]
        moved = np.average(rows, axis=0, weights=weights)
        if distance(moved, center) < 1e-14 * (1 + distance(moved, 0 * moved)):
            break
        center = moved
    return center


def centered_clipping_reference(rows, radius, iterations, center):
    for _ in range(iterations):
        distances = [distance(row, center) for row in rows]
        limit = float(np.median(distances)) if radius is None else radius
        shares = [1.0 if length <= limit else limit / length for length in distances]
        center = center + np.mean([(row - center) * share for row, share in zip(rows, shares, strict=True)], axis=0)
    return center


def norm_clipping_reference(rows, max_norm):
    """By default the bound is the lower median norm, which no single client can raise."""
    norms = [distance(row, 0 * row) for row in rows]
    limit = sorted(norms)[(len(norms) - 1) // 2] if max_norm is None else max_norm
    return np.mean([row if n <= limit else row * limit / n for row, n in zip(rows, norms, strict=True)], axis=0)


def fltrust_reference(rows, trusted):
    total, result, length = 0.0, 0 * trusted, distance(trusted, 0 * trusted)
    for row in rows:
        norm = distance(row, 0 * row)
        score = max(0.0, float(row @ trusted) / (norm * length)) if norm * length else 0.0
        total += score
        result = result + (score * length / norm * row if score else 0)
    return result / total if total else result


def nnm_reference(rows, f):
    mixed = []
    for i, row in enumerate(rows):
        order = sorted(range(len(rows)), key=lambda j: -1 if j == i else distance(row, rows[j]))
        mixed.append(np.mean([rows[j] for j in order[: len(rows) - f]], axis=0))
    return np.array(mixed)


def arc_reference(rows, f):
    norms = [distance(row, 0 * row) for row in rows]
    clipped = 2 * f * (len(rows) - f) // len(rows)
    limit = sorted(norms)[len(rows) - clipped - 1]
    return np.array([row if norm <= limit else row * limit / norm for row, norm in zip(rows, norms, strict=True)])


def bucketing_reference(rows, order, size):
    return np.array([np.mean(rows[order[start : start + size]], axis=0) for start in range(0, len(rows), size)])


def majority_reference(values):
    """The value of more than half of the clients, or the lower median."""
    for value in values:
        if 2 * sum(other == value for other in values) > len(values):
            return value
    return sorted(values)[(len(values) - 1) // 2]
