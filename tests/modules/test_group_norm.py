"""BatchNorm to GroupNorm: keeps the weights, and equals a network built with GroupNorm."""

import copy
import io

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
from timm.layers.norm_act import BatchNormAct2d, GroupNormAct, convert_sync_batchnorm
from torch import nn

from lightning_fed.modules.group_norm import to_group_norm
from tests.breadth import quick

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def randomise(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, BATCH_NORMS) and module.affine:
            module.weight.data = torch.rand(module.weight.shape, generator=generator) + 0.5
            module.bias.data = torch.randn(module.bias.shape, generator=generator)
    return model


@pytest.mark.parametrize(
    ("channels", "num_groups", "expected"),
    [(64, 32, 32), (48, 32, 24), (20, 32, 20), (17, 16, 1), (96, 32, 32), (12, 5, 4), (7, 1, 1), (1, 32, 1)],
)
def test_number_of_groups_is_the_largest_divisor(channels, num_groups, expected):
    for kind in (nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        norm = to_group_norm(kind(channels), num_groups)
        assert type(norm) is nn.GroupNorm
        assert (norm.num_groups, norm.num_channels) == (expected, channels)


def test_vectors_keep_their_signal():
    """One channel per group would reduce a vector to the bias, two channels to signs."""
    for channels, groups in ((16, 1), (31, 1), (32, 2), (64, 4), (1024, 32), (7, 1)):
        norm = to_group_norm(nn.BatchNorm1d(channels))
        assert norm.num_groups == groups
        values = norm(torch.randn(4, channels, generator=torch.Generator().manual_seed(0))).detach()
        assert len(values.unique()) > 2 * channels


def network(norm):
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, bias=False),
        norm(24),
        nn.ModuleDict({"body": nn.Sequential(nn.ReLU(), nn.Conv2d(24, 12, 3), norm(12))})["body"],
        nn.Flatten(2),
        nn.AdaptiveAvgPool1d(9),
    )


def test_output_equals_that_of_a_network_built_with_group_norm():
    torch.manual_seed(0)
    model = randomise(network(lambda channels: nn.BatchNorm2d(channels, eps=1e-3)))
    by_hand = network(lambda channels: nn.GroupNorm({24: 8, 12: 6}[channels], channels, eps=1e-3))
    weights = {k: v for k, v in model.state_dict().items() if "running" not in k and "tracked" not in k}
    by_hand.load_state_dict(weights)  # strict: exactly these keys
    converted = to_group_norm(model, num_groups=8)
    assert converted is model
    x = torch.randn(5, 3, 12, 12)
    for mode in (True, False):
        assert torch.equal(converted.train(mode)(x), by_hand.train(mode)(x))
    # the equation in numpy: groups with 3 channels of one example
    x = torch.randn(2, 24, 4, 4, dtype=torch.float64)
    norm = copy.deepcopy(converted[1]).double()
    groups = x.numpy().reshape(2, 8, -1)
    expected = (groups - groups.mean(2, keepdims=True)) / (groups.var(2, keepdims=True) + 1e-3) ** 0.5
    expected = torch.from_numpy(expected).reshape(2, 24, 4, 4) * norm.weight[:, None, None] + norm.bias[:, None, None]
    assert torch.allclose(norm(x), expected, rtol=1e-12, atol=1e-12)


def test_state_dict_loses_the_statistics_only_and_round_trips():
    model = randomise(network(nn.BatchNorm2d))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    to_group_norm(model)
    after = model.state_dict()
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert list(after) == [name for name in before if not name.endswith(statistics)]
    assert all(torch.equal(after[name], before[name]) for name in after)
    file = io.BytesIO()
    torch.save(after, file)
    file.seek(0)
    restored = to_group_norm(network(nn.BatchNorm2d))
    restored.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(2, 3, 12, 12)
    assert torch.equal(restored(x), model(x))


def test_parameters_stay_the_same_objects():
    """An existing optimizer, tied weights and frozen weights remain valid."""
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    to_group_norm(model, 2)
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert model[0].weight is model[1].weight
    assert [p.requires_grad for p in model.parameters()] == [True, False, True]
    assert (model[0].affine, model[2].affine, model[2].weight, model[2].bias) == (True, False, None, None)
    before = model[0].weight.detach().clone()
    (model(torch.randn(3, 4, 5, 5)) ** 3).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_shared_modules_stay_shared():
    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(4)
            self.again = self.norm  # twice in one parent
            block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
            # and in another parent, and a whole block
            self.blocks = nn.ModuleList([block, block, nn.Sequential(self.norm)])

    model = to_group_norm(Shares())
    assert not any(isinstance(module, BATCH_NORMS) for module in model.modules())
    assert model.norm is model.again is model.blocks[2][0]
    assert isinstance(model.norm, nn.GroupNorm)
    assert model.blocks[0] is model.blocks[1]
    assert sum(isinstance(module, nn.GroupNorm) for module in model.modules()) == 2


