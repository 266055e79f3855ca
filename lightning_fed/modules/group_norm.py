"""Replaces BatchNorm layers by GroupNorm layers, which have no running statistics.

Wu and He, "Group Normalization", ECCV 2018; Hsieh et al., "The Non-IID Data Quagmire of Decentralized Machine
Learning", ICML 2020 (GroupNorm instead of BatchNorm under label skew).
"""

from __future__ import annotations

import sys
from typing import TypeAlias

from torch import nn

from lightning_fed.argument_checks import check_count

__all__ = ["to_group_norm"]

# A BatchNorm1d may receive vectors with one value per channel. Then the channels are a group's only values: with one
# channel the output is constant, with two channels only a sign. Wu and He recommend at least 16 channels per group.
_CHANNELS_PER_GROUP_1D = 16

_Lazy: TypeAlias = nn.LazyBatchNorm1d | nn.LazyBatchNorm2d | nn.LazyBatchNorm3d
_BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm | _Lazy


def to_group_norm(model: nn.Module, num_groups: int = 32) -> nn.Module:
    r"""Replaces all batch normalisations in a model by group normalisations, in place. Returns the model.

    BatchNorm uses statistics of the batch in training, and running statistics in evaluation. If clients have different
    data, the averaged running statistics do not fit any client. GroupNorm uses statistics of one example, so training
    and evaluation agree.

    The `Parameter` objects and their names stay the same. Running statistics and hooks on the old layers are lost. A
    pretrained model needs fine-tuning afterwards. Other normalisation layers are not changed.

    Args:
        model: Any module. For a batch normalisation the result is the new layer.
        num_groups: Maximum number of groups per layer. A layer with C channels gets the largest divisor of C up to this
            number. `torch.nn.BatchNorm1d` gets at most C / 16 groups. A layer with one-pixel inputs needs several
            channels per group.

    Raises:
        TypeError: If a layer is not initialised (`torch.nn.LazyBatchNorm2d`), or has a custom ``forward``.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 48, 3, bias=False), nn.BatchNorm2d(48), nn.ReLU())
        >>> model = to_group_norm(model)
        >>> model[1].num_groups, model[1].num_channels
        (24, 48)
    """
    check_count("num_groups", num_groups)
    # All paths to every layer, including the second path to a shared layer. All replacements are created before the
    # first assignment, so an error leaves the model unchanged.
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
        # a SyncBatchNormAct may lack these parts
        for part in ("drop", "act"):
            if hasattr(batch_norm, part):
                setattr(group_norm, part, getattr(batch_norm, part))
    else:
        raise TypeError(
            f"Expected batch normalisations of torch or timm, but {name} has a custom `forward`: replace it by hand, "
            "then call `to_group_norm`."
        )
    group_norm.affine = batch_norm.affine
    group_norm.weight = batch_norm.weight
    group_norm.bias = batch_norm.bias
    return group_norm.train(batch_norm.training)


def _is_timm_fused(module: nn.Module) -> bool:
    if "timm" not in sys.modules:  # no import of timm
        return False
    from timm.layers.norm_act import BatchNormAct2d, SyncBatchNormAct

    return type(module).forward in (BatchNormAct2d.forward, SyncBatchNormAct.forward)
