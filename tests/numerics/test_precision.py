"""Float64 sums for tensors on a device without float64, simulated because no test machine has one."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_fed import ClientUpdate
from lightning_fed.algorithms import (
    CenteredClipping,
    FedAtt,
    FedAvg,
    FedMargin,
    FeSEM,
    GeometricMedian,
    Krum,
    Median,
)
from lightning_fed.algorithms.fedmargin import class_prototypes, class_sums
from lightning_fed.batch_norm.measurement import InputStatistics, pool_statistics
from lightning_fed.metrics import AggregateMeanMargin, MaximumMeanDiscrepancy, MeanEntropy
from lightning_fed.model.entries import batch_norm_layers
from lightning_fed.rule import RoundInfo
from tests.breadth import slow

MPS = torch.device("mps")
ROBUST = (Median, Krum, GeometricMedian, lambda: CenteredClipping(0.1))
CPU = torch.device("cpu")


class Apple(torch.Tensor):
    """A tensor that reports Apple's device."""


class AppleDevice(TorchFunctionMode):
    """The rules of the device: no float64, and no operations across devices except scalars and copies."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        on_apple = [isinstance(tensor, Apple) for tensor in tensors]
        if func == torch.Tensor.device.__get__:
            return MPS if on_apple[0] else func(*args)
        if any(on_apple) and func is not torch.Tensor.copy_:
            strangers = [tensor.ndim for tensor, is_on_apple in zip(tensors, on_apple, strict=True) if not is_on_apple]
            assert not any(strangers), f"{func} of tensors on two devices"
        moves = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        is_apple = moves[0] == MPS if moves else any(on_apple) and func is not torch.Tensor.cpu
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - from torch's guide to subclasses
            result = func(
                *(CPU if leaf == MPS and isinstance(leaf, torch.device) else leaf for leaf in args),
                **{name: CPU if name == "device" and value == MPS else value for name, value in kwargs.items()},
            )

        def placed(value):
            assert not (is_apple and value.dtype in (torch.float64, torch.complex128)), f"{func} makes float64"
            return value.as_subclass(Apple if is_apple else torch.Tensor)

        return tree_map_only(torch.Tensor, placed, result)


@pytest.fixture
def apple():
    with AppleDevice():
        yield lambda values: torch.as_tensor(values).as_subclass(Apple)


def test_the_device_has_no_float64(apple):
    value = apple([1.0])
    assert value.device == MPS
    with pytest.raises(AssertionError, match="makes float64"):
        value.double()
    with pytest.raises(AssertionError, match="two devices"):
        value + torch.tensor([1.0])
    assert value.to(CPU).device == CPU


@pytest.mark.parametrize("rule", [FedAvg, FedAtt, FedMargin, lambda: FeSEM(num_centers=2), *ROBUST])
def test_aggregation(rule, apple):
    """The server computes in float64 on the CPU, bit for bit; the new state is on the device of the old state."""

    def aggregate(to_device):
        aggregator = rule()
        state = {"w": to_device([1.0, 2.0]), "steps": to_device(3)}
        aggregator.start(RoundInfo(0), state)
        for client, size in enumerate((3, 5, 9)):
            change = {"w": state["w"] + 0.1 * (client - 0.7) ** 3, "steps": state["steps"] + client}
            aggregator.receive(ClientUpdate(client, size, change))
        return aggregator.aggregate()

    expected, new = aggregate(torch.as_tensor), aggregate(apple)
    for name, value in new.items():
        assert value.device == MPS
        assert value.dtype == expected[name].dtype
        assert torch.equal(value.to(CPU), expected[name])


def test_statistics_of_batch_norm(apple):
    layer = torch.nn.BatchNorm1d(2, affine=False)
    layer.running_mean, layer.running_var = apple([0.0, 0.0]), apple([1.0, 1.0])
    statistics = InputStatistics(batch_norm_layers(layer))
    with statistics.watching():
        layer(apple([[0.0, 1.0], [2.0, 3.0]]))
    mean, variance = pool_statistics([statistics.as_extras()], "")
    assert mean.tolist() == [1.0, 2.0]
    assert variance.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("name", ["margin", "softmax", "feature", "discrepancy", slow("by class")])
def test_metrics(name, apple):
    """Sums are on the CPU; the result is on the metric's device, also after a reset."""
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.rand(12, 3, generator=generator), torch.arange(12) % 3
    make, inputs = {
        "margin": (lambda: AggregateMeanMargin(3, 3), (features, labels)),
        "softmax": (MeanEntropy, (features, labels)),
        "feature": (lambda: MeanEntropy("feature", ignore_index=2), (features, labels)),
        "discrepancy": (MaximumMeanDiscrepancy, (features, features + 1)),
        "by class": (lambda: MaximumMeanDiscrepancy(num_classes=3), (features, features + 1, labels)),
    }[name]
    there, here = make().to("mps"), make()
    assert there.device == MPS
    here.update(*inputs)
    for _ in range(2):
        there.update(*(apple(tensor) for tensor in inputs))
        value = there.compute()
        assert value.device == MPS
        assert value.to(CPU).item() == here.compute().item()
        there.reset()


def test_prototypes(apple):
    sums, counts = class_sums(apple([[1.0, 0.0], [3.0, 4.0]]), apple([1, 1]), 3)
    assert class_prototypes(sums, counts).means[1].tolist() == [2.0, 2.0]
