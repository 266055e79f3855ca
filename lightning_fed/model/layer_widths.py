"""What layers say of their widths, and which of these must fit each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

_HAVE_ROWS = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.modules.batchnorm._NormBase),  # noqa: SLF001  and its kinds
    *(nn.LayerNorm, nn.GroupNorm),
)
_KEEP = (  # the axes as they are
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Sigmoid),
    *(nn.Tanh, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.GroupNorm, nn.LayerNorm),
)
_KEEP_CHANNELS = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)


class WidthRatio(NamedTuple):
    """Two numbers of a module, of which one stays the same multiple of the other, whatever the widths are.

    Attributes:
        maker: What has the first, such as ``0.weight``.
        made: The number.
        reader: What has the second.
        read: The number.

    """

    maker: str
    made: int
    reader: str
    read: int


def find_width_ratios(module: nn.Module) -> list[WidthRatio]:
    """What layers alone say of widths that go together: each of its own tensors, and those in an ``nn.Sequential``.

    How other layers are connected only a run of the module could say.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.Flatten(), nn.Linear(36, 2))
        >>> for ratio in find_width_ratios(net):
        ...     print(*ratio)
        2.weight 2 2.bias 2
        0 4 2 36

    """
    seams = [seam for name, layer in module.named_modules() for seam in _within(name, layer)]
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Sequential) and type(layer).forward is nn.Sequential.forward:
            seams += _along(f"{name}." if name else "", layer)
    return seams


def _within(name: str, layer: nn.Module) -> Iterator[WidthRatio]:
    """Rows of a layer's tensors; in a recurrent layer also what reads its units."""
    own = {
        key: value.shape
        for key, value in chain(layer.named_parameters(recurse=False), layer.named_buffers(recurse=False))
    }
    if isinstance(layer, nn.RNNBase | nn.RNNCellBase):
        pairs = list(_in_recurrent(own))
    elif isinstance(layer, _HAVE_ROWS):
        keys = [key for key in ("weight", "bias", "running_mean", "running_var") if key in own]
        pairs = [((keys[0], 0), (key, 0)) for key in keys[1:]]
    else:
        return
    prefix = f"{name}." if name else ""
    for (first, axis), (second, other) in pairs:
        yield WidthRatio(prefix + first, own[first][axis], prefix + second, own[second][other])


def _in_recurrent(names: Iterable[str]) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    """The axes of gates' rows, and those of what a step makes: units, or their projection."""
    suffix = next(name for name in names if name.startswith("weight_hh"))[len("weight_hh") :]
    rows, made = ("weight_ih" + suffix, 0), ("weight_hh" + suffix, 1)
    for name in names:
        kind, _, place = name.partition("_")[2].partition("_")
        if kind == "hr":
            yield rows, (name, 1)
            yield made, (name, 0)
            continue
        yield rows, (name, 0)
        if name.startswith("weight") and (kind == "hh" or (place and not place.startswith("l0"))):
            yield made, (name, 1)
    if not any(name.startswith("weight_hr") for name in names):
        yield rows, made


def _along(prefix: str, layers: nn.Sequential) -> Iterator[WidthRatio]:
    """What one layer makes and the next one reads. Where the axis is not certain nothing is said."""
    maker: tuple[str, int] | None = None
    is_channels = is_flat = False  # else it is the last axis
    for key, layer in layers._modules.items():  # noqa: SLF001  with layers that are there twice
        numbers = layer_numbers(layer)
        if isinstance(layer, nn.modules.conv._ConvNd | nn.Linear):  # noqa: SLF001  all convolutions
            wants_channels = not isinstance(layer, nn.Linear)
            read = numbers["in_channels" if wants_channels else "in_features"]
            if maker is not None and (is_channels and not is_flat) == wants_channels:
                yield WidthRatio(*maker, prefix + key, read)
            maker = (prefix + key, numbers["out_channels" if wants_channels else "out_features"])
            is_channels, is_flat = wants_channels, False
        elif isinstance(layer, nn.modules.batchnorm._NormBase):  # noqa: SLF001  batch and instance normalisation
            if maker is not None and is_channels and not is_flat and "num_features" in numbers:
                yield WidthRatio(*maker, prefix + key, numbers["num_features"])
        elif isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
            is_flat = True
        elif not isinstance(layer, _KEEP) and not (is_channels and not is_flat and isinstance(layer, _KEEP_CHANNELS)):
            maker = None


def layer_numbers(layer: nn.Module) -> dict[str, Any]:
    """What a layer says of its tensors' shapes, as they are."""
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
    if isinstance(layer, nn.modules.batchnorm._NormBase):  # noqa: SLF001  batch and instance normalisation
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