def test_dtype_device_and_mode_are_kept():
    model = nn.Sequential(nn.BatchNorm2d(4, dtype=torch.float64, device="meta"), nn.BatchNorm3d(6)).train()
    model[1].eval()
    to_group_norm(model)
    assert (model[0].weight.dtype, model[0].weight.device.type) == (torch.float64, "meta")
    assert [module.training for module in (model, *model)] == [True, True, False]


def test_random_state_is_not_touched():
    model = network(nn.BatchNorm2d)
    state = torch.get_rng_state()
    to_group_norm(model)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_a_batch_norm_as_the_root_gives_the_new_layer(kind):
    root = randomise(kind(64, eps=1e-4)).eval()
    norm = to_group_norm(root, 4)
    assert type(norm) is nn.GroupNorm
    assert (norm.num_groups, norm.eps, norm.training) == (4, 1e-4, False)
    assert norm.weight is root.weight
    assert norm.bias is root.bias


def test_other_layers_stay():
    model = nn.Sequential(nn.InstanceNorm2d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.LocalResponseNorm(2))
    layers = list(model)
    assert all(a is b for a, b in zip(to_group_norm(model), layers, strict=True))


def test_timm_norm_and_activation_in_one_keeps_its_activation():
    torch.manual_seed(0)
    fused = randomise(BatchNormAct2d(16, eps=1e-2, act_layer=nn.Hardswish, drop_layer=nn.Dropout))
    plain = randomise(nn.BatchNorm2d(16, eps=1e-2))
    model, x = nn.Sequential(copy.deepcopy(fused)), torch.randn(3, 16, 5, 5) * 3
    to_group_norm(model, 4)
    assert isinstance(model[0], GroupNormAct)
    assert isinstance(model[0].drop, nn.Dropout)
    expected = nn.functional.hardswish(to_group_norm(plain, 4)(x))
    assert torch.equal(model.eval()(x), expected)
    synchronised = convert_sync_batchnorm(nn.Sequential(copy.deepcopy(fused)))
    assert type(synchronised[0]).__name__ == "SyncBatchNormAct"
    assert torch.equal(to_group_norm(synchronised, 4).eval()(x), expected)


def test_refusals_leave_the_model_as_it_was():
    class Odd(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x) + 1

    class Renamed(nn.BatchNorm2d):
        pass

    model = nn.Sequential(nn.BatchNorm2d(4), nn.Sequential(Odd(4)))
    with pytest.raises(TypeError, match=r"but '1.0' \(Odd\) has a custom `forward`"):
        to_group_norm(model)
    assert isinstance(model[0], nn.BatchNorm2d)
    with pytest.raises(TypeError, match="but LazyBatchNorm2d is lazy"):
        to_group_norm(nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match="`num_groups` to be at least 1, but got 0"):
        to_group_norm(model, 0)
    assert type(to_group_norm(Renamed(4))) is nn.GroupNorm


def smp_model(name):
    torch.manual_seed(0)
    if name == "deeplab":
        return smp.DeepLabV3Plus("resnet18", encoder_weights=None, classes=3)
    if name == "mobilenet":
        return smp.Unet("mobilenet_v2", encoder_weights=None, classes=3)
    return smp.Unet("tu-tf_efficientnet_lite0", encoder_weights=None, classes=3)  # timm: fused norm and activation


@pytest.mark.parametrize("name", quick(["deeplab", "mobilenet", "timm"], ["timm"]))
def test_smp_models(name):
    model = randomise(smp_model(name))
    norms = {path: module for path, module in model.named_modules() if isinstance(module, BATCH_NORMS)}
    assert any(isinstance(module, BatchNormAct2d) for module in norms.values()) == (name == "timm")
    weights = {path: (norm.weight.detach().clone(), norm.bias.detach().clone()) for path, norm in norms.items()}
    to_group_norm(model)
    assert not any(isinstance(module, BATCH_NORMS) for module in model.modules())
    for path, (weight, bias) in weights.items():
        norm = model.get_submodule(path)
        assert isinstance(norm, nn.GroupNorm)
        assert torch.equal(norm.weight, weight)
        assert torch.equal(norm.bias, bias)
    # One example's output is independent of other examples, and training equals evaluation (except dropout): both fail
    # with BatchNorm.
    x = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        alone, together = model.eval()(x[:1]), model(x)[:1]
    scale = together.abs().max()
    assert scale > 0
    assert torch.allclose(alone, together, rtol=0, atol=1e-4 * scale)
    for module in model.train().modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    assert torch.allclose(model(x)[:1], together, rtol=0, atol=1e-4 * scale)


@pytest.mark.slow
def test_a_converted_classifier_is_as_good_in_evaluation_as_in_training():
    """After 20 steps BatchNorm's running statistics lag behind: correct in training, at chance in evaluation."""
    x, y = torch.randn(8, 1, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    x[y == 1] += torch.linspace(-1, 1, 32)
    right = {}
    for convert in (to_group_norm, nn.Module.train):
        torch.manual_seed(0)
        model = convert(timm.create_model("resnet10t", num_classes=2, in_chans=1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for _ in range(20):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert loss < 0.1
        right[convert] = int((model.eval()(x).argmax(1) == y).sum())
    assert right[nn.Module.train] < right[to_group_norm] == 8
