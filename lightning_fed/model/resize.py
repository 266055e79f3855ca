"""Changes the widths of layers in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_fed.model.entries import entry_tensors
from lightning_fed.model.layer_widths import find_width_ratios, layer_numbers


class AttributeChange(NamedTuple):
    """A changed layer attribute, with its previous value."""

    layer: nn.Module
    name: str
    before: Any


@torch.no_grad()
def resize_module(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads a state of any widths into a module, for example from a checkpoint.

    `Parameter` objects stay the same, so optimizers, tied weights and hooks keep working. Optimizer states of
    parameters with a new shape become invalid, and gradients are dropped. Layer attributes (``out_channels``,
    ``num_features``, ``hidden_size``, depthwise groups) are updated.

    Args:
        module: Module, changed in place.
        state: Values for any entries, with unchanged number of axes. Dtypes and devices are taken from the module.

    Raises:
        ValueError: If an entry is unknown or has another number of axes. The module then stays unchanged.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> wide = {"0.weight": torch.ones(5, 2), "0.bias": torch.zeros(5), "2.weight": torch.ones(1, 5)}
        >>> resize_module(net, wide)
        >>> net[0].out_features, net(torch.ones(4, 2)).shape
        (5, torch.Size([4, 1]))
    """
    tensors = entry_tensors(module)
    for name, value in state.items():
        if name not in tensors:
            raise ValueError(f"Expected only entries of the module, but got {name!r}.")
        if value.ndim != tensors[name].ndim:
            raise ValueError(
                f"Expected {name!r} to have {tensors[name].ndim} axes, but got the shape {tuple(value.shape)}."
            )
    for name, value in state.items():
        tensor = tensors[name]
        if tensor.shape == value.shape:
            tensor.copy_(value)
        else:
            set_tensor_data(tensor, value.detach().to(tensor, copy=True))
    update_layer_sizes(module)


def set_tensor_data(owner: Tensor, value: Tensor) -> None:
    """Replaces the data of a parameter or buffer, also for a new shape. Drops the gradient."""
    owner.grad = None
    if value.shape != owner.shape:
        # Autograd remembers the old shape while an earlier graph exists. Setting a new dtype resets the shape.
        owner.data = owner.data.new_empty(0, dtype=torch.float32 if owner.dtype != torch.float32 else torch.float64)
    owner.data = value


def match_widths(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Sets layer widths to match a state. Unknown names are ignored.

    An entry with a different number of axes, or different widths within a layer or along an ``nn.Sequential``, raises
    ``ValueError`` and leaves the module unchanged.
    """
    tensors = entry_tensors(module)
    resized = {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and name in tensors and tensors[name].shape != value.shape
    }
    if not resized:
        return
    ratios, values = find_width_ratios(module), {name: tensors[name].data for name in resized}
    resize_module(module, resized)
    for old, new in zip(ratios, find_width_ratios(module), strict=True):
        if old.out_width * new.in_width != new.out_width * old.in_width:
            for name, value in values.items():
                set_tensor_data(tensors[name], value)
            update_layer_sizes(module)
            raise ValueError(
                f"Expected compatible widths, such as {old.out_width} for {old.producer} and {old.in_width} for "
                f"{old.consumer}, but got {new.out_width} and {new.in_width}."
            )


def update_layer_sizes(module: nn.Module) -> list[AttributeChange]:
    """Sets the width attributes of all layers to match the tensors; returns the changes."""
    changes = []
    for layer in module.modules():
        for name, value in layer_numbers(layer).items():
            before = getattr(layer, name)
            if before != value:
                changes.append(AttributeChange(layer, name, before))
                setattr(layer, name, value)
        if isinstance(layer, nn.RNNBase):
            layer.flatten_parameters()  # for cuDNN
    return changes
