"""Maximum mean discrepancy, a distance between the distributions of two feature samples.

Gretton et al., "A Kernel Two-Sample Test", JMLR 2012, equations 3 (unbiased) and 5 (biased). Used by Michieli, Toldo
and Ozay (FedMargin, IEEE Internet of Things Journal 2022), to compare a federated with a centrally trained model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_fed.argument_checks import check_option, check_positive
from lightning_fed.metrics.functional.distances import blocks_of, center, squared_distances
from lightning_fed.numerics.precision import float64_device

Estimator = Literal["biased", "unbiased"]
Bandwidth = Literal["median", "pooled"]

_BITS = 16  # bits of a float32 that one pass over all distances determines


@torch.no_grad()
def maximum_mean_discrepancy(
    features: Tensor,
    reference: Tensor,
    *,
    bandwidth: float | Bandwidth = "median",
    estimator: Estimator = "biased",
    squared: bool = False,
) -> Tensor:
    r"""Computes the maximum mean discrepancy (MMD) with a Gaussian kernel.

    For samples :math:`x_1, \dots, x_m` and :math:`y_1, \dots, y_n`, and a Gaussian kernel :math:`k` of width
    :math:`\sigma`,

    .. math:: k(a, b) = e^{-\lVert a - b \rVert^2 / (2 \sigma^2)}

    .. math:: \text{biased: } \mathrm{MMD}^2 = \frac{1}{m^2} \sum_{i,j} k(x_i, x_j)
        + \frac{1}{n^2} \sum_{i,j} k(y_i, y_j) - \frac{2}{m n} \sum_{i,j} k(x_i, y_j)

    .. math:: \text{unbiased: } \mathrm{MMD}^2 = \frac{1}{m (m - 1)} \sum_{i \ne j} k(x_i, x_j)
        + \frac{1}{n (n - 1)} \sum_{i \ne j} k(y_i, y_j) - \frac{2}{m n} \sum_{i,j} k(x_i, y_j)

    The result is a float64 scalar. The kernel and bandwidth are our reconstruction of FedMargin.

    Args:
        features: Samples :math:`x`, shape ``(m, d)``.
        reference: Reference samples :math:`y`, shape ``(n, d)``.
        bandwidth: Kernel width :math:`\sigma`, greater than 0. "median" is the median distance between reference
            samples, and "pooled" between all samples.
        estimator: "biased" also compares each sample with itself. "unbiased" does not, and can be negative.
        squared: Whether to return :math:`\mathrm{MMD}^2`. By default :math:`\sqrt{\max(\mathrm{MMD}^2, 0)}` is
            returned.

    Raises:
        ValueError: If shapes are inconsistent, samples are too few, an option is invalid, or the median distance is 0.

    Example:
        >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> round(maximum_mean_discrepancy(x, x + 1, squared=True).item(), 6)
        0.757854
    """
    check_option("estimator", estimator, Estimator)
    least = 1 if estimator == "biased" else 2
    _check_samples(features, reference, least)
    check_bandwidth(bandwidth)
    features, reference = (samples.to(float64_device(samples.device)) for samples in (features, reference))
    # The kernel and bandwidth are our choice.
    sigma = _sigma(features, reference, bandwidth)
    factor = -0.5 / sigma**2
    shift = center(reference)
    m, n = len(features), len(reference)
    within = 0.0
    for samples, count in ((features, m), (reference, n)):
        pairs = 2 * _kernel_sum(_pair_distances(samples, shift), factor)
        if estimator == "biased":  # each kernel of a sample with itself is 1
            within += (pairs + count) / count**2
        else:
            within += pairs / (count * (count - 1))
    across = _kernel_sum(_cross_distances(features, reference, shift), factor) / (m * n)
    value = torch.tensor(within - 2 * across, dtype=torch.float64, device=features.device)
    return value if squared else value.clamp(min=0).sqrt()


@torch.no_grad()
def classwise_maximum_mean_discrepancy(
    features: Tensor,
    reference: Tensor,
    labels: Tensor,
    reference_labels: Tensor,
    num_classes: int,
    *,
    bandwidth: float | Bandwidth = "median",
    estimator: Estimator = "biased",
    **options: Any,
) -> Tensor:
    """Computes the maximum mean discrepancy within every class, shape ``(C,)``.

    All classes share one bandwidth, computed from all samples. The result is NaN for a class with too few samples.

    Args:
        features: Samples, shape ``(m, d)``.
        reference: Reference samples, shape ``(n, d)``.
        labels: Sample classes, shape ``(m,)``. Labels outside 0 to C - 1 are skipped.
        reference_labels: Reference classes, shape ``(n,)``.
        num_classes: Number of classes :math:`C`.
        bandwidth: See :func:`maximum_mean_discrepancy`.
        estimator: See :func:`maximum_mean_discrepancy`.
        **options: `squared`, see :func:`maximum_mean_discrepancy`.

    Raises:
        ValueError: As in :func:`maximum_mean_discrepancy`, and if the numbers of labels and samples differ.

    Example:
        >>> x, y = torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([[0.0], [2.0], [7.0]])
        >>> classwise_maximum_mean_discrepancy(x, y, torch.tensor([0, 0, 1]), torch.tensor([0, 0, 2]), 3)
        tensor([0.0995,    nan,    nan], dtype=torch.float64)
    """
    check_option("estimator", estimator, Estimator)
    _check_samples(features, reference, 1)
    for name, values, samples in (("labels", labels, features), ("reference_labels", reference_labels, reference)):
        if values.shape != samples.shape[:1]:
            raise ValueError(
                f"Expected `{name}` to be one class per sample ({len(samples)}), but got shape {tuple(values.shape)}."
            )
    device = float64_device(features.device)
    features, reference, labels, reference_labels = (
        values.to(device) for values in (features, reference, labels, reference_labels)
    )
    sigma = _sigma(features, reference, bandwidth)
    least = 1 if estimator == "biased" else 2
    result = torch.full((num_classes,), torch.nan, dtype=torch.float64, device=device)
    for index in range(num_classes):
        members, reference_members = features[labels == index], reference[reference_labels == index]
        if min(len(members), len(reference_members)) >= least:
            result[index] = maximum_mean_discrepancy(
                members, reference_members, bandwidth=sigma, estimator=estimator, **options
            )
    return result


@torch.no_grad()
def median_distance(samples: Tensor) -> float:
    """Median Euclidean distance over all pairs of samples.

    Args:
        samples: Samples, shape ``(n, d)``, at least two.

    Raises:
        ValueError: If there are fewer than two samples, or a sample is not finite.

    Example:
        >>> median_distance(torch.tensor([[0.0], [1.0], [3.0], [7.0]]))
        3.5
    """
    _check_samples(samples, samples, 2)
    samples = samples.to(float64_device(samples.device))
    pairs = len(samples) * (len(samples) - 1) // 2
    shift = center(samples)
    middle = [(pairs - 1) // 2, pairs // 2]
    leading = _bit_counts(samples, shift, None).cumsum(0)
    heads = [int(torch.searchsorted(leading, rank, right=True)) for rank in middle]
    values = []
    for head in sorted(set(heads)):
        trailing = _bit_counts(samples, shift, head).cumsum(0)
        smaller = int(leading[head - 1]) if head else 0
        for rank, rank_head in zip(middle, heads, strict=True):
            if rank_head == head:
                tail = int(torch.searchsorted(trailing, rank - smaller, right=True))
                bits = torch.tensor(head << _BITS | tail, dtype=torch.int32)
                values.append(math.sqrt(bits.view(torch.float32).item()))
    median = sum(values) / 2
    if not math.isfinite(median):
        raise ValueError("Expected finite samples with distances below 1e19, but the median distance is not finite.")
    return median


def check_bandwidth(bandwidth: float | Bandwidth) -> None:
    """Raises ``ValueError`` for an unknown name, or a number that is not positive."""
    if isinstance(bandwidth, str):
        if bandwidth not in get_args(Bandwidth):
            raise ValueError(
                f"Expected `bandwidth` to be one of {list(get_args(Bandwidth))} or a number, but got {bandwidth!r}."
            )
    else:
        check_positive("bandwidth", bandwidth)


def _bit_counts(samples: Tensor, shift: Tensor, head: int | None) -> Tensor:
    # For non-negative floats, the bit patterns read as integers have the same order as the floats.
    counts = torch.zeros(1 << _BITS, dtype=torch.int64, device=samples.device)
    for block in _pair_distances(samples, shift):
        bits = block.float().abs().view(torch.int32)  # a NaN, which may be negative, is sorted last
        leading = bits >> _BITS
        bits = leading if head is None else bits[leading == head] & ((1 << _BITS) - 1)
        counts += torch.bincount(bits, minlength=1 << _BITS)
    return counts


def _kernel_sum(blocks: Iterator[Tensor], factor: float) -> float:
    # Python numbers, because small tensors between large tensors would prevent memory reuse.
    return sum((block * factor).exp_().sum().item() for block in blocks)


def _pair_distances(samples: Tensor, shift: Tensor) -> Iterator[Tensor]:
    chunks = blocks_of(samples)
    for index, chunk in enumerate(chunks):
        block = squared_distances(chunk, chunk, shift)
        yield block[torch.ones_like(block, dtype=torch.bool).triu(1)]
        for later_chunk in chunks[index + 1 :]:
            yield squared_distances(chunk, later_chunk, shift).flatten()


def _cross_distances(samples: Tensor, reference: Tensor, shift: Tensor) -> Iterator[Tensor]:
    for chunk in blocks_of(samples):
        for reference_chunk in blocks_of(reference):
            yield squared_distances(chunk, reference_chunk, shift)


def _sigma(features: Tensor, reference: Tensor, bandwidth: float | Bandwidth) -> float:
    if isinstance(bandwidth, str):
        samples = reference if bandwidth == "median" else torch.cat([features, reference])
        sigma = median_distance(samples)
        if sigma > 0:
            return sigma
        raise ValueError(
            f"Expected samples that differ for bandwidth={bandwidth!r}, but at least half of the pairs have distance "
            "0: pass a number as `bandwidth`."
        )
    return float(bandwidth)


def _check_samples(features: Tensor, reference: Tensor, least: int) -> None:
    if features.ndim != 2 or reference.ndim != 2 or features.shape[1] != reference.shape[1]:
        raise ValueError(
            "Expected samples of shape (m, d) and (n, d), but got"
            f" {tuple(features.shape)} and {tuple(reference.shape)}."
        )
    if min(len(features), len(reference)) < least:
        raise ValueError(f"Expected at least {least} samples, but got {len(features)} and {len(reference)}.")
