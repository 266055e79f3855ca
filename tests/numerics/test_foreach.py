"""Operations on many tensors: equal results for joint operations, as on a GPU, and for single tensors."""

import pytest
import torch

from lightning_fed.model.entries import distance, find_implausible, load_entries
from lightning_fed.numerics import foreach
from lightning_fed.numerics.weighted_mean import WeightedMean

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


@pytest.fixture(params=["together", "one after another", "few at a time"])
def way(request, monkeypatch):
    """Forces the joint operations, normally used on other devices, on the CPU."""
    if request.param != "one after another":
        monkeypatch.setattr(foreach, "_are_on_the_cpu", lambda tensors: False)
    if request.param == "few at a time":
        monkeypatch.setattr(foreach, "_MOST_ELEMENTS", 10)


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3,), (2, 5), (), (0,), (40,), (1, 2, 3, 4)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    made = [value.to(TYPES[place % len(TYPES)]) for place, value in enumerate(made)]
    return [*made, torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last)]


@pytest.mark.usefixtures("way")
def test_copies_share_no_memory_and_keep_their_layout():
    originals = tensors(0)
    copied = foreach.copies(originals)
    for value, original in zip(copied, originals, strict=True):
        assert torch.equal(value, original)
        assert value.dtype == original.dtype
        assert value.stride() == original.stride()
        assert not value.numel() or value.data_ptr() != original.data_ptr()


@pytest.mark.usefixtures("way")
def test_loading_writes_into_the_entries():
    names = [str(number) for number in range(7)]
    entries, state = (dict(zip(names, tensors(seed), strict=True)) for seed in (0, 1))
    before = {name: value.data_ptr() for name, value in entries.items()}
    load_entries(entries, state)
    assert all(torch.equal(entries[name], value) for name, value in state.items())
    assert {name: value.data_ptr() for name, value in entries.items()} == before


@pytest.mark.usefixtures("way")
def test_sums_are_in_float64():
    values = [tensors(seed) for seed in range(3)]
    mean = WeightedMean()
    for weight, state in zip((1.0, 2.5, 4.0), values, strict=True):
        mean.add({str(number): value for number, value in enumerate(state)}, weight, 1)
    for number, (a, b, c) in enumerate(zip(*values, strict=True)):
        wide = torch.complex128 if a.is_complex() else torch.float64
        expected = ((a.to(wide) + 2.5 * b.to(wide) + 4 * c.to(wide)) / 7.5).to(a.dtype)
        assert torch.allclose(mean.mean()[str(number)].to(wide), expected.to(wide), rtol=1e-7, atol=1e-7)


@pytest.mark.usefixtures("way")
def test_norms_and_distances():
    left, right = tensors(0), tensors(1)
    exact = [torch.linalg.vector_norm(value.to(torch.complex128)) for value in left]
    found = sorted(float(value) for value in foreach.norms(iter(left)))
    assert found == pytest.approx(sorted(map(float, exact)), rel=1e-6)
    wide = (torch.float64, torch.complex128)
    types = [torch.float64 if value.dtype in wide else torch.float32 for value in left]
    assert [length.dtype for length in foreach.norms(left)] == types
    steps = [a.to(torch.complex128) - b.to(torch.complex128) for a, b in zip(left, right, strict=True)]
    expected = torch.cat([step.flatten() for step in steps]).norm()
    states = [{str(number): value for number, value in enumerate(values)} for values in (left, right)]
    assert distance(*states, states[0]) == pytest.approx(float(expected), rel=2e-3)  # bfloat16 numbers
    assert foreach.norms([]) == []
    states = [{"w": value.double()} for value in (torch.tensor([1e-9, 1.0]), torch.tensor([1e-9, -1e-9]))]
    # a bound on the step is as exact as the model
    assert distance(*states, ["w"]) == pytest.approx(1 + 1e-9, rel=1e-15)


@pytest.mark.usefixtures("way")
def test_what_is_not_finite_or_negative_is_found_among_many():
    state = {f"{number}.running_var": torch.ones(3) for number in range(5)}
    state |= {f"{number}.num_batches_tracked": torch.tensor(number) for number in range(5)}
    assert find_implausible(state) is None
    assert find_implausible({**state, "3.running_var": torch.tensor([1.0, -1e-9, 1.0])}) == (
        "entry '3.running_var' is negative"
    )
    assert find_implausible({**state, "2.num_batches_tracked": torch.tensor(-1)}) == (
        "entry '2.num_batches_tracked' is negative"
    )
    assert "'4.running_var' has NaN" in find_implausible({**state, "4.running_var": torch.tensor([torch.nan])})
