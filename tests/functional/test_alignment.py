"""Alignment of neurons, against all orders there are."""

import itertools

import pytest
import torch

from lightning_fed.functional import align_neurons


def orders(size, blocks):
    """All orders in which neurons stay with those of their block."""
    width = size // blocks
    for pairs in itertools.permutations(range(blocks)):
        for inner in itertools.product(itertools.permutations(range(width)), repeat=blocks):
            yield [pair * width + place for pair, places in zip(pairs, inner, strict=True) for place in places]


@pytest.mark.parametrize(("size", "blocks"), [(6, 1), (6, 2), (6, 3), (4, 4), (1, 1)])
def test_no_order_is_nearer(size, blocks):
    for _ in range(5):
        reference, neurons = torch.randn(2, size, 3, dtype=torch.float64)
        ours = align_neurons(reference, neurons, blocks)
        distances = {tuple(order): float((reference - neurons[order]).square().sum()) for order in orders(size, blocks)}
        assert distances[tuple(ours.tolist())] == pytest.approx(min(distances.values()))
        if blocks < size > 1:
            assert max(distances.values()) > 1.01 * min(distances.values())


@pytest.mark.parametrize("blocks", [1, 4])
def test_an_order_is_found_again(blocks):
    reference = torch.randn(32, 9)
    order = torch.cat([place * 8 + torch.randperm(8) for place in torch.randperm(4)])
    noisy = (reference + 0.1 * torch.randn(32, 9))[torch.argsort(order)]
    assert torch.equal(align_neurons(reference, noisy, blocks), order)
    assert torch.equal(align_neurons(reference.half(), noisy.half(), blocks), order)


def test_refusals():
    for other in (torch.zeros(4, 2), torch.zeros(6, 3), torch.zeros(6)):
        with pytest.raises(ValueError, match=r"`reference` and `neurons` to have the same shape \(L, D\), but got"):
            align_neurons(torch.zeros(6, 2), other)
    with pytest.raises(ValueError, match="`blocks` to divide the 6 neurons, but got 4"):
        align_neurons(torch.zeros(6, 2), torch.zeros(6, 2), 4)
    with pytest.raises(ValueError, match="to be finite, but got NaN"):
        align_neurons(torch.zeros(2, 2), torch.full((2, 2), torch.nan))
