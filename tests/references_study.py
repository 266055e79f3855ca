"""Statistics of a study, written from the papers with plain loops; nothing from the package.

The spec is specs/study.md: paired t, DeLong, DerSimonian and Laird with Hartung and Knapp, Holm.
"""

import math
import statistics


def psi(x, y):
    return 1.0 if x > y else 0.5 if x == y else 0.0


def delong(positives, negatives):
    """Areas of two models, and the variance of the difference, over all pairs of a positive and a negative.

    Args:
        positives: Pairs with the scores of both models.
        negatives: The same for the negatives.
    """
    m, n = len(positives), len(negatives)
    v10 = [[sum(psi(x[model], y[model]) for y in negatives) / n for x in positives] for model in (0, 1)]
    v01 = [[sum(psi(x[model], y[model]) for x in positives) / m for y in negatives] for model in (0, 1)]
    areas = [sum(values) / m for values in v10]
    over = [statistics.variance(first - second for first, second in zip(*values, strict=True)) for values in (v10, v01)]
    return areas, over[0] / m + over[1] / n


def random_effects(values, variances):
    """Mean, its variance, and the variance between sites."""
    k, weights = len(values), [1 / variance for variance in variances]
    fixed = sum(map(math.prod, zip(weights, values, strict=True))) / sum(weights)
    q = sum(weight * (value - fixed) ** 2 for weight, value in zip(weights, values, strict=True))
    scale = sum(weights) - sum(weight**2 for weight in weights) / sum(weights)
    tau_squared = max(0.0, (q - (k - 1)) / scale)
    weights = [1 / (variance + tau_squared) for variance in variances]
    mean = sum(map(math.prod, zip(weights, values, strict=True))) / sum(weights)
    spread = sum(weight * (value - mean) ** 2 for weight, value in zip(weights, values, strict=True))
    return mean, max(spread / ((k - 1) * sum(weights)), 1 / sum(weights)), tau_squared


def holm_rejects(p_values, level):
    """Holm's step-down procedure: the rejected hypotheses, by position."""
    rejected = set()
    for step, (p, place) in enumerate(sorted((p, place) for place, p in enumerate(p_values))):
        if p > level / (len(p_values) - step):
            break
        rejected.add(place)
    return rejected
