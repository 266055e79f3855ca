"""Rules for operations without weights: each rule assigns an operation's outputs to neurons."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fed.matching.neuron_ids import NEUTRAL, PINNED, ParameterView, TracedActivation
from lightning_fed.matching.tracer import Call, Rule, Tracer
from lightning_fed.numerics.trees import map_leaves

_CONSTANTS = "full full_like new_full new_ones new_zeros ones ones_like scalar_tensor zeros zeros_like"

_SAME = "_to_copy alias clone contiguous detach lift_fresh lift_fresh_copy to type_as"

_MOVES = """_reshape_alias _unsafe_view adjoint channel_shuffle chunk diagonal expand expand_as flatten flip hstack
im2col mT movedim narrow native_channel_shuffle numpy_T permute pixel_shuffle pixel_unshuffle repeat
repeat_interleave reshape reshape_as roll rot90 select slice split split_with_sizes squeeze stack swapaxes t
tensor_split tile transpose unbind unflatten unfold unsqueeze view view_as"""

# In addition to all operations with the pointwise tag.
_POINTWISE = """alpha_dropout celu dropout elu feature_alpha_dropout feature_dropout gelu hardsigmoid hardswish hardtanh
leaky_relu logsigmoid mish native_dropout pointwise relu relu6 rsub selu silu softplus softsign threshold where"""

_POOLS = """_adaptive_avg_pool2d _adaptive_avg_pool3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d adaptive_avg_pool1d adaptive_avg_pool2d
adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d
max_pool1d max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices reflection_pad1d reflection_pad2d
reflection_pad3d replication_pad1d replication_pad2d replication_pad3d upsample_bicubic2d upsample_bilinear2d
upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d"""

_REDUCTIONS = "amax amin linalg_vector_norm logsumexp max mean min norm prod std std_mean sum var var_mean"

_SOFTMAXES = "_log_softmax _softmax log_softmax softmax"

_AXIS_ORDERS = ("mT", "numpy_T", "permute", "swapaxes", "t", "transpose")


def constant(tracer: Tracer, call: Call) -> Any:
    """Handles tensors with one repeated value, such as zeros. No element belongs to a neuron."""
    return TracedActivation.filled(tracer.constant_id, call.shape)


def same(tracer: Tracer, call: Call) -> Any:
    """Returns the input's neurons, for operations that only change dtype, memory or name."""
    return call.args[0]


def pointwise(tracer: Tracer, call: Call) -> Any:
    """Assigns an elementwise operation's outputs to neurons. Merges the neurons of inputs at the same index."""
    return call.results(tracer.pointwise(call.tensors, call.shape))


def pool(tracer: Tracer, call: Call) -> Any:
    """Assigns outputs to neurons, for pooling, interpolation and padding over spatial dimensions."""
    activation = tracer.activation(call.tensors[0])
    number = re.search(r"(\d)d", call.name)
    assert number is not None
    rank = len(activation.shape)
    ids = tracer.coupled(activation, range(rank - int(number[1]), rank)).ids
    return call.alike(ids)


def reduction(tracer: Tracer, call: Call) -> Any:
    """Assigns a reduction's outputs to neurons, for example a sum, mean or maximum."""
    if len(call.tensors) > 1:
        return pointwise(tracer, call)
    activation = tracer.activation(call.tensors[0])
    rank = len(activation.shape)
    dim = call.arguments.get("dim")
    dims = {index % rank for index in ([dim] if isinstance(dim, int) else dim or range(rank))}
    ids = tracer.reduced(activation, dims).ids
    if len(call.shape) < rank:
        ids = ids.reshape([length for index, length in enumerate(ids.shape) if index not in dims])
    return call.alike(ids)


def softmax(tracer: Tracer, call: Call) -> Any:
    """Gives each softmax output the neuron of its input. Neurons in one softmax only change places with each other."""
    activation = tracer.activation(call.tensors[0])
    dim = call.arguments["dim"] % len(activation.shape)
    if dim in activation.varying:
        tracer.keep_within(activation, activation.varying - {dim})
    return activation


