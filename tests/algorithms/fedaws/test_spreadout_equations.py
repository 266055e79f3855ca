"""The spread-out regulariser: the paper's equations, plain sums, gradients and bounded memory."""

import pytest
import torch
from torch.nn import functional as F

from lightning_fed.algorithms.fedaws import spreadout_margin, spreadout_top_k
from lightning_fed.numerics import chunks
from tests.breadth import pairs
from tests.references_server import gradient_reference, spreadout_margin_reference, spreadout_top_k_reference

EXAMPLE = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])


def vectors(count=7, size=3, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    lengths = 10 ** torch.linspace(-2, 2, count, dtype=torch.float64)[:, None]
    return (torch.randn(count, size, generator=generator, dtype=torch.float64) * lengths).to(dtype)


def test_the_example():
    """Distances 1, 0.4 and 0.2."""
    assert spreadout_margin(EXAMPLE, 0.9).item() == pytest.approx(2 * (0.5**2 + 0.7**2))
    assert spreadout_top_k(EXAMPLE, torch.arange(3), 1).item() == pytest.approx(-(0.4**2) - 0.2**2 - 0.2**2)


@pytest.mark.parametrize("margin", [0.1, 0.9, 1.7])
def test_margins_against_a_plain_sum(margin):
    weight = vectors()
    assert spreadout_margin(weight, margin).item() == pytest.approx(spreadout_margin_reference(weight.tolist(), margin))


@pytest.mark.parametrize(
    ("classes", "k", "comparison"),
    pairs([[0, 1, 2, 3, 4, 5, 6], [5, 2], [4], []], [1, 3, 100], [None, [0, 2, 3, 6], [4]]),
)
def test_nearest_classes_against_a_plain_sum(classes, k, comparison):
    """Includes a class without other classes for comparison, and fewer than k other classes."""
    weight = vectors()
    given = None if comparison is None else torch.tensor(comparison)
    value = spreadout_top_k(weight, torch.tensor(classes, dtype=torch.int64), k, given)
    assert value.item() == pytest.approx(spreadout_top_k_reference(weight.tolist(), classes, k, comparison))


@pytest.mark.parametrize("elements", [1, 10, 1 << 22])
@pytest.mark.parametrize("variant", ["margin", "top_k"])
def test_gradients_against_differences(variant, elements, monkeypatch):
    """Through the normalisation, for both classes of a distance, in any number of chunks."""
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", elements)
    weight = vectors(5).requires_grad_()
    if variant == "margin":
        spreadout_margin(weight, 0.9).backward()
        expected = gradient_reference(lambda rows: spreadout_margin_reference(rows, 0.9), weight.tolist())
    else:
        spreadout_top_k(weight, torch.tensor([1, 4]), 2, torch.tensor([0, 1, 3, 4])).backward()
        expected = gradient_reference(lambda rows: spreadout_top_k_reference(rows, [1, 4], 2, [0, 1, 3, 4]),
                                      weight.tolist())  # fmt: skip
        assert not weight.grad[2].any()  # neither a class nor a comparison
    assert weight.grad.abs().max() > 0.01
    for ours, theirs in zip(weight.grad.tolist(), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("variant", ["margin", "top_k"])
def test_lengths_do_not_matter(variant):
    """Scaling a vector does not change the value, so gradients are orthogonal to the vectors."""
    weight = vectors().requires_grad_()

    def value(rows):
        return spreadout_margin(rows) if variant == "margin" else spreadout_top_k(rows, torch.arange(7), 2)

    assert value(weight).item() == pytest.approx(value(F.normalize(weight)).item())
    value(weight).backward()
    assert torch.allclose((weight.grad * weight).sum(1), torch.zeros(7, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("variant", ["margin", "top_k"])
def test_a_step_takes_near_classes_apart(variant):
    weight = F.normalize(torch.tensor([[1.0, 0.1], [1.0, -0.1], [-1.0, 0.0]], dtype=torch.float64)).requires_grad_()
    value = spreadout_margin(weight) if variant == "margin" else spreadout_top_k(weight, torch.tensor([0]), 1)
    value.backward()
    moved = F.normalize(weight - 0.1 * weight.grad)
    assert moved[0] @ moved[1] < weight[0] @ weight[1]
    assert torch.equal(weight.grad[2], torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("variant", ["margin", "top_k"])
def test_vectors_of_zeros_have_moderate_gradients(variant):
    """A zero vector has distance 1 to all others, and the step gives the vector a direction."""
    weight = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    value = spreadout_margin(weight, 1.5) if variant == "margin" else spreadout_top_k(weight, torch.arange(2), 1)
    assert value.item() == pytest.approx(0.5 if variant == "margin" else -2.0)
    # a vector is not a neighbour of itself
    assert spreadout_top_k(weight, torch.arange(2), 5).item() == pytest.approx(-2.0)
    value.backward()
    assert weight.grad.abs().max() < 10
    assert (weight.grad[0] / weight.grad[0].norm()).tolist() == pytest.approx([0.6, 0.8])  # away from the other vector


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    weight = vectors(dtype=dtype).requires_grad_()
    for function in (spreadout_margin, lambda rows: spreadout_top_k(rows, torch.arange(7), 2)):
        value = function(weight)
        assert value.dtype == torch.float32
        assert value.item() == pytest.approx(function(weight.detach().float()).item(), rel=1e-6)
        (gradient,) = torch.autograd.grad(value, weight)
        assert gradient.dtype == dtype


def test_memory_is_that_of_pieces(monkeypatch):
    """The full matrix of 1200 x 1200 similarities is never allocated, and the graph stores no chunk."""
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", 12_000)
    largest, kept = [], []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest.append(result.numel())
            return result

    weight = torch.randn(1200, 4, requires_grad=True)
    for variant in (lambda: spreadout_margin(weight), lambda: spreadout_top_k(weight, torch.arange(1200), 2)):
        with Watch(), torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x):
            value = variant()
        value.backward()
        assert len(largest) > 100
        assert max(largest) <= 12_000
        assert max(kept) <= 4_800
        assert weight.grad.any()
        largest.clear()
        kept.clear()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: spreadout_margin(EXAMPLE, 0.0), "`margin` to be greater than 0 and finite, but got 0.0"),
        (lambda: spreadout_margin(torch.zeros(3)), r"`weight` of shape \(n, d\), but got \(3,\)"),
        (lambda: spreadout_top_k(torch.zeros(3), torch.arange(1), 1), r"`weight` of shape \(n, d\), but got \(3,\)"),
        (lambda: spreadout_top_k(EXAMPLE, torch.arange(3), 0), "`k` to be at least 1, but got 0"),
        (lambda: spreadout_top_k(EXAMPLE, torch.arange(3), 1.5), "`k` to be a whole number, but got 1.5"),
    ],
)
def test_options_that_cannot_be(call, message):
    with pytest.raises(ValueError, match=message):
        call()
