"""Compares two models' scores on the same examples ("cases"), from sums over cases. Arrays may have leading axes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import nctdtrinc, ndtr, ndtri, stdtr, stdtrit

from lightning_fed.messages import Client
from lightning_fed.numerics.seeds import client_key

Floats: TypeAlias = NDArray[np.float64]

SHIFT = 0.5
"""Constant subtracted from every score before the sums, against cancellation."""


@dataclass(frozen=True)
class Estimate:
    """Estimated differences between two models. Missing numbers are NaN.

    Args:
        value: Differences.
        variance: Sampling variances of the differences.
        degrees: Degrees of freedom for Student's t; infinity for the normal distribution.

    Example:
        >>> round(float(Estimate(np.array(0.1), np.array(0.0025), np.array(np.inf)).p_value()), 4)
        0.0455
    """

    value: Floats
    variance: Floats
    degrees: Floats

    def interval(self, level: float = 0.95) -> tuple[Floats, Floats]:
        """Returns the lower and upper confidence bounds for each difference between two models' scores."""
        half = self._quantile((1 + level) / 2) * np.sqrt(self.variance)
        return self.value - half, self.value + half

    def p_value(self) -> Floats:
        """Returns the two-sided p-value for a difference of 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(self.value == 0, 0.0, -np.abs(self.value) / np.sqrt(self.variance))
        ratio = np.where(np.isnan(self.variance), np.nan, ratio)
        return np.asarray(2 * np.where(np.isinf(self.degrees), ndtr(ratio), stdtr(self._finite_degrees(), ratio)))

    def detectable(self, level: float = 0.95, power: float = 0.8) -> Floats:
        """Smallest true difference for which the interval at ``level`` excludes 0 with probability ``power``."""
        limit = self._quantile((1 + level) / 2)
        # The ratio to the standard error has a noncentral t distribution.
        center = nctdtrinc(self._finite_degrees(), 1 - power, limit)
        return np.asarray(np.where(np.isinf(self.degrees), limit + ndtri(power), center) * np.sqrt(self.variance))

    def _quantile(self, share: float) -> Floats:
        return np.asarray(np.where(np.isinf(self.degrees), ndtri(share), stdtrit(self._finite_degrees(), share)))

    def _finite_degrees(self) -> Floats:
        return np.where(np.isinf(self.degrees), 1.0, self.degrees)


@dataclass(frozen=True)
class RandomEffects(Estimate):
    """Estimated mean difference over sites, from a random-effects model.

    ``fixed`` is the fixed-effect mean, and ``q`` Cochran's Q, which measures differences between sites. ``tau_squared``
    is the variance between sites, and ``i_squared`` the share of this variance in the total variance.
    """

    fixed: Floats
    q: Floats
    tau_squared: Floats
    i_squared: Floats


def paired_sums(first: ArrayLike, second: ArrayLike, shift: float = SHIFT) -> Floats:
    """Returns six sums over the scores :math:`a` and :math:`b` of two models on the same n cases.

    The six numbers are n and the sums over :math:`a, b, a^2, b^2, a b`. Both inputs have shape ``(..., n)``. ``shift``
    is first subtracted from every score.

    Example:
        >>> paired_sums([0.5, 1.0], [0.5, 0.5]).tolist()
        [2.0, 0.5, 0.0, 0.25, 0.0, 0.0]
    """
    a, b = np.broadcast_arrays(np.asarray(first, np.float64) - shift, np.asarray(second, np.float64) - shift)
    count = np.full(a.shape[:-1], float(a.shape[-1]))
    return np.stack([count, *(values.sum(-1) for values in (a, b, a * a, b * b, a * b))], axis=-1)


def difference_of_sums(sums: ArrayLike) -> Estimate:
    """Estimates the mean difference between two models' scores from :func:`paired_sums`, as in a paired t-test.

    Example:
        >>> float(difference_of_sums(paired_sums([0.5, 1.0], [0.5, 0.5])).variance)
        0.0625
    """
    count, a, b, a_squared, b_squared, product = np.moveaxis(np.asarray(sums, np.float64), -1, 0)
    total = a - b
    with np.errstate(divide="ignore", invalid="ignore"):
        value, spread = total / count, a_squared + b_squared - 2 * product - total * total / count
        # Equal differences leave rounding errors only.
        spread = np.where(spread > 4 * np.finfo(float).eps * count * (a_squared + b_squared), spread, spread * 0)
        variance = np.where(count < 2, np.nan, spread / (count * (count - 1)))
    return Estimate(value, variance, np.where(count < 2, np.nan, count - 1))


def mean_by_group(scores: ArrayLike, groups: Sequence[Hashable]) -> Floats:
    """Returns the mean score per group. Scores have shape ``(..., n)``, and ``groups`` has n names."""
    values = np.asarray(scores, np.float64)
    places: dict[Hashable, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    return np.stack([values[..., members].mean(-1) for members in places.values()], axis=-1)


def placements(positives: ArrayLike, negatives: ArrayLike) -> tuple[Floats, Floats]:
    """Returns for each positive the share of smaller negatives, and for each negative the share of larger positives.

    Equal scores count one half. The mean of each result is the area under the ROC curve (DeLong et al., Biometrics
    1988).

    Example:
        >>> above, below = placements([0.9, 0.4], [0.5, 0.4])
        >>> above.tolist(), below.tolist()
        ([1.0, 0.25], [0.5, 0.75])
    """
    x, y = np.sort(np.asarray(positives, np.float64)), np.sort(np.asarray(negatives, np.float64))

    def share(values: ArrayLike, others: Floats) -> Floats:
        return np.asarray(sum(np.searchsorted(others, values, side) for side in ("left", "right")) / (2 * len(others)))

    return share(positives, y), 1 - share(negatives, x)


def area_sums(first: tuple[ArrayLike, ArrayLike], second: tuple[ArrayLike, ArrayLike]) -> Floats:
    """Returns ten numbers to compare the areas under the ROC curve of two models (DeLong et al. 1988).

    ``first`` and ``second`` are the models' :func:`placements`. The first four numbers are the counts of positive and
    negative cases, and both areas. The next three are covariances of the placements over the positives: first with
    first, first with second, second with second. The last three are the same covariances over the negatives.

    Example:
        >>> area_sums(placements([0.9, 0.4], [0.5, 0.4]), placements([0.9, 0.6], [0.5, 0.4])).tolist()
        [2.0, 2.0, 0.625, 1.0, 0.28125, 0.0, 0.0, 0.03125, 0.0, 0.0]
    """
    counts, covariances = [], list[float]()
    for values in zip(first, second, strict=True):
        pair = np.stack([np.asarray(value, np.float64) for value in values])
        counts.append(float(pair.shape[1]))
        matrix = np.cov(pair) if pair.shape[1] > 1 else np.full((2, 2), np.nan)
        covariances += [matrix[0, 0], matrix[0, 1], matrix[1, 1]]
    areas = [float(np.asarray(model[0]).mean()) if min(counts) else np.nan for model in (first, second)]
    return np.array([*counts, *areas, *covariances])


def difference_of_areas(sums: ArrayLike) -> Estimate:
    """Estimates the difference between two areas under the ROC curve from :func:`area_sums`, with DeLong's variance."""
    m, n, first, second, *covariances = np.moveaxis(np.asarray(sums, np.float64), -1, 0)
    over_positives, over_negatives = (part[0] + part[2] - 2 * part[1] for part in (covariances[:3], covariances[3:]))
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = np.maximum(over_positives / m + over_negatives / n, 0.0)
    return Estimate(first - second, variance, np.full_like(variance, np.inf))


