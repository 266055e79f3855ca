"""MAP@R, and distances between samples."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_fed.metrics.functional import distances
from lightning_fed.metrics.functional.distances import squared_distances
from lightning_fed.metrics.functional.retrieval import mean_average_precision_at_r
from tests import references_retrieval as references
from tests.breadth import quick

ROOT = Path(__file__).parents[3]


def images(count, classes=5, width=4, seed=0):
    """Embeddings near class directions with different lengths; the last class has a single image."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes - 1, (count,), generator=generator)
    labels[-1] = classes - 1
    embeddings = torch.randn(count, width, generator=generator)
    embeddings += torch.randn(classes, width, generator=generator)[labels]
    return embeddings * (0.1 + 3 * torch.rand(count, 1, generator=generator)), 100 + 7 * labels


@pytest.mark.parametrize(
    ("relevant", "r", "expected"),
    [
        ((1, 0, 1, 1, 0), 5, 0.4833333),
        ((1, 1, 1, 1, 0, 0, 0, 0, 0, 0), 10, 0.4),
        ((1, 0, 1, 1, 0), "relevant", (1 + 2 / 3) / 3),
        ((0, 0, 0, 1), 3, 0.0),
        ((1, 1), 10, 0.2),  # two of ten places are relevant
    ],
)
def test_the_reference_gives_the_examples_of_the_spec(relevant, r, expected):
    depth = sum(relevant) if r == "relevant" else r
    assert references.average_precision_reference(relevant, depth) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("metric", "r"),
    quick(
        itertools.product(["cosine", "euclidean"], [1, 3, 10, 60, "relevant"]),
        [("cosine", "relevant"), ("euclidean", 10), ("euclidean", 60)],
    ),
)
def test_against_the_reference(r, metric, monkeypatch):
    embeddings, labels = images(37)
    expected = references.map_reference(embeddings, labels, r, metric)
    assert 0.01 < expected < 0.95
    for chunk_size in (1, 5, 16, 37, 1000):
        monkeypatch.setattr(distances, "CHUNK", chunk_size)
        result = mean_average_precision_at_r(embeddings, labels, r, metric=metric)
        assert result.dtype == torch.float64
        assert result.item() == pytest.approx(expected, abs=1e-12)


def test_the_two_metrics_differ_but_for_the_length():
    embeddings, labels = images(40)
    cosine, euclidean = (mean_average_precision_at_r(embeddings, labels, metric=m) for m in ("cosine", "euclidean"))
    assert abs(cosine - euclidean) > 0.01
    unit = torch.nn.functional.normalize(embeddings.double(), dim=1)
    assert mean_average_precision_at_r(unit, labels, metric="euclidean").item() == pytest.approx(cosine.item())
    lengths = torch.rand(40, 1, generator=torch.Generator().manual_seed(3)) + 0.1
    assert mean_average_precision_at_r(embeddings * lengths, labels).item() == pytest.approx(cosine.item())
    moved = mean_average_precision_at_r(embeddings.double() + 1e7, labels, metric="euclidean")
    assert moved.item() == pytest.approx(euclidean.item())


def test_a_perfect_model():
    """Embeddings equal class directions: 1. With five images per class MAP@10 is 0.4."""
    labels = torch.arange(30) % 6
    noise = 0.01 * torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
    embeddings = torch.eye(6)[labels] + noise
    assert mean_average_precision_at_r(embeddings, labels, "relevant").item() == 1
    assert mean_average_precision_at_r(embeddings, labels, 4).item() == 1
    assert mean_average_precision_at_r(embeddings, labels, 10).item() == pytest.approx(0.4)
    assert mean_average_precision_at_r(embeddings, torch.arange(30), 10).item() == 0
    assert mean_average_precision_at_r(embeddings, torch.arange(30), "relevant").isnan()  # no class has two images


def test_an_image_is_not_its_own_neighbour(monkeypatch):
    """Copies are other images, and do count."""
    monkeypatch.setattr(distances, "CHUNK", 3)
    embeddings, labels = torch.eye(4).repeat(2, 1), torch.arange(4).repeat(2)
    assert mean_average_precision_at_r(embeddings, labels, "relevant").item() == 1
    assert mean_average_precision_at_r(embeddings, labels, 2).item() == 0.5  # the second image is irrelevant


