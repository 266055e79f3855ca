"""Entropy maps."""

import math

import pytest
import torch

from lightning_fed.metrics.functional.entropy import feature_entropy, shannon_entropy, softmax_entropy
from lightning_fed.numerics import chunks
from tests import references_margin as references
from tests.breadth import pairs

ACTIVATIONS = ["relu", "abs", "softmax"]
SHAPES = [(3, 4), (2, 3, 5), (2, 5, 3, 4), (1, 2, 2, 3, 2)]


def by_pixel(values, function):
    """Applies a function to the channels of every pixel."""
    flat = values.double().flatten(2) if values.ndim > 2 else values.double().unsqueeze(2)
    rows = [[function(pixel.tolist()) for pixel in image.T] for image in flat]
    return torch.tensor(rows, dtype=torch.float64).reshape(values.shape[:1] + values.shape[2:])


@pytest.mark.parametrize("normalize", [False, True])
def test_the_examples_of_the_spec(normalize):
    probabilities = torch.tensor([[0.7, 0.2, 0.1]])
    expected = pytest.approx(0.729847 if normalize else 0.801819, abs=1e-5)
    assert shannon_entropy(probabilities, normalize=normalize).item() == expected
    assert softmax_entropy(probabilities.log(), normalize=normalize).item() == expected
    features = torch.tensor([[2.0, 0.0, 1.0, 1.0]])
    assert feature_entropy(features, normalize=normalize).item() == pytest.approx(
        0.75 if normalize else 1.039721, abs=1e-5
    )


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_against_the_reference(shape, normalize):
    logits = 3 * torch.randn(shape)
    scale = math.log(shape[1]) if normalize else 1.0
    expected = by_pixel(logits, lambda v: references.shannon_reference(references.softmax_reference(v)) / scale)
    result = softmax_entropy(logits, normalize=normalize)
    torch.testing.assert_close(result, expected.float(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(softmax_entropy(logits.double(), normalize=normalize), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_features_that_are_not_finite_have_no_entropy(activation):
    features = torch.tensor([[math.nan, 1.0, 2.0], [0.0, math.inf, 1.0], [3.0, 1.0, 2.0]])
    result = feature_entropy(features, activation=activation, normalize=True)
    assert result.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize(("shape", "activation", "normalize"), pairs(SHAPES, ACTIVATIONS, [False, True]))
def test_features_against_the_reference(shape, activation, normalize):
    features = torch.randn(shape, dtype=torch.float64)
    features[0] = -features[0].abs()  # all 0 after a ReLU
    scale = math.log(shape[1]) if normalize else 1.0

    def of_pixel(values):
        return references.shannon_reference(references.feature_shares_reference(values, activation)) / scale

    result = feature_entropy(features, activation=activation, normalize=normalize)
    torch.testing.assert_close(result, by_pixel(features, of_pixel), atol=1e-12, rtol=0)
    if activation == "relu":
        assert torch.allclose(result[0], torch.tensor(math.log(shape[1]) / scale).double())


@pytest.mark.parametrize("size", [(9, 8), (3, 4), (6, 7)])
def test_maps_are_resized_bilinearly(size):
    features = torch.rand(2, 5, 3, 4, dtype=torch.float64)
    small = feature_entropy(features)
    result = feature_entropy(features, size=size)
    for image, expected in zip(result, small, strict=True):
        reference = references.bilinear_reference(expected.tolist(), *size)
        torch.testing.assert_close(image, torch.from_numpy(reference), atol=1e-12, rtol=0)


@pytest.mark.parametrize("elements", [1, 6, 50])
@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_do_not_matter(shape, elements, monkeypatch):
    values = torch.randn(shape)
    whole = softmax_entropy(values), feature_entropy(values)
    monkeypatch.setattr(chunks, "CHUNK_ELEMENTS", elements)
    # Vector instructions process full registers and scalar code the rest, so chunks change single pixels.
    torch.testing.assert_close(softmax_entropy(values), whole[0])
    torch.testing.assert_close(feature_entropy(values), whole[1])


def test_pieces_are_small():
    """Working memory is bounded by a chunk, for many small images and for few large images."""
    for count, width, positions in ((1000, 21, 1), (7, 21, 1000), (3, 5, 99), (1, 100, 1), (0, 3, 4)):
        for elements in (1, 50, 2000, 10**9):
            images, pixels = chunks.chunk_steps(count, width, positions, elements)
            assert images * width * pixels <= max(elements, width)
            assert images == 1 or pixels == positions
            assert images >= 1
            assert pixels >= 1
    assert chunks.chunk_steps(1000, 21, 4, 10**9) == (1000, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    """Computed in float32: a sum of features may exceed the float16 range."""
    logits = torch.tensor([[20.0, 0.0, -20.0]])
    assert softmax_entropy(logits.to(dtype)).dtype == torch.float32
    assert torch.equal(softmax_entropy(logits.to(dtype)), softmax_entropy(logits))
    assert feature_entropy(torch.full((1, 8), 60000.0, dtype=dtype)).item() == pytest.approx(math.log(8))
    assert shannon_entropy(torch.full((4,), 0.25, dtype=dtype)).dtype == torch.float32


def test_extremes():
    assert softmax_entropy(torch.tensor([[1e4, 0.0, -torch.inf]])).tolist() == [0.0]
    assert softmax_entropy(torch.zeros(1, 6), normalize=True).item() == pytest.approx(1)
    assert feature_entropy(torch.tensor([[0.0, 3.0, 0.0]])).tolist() == [0.0]
    assert feature_entropy(torch.zeros(1, 3, 2, 2), normalize=True).allclose(torch.ones(2, 2))
    assert shannon_entropy(torch.ones(1), normalize=True) == 0
    assert shannon_entropy(torch.full((5,), 0.2), normalize=True).item() == pytest.approx(1)
    assert softmax_entropy(torch.zeros(0, 3, 4, 4)).shape == (0, 4, 4)


def test_the_dimension_of_the_outcomes():
    probabilities = torch.tensor([[0.5, 1.0], [0.5, 0.0]])
    torch.testing.assert_close(shannon_entropy(probabilities, 0), torch.tensor([math.log(2), 0.0]))


def test_gradients_flow():
    """A step along the negative gradient makes a model more certain."""
    logits = torch.randn(4, 3, requires_grad=True)
    before = softmax_entropy(logits).sum()
    (gradient,) = torch.autograd.grad(before, logits)
    assert softmax_entropy(logits - 0.1 * gradient).sum() < before
    features = torch.zeros(2, 3, 2, 2, requires_grad=True)
    feature_entropy(features).sum().backward()
    assert features.grad.isfinite().all()


def test_errors():
    for function, name in ((softmax_entropy, "logits"), (feature_entropy, "features")):
        with pytest.raises(ValueError, match=rf"`{name}` of shape .* but got \(3, 1\).*0 and l"):
            function(torch.zeros(3, 1))
        with pytest.raises(ValueError, match=rf"`{name}` of shape .* but got \(3,\)"):
            function(torch.zeros(3))
    with pytest.raises(ValueError, match=r"`activation` to be one of \['relu', 'abs', 'softmax'\], but got 'gelu'"):
        feature_entropy(torch.zeros(3, 2), activation="gelu")
    with pytest.raises(ValueError, match=r"`size` to be a height and a width, but got \(3, 2\) and \(4, 4\)"):
        feature_entropy(torch.zeros(3, 2), size=(4, 4))
    with pytest.raises(ValueError, match=r"but got \(1, 2, 3, 3\) and \(4,\)"):
        feature_entropy(torch.zeros(1, 2, 3, 3), size=[4])