def draw_cases(seed: int, replicate: int, client: Client, count: int) -> NDArray[np.int64]:
    """Draws a bootstrap sample of a client's cases: ``count`` indices with replacement."""
    generator = np.random.default_rng(np.random.SeedSequence([seed, replicate, client_key(client)]))
    return generator.integers(count, size=count)


def difference_of_replicates(sums: ArrayLike) -> Estimate:
    """Estimates the difference between two models' metric values, with the variance from bootstrap samples.

    ``sums[..., :2]`` are both models' values on all cases. The rest is :func:`paired_sums` of the bootstrap values.
    """
    values = np.moveaxis(np.asarray(sums, np.float64), -1, 0)
    spread = difference_of_sums(np.moveaxis(values[2:], 0, -1))
    return Estimate(values[0] - values[1], spread.variance * values[2], np.full_like(values[0], np.inf))


def random_effects(values: ArrayLike, variances: ArrayLike) -> RandomEffects:
    """Estimates the mean difference over sites by a random-effects model (DerSimonian and Laird 1986).

    ``values`` and ``variances`` have shape ``(..., k)`` for k sites. The variance of the mean follows Hartung and Knapp
    (2001), but is at least 1 / (sum of the weights) (Röver et al. 2015).

    Raises:
        ValueError: If there are fewer than two sites, or a variance is 0.

    Example:
        >>> round(float(random_effects([0.04, 0.01, 0.07, -0.02], [0.0004, 0.0009, 0.0016, 0.0001]).value), 6)
        0.017701
    """
    y, v = np.broadcast_arrays(np.asarray(values, np.float64), np.asarray(variances, np.float64))
    sites = y.shape[-1]
    if sites < 2 or not (v > 0).all():
        raise ValueError(f"Expected at least two sites with positive variances, but got variances {v.tolist()!s:.100}.")
    fixed = (y / v).sum(-1) / (1 / v).sum(-1)
    centered = y - fixed[..., None]  # against cancellation
    sums = effect_sums(centered, v).sum(-2)
    q, tau_squared = sums[..., 2], tau_squared_of_sums(sums, sites)
    mean = effect_of_sums(effect_sums(centered, v, tau_squared[..., None]).sum(-2), sites)
    with np.errstate(divide="ignore", invalid="ignore"):
        i_squared = np.where(q > sites - 1, 1 - (sites - 1) / q, 0.0)
    return RandomEffects(fixed + mean.value, mean.variance, mean.degrees, fixed, q, tau_squared, i_squared)


