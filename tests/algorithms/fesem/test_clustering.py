"""k-means against plain Python, and the distribution of the first centres."""

from collections import Counter

import numpy as np
import pytest
import torch

from lightning_fed.algorithms.fesem.clustering import embed, k_means
from tests.references_baselines import k_means_reference


@pytest.mark.parametrize("num_centers", [1, 2, 4, 12])
def test_against_plain_python(num_centers):
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        points = torch.randn(12, 3, generator=generator) + 1000  # far from zero, close to one another
        weights = torch.randint(1, 9, (12,), generator=generator)
        groups, first = k_means(points, num_centers, weights, np.random.default_rng(seed))
        expected = k_means_reference(points.tolist(), num_centers, weights.tolist(), np.random.default_rng(seed))
        assert (groups.tolist(), first.tolist()) == expected
        assert len(set(first.tolist())) == num_centers


def test_first_centres_are_drawn_by_squared_distance():
    """Weights for the second centre after 0, 1 or 3 are 1 : 9, 1 : 4 and 9 : 4."""
    points, counts, draws = torch.tensor([[0.0], [1.0], [3.0]]), Counter(), 300
    for seed in range(3 * draws):
        _, first = k_means(points, 2, torch.ones(3), np.random.default_rng(seed), num_starts=1)
        counts[tuple(first.tolist())] += 1
    shares = {(0, 1): 1 / 10, (0, 2): 9 / 10, (1, 0): 1 / 5, (1, 2): 4 / 5, (2, 0): 9 / 13, (2, 1): 4 / 13}
    for pair, share in shares.items():
        assert counts[pair] == pytest.approx(draws * share, abs=5 * (draws * share * (1 - share / 3)) ** 0.5)


def test_the_best_of_several_starts():
    """Five pairs: a single start often puts two centres into one pair, and one centre between two pairs."""
    points = torch.cat([torch.tensor([4.0 * pair, 4.0 * pair + 1]) for pair in range(5)])[:, None]
    best_starts = Counter()
    for seed in range(20):
        for starts in (1, 10):
            groups, _ = k_means(points, 5, torch.ones(10), np.random.default_rng(seed), num_starts=starts)
            best_starts[starts] += len(set(groups[::2].tolist())) == 5 and torch.equal(groups[::2], groups[1::2])
    assert best_starts[10] == 20
    assert best_starts[1] < 20


@pytest.mark.parametrize("count", [1, 2, 7])
def test_embedded_points_are_as_far_from_one_another_as_states(count, monkeypatch):
    monkeypatch.setattr("lightning_fed.algorithms.fesem.clustering.CHUNK_ELEMENTS", 10)
    states = [{"a": torch.randn(3, 4) + 1000, "b": torch.randn(5).half(), "c": torch.randn(2)} for _ in range(count)]
    points = embed(states, ["a", "b"])
    assert points.shape == (count, count)
    flat = torch.stack([torch.cat([state["a"].flatten(), state["b"].float()]).double() for state in states])
    assert torch.allclose(torch.cdist(points, points), torch.cdist(flat, flat), atol=1e-6)


def test_groups_that_are_far_apart_are_found():
    points = torch.cat([torch.randn(20, 5) + 50 * group for group in range(3)])
    groups, _ = k_means(points, 3, torch.ones(60), np.random.default_rng(0))
    assert sorted(len(set(part.tolist())) for part in groups.split(20)) == [1, 1, 1]
    assert len(set(groups.tolist())) == 3


def test_equal_points():
    groups, first = k_means(torch.ones(4, 2), 3, torch.ones(4), np.random.default_rng(0))
    assert groups.tolist() == [0] * 4
    assert len(set(first.tolist())) == 3


def test_too_few_points():
    with pytest.raises(ValueError, match="as many points as centres, but got 2 and 3"):
        k_means(torch.ones(2, 2), 3, torch.ones(2), np.random.default_rng(0))
