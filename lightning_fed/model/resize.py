"""A module whose layers get other widths, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_fed.model.layer_widths import find_width_ratios, layer_numbers


class Change(NamedTuple):
    """An attribute of a layer that was given another value."""

    layer: nn.Module
    name: str
    before: Any


@torch.no_grad()
def resize_module(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Gives a module's entries the values of a state, also where they have other widths.

    The `Parameter` objects stay the same, so that optimizers that hold them, tied weights and hooks go on working; what
    an optimizer remembers of one that got another shape fits no longer, and its gradient is dropped. Layers' own
    numbers (``out_channels``, ``num_features``, ``hidden_size``, the groups of depthwise convolutions) follow.

    The state alone says what the widths are: that of a checkpoint makes a module as wide as it was.

    Args:
        module: The module, changed in place.
        state: Values of any of its entries, with as many axes as they have. Types and devices are the module's.

    Raises:
        ValueError: If there is no such entry, or it has another number of axes. Nothing is changed then.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> wide = {"0.weight": torch.ones(5, 2), "0.bias": torch.zeros(5), "2.weight": torch.ones(1, 5)}
        >>> resize_module(net, wide)
        >>> net[0].out_features, net(torch.ones(4, 2)).shape
        (5, torch.Size([4, 1]))

    """
    tensors = named_tensors(module)
    for name, value in state.items():
        if name not in tensors:
            raise ValueError(f"Expected entries of the module, but got {name!r}.")
        if value.ndim != tensors[name].ndim:
            raise ValueError(
                f"Expected {name!r} to have {tensors[name].ndim} axes, but got the shape {tuple(value.shape)}."
            )
    for name, value in state.items():
        own = tensors[name]
        if own.shape == value.shape:
            own.copy_(value)
        else:
            set_tensor_data(own, value.detach().to(own, copy=True))
    update_layer_sizes(module)


def set_tensor_data(owner: Tensor, value: Tensor) -> None:
    """Makes ``value`` the memory of a parameter or buffer, whose shape may be another. Its gradient is dropped."""
    owner.grad = None
    if value.shape != owner.shape:
        # Where a graph of an earlier step lives on, autograd remembers the old shape; a change of type it notices.
        owner.data = owner.data.new_empty(0, dtype=torch.float32 if owner.dtype != torch.float32 else torch.float64)
    owner.data = value


def match_widths(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Gives a module's layers the widths of a state, where they differ. Names that it does not have are left alone.

    Args:
        module: The module, changed in place.
        state: A state as ``module.state_dict()`` has it.

    Raises:
        ValueError: If an entry has another number of axes, or layers do not fit each other then: the tensors of one
            layer, or those that come one after another in an ``nn.Sequential``. The module is as it was then.

    """
    own = named_tensors(module)
    other = {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and name in own and own[name].shape != value.shape
    }
    if not other:
        return
    before, values = find_width_ratios(module), {name: own[name].data for name in other}
    resize_module(module, other)
    for old, new in zip(before, find_width_ratios(module), strict=True):
        if old.made * new.read != new.made * old.read:
            for name, value in values.items():
                set_tensor_data(own[name], value)
            update_layer_sizes(module)
            raise ValueError(
                f"Expected layers that fit each other, where {old.maker} has {old.made} and {old.reader} {old.read},"
                f" but got {new.made} and {new.read}."
            )


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The entries of a module's state themselves, tied ones under every name."""
    tensors = dict[str, Tensor](module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    return {name: tensors[name] for name in module.state_dict(keep_vars=True) if name in tensors}


def update_layer_sizes(module: nn.Module) -> list[Change]:
    """Makes the numbers that layers keep those of their tensors; which have changed."""
    changes = []
    for layer in module.modules():
        for name, value in layer_numbers(layer).items():
            before = getattr(layer, name)
            if before != value:
                changes.append(Change(layer, name, before))
                setattr(layer, name, value)
        if isinstance(layer, nn.RNNBase):
            layer.flatten_parameters()  # for cuDNN
    return changes