def effect_sums(values: ArrayLike, variances: ArrayLike, tau_squared: ArrayLike = 0.0) -> Floats:
    """Returns four numbers for each site. The sums over sites give a random-effects mean.

    The numbers are :math:`w, w d, w d^2, w^2`. Here :math:`d` is the difference between two models' scores at a site
    (``values``). The weight is :math:`w = 1 / (v + t)`, with the sampling variance :math:`v` (``variances``) and the
    variance :math:`t` between sites (``tau_squared``).

    Example:
        >>> effect_sums(0.5, 0.25).tolist()
        [4.0, 2.0, 1.0, 16.0]
    """
    y, v, tau = (np.asarray(value, np.float64) for value in (values, variances, tau_squared))
    weights = 1 / (v + tau)
    return np.stack([weights, weights * y, weights * y * y, weights * weights], axis=-1)


def tau_squared_of_sums(sums: ArrayLike, sites: int) -> Floats:
    """Estimates the variance between sites (DerSimonian and Laird). ``sums``: :func:`effect_sums`, added over sites."""
    weights, total, squares, of_weights = np.moveaxis(np.asarray(sums, np.float64), -1, 0)
    q = squares - total * total / weights
    return np.asarray(np.maximum((q - (sites - 1)) / (weights - of_weights / weights), 0.0))


def effect_of_sums(sums: ArrayLike, sites: int) -> Estimate:
    """Estimates the random-effects mean of ``sites`` sites. ``sums``: :func:`effect_sums`, added over all sites."""
    weights, total, squares, _ = np.moveaxis(np.asarray(sums, np.float64), -1, 0)
    spread = (squares - total * total / weights) / ((sites - 1) * weights)
    return Estimate(total / weights, np.maximum(spread, 1 / weights), np.full_like(weights, sites - 1))


def holm(p_values: ArrayLike) -> Floats:
    """Adjusts p-values ``(..., K)`` for multiple testing (Holm 1979). NaN values are not counted as tests.

    Example:
        >>> [round(float(value), 3) for value in holm([0.004, 0.03, 0.2, 0.011])]
        [0.016, 0.06, 0.2, 0.033]
    """
    p = np.asarray(p_values, np.float64)
    order = np.argsort(p, axis=-1)
    ordered = np.take_along_axis(p, order, -1)
    factors = np.isfinite(p).sum(-1, keepdims=True) - np.arange(p.shape[-1])
    adjusted = np.maximum.accumulate(np.minimum(1.0, np.maximum(factors, 1) * ordered), axis=-1)
    result = np.empty_like(p)
    np.put_along_axis(result, order, adjusted, -1)
    return result
