"""BatchNorm layers in a module, and the layers' training modes."""

from __future__ import annotations

from types import ModuleType
from typing import cast

from torch import nn

from lightning_fed.lazy_names import load_feature
from lightning_fed.model.entries import BatchNorm, layer_prefixes


def batch_norm_layers(module: nn.Module) -> dict[str, nn.BatchNorm2d]:
    """Maps the prefix of entry names to each BatchNorm layer (of any kind) with running statistics."""
    layers = {
        # All kinds have the same attributes, but no public base class.
        path: cast("nn.BatchNorm2d", layer)
        for path, layer in module.named_modules()
        if isinstance(layer, BatchNorm) and layer.running_mean is not None
    }
    prefixes = layer_prefixes(module) if layers else {}
    return {prefixes.get(layer, f"{path}.").removesuffix("."): layer for path, layer in layers.items()}


def freeze_batch_norm(module: nn.Module) -> None:
    """Makes BatchNorm layers normalise with constant running statistics, also in training."""
    for layer in batch_norm_layers(module).values():
        layer.eval()


def thaw_batch_norm(module: nn.Module) -> None:
    """Sets each BatchNorm layer to the parent module's mode (training or evaluation)."""
    for parent in module.modules():
        for child in parent.children():
            if isinstance(child, BatchNorm):
                child.train(parent.training)


def find_measurement(module: nn.Module) -> ModuleType | None:
    """Imports ``batch_norm.measurement``, the code for BatchNorm's running statistics, if a module has such layers."""
    return load_feature("lightning_fed.batch_norm.measurement") if batch_norm_layers(module) else None
