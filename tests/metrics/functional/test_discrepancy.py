"""Maximum mean discrepancy."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_fed.metrics.functional import distances
from lightning_fed.metrics.functional.discrepancy import (
    classwise_maximum_mean_discrepancy,
    maximum_mean_discrepancy,
    median_distance,
)
from tests import references_margin as references
from tests.breadth import quick

ROOT = Path(__file__).parents[3]
X = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
Y = X + 1


def samples(m, n, d=4, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(m, d, generator=generator).to(dtype),
        (0.7 * torch.randn(n, d, generator=generator) + 0.3).to(dtype),
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"bandwidth": 1.0}, 0.757854),
        ({"bandwidth": 1.0, "estimator": "unbiased"}, 0.442507),
        ({"bandwidth": 2**0.5}, 0.587178),
        ({"bandwidth": "pooled"}, 0.587178),
        ({"bandwidth": "median"}, 0.757854),  # distances within Y: 1, 1 and the root of 2
    ],
)
def test_the_examples_of_the_spec(options, expected):
    assert maximum_mean_discrepancy(X, Y, squared=True, **options).item() == pytest.approx(expected, abs=1e-5)
    assert maximum_mean_discrepancy(X, Y, **options).item() == pytest.approx(expected**0.5, abs=1e-5)


SIZES = [(7, 7), (12, 5), (2, 9)]


@pytest.mark.parametrize(
    ("estimator", "bandwidth", "size"),
    quick(
        itertools.product(["biased", "unbiased"], ["median", "pooled", 0.7], SIZES),
        [
            *itertools.product(["biased", "unbiased"], ["median", 0.7], SIZES),
            *itertools.product(["biased", "unbiased"], ["pooled"], SIZES[2:]),
        ],
    ),
)
def test_against_the_reference(size, bandwidth, estimator, monkeypatch):
    x, y = samples(*size)
    sigma = {
        "median": references.median_distance_reference(y),
        "pooled": references.median_distance_reference(torch.cat([x, y])),
    }.get(bandwidth, bandwidth)
    expected = references.mmd_squared_reference(x, y, sigma, estimator)
    options = {"bandwidth": bandwidth, "estimator": estimator}
    for chunk_size in (1, 4, 1000):
        monkeypatch.setattr(distances, "CHUNK", chunk_size)
        result = maximum_mean_discrepancy(x, y, squared=True, **options)
        assert result.item() == pytest.approx(expected, abs=1e-6)  # the median is exact to float32
        assert result.dtype == torch.float64
        root = maximum_mean_discrepancy(x, y, **options)
        assert root.item() == pytest.approx(math.sqrt(max(result.item(), 0)), abs=1e-7)


@pytest.mark.parametrize("estimator", ["biased", "unbiased"])
@pytest.mark.parametrize("chunk_size", quick([7, 17, 64, 250], [17, 64, 250]))
def test_pieces_do_not_matter(chunk_size, estimator, monkeypatch):
    x, y = samples(90, 130, 16)
    options = {"estimator": estimator, "squared": True}
    whole = maximum_mean_discrepancy(x, y, **options)
    monkeypatch.setattr(distances, "CHUNK", chunk_size)
    pieces = maximum_mean_discrepancy(x, y, **options)
    torch.testing.assert_close(pieces, whole, atol=1e-12, rtol=0)


def test_equal_samples_have_no_discrepancy(monkeypatch):
    monkeypatch.setattr(distances, "CHUNK", 64)
    x, _ = samples(200, 1, 32)
    assert maximum_mean_discrepancy(x, x[torch.randperm(200)]).item() < 1e-7
    assert maximum_mean_discrepancy(x, x, estimator="unbiased").item() == 0  # negative before the clamp


def test_it_is_symmetric_for_one_bandwidth():
    x, y = samples(20, 30)
    forth, back = (maximum_mean_discrepancy(a, b, bandwidth=1.3) for a, b in ((x, y), (y, x)))
    assert forth.item() == pytest.approx(back.item(), abs=1e-12)


def test_the_unbiased_estimator_has_no_bias():
    """The unbiased estimate for equal distributions is 0 on average; the biased estimate is not."""
    values = {"biased": [], "unbiased": []}
    for seed in range(100):
        x, _ = samples(20, 1, seed=seed)
        y, _ = samples(20, 1, seed=1000 + seed)
        for name, kept in values.items():
            kept.append(maximum_mean_discrepancy(x, y, bandwidth=2.0, estimator=name, squared=True).item())
    error = np.std(values["unbiased"]) / 10
    assert abs(np.mean(values["unbiased"])) < 4 * error
    assert np.mean(values["biased"]) > 10 * error


def test_it_grows_with_the_shift():
    x, _ = samples(50, 1)
    values = [maximum_mean_discrepancy(x + shift, x).item() for shift in (0, 0.2, 0.5, 1, 2)]
    assert values == sorted(values)
    assert maximum_mean_discrepancy(x + 1e6, x).item() == pytest.approx(
        maximum_mean_discrepancy(x - 1e6, x).item(), rel=1e-3
    )


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_far_from_zero(offset):
    """A common offset does not reduce precision."""
    x, y = samples(40, 40, 8, dtype=torch.float64)
    expected = maximum_mean_discrepancy(x, y, squared=True)
    result = maximum_mean_discrepancy(x + offset, y + offset, squared=True)
    assert result.item() == pytest.approx(expected.item(), abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types(dtype):
    x, y = samples(30, 20, dtype=dtype)
    expected = maximum_mean_discrepancy(x.double(), y.double())
    assert maximum_mean_discrepancy(x, y).item() == pytest.approx(expected.item(), abs=1e-12)


def test_large_half_precision_features():
    """Squares exceed the float16 range."""
    x = torch.tensor([[0.0], [60000.0]], dtype=torch.float16)
    assert median_distance(x) == 60000 - 60000 % 32
    assert maximum_mean_discrepancy(x, x.flip(0)).item() < 1e-7


def test_gradients_are_not_recorded():
    x, y = samples(5, 5)
    assert not maximum_mean_discrepancy(x.requires_grad_(), y).requires_grad


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_seen(value):
    x, y = samples(5, 5)
    x[0, 0] = value
    assert maximum_mean_discrepancy(x, y).isnan()
    with pytest.raises(ValueError, match="the median distance is not finite"):
        maximum_mean_discrepancy(y, x)


# --- Median -----------------------------------------------------------------------------------------------------------


NUMBERS = [2, 3, 4, 5, 31, 40]


@pytest.mark.parametrize(
    ("seed", "n", "chunk_size"),
    quick(
        itertools.product(range(2), NUMBERS, [1, 5, 100]),
        [
            (place % 2, n, size)
            for size in (1, 5, 100)
            for place, n in enumerate(NUMBERS)
            if size == 5 or n == 4 or (size, n) == (100, 31)
        ],
    ),
)
def test_median_against_the_reference(seed, n, chunk_size, monkeypatch):
    monkeypatch.setattr(distances, "CHUNK", chunk_size)
    for scale in (1e-4, 1.0, 1e5):
        x, _ = samples(n, 1, seed=seed)
        expected = references.median_distance_reference(scale * x)
        assert median_distance(scale * x) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "values",
    [
        [0, 0, 1],  # two of three distances are 1
        [0, 0, 0, 1, 1],  # 4 of 10 are 0
        [0, 0, 0, 0, 1],  # the middle of ten lies between 0 and 1: 6 are 0
        [0, 1, 3, 7, 15, 31],
        [0, 1, 1000, 1001],  # the middle two have different leading bits
    ],
)
def test_medians_with_ties(values):
    x = torch.tensor(values, dtype=torch.float32).unsqueeze(1)
    assert median_distance(x) == pytest.approx(references.median_distance_reference(x), rel=1e-6, abs=0)


def test_copies_have_no_distance():
    """For values with non-zero distance in the formula by a matrix product."""
    x = (torch.randn(1, 300) * 100 + 1e3).repeat(6, 1)
    assert median_distance(torch.cat([x, torch.randn(2, 300)])) == 0
    with pytest.raises(ValueError, match="half of the pairs have distance 0: pass"):
        maximum_mean_discrepancy(x + 1, x)


# --- Per class --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["biased", "unbiased"])
@pytest.mark.parametrize("bandwidth", ["median", "pooled", 2.0])
def test_classes_against_the_reference(bandwidth, estimator):
    x, y = samples(30, 26)
    x_labels = torch.tensor([0] * 10 + [1] * 12 + [2] * 1 + [3] * 5 + [255] * 2)
    y_labels = torch.tensor([0] * 8 + [1] * 9 + [2] * 4 + [5] * 5)
    sigma = {
        "median": references.median_distance_reference(y),
        "pooled": references.median_distance_reference(torch.cat([x, y])),
    }.get(bandwidth, bandwidth)
    result = classwise_maximum_mean_discrepancy(
        x, y, x_labels, y_labels, 5, bandwidth=bandwidth, estimator=estimator, squared=True
    )
    for c in range(5):
        members, reference_members = x[x_labels == c], y[y_labels == c]
        if c < (3 if estimator == "biased" else 2):
            expected = references.mmd_squared_reference(members, reference_members, sigma, estimator)
            assert result[c].item() == pytest.approx(expected, abs=1e-6)
        else:
            assert result[c].isnan()


def test_one_class_is_all():
    x, y = samples(20, 30)
    labels = torch.zeros(30, dtype=torch.int64)
    result = classwise_maximum_mean_discrepancy(x, y, labels[:20], labels, 1)
    assert result.item() == maximum_mean_discrepancy(x, y).item()


# --- Errors -----------------------------------------------------------------------------------------------------------

BAD = [
    ({"features": torch.zeros(3)}, r"shape \(m, d\) and \(n, d\), but got \(3,\) and \(3, 2\)"),
    ({"features": torch.zeros(3, 1)}, r"but got \(3, 1\) and \(3, 2\)"),
    ({"features": torch.zeros(0, 2)}, "at least 1 samples, but got 0 and 3"),
    ({"features": torch.zeros(1, 2), "estimator": "unbiased"}, "at least 2 samples, but got 1 and 3"),
    ({"reference": torch.zeros(1, 2)}, "at least 2 samples, but got 1 and 1"),
    ({"estimator": "linear"}, r"`estimator` to be one of \['biased', 'unbiased'\], but got 'linear'"),
    ({"bandwidth": "mean"}, r"`bandwidth` to be one of \['median', 'pooled'\] or a number, but got 'mean'"),
    ({"bandwidth": 0.0}, "`bandwidth` to be greater than 0 and finite, but got 0.0"),
    ({"bandwidth": float("nan")}, "`bandwidth` to be greater than 0 and finite, but got nan"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD)
def test_bad_arguments(wrong, message):
    arguments = {"features": X, "reference": Y, **wrong}
    with pytest.raises(ValueError, match=message):
        maximum_mean_discrepancy(**arguments)


def test_bad_labels():
    labels = torch.tensor([0, 1, 1])
    with pytest.raises(ValueError, match=r"`labels` to be one class per sample \(3\), but got shape \(2,\)"):
        classwise_maximum_mean_discrepancy(X, Y, labels[:2], labels, 2)
    with pytest.raises(
        ValueError, match=r"`reference_labels` to be one class per sample \(3\), but got shape \(3, 1\)"
    ):
        classwise_maximum_mean_discrepancy(X, Y, labels, labels[:, None], 2)
    with pytest.raises(ValueError, match="`estimator` to be one of"):
        classwise_maximum_mean_discrepancy(X, Y, labels, labels, 2, estimator="linear")


# --- Memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_of_twenty_thousand_samples():
    """One distance matrix would take 3.2 GB."""
    command = [sys.executable, "benchmarks/margin_memory.py", "--measure", "mmd", "--samples", "20000"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["peak_bytes"] < 2 * 2**30
    assert result["peak_bytes"] - result["input_bytes"] < 2**28
