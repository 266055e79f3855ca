"""FedFusion's equations."""

import pytest
import torch

from lightning_fed.algorithms.fedfusion.equations import (
    channel_axis_of,
    fuse_conv,
    fuse_multi,
    fuse_single,
    smooth_weight,
)
from tests.references_fusion import fuse_reference

SHAPES = {  # features: shape, and options for the channel axis
    "vectors": ((5, 6), None, 1),
    "tokens": ((5, 3, 6), None, 2),
    "sequences": ((5, 6, 3), 1, 1),
    "maps": ((5, 6, 4, 3), None, 1),
    "maps, channels last": ((5, 4, 3, 6), -1, 3),
    "volumes": ((5, 6, 2, 4, 3), None, 1),
}


def draw(shape, dtype=torch.float64, **options):
    return torch.randn(shape, dtype=dtype, **options)


def fuse(kind, local, reference, weight, bias=None, axis=None):
    if kind == "conv":
        return fuse_conv(local, reference, weight, bias, axis)
    return fuse_multi(local, reference, weight, axis) if kind == "multi" else fuse_single(local, reference, weight)


def weights(kind, channels=6, **options):
    shape = {"conv": (channels, 2 * channels), "multi": (channels,), "single": ()}[kind]
    return [draw(shape, **options), *([draw((channels,), **options)] if kind == "conv" else [])]


def test_numbers_of_multi_and_single():
    local, reference = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]])
    assert fuse_multi(local, reference, torch.tensor([0.25, 0.5])).tolist() == [[1.5, 0.5]]
    assert fuse_single(local, reference, torch.tensor(0.25)).tolist() == [[1.5, 1.25]]


def test_numbers_of_conv_have_the_global_features_first():
    local, reference = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]])
    weight = torch.tensor([[1.0, 0.0, 0.5, 0.0], [0.0, 2.0, 0.0, -1.0]])
    assert fuse_conv(local, reference, weight).tolist() == [[3.5, -4.0]]
    assert fuse_conv(reference, local, weight).tolist() == [[2.5, 5.0]]  # result of the authors' program


@pytest.mark.parametrize("kind", ["conv", "multi", "single"])
@pytest.mark.parametrize(("shape", "said", "axis"), SHAPES.values(), ids=SHAPES)
def test_values_and_gradients(kind, shape, said, axis):
    local, reference = draw(shape, requires_grad=True), draw(shape, requires_grad=True)
    parameters = weights(kind, requires_grad=True)
    inputs = [local, reference, *parameters]
    result, expected = fuse(kind, *inputs, axis=said), fuse_reference(kind, *inputs, axis=axis)
    torch.testing.assert_close(result, expected)
    slope = draw(shape)
    grads = [torch.autograd.grad(value, inputs, slope) for value in (result, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("kind", ["multi", "single"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_of_zero_are_the_plain_model_to_the_last_bit(kind, dtype):
    local = draw((5, 6, 4, 3), dtype, requires_grad=True)
    reference = draw((5, 6, 4, 3), dtype)
    (weight,) = weights(kind)
    result = fuse(kind, local, reference, torch.zeros_like(weight))
    assert result.dtype == dtype
    assert torch.equal(result, local)
    slope = draw((5, 6, 4, 3), dtype)
    assert torch.equal(torch.autograd.grad(result, local, slope)[0], slope)


@pytest.mark.parametrize("kind", ["multi", "single"])
def test_equal_features_stay_as_they_are_and_move_no_weight(kind):
    features, parameters = draw((5, 6, 4, 3), torch.float32), weights(kind, dtype=torch.float32, requires_grad=True)
    result = fuse(kind, features, features.clone(), *parameters)
    assert torch.equal(result, features)
    assert not torch.autograd.grad(result.sum(), parameters)[0].any()


def test_layout_of_maps_is_kept():
    local = torch.randn(2, 4, 5, 5)
    weight, bias = weights("conv", 4, dtype=torch.float32)
    for layout in (torch.contiguous_format, torch.channels_last):
        maps = local.contiguous(memory_format=layout)
        assert fuse_conv(maps, maps, weight, bias).is_contiguous(memory_format=layout)


def test_smooth_weight_starts_from_zero():
    value, values = torch.zeros(()), []
    for mean in (0.2, 0.3, 0.1):
        value = smooth_weight(torch.tensor(mean), value, ema=0.9)
        values.append(value.item())
    assert values == pytest.approx([0.02, 0.048, 0.0532])
    weighted = torch.tensor((1 * 0.0 + 3 * 0.4) / 4)  # clients with 1 and 3 examples
    assert smooth_weight(weighted, torch.zeros(()), ema=0.9).item() == pytest.approx(0.03)


def test_smooth_weight_without_average_is_the_weight():
    weight = torch.randn(4)
    assert smooth_weight(weight, torch.randn(4), ema=0) is weight


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: fuse_multi(x, x[:1], torch.zeros(6)), "Expected `reference` to have the shape of `local`"),
        (lambda x: fuse_multi(x, x, torch.zeros(4)), "a number for each of 6 channels"),
        (lambda x: fuse_multi(x, x, torch.zeros(())), "a number for each of 6 channels"),
        (lambda x: fuse_single(x, x, torch.zeros(1)), "Expected `weight` to be one number"),
        (lambda x: fuse_conv(x, x, torch.zeros(6, 6)), r"Expected `weight` to have shape \(6, 12\)"),
        (lambda x: channel_axis_of(x, 0), "channels on axis 0"),
        (lambda x: channel_axis_of(x, 2), "channels on axis 2"),
        (lambda x: channel_axis_of(x[:, 0]), "Expected features with examples"),
    ],
)
def test_what_does_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(5, 6))