@pytest.mark.parametrize("chunk_size", quick([2, 7, 100], [7]))
def test_equally_near_images(chunk_size, monkeypatch):
    """Irrelevant images come first for any order: on a grid most distances are ties."""
    monkeypatch.setattr(distances, "CHUNK", chunk_size)
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randint(3, (60, 2), generator=generator).float()
    labels = torch.randint(3, (60,), generator=generator)
    for metric in ("cosine", "euclidean"):
        for r in (5, "relevant"):
            expected = references.map_reference(embeddings, labels, r, metric)
            assert expected > 0.01
            for order in (torch.arange(60), torch.randperm(60, generator=generator), labels.argsort()):
                result = mean_average_precision_at_r(embeddings[order], labels[order], r, metric=metric)
                assert result.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("point", [torch.zeros(3), torch.tensor([0.3, -0.7, 1.1])])
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_one_point_for_all_images_gets_no_credit(point, metric, monkeypatch):
    monkeypatch.setattr(distances, "CHUNK", 16)
    labels = torch.arange(40) // 2
    assert mean_average_precision_at_r(point.repeat(40, 1), labels, 10, metric=metric).item() == 0
    assert mean_average_precision_at_r(point.repeat(40, 1), labels, "relevant", metric=metric).item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types(dtype):
    embeddings, labels = images(30)
    expected = mean_average_precision_at_r(embeddings.to(dtype).double(), labels)
    result = mean_average_precision_at_r(embeddings.to(dtype), labels.to(torch.int32))
    assert result.item() == pytest.approx(expected.item(), abs=1e-12)


def test_the_inputs_stay_as_they_are():
    embeddings, labels = images(20)
    embeddings = embeddings.double().requires_grad_()
    before = embeddings.detach().clone(), labels.clone()
    for metric in ("cosine", "euclidean"):
        assert not mean_average_precision_at_r(embeddings, labels, metric=metric).requires_grad
    assert torch.equal(embeddings.detach(), before[0])
    assert torch.equal(labels, before[1])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite(value):
    """A diverged model has NaN as score, as in the loss."""
    embeddings, labels = images(9)
    embeddings[4, 1] = value
    assert mean_average_precision_at_r(embeddings, labels).isnan()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "`r` to be at least 1, but got 0"),
        ({"r": 2.5}, "`r` to be a whole number, but got 2.5"),
        ({"r": "all"}, "`r` to be an integer or 'relevant', but got 'all'"),
        ({"metric": "dot"}, r"`metric` to be one of \['cosine', 'euclidean'\], but got 'dot'"),
        ({"embeddings": torch.zeros(9)}, r"`embeddings` of shape \(n, d\) with n at least 1, but got \(9,\)"),
        ({"embeddings": torch.zeros(0, 4), "labels": torch.zeros(0).long()}, r"n at least 1, but got \(0, 4\)"),
        ({"labels": torch.zeros(8).long()}, r"`labels` of shape \(9,\), but got \(8,\)"),
        ({"labels": torch.zeros(9)}, r"`labels` to be integers, but got torch\.float32"),
    ],
)
def test_refusals(changes, message):
    embeddings, labels = images(9)
    with pytest.raises(ValueError, match=message):
        mean_average_precision_at_r(**{"embeddings": embeddings, "labels": labels, **changes})


def test_distances():
    """Copies have distance zero, even far from the origin."""
    samples = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).double()
    expected = [
        [sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) for y in samples.tolist()] for x in samples.tolist()
    ]
    for offset in (0.0, 1e6):
        moved = samples + offset
        for shift in (torch.zeros(3), moved.mean(0)):
            distances = squared_distances(moved, moved, shift.double())
            assert (distances.diagonal() == 0).all()
            assert (distances >= 0).all()
            if not offset or shift.any():
                torch.testing.assert_close(distances, torch.tensor(expected).double(), atol=1e-7, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_is_bounded():
    """The full distance matrix for 6,000 images would take 274 MiB."""
    command = [sys.executable, "benchmarks/retrieval_memory.py", "--measure", "map", "--samples", "6000"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["peak_bytes"] - result["input_bytes"] < 6000**2 * 8 / 2
    assert 0 < result["value"] < 1
    assert math.isfinite(result["cpu_s"])
