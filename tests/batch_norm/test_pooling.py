"""Recalibrated running statistics against explicit sums over all inputs."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.modules import recalibrate_batch_norm


def network():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 3, 3),
        nn.BatchNorm2d(3, momentum=None), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(3),
    )  # fmt: skip
    with torch.no_grad():
        for tensor in net.state_dict().values():
            if tensor.is_floating_point() and tensor.ndim == 1:
                tensor.add_(torch.rand_like(tensor))
    return net


def by_hand(net, batches):
    """Mean and unbiased variance over all inputs, with batch normalisation by each batch."""
    inputs = {1: [], 5: [], 8: []}
    for batch in batches:
        values = batch.double()
        for number, layer in enumerate(copy.deepcopy(net).double()):
            if number in inputs:
                inputs[number].append(values.transpose(0, 1).flatten(1).detach().numpy())
                dims = tuple(dim for dim in range(values.ndim) if dim != 1)
                mean, variance = values.mean(dims, keepdim=True), values.var(dims, correction=0, keepdim=True)
                shape = [-1 if dim == 1 else 1 for dim in range(values.ndim)]
                values = (values - mean) / (variance + layer.eps).sqrt() * layer.weight.view(shape)
                values = values + layer.bias.view(shape)
            elif not isinstance(layer, nn.Dropout):
                values = layer(values)
    joined = {number: np.concatenate(values, 1) for number, values in inputs.items()}
    return {number: (values.mean(1), values.var(1, ddof=1)) for number, values in joined.items()}


@pytest.mark.parametrize("is_training", [False, True])
def test_statistics_are_those_of_all_inputs(is_training):
    net = network().train(is_training)
    net[4].eval()
    before = copy.deepcopy(net.state_dict())
    images = torch.randn(20, 2, 8, 8) * 3 + 1
    loader = DataLoader(TensorDataset(images, torch.zeros(20)), 8)  # the last batch is smaller
    recalibrate_batch_norm(net, loader)
    for number, (mean, variance) in by_hand(net, images.split(8)).items():
        np.testing.assert_allclose(net[number].running_mean.numpy(), mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(net[number].running_var.numpy(), variance, rtol=1e-5)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]) != name.endswith(("running_mean", "running_var"))
    assert (net[1].momentum, net[5].momentum) == (0.1, None)
    assert [layer.training for layer in net] == [is_training] * 4 + [False] + [is_training] * 4


def test_layers_that_are_not_reached_and_modules_without_any():
    net = nn.ModuleDict({"used": nn.BatchNorm1d(2), "other": nn.BatchNorm1d(2)})
    net.forward = net["used"].__call__
    recalibrate_batch_norm(net, iter([torch.tensor([[1.0, 2.0], [3.0, 6.0]])]))
    assert net["used"].running_mean.tolist() == [2, 4]
    assert net["used"].running_var.tolist() == [2, 8]
    assert net["other"].running_mean.tolist() == [0, 0]
    recalibrate_batch_norm(nn.Linear(2, 2), [torch.zeros(1, 2)])


def test_where_batches_have_their_inputs():
    for batch, key in (({"image": torch.ones(4, 1)}, None), ({"scan": torch.ones(4, 1)}, "scan")):
        net = nn.Sequential(nn.BatchNorm1d(1))
        recalibrate_batch_norm(net, [batch], key)
        assert net[0].running_mean.item() == 1


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "`batches` to have at least one batch, but got none"),
        ([torch.randn(4, 2), {"scan": 1}], "a batch with inputs"),
        ([torch.randn(4, 2), torch.randn(1, 2)], "more than 1 value per channel"),
        ([torch.randn(4, 2), torch.full((4, 2), torch.nan)], "inputs of BatchNorm layers to be finite"),
    ],
)
def test_refusals_change_nothing(batches, message):
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=message):
        recalibrate_batch_norm(net, batches)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.training
    assert all(layer.training for layer in net)
    assert net[0].momentum == 0.1
