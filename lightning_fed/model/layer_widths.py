"""Layer widths, and width ratios that the architecture fixes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

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


class WidthRatio(NamedTuple):
    """Two layer widths whose ratio the architecture fixes. Names are layers or entries, such as ``0.weight``."""

    producer: str
    out_width: int
    consumer: str
    in_width: int


def find_width_ratios(module: nn.Module) -> list[WidthRatio]:
    """Finds widths with fixed ratios: between the tensors of a layer, and along an ``nn.Sequential``.

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
    """Yields ratios between rows of a layer's tensors; for recurrent layers also ratios to hidden columns."""
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
    """Yields pairs of axes with equal width in a recurrent layer: gate rows, and hidden or projected outputs."""
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
    """Yields ratios between the outputs of a layer and the inputs of the next layer, if the width axis is known."""
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


def layer_numbers(layer: nn.Module) -> dict[str, Any]:
    """Size attributes of a layer (such as ``in_features``), computed from the current shapes of its tensors."""
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