def move(tracer: Tracer, call: Call) -> Any:
    """Assigns outputs to neurons, for operations that move elements, such as reshape, flip or slice."""
    if any(isinstance(value, torch.dtype) for value in call.args):  # reinterpreted bytes
        return tracer.unknown_result(call)
    first = call.args[0]
    if isinstance(first, ParameterView) and call.name in _AXIS_ORDERS:
        numbered = torch.empty(range(1, len(first.axes) + 1), device="meta")
        moved_ids = call.target(numbered, *call.args[1:], **call.kwargs)
        return ParameterView(first.name, first.lengths, tuple(first.axes[number - 1] for number in moved_ids.shape))

    def ids_of(value: Any) -> Any:  # float64, because all operations support this dtype
        return (
            tracer.activation(value).expanded().double()
            if isinstance(value, TracedActivation | ParameterView)
            else value
        )

    source_ids = torch.unique(torch.cat([tracer.activation(value).ids.reshape(-1) for value in call.tensors]))
    moved_ids = call.target(*map_leaves(ids_of, call.args), **map_leaves(ids_of, call.kwargs))
    results = [TracedActivation.of(value.long()) for value in (moved_ids if call.has_many else [moved_ids])]
    for result in results:
        _keep_apart(tracer, source_ids, result)
    return call.results(*results)


def concatenation(tracer: Tracer, call: Call) -> Any:
    """Joins the neuron ids of the tensors in a concatenation along one dimension."""
    activations = [tracer.activation(value) for value in call.tensors]
    is_neutral = [bool((activation.ids == NEUTRAL).all()) for activation in activations]
    if sum(is_neutral) > 1:  # possibly constants with different values
        pairs = zip(activations, is_neutral, strict=True)
        activations = [
            TracedActivation.filled(PINNED, activation.shape) if neutral else activation
            for activation, neutral in pairs
        ]
    rank = len(call.shape)
    activations = [
        activation for activation in activations if len(activation.shape) == rank
    ]  # legacy empty tensors of shape (0,) are dropped
    dim = call.arguments["dim"] % rank
    lengths = [max(activation.ids.shape[index] for activation in activations) for index in range(rank)]
    parts = [
        activation.ids.expand([*lengths[:dim], activation.shape[dim], *lengths[dim + 1 :]])
        for activation in activations
    ]
    return TracedActivation(TracedActivation.of(torch.cat(parts, dim)).ids, call.shape)


def padding(tracer: Tracer, call: Call) -> Any:
    """Assigns outputs to neurons, for padding."""
    activation = tracer.activation(call.tensors[0])
    amounts = call.arguments["pad"]
    padded = {len(activation.shape) - 1 - index // 2 for index, amount in enumerate(amounts) if amount}
    if not padded & activation.varying:  # padding within each channel
        return TracedActivation(activation.ids, call.shape)
    if call.arguments.get("mode", "constant") != "constant":
        return move(tracer, call)
    result = TracedActivation.of(F.pad(activation.expanded(), list(amounts), value=NEUTRAL))
    _keep_apart(tracer, activation.ids.reshape(-1), result)
    return result


def _keep_apart(tracer: Tracer, source_ids: Tensor, result: TracedActivation) -> None:
    # a slice separated these elements from others
    if not bool(torch.isin(source_ids, result.ids).all()):
        tracer.union_find.constrain(result.ids, "apart")


_KINDS: list[tuple[str, Rule]] = [
    (_CONSTANTS, constant),
    (_SAME, same),
    (_POINTWISE, pointwise),
    (_POOLS, pool),
    (_REDUCTIONS, reduction),
    (_SOFTMAXES, softmax),
    (_MOVES, move),
    ("cat concat", concatenation),
    ("pad constant_pad_nd", padding),
]

# Rules by operation name.
RULES: dict[str, Rule] = {name: rule for names, rule in _KINDS for name in names.split()}
