"""BatchNorm to GroupNorm: normalisation without statistics that clients would have to agree on.

References:
    Wu and He, "Group Normalization", ECCV 2018.
    Hsieh et al., "The Non-IID Data Quagmire of Decentralized Machine Learning", ICML 2020 (GroupNorm in place of
    BatchNorm under label skew).
"""

from __future__ import annotations

import sys
from typing import TypeAlias

from torch import nn

from lightning_fed.argument_checks import check_count

__all__ = ["to_group_norm"]

# A BatchNorm1d may be given vectors, one value per channel. A group's values are then its channels alone: with one
# channel its output is constant, with two it is a sign. 16 is the fewest channels per group that Wu and He recommend.
_CHANNELS_PER_GROUP_1D = 16

_Lazy: TypeAlias = nn.LazyBatchNorm1d | nn.LazyBatchNorm2d | nn.LazyBatchNorm3d
_BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm | _Lazy


def to_group_norm(model: nn.Module, num_groups: int = 32) -> nn.Module:
    r"""Replaces every batch normalisation in a model by group normalisation, in place.

    BatchNorm averages over the batch, :math:`y = \gamma (x - \mu_c) / \sqrt{\sigma_c^2 + \epsilon} + \beta` with
    :math:`\mu_c, \sigma_c` of channel c over the batch in training and running averages of it in evaluation. Clients
    with different data have different :math:`\mu_c, \sigma_c`, and their average fits none of them. GroupNorm takes
    the mean and variance over a group of channels of *one* example, so training and evaluation compute the same and
    only weights are averaged.

    Kept: :math:`\gamma` and :math:`\beta` (the same `Parameter` objects, so also device, dtype, ``requires_grad``, ties
    and an optimizer that already holds them), :math:`\epsilon`, training mode, the names of the weights, and sharing:
    a layer used twice is one layer afterwards. timm's fused norm and activation (``BatchNormAct2d``) becomes
    ``GroupNormAct`` with the same activation and drop layer.

    Lost: ``running_mean``, ``running_var`` and ``num_batches_tracked`` (three entries of the state per layer), hence
    the function that a trained or pretrained model computed: fine-tune after converting. Hooks on the old layers do
    not carry over. Layers without batch statistics (frozen BatchNorm, InstanceNorm, LayerNorm) stay as they are.

    Args:
        model: Any module: smp, timm, torchvision or your own.
        num_groups: Most groups per layer. A layer of C channels gets the largest divisor of C not above it, and for a
            `torch.nn.BatchNorm1d`, which may be given vectors, not above C / 16 either (below 32 channels: one group).
            A layer whose input is one pixel (global pooling) needs several channels per group as well: where it has
            no more than ``num_groups`` channels, choose fewer groups.

    Returns:
        The same model, or the new layer if ``model`` itself is a batch normalisation.

    Raises:
        ValueError: If ``num_groups`` is below 1.
        TypeError: If a layer is not initialised yet (`torch.nn.LazyBatchNorm2d`), or is a subclass of a batch
            normalisation with a ``forward`` of its own, which cannot be replaced without knowing it.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 48, 3, bias=False), nn.BatchNorm2d(48), nn.ReLU())
        >>> model = to_group_norm(model)
        >>> model[1].num_groups, model[1].num_channels
        (24, 48)
    """
    check_count("num_groups", num_groups)
    # Every path to every layer, also the second path to a shared one. All replacements are made before the first is
    # put in place: a refusal leaves the model as it was.
    paths = [
        (path, module) for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, _BatchNorm)
    ]
    replacements: dict[nn.Module, nn.Module] = {}
    for path, module in paths:
        if module not in replacements:
            replacements[module] = _group_norm(module, num_groups, path)
    for path, module in paths:
        if path == "":
            return replacements[module]
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent).register_module(name, replacements[module])
    return model


def _group_norm(batch_norm: _BatchNorm, num_groups: int, path: str) -> nn.GroupNorm:
    """Returns the group normalisation that takes the place of one batch normalisation."""
    name = f"'{path}' ({type(batch_norm).__name__})" if path else type(batch_norm).__name__
    if isinstance(batch_norm, _Lazy):
        raise TypeError(f"Expected initialised layers, but {name} is lazy: run one batch through the model first.")
    channels = batch_norm.num_features
    if isinstance(batch_norm, nn.BatchNorm1d):
        num_groups = min(num_groups, max(1, channels // _CHANNELS_PER_GROUP_1D))
    num_groups = next(divisor for divisor in range(min(num_groups, channels), 0, -1) if channels % divisor == 0)

    group_norm: nn.GroupNorm
    if type(batch_norm).forward in (nn.BatchNorm2d.forward, nn.SyncBatchNorm.forward):
        group_norm = nn.GroupNorm(num_groups, channels, eps=batch_norm.eps, affine=False)
    elif _is_timm_fused(batch_norm):
        from timm.layers.norm_act import GroupNormAct

        group_norm = GroupNormAct(channels, num_groups, eps=batch_norm.eps, affine=False, apply_act=False)
        # a SyncBatchNormAct may lack them
        for part in ("drop", "act"):
            if hasattr(batch_norm, part):
                setattr(group_norm, part, getattr(batch_norm, part))
    else:
        raise TypeError(
            f"Expected batch normalisations of torch or timm, but {name} has a `forward` of its own: "
            "replace it by hand, then call `to_group_norm`."
        )
    group_norm.affine = batch_norm.affine
    group_norm.weight = batch_norm.weight
    group_norm.bias = batch_norm.bias
    return group_norm.train(batch_norm.training)


def _is_timm_fused(module: nn.Module) -> bool:
    """Returns whether a module is timm's norm and activation in one; a model has one only if timm is imported."""
    if "timm" not in sys.modules:
        return False
    from timm.layers.norm_act import BatchNormAct2d, SyncBatchNormAct

    return type(module).forward in (BatchNormAct2d.forward, SyncBatchNormAct.forward)
