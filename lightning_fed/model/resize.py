"""Changes layer widths (such as ``out_features``) in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_fed.model.entries import entry_tensors


class AttributeChange(NamedTuple):
    """Change of a layer's size attribute, such as ``out_features``, with the previous value."""

    layer: nn.Module
    name: str
    before: Any


@torch.no_grad()
def resize_module(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads a state dict into a module, and changes the module's layer widths to fit.

    `Parameter` objects stay the same, so optimizers, tied weights and hooks keep working. Layer attributes such as
    ``out_channels`` are updated. Gradients are dropped, and optimizer states of resized parameters become invalid.

    Args:
        module: Module, changed in place.
        state: New values of parameters and buffers by name, with unchanged number of axes.

    Raises:
        ValueError: If a name is unknown, or a value has another number of axes. The module is then unchanged.

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
    """Replaces the data of the parameter or buffer ``owner``, possibly with a new shape, and deletes the gradient."""
    owner.grad = None
    if value.shape != owner.shape:
        # Autograd remembers the old shape while an earlier graph exists. Setting a new dtype resets the shape.
        owner.data = owner.data.new_empty(0, dtype=torch.float32 if owner.dtype != torch.float32 else torch.float64)
    owner.data = value


def update_layer_sizes(module: nn.Module) -> list[AttributeChange]:
    """Sets the width attributes of all layers, such as ``in_features``, to the tensors' shapes. Returns the changes."""
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


def layer_numbers(layer: nn.Module) -> dict[str, Any]:
    """Computes a layer's size attributes, such as ``in_features``, from the layer's tensor shapes."""
    if isinstance(layer, nn.modules.conv._ConvNd):  # noqa: SLF001  the base class of all convolutions
        first, second = layer.weight.shape[:2]
        if layer.transposed:
            groups = first if layer.groups == layer.in_channels > 1 and second == 1 else layer.groups
            return {"in_channels": first, "out_channels": second * groups, "groups": groups}
        is_depthwise = layer.groups == layer.in_channels > 1
        groups = first // (layer.out_channels // layer.groups) if is_depthwise else layer.groups
        return {"in_channels": second * groups, "out_channels": first, "groups": groups}
    if isinstance(layer, nn.Linear):
        return {"in_features": layer.weight.shape[1], "out_features": layer.weight.shape[0]}
    if isinstance(layer, nn.modules.batchnorm._NormBase):  # noqa: SLF001  batch and instance normalization
        vector = layer.weight if layer.weight is not None else layer.running_mean
        return {} if vector is None else {"num_features": len(vector)}
    if isinstance(layer, nn.LayerNorm):
        return {} if layer.weight is None else {"normalized_shape": tuple(layer.weight.shape)}
    if isinstance(layer, nn.Embedding):
        return {"num_embeddings": layer.weight.shape[0], "embedding_dim": layer.weight.shape[1]}
    if isinstance(layer, nn.PReLU):
        return {"num_parameters": len(layer.weight)}
    if isinstance(layer, nn.RNNBase):
        gates = {"LSTM": 4, "GRU": 3}.get(layer.mode, 1)
        numbers = {
            "hidden_size": layer.get_parameter("weight_hh_l0").shape[0] // gates,
            "input_size": layer.get_parameter("weight_ih_l0").shape[1],
        }
        return numbers | ({"proj_size": layer.get_parameter("weight_hr_l0").shape[0]} if layer.proj_size else {})
    if isinstance(layer, nn.RNNCellBase):
        return {"hidden_size": layer.weight_hh.shape[1], "input_size": layer.weight_ih.shape[1]}
    return {}
