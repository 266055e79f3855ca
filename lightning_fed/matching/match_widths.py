"""Resizes a module's layers to the shapes in a state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_fed.model.entries import entry_tensors
from lightning_fed.model.resize import layer_numbers, resize_module, set_tensor_data, update_layer_sizes

_ROW_LAYERS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.modules.batchnorm._NormBase),  # noqa: SLF001  and its kinds
    *(nn.LayerNorm, nn.GroupNorm),
)
_ELEMENTWISE = (  # layers that preserve all axes
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Sigmoid),
    *(nn.Tanh, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.GroupNorm, nn.LayerNorm),
)
_CHANNELWISE = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)


def match_widths(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Resizes a module's layers to the shapes in a state dict.

    Entries without a place in the module are ignored. Raises ``ValueError`` if the new widths do not fit together, and
    leaves the module unchanged.
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


class WidthRatio(NamedTuple):
    """Two widths with a fixed ratio. ``producer`` and ``consumer`` name the layers or tensors with these widths."""

    producer: str
    out_width: int
    consumer: str
    in_width: int


def find_width_ratios(module: nn.Module) -> list[WidthRatio]:
    """Finds pairs of widths with a fixed ratio. Resized layers must keep this ratio.

    A pair belongs to two tensors in one layer, or to successive layers in an ``nn.Sequential``. In the example,
    ``2.weight`` and ``2.bias`` both have 2 rows. The 4 channels of layer 0 become 36 inputs of layer 2.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.Flatten(), nn.Linear(36, 2))
        >>> for ratio in find_width_ratios(net):
        ...     print(*ratio)
        2.weight 2 2.bias 2
        0 4 2 36
    """
    ratios = [ratio for name, layer in module.named_modules() for ratio in _ratios_within(name, layer)]
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Sequential) and type(layer).forward is nn.Sequential.forward:
            ratios += _ratios_along(f"{name}." if name else "", layer)
    return ratios


def _ratios_within(name: str, layer: nn.Module) -> Iterator[WidthRatio]:
    """Yields pairs of widths in one layer that must stay in proportion, such as rows of weight and bias."""
    shapes = {
        key: value.shape
        for key, value in chain(layer.named_parameters(recurse=False), layer.named_buffers(recurse=False))
    }
    if isinstance(layer, nn.RNNBase | nn.RNNCellBase):
        pairs = list(_in_recurrent(shapes))
    elif isinstance(layer, _ROW_LAYERS):
        keys = [key for key in ("weight", "bias", "running_mean", "running_var") if key in shapes]
        pairs = [((keys[0], 0), (key, 0)) for key in keys[1:]]
    else:
        return
    prefix = f"{name}." if name else ""
    for (first, first_axis), (second, second_axis) in pairs:
        yield WidthRatio(prefix + first, shapes[first][first_axis], prefix + second, shapes[second][second_axis])


def _in_recurrent(names: Iterable[str]) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    suffix = next(name for name in names if name.startswith("weight_hh"))[len("weight_hh") :]
    rows, outputs = ("weight_ih" + suffix, 0), ("weight_hh" + suffix, 1)
    for name in names:
        kind, _, layer_suffix = name.partition("_")[2].partition("_")
        if kind == "hr":
            yield rows, (name, 1)
            yield outputs, (name, 0)
            continue
        yield rows, (name, 0)
        if name.startswith("weight") and (kind == "hh" or (layer_suffix and not layer_suffix.startswith("l0"))):
            yield outputs, (name, 1)
    if not any(name.startswith("weight_hr") for name in names):
        yield rows, outputs


def _ratios_along(prefix: str, layers: nn.Sequential) -> Iterator[WidthRatio]:
    producer: tuple[str, int] | None = None
    is_channels = is_flat = False  # otherwise the width is on the last axis
    for key, layer in layers._modules.items():  # noqa: SLF001  includes repeated layers
        numbers = layer_numbers(layer)
        if isinstance(layer, nn.modules.conv._ConvNd | nn.Linear):  # noqa: SLF001  all convolutions
            wants_channels = not isinstance(layer, nn.Linear)
            in_width = numbers["in_channels" if wants_channels else "in_features"]
            if producer is not None and (is_channels and not is_flat) == wants_channels:
                yield WidthRatio(*producer, prefix + key, in_width)
            producer = (prefix + key, numbers["out_channels" if wants_channels else "out_features"])
            is_channels, is_flat = wants_channels, False
        elif isinstance(layer, nn.modules.batchnorm._NormBase):  # noqa: SLF001  batch and instance normalization
            if producer is not None and is_channels and not is_flat and "num_features" in numbers:
                yield WidthRatio(*producer, prefix + key, numbers["num_features"])
        elif isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
            is_flat = True
        elif not isinstance(layer, _ELEMENTWISE) and not (
            is_channels and not is_flat and isinstance(layer, _CHANNELWISE)
        ):
            producer = None
