"""Tables with some rows per client: against loops over rows, and against the mean of whole tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fed.numerics.row_sums import RowSums, find_bad_rows
from lightning_fed.numerics.weighted_mean import WeightedMean

Parts = Sequence[tuple[Tensor, Tensor, float]]


def by_loops(base: Tensor, parts: Parts, weighting: str) -> np.ndarray:
    """FedSS, Algorithm 1: a client without the row contributes a change of zero."""
    table = base.double().numpy().copy()
    for row in range(len(table)):
        change, held = np.zeros(table.shape[1:]), 0.0
        for rows, values, weight in parts:
            for index, held_row in enumerate(rows.tolist()):
                if held_row == row:
                    change = change + weight * (values[index].double().numpy() - table[row])
                    held += weight
        whole = sum(weight for _, _, weight in parts) if weighting == "global" else held
        if held:
            table[row] += change / whole
    return table


def some_parts(num_rows: int, columns: Sequence[int], clients: int, seed: int) -> Parts:
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(clients):
        count = int(torch.randint(1, num_rows + 1, (), generator=generator))
        rows = torch.randperm(num_rows, generator=generator)[:count].sort().values
        weight = float(torch.randint(1, 50, (), generator=generator))
        parts.append((rows, torch.randn(count, *columns, generator=generator), weight))
    return parts


@pytest.mark.parametrize("weighting", ["global", "per_row"])
@pytest.mark.parametrize("columns", [(), (3,), (2, 2)])
def test_the_mean_is_that_of_loops(columns: Sequence[int], weighting: str) -> None:
    base = torch.randn(9, *columns, generator=torch.Generator().manual_seed(1))
    parts = some_parts(8, columns, clients=6, seed=2)  # no client holds the last row
    sums = RowSums()
    for part in parts:
        sums.add(*part)
    mean = sums.mean(base, weighting)  # type: ignore[arg-type]
    np.testing.assert_allclose(mean.numpy(), by_loops(base, parts, weighting), rtol=1e-6, atol=1e-7)
    assert torch.equal(mean[8], base[8])
    assert not torch.equal(mean[0], base[0])


def test_the_papers_numbers() -> None:
    sums = RowSums()
    sums.add(torch.tensor([0]), torch.tensor([[1.0]]), weight=10)
    sums.add(torch.tensor([1]), torch.tensor([[1.0]]), weight=30)
    assert sums.mean(torch.zeros(2, 1))[0].item() == 0.25
    assert sums.mean(torch.zeros(2, 1), "per_row")[0].item() == 1.0


def test_all_rows_are_the_whole_entry_to_the_last_bit() -> None:
    generator = torch.Generator().manual_seed(3)
    base = {"w": torch.randn(50, 7, generator=generator)}
    whole, sliced = WeightedMean(), WeightedMean()
    for size in (3, 19, 7):
        state = {"w": torch.randn(50, 7, generator=generator), "b": torch.randn(2, generator=generator)}
        whole.add(state, size, size)
        sliced.add(state, size, size, {"w": torch.arange(50)})
    for weighting in ("global", "per_row"):
        mean = sliced.mean(base, weighting)  # type: ignore[arg-type]
        assert torch.equal(mean["w"], whole.mean()["w"])
        assert torch.equal(mean["b"], whole.mean()["b"])


@pytest.mark.parametrize("weighting", ["global", "per_row"])
def test_some_may_hold_all_of_an_entry(weighting: str) -> None:
    base = torch.randn(6, 2, generator=torch.Generator().manual_seed(4))
    parts = [*some_parts(6, (2,), clients=3, seed=5), (torch.arange(6), torch.ones(6, 2), 4.0)]
    mean = WeightedMean()
    for rows, values, weight in parts[:-1]:
        mean.add({"w": values}, weight, 1, {"w": rows})
    mean.add({"w": parts[-1][1]}, 4.0, 1)
    result = mean.mean({"w": base}, weighting)["w"]  # type: ignore[arg-type]
    np.testing.assert_allclose(result.numpy(), by_loops(base, parts, weighting), rtol=1e-6, atol=1e-7)


def test_neither_the_order_nor_the_process_matters() -> None:
    base = torch.randn(40, 3, generator=torch.Generator().manual_seed(6))
    parts = some_parts(40, (3,), clients=12, seed=7)
    one, backwards, left, right = RowSums(), RowSums(), RowSums(), RowSums()
    for number, part in enumerate(parts):
        one.add(*part)
        backwards.add(*parts[-1 - number])
        (left if number % 3 else right).add(*part)
    left.merge(right)
    assert torch.equal(one.mean(base), backwards.mean(base))
    assert torch.equal(one.mean(base), left.mean(base))
    assert left.total == one.total


def test_memory_is_that_of_the_rows_that_differ() -> None:
    sums = RowSums()
    for _ in range(100):
        sums.add(torch.arange(10), torch.ones(10, 4), 1.0)
        assert sums.num_rows <= 20  # twice the number of different rows
    assert torch.equal(sums.mean(torch.zeros(10, 4)), torch.ones(10, 4))


def test_half_precision_is_summed_up_in_double() -> None:
    sums = RowSums()
    for _ in range(3000):
        sums.add(torch.tensor([1]), torch.tensor([[0.1]], dtype=torch.float16), 1.0)
    mean = sums.mean(torch.zeros(2, 1, dtype=torch.float16))
    assert mean.dtype == torch.float16
    assert torch.equal(mean[1], torch.tensor([0.1], dtype=torch.float16))


def test_weights_of_zero_leave_the_row() -> None:
    sums = RowSums()
    sums.add(torch.tensor([0]), torch.tensor([[5.0]]), 0.0)
    assert torch.equal(sums.mean(torch.ones(1, 1), "per_row"), torch.ones(1, 1))


def test_nothing_was_added() -> None:
    base = torch.ones(2, 2)
    assert torch.equal(RowSums().mean(base), base)
    assert RowSums().mean(base).data_ptr() != base.data_ptr()


def test_an_unknown_weighting() -> None:
    with pytest.raises(ValueError, match=r"Expected `row_weighting` to be one of \['global', 'per_row'\]"):
        RowSums().mean(torch.ones(1, 1), "column")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "table", "fault"),
    [
        (torch.tensor([0, 2]), torch.zeros(3, 1), None),
        (torch.zeros(0, dtype=torch.int64), torch.zeros(3), None),
        (torch.tensor([0, 0]), torch.zeros(3, 1), "not strictly increasing"),
        (torch.tensor([1, 3]), torch.zeros(3, 1), "range from 1 to 3, but the table has 3"),
        (torch.tensor([-1, 2]), torch.zeros(3, 1), "range from -1 to 2, but the table has 3"),
        (torch.tensor([0.0]), torch.zeros(3, 1), "float32 of shape"),
        (torch.tensor([[0]]), torch.zeros(3, 1), "of shape (1, 1)"),
        (torch.tensor([0]), torch.zeros(()), "is not a table of floating-point rows"),
        (torch.tensor([0]), torch.zeros(3, dtype=torch.int64), "is not a table of floating-point rows"),
    ],
)
def test_bad_rows(rows: Tensor, table: Tensor, fault: str | None) -> None:
    described = find_bad_rows(rows, table)
    if fault is None:
        assert described is None
    else:
        assert described is not None
        assert fault in described
