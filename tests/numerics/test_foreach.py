"""Operations on many tensors: equal results for flat runs and for single tensors."""

import pytest
import torch
from torch import nn

from lightning_fed.client.client_store import MemoryStore
from lightning_fed.client.local_model import LocalModel
from lightning_fed.model.entries import distance, entry_policies, find_implausible, load_entries
from lightning_fed.numerics import trees
from lightning_fed.numerics.weighted_mean import WeightedMean

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3,), (2, 5), (), (0,), (40,), (1, 2, 3, 4)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    made = [value.to(TYPES[place % len(TYPES)]) for place, value in enumerate(made)]
    return [*made, torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last)]


def test_copies_share_no_memory_and_keep_their_layout():
    originals = tensors(0)
    copied = trees.copies(originals)
    for value, original in zip(copied, originals, strict=True):
        assert torch.equal(value, original)
        assert value.dtype == original.dtype
        assert value.stride() == original.stride()
        assert not value.numel() or value.data_ptr() != original.data_ptr()


def test_loading_writes_into_the_entries():
    names = [str(number) for number in range(7)]
    entries, state = (dict(zip(names, tensors(seed), strict=True)) for seed in (0, 1))
    before = {name: value.data_ptr() for name, value in entries.items()}
    load_entries(entries, state)
    assert all(torch.equal(entries[name], value) for name, value in state.items())
    assert {name: value.data_ptr() for name, value in entries.items()} == before


def test_sums_are_in_float64():
    values = [tensors(seed) for seed in range(3)]
    mean = WeightedMean()
    for weight, state in zip((1.0, 2.5, 4.0), values, strict=True):
        mean.add({str(number): value for number, value in enumerate(state)}, weight, 1)
    for number, (a, b, c) in enumerate(zip(*values, strict=True)):
        wide = torch.complex128 if a.is_complex() else torch.float64
        expected = ((a.to(wide) + 2.5 * b.to(wide) + 4 * c.to(wide)) / 7.5).to(a.dtype)
        assert torch.allclose(mean.mean()[str(number)].to(wide), expected.to(wide), rtol=1e-7, atol=1e-7)


def test_norms_and_distances():
    left, right = tensors(0), tensors(1)
    exact = [torch.linalg.vector_norm(value.to(torch.complex128)) for value in left]
    found = sorted(float(value) for value in trees.norms(iter(left)))
    assert found == pytest.approx(sorted(map(float, exact)), rel=1e-6)
    wide = (torch.float64, torch.complex128)
    types = [torch.float64 if value.dtype in wide else torch.float32 for value in left]
    assert [length.dtype for length in trees.norms(left)] == types
    steps = [a.to(torch.complex128) - b.to(torch.complex128) for a, b in zip(left, right, strict=True)]
    expected = torch.cat([step.flatten() for step in steps]).norm()
    states = [{str(number): value for number, value in enumerate(values)} for values in (left, right)]
    assert distance(*states, states[0]) == pytest.approx(float(expected), rel=2e-3)  # bfloat16 numbers
    assert trees.norms([]) == []
    states = [{"w": value.double()} for value in (torch.tensor([1e-9, 1.0]), torch.tensor([1e-9, -1e-9]))]
    # a bound on the step is as exact as the model
    assert distance(*states, ["w"]) == pytest.approx(1 + 1e-9, rel=1e-15)


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


def test_copies_are_joined_again(monkeypatch):
    originals = [value for value in tensors(0) if value.dtype == torch.float32]
    originals += [torch.tensor([1, 2]), torch.tensor(3), torch.ones(2, 2), torch.zeros(6).expand(2, 6)]
    copied = trees.copies(originals)
    other_copied = trees.copies(originals)
    floats, integers, others = [0, 1, 5], [3, 4], [2, 6]
    assert [value.dtype == torch.int64 for value in copied] == [place in integers for place in range(7)]
    assert [place for place in range(7) if not originals[place].is_contiguous()] == others
    order = [0, 3, 1, 2, 4, 6, 5]
    joined = trees.join([copied[place] for place in order], [other_copied[place] for place in order])
    assert [len(flat) for flat, _ in joined if flat.ndim == 1] == [
        sum(originals[place].numel() for place in places) for places in (floats, integers)
    ]
    assert len(joined) == 2 + len(others)
    for flat, other_flat in joined:
        assert torch.equal(flat, other_flat)
        flat += 1  # a view
    assert all(torch.equal(value, original + 1) for value, original in zip(copied, originals, strict=True))
    monkeypatch.setattr(trees, "_BUFFER_ELEMENTS", 8)
    sizes = [value.untyped_storage().nbytes() for value in trees.copies([*[torch.ones(4)] * 5, torch.ones(9)])]
    assert sizes == [32, 32, 32, 32, 52, 52]


def test_a_models_copy_is_one_flat_tensor_per_kind(monkeypatch):
    """One call checks or adds all parameters, not one call per entry."""
    net = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))))
    local = LocalModel(net, entry_policies(net), MemoryStore())
    start, end = local.global_state(), local.answer("a", 1).state
    parameters = [name for name, _ in net.named_parameters()]
    assert len(trees.find_runs([start[name] for name in parameters], [end[name] for name in parameters])) == 1
    assert len(trees.find_runs(list(start.values()), list(end.values()))) == 4  # also BatchNorm
    sums = WeightedMean()
    sums.add(start, 1.0, 1)
    added = []
    monkeypatch.setattr(trees, "cache_chunks", lambda value: added.append(value) or (value,))
    sums.add(end, 2.0, 1)
    size = sum(value.numel() for value in net.parameters())
    assert [len(flat) for flat in added] == [size, size, 10, 10, 10, 10]
    assert all(torch.equal(value, start[name]) for name, value in sums.mean().items())


def test_neighbours_in_separate_memory_are_not_joined():
    memory = torch.arange(8.0)
    first, second = (torch.frombuffer(memory.numpy()[part], dtype=torch.float32) for part in (slice(4), slice(4, 8)))
    assert second.data_ptr() == first.data_ptr() + 16
    assert [len(run) for run in trees.find_runs([first, second])] == [1, 1]
    assert [len(run) for run in trees.find_runs([memory[:4], memory[4:]], [first, second])] == [1, 1]
    assert [len(run) for run in trees.find_runs([memory[:4], memory[4:].view(torch.int32)])] == [1, 1]
    assert [len(run) for run in trees.find_runs([memory[:4], memory[4:]])] == [2]
