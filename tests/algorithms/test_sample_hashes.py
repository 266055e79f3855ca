"""Hashes distinguish samples by content."""

import pytest
import torch

from lightning_fed.algorithms.sample_hashes import sample_hashes


def count(samples):
    return len(set(sample_hashes(samples).tolist()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64, torch.bool])
def test_one_number_for_each_content(dtype):
    for size in (1, 3, 7, 64):
        samples = torch.eye(size).to(dtype)
        assert count(samples) == size
        hashes = sample_hashes(samples)
        order = torch.randperm(size)
        assert torch.equal(sample_hashes(samples[order]), hashes[order])  # does not depend on other samples
        assert torch.equal(sample_hashes(samples[:1]), hashes[:1])


def test_a_single_bit_makes_another_number():
    sample = torch.randn(1, 3, 5, 5)
    for index in range(75):
        for bit in range(0, 32, 5):
            changed = sample.clone()
            changed.view(torch.int32).view(-1)[index] ^= 1 << bit
            assert sample_hashes(changed) != sample_hashes(sample)


@pytest.mark.parametrize(
    "samples",
    [
        (torch.rand(20_000, 196) > 0.5).float(),  # most bits are equal
        torch.stack([torch.randperm(50).float() for _ in range(20_000)]),  # equal sums
        torch.randint(2, (20_000, 40)).to(torch.uint8) * 255,
    ],
    ids=["black and white", "permuted", "bytes"],
)
def test_samples_that_are_alike_do_not_collide(samples):
    assert count(samples) == len(samples.unique(dim=0))


def test_layout_and_views_do_not_matter():
    maps = torch.randn(4, 3, 6, 6)
    assert torch.equal(sample_hashes(maps), sample_hashes(maps.contiguous(memory_format=torch.channels_last)))
    assert torch.equal(sample_hashes(maps[::2]), sample_hashes(maps)[::2])
    assert sample_hashes(torch.randn(4)).shape == (4,)
    assert sample_hashes(torch.randn(4, 2, dtype=torch.complex64)).unique().numel() == 4
    memory = torch.randn(9)
    for start in range(2):  # memory without the alignment of int64
        part = memory[start : start + 8].view(1, 8)
        assert torch.equal(sample_hashes(part), sample_hashes(part.clone()))
