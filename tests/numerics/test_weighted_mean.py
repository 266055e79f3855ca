"""The running weighted mean, against exact arithmetic."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch

from lightning_fed.numerics.weighted_mean import WeightedMean


def mean_of(states, weights, sizes=None):
    mean = WeightedMean()
    for state, weight, size in zip(states, weights, sizes or weights, strict=True):
        mean.add(state, weight, size)
    return mean


def random_states(count, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {"w": (scale * torch.randn(5, 3, generator=generator, dtype=torch.float64)).to(dtype)} for _ in range(count)
    ]


def exact_mean(states, weights, name="w"):
    """In rational numbers, rounded once."""
    total = sum(map(Fraction, weights))
    flat = zip(*(state[name].double().flatten().tolist() for state in states), strict=True)
    values = [float(sum(Fraction(w) * Fraction(v) for w, v in zip(weights, row, strict=True)) / total) for row in flat]
    return torch.tensor(values, dtype=torch.float64).reshape(states[0][name].shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights", [[1, 1], [3, 5, 11], [0.1, 0.2, 0.7], [1000, 1, 1], [7] * 31])
def test_against_exact_arithmetic(dtype, weights):
    states = random_states(len(weights), dtype)
    result = mean_of(states, weights).mean()["w"]
    assert result.dtype == dtype
    assert torch.equal(result, exact_mean(states, weights).to(dtype))


def test_double_precision():
    weights = [3, 5, 11]
    states = random_states(3, torch.float64)
    result = mean_of(states, weights).mean()["w"]
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, exact_mean(states, weights), rtol=1e-15, atol=1e-15)


def test_against_numpy():
    weights = np.arange(1.0, 9.0)
    states = random_states(8)
    stacked = np.stack([state["w"].numpy().astype(np.float64) for state in states])
    expected = np.average(stacked, axis=0, weights=weights).astype(np.float32)
    assert np.array_equal(mean_of(states, weights.tolist()).mean()["w"].numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3, 10, 100])
def test_identical_states_are_returned_exactly(dtype, count):
    (state,) = random_states(1, dtype, scale=1e3)
    state["w"].view(-1)[:4] = torch.tensor([0.0, 6e-5, 6e4, -1 / 3]).to(dtype)
    weights = [1 + 13 * index % 17 for index in range(count)]
    assert torch.equal(mean_of([state] * count, weights).mean()["w"], state["w"])
    thirds = [1 / 3] * count
    assert torch.equal(mean_of([state] * count, thirds, [1] * count).mean()["w"], state["w"])


def test_the_order_does_not_matter():
    states, weights = random_states(5, scale=1e4), [1, 50, 3, 7, 2]
    pairs = list(zip(states, weights, strict=True))
    results = [mean_of(*zip(*order, strict=True)).mean()["w"] for order in itertools.permutations(pairs)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_large_values_do_not_overflow():
    """The sum of half-precision values exceeds the float16 range."""
    states = [{"w": torch.tensor([60000.0], dtype=torch.float16)}, {"w": torch.tensor([65000.0], dtype=torch.float16)}]
    assert mean_of(states, [10_000, 10_000]).mean()["w"].item() == 62496  # nearest to 62500
    states = [{"w": torch.tensor([3e38])}, {"w": torch.tensor([3e38])}]
    assert torch.equal(mean_of(states, [1e6, 1e6]).mean()["w"], torch.tensor([3e38]))


def test_small_differences_do_not_drown():
    """Ten thousand states differ in the last bit: a float32 sum would lose the difference."""
    one = torch.tensor([1.0])
    above = torch.nextafter(one, 2 * one)
    mean = WeightedMean()
    for index in range(10_000):
        mean.add({"w": above if index % 4 else one}, 1, 1)
    assert torch.equal(mean.mean()["w"], above)


@pytest.mark.parametrize("cut", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64])
def test_merge_is_add(cut, dtype):
    generator = torch.Generator().manual_seed(1)
    states = [{"w": (10 * torch.randn(4, 2, generator=generator)).to(dtype)} for _ in range(4)]
    weights, sizes = [1, 2.5, 3, 4], [3, 9, 9, 1]
    whole = mean_of(states, weights, sizes)
    left, right = mean_of(states[:cut], weights[:cut], sizes[:cut]), mean_of(states[cut:], weights[cut:], sizes[cut:])
    before = {name: value.clone() for name, value in right.mean().items()} if cut < 4 else None
    left.merge(right)
    assert torch.equal(left.mean()["w"], whole.mean()["w"])
    assert left.total == whole.total
    assert left.count == whole.count == 4
    if before:
        assert torch.equal(right.mean()["w"], before["w"])  # unchanged
        left.add(states[0], 1, 1)
        assert torch.equal(right.mean()["w"], before["w"])


def test_merging_nothing_with_nothing():
    mean = WeightedMean()
    mean.merge(WeightedMean())
    assert (mean.count, mean.total) == (0, 0)


# --- Entries without an average ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_are_those_of_the_largest(dtype):
    values = [torch.tensor(value).to(dtype) for value in (1, 0, 1)]
    states = [{"steps": value} for value in values]
    for order in itertools.permutations(zip(states, [5, 80, 20], strict=True)):
        ordered, sizes = zip(*order, strict=True)
        result = mean_of(ordered, [1, 1, 1], sizes).mean()["steps"]
        assert result.dtype == dtype
        assert torch.equal(result, values[1])


def test_of_equals_the_larger_integer():
    states = [{"steps": torch.tensor([3, 8])}, {"steps": torch.tensor([5, 2])}, {"steps": torch.tensor([100, 100])}]
    sizes = [int("7000"), int("7000"), 6000]  # equal, but not the same object
    for order in itertools.permutations(zip(states, sizes, strict=True)):
        ordered, sizes = zip(*order, strict=True)
        assert mean_of(ordered, [1, 1, 1], sizes).mean()["steps"].tolist() == [5, 8]


def test_the_size_and_not_the_weight_decides():
    states = [{"steps": torch.tensor(1)}, {"steps": torch.tensor(2)}]
    assert mean_of(states, [1.0, 1.0], [10, 5]).mean()["steps"] == 1
    assert mean_of(states, [0.1, 0.9], [10, 5]).mean()["steps"] == 1


def test_merged_integers():
    """The largest of both parts, for any order."""
    states = [{"steps": torch.tensor(value)} for value in (4, 9, 6, 7)]
    sizes = [10, 2, 10, 3]
    for first in itertools.permutations(range(4)):
        for cut in range(1, 4):
            parts = [
                mean_of([states[i] for i in part], [1] * len(part), [sizes[i] for i in part])
                for part in (first[:cut], first[cut:])
            ]
            parts[0].merge(parts[1])
            assert parts[0].mean()["steps"] == 6


def test_complex_entries():
    states = [{"w": torch.tensor([1 + 2j])}, {"w": torch.tensor([3 - 6j])}]
    result = mean_of(states, [1, 3]).mean()["w"]
    assert result.dtype == torch.complex64
    assert result.item() == 2.5 - 4j


def test_shapes():
    states = [
        {"scalar": torch.tensor(1.0), "none": torch.zeros(0, 3)},
        {"scalar": torch.tensor(2.0), "none": torch.zeros(0, 3)},
    ]
    result = mean_of(states, [1, 1]).mean()
    assert result["scalar"].shape == ()
    assert result["scalar"] == 1.5
    assert result["none"].shape == (0, 3)


# --- Ownership and errors ---------------------------------------------------------------------------------------------


def test_what_was_added_is_not_changed():
    state = {"w": torch.ones(3, dtype=torch.float64), "steps": torch.tensor(3)}
    mean = mean_of([state], [2.0], [1])
    mean.add({"w": torch.zeros(3, dtype=torch.float64), "steps": torch.tensor(9)}, 2.0, 5)
    assert torch.equal(state["w"], torch.ones(3, dtype=torch.float64))
    assert state["steps"] == 3
    first = mean.mean()
    first["w"].zero_()
    first["steps"].zero_()
    assert mean.mean()["w"].tolist() == [0.5] * 3
    assert mean.mean()["steps"] == 9


def test_gradients_are_not_recorded():
    weight = torch.nn.Parameter(torch.ones(2))
    result = mean_of([{"w": weight}, {"w": 2 * weight}], [1, 1]).mean()["w"]
    assert not result.requires_grad
    assert result.tolist() == [1.5, 1.5]


def test_the_memory_is_that_of_one_state():
    mean = WeightedMean()
    for index in range(50):
        mean.add({"w": torch.full((10,), float(index))}, 1, 1)
    assert mean.count == 50
    assert sum(value.numel() for value in mean._sums.values()) == 10  # noqa: SLF001


@pytest.mark.parametrize("weight", [-1.0, float("inf"), float("nan")])
def test_weights_out_of_range(weight):
    with pytest.raises(ValueError, match=f"`weight` to be finite and not negative, but got {weight}"):
        WeightedMean().add({"w": torch.ones(1)}, weight, 1)


def test_nothing_to_average():
    with pytest.raises(ValueError, match="at least one state with a positive weight"):
        WeightedMean().mean()
    with pytest.raises(ValueError, match="at least one state with a positive weight"):
        mean_of([{"w": torch.ones(1)}], [0]).mean()
