"""Rules for layers with weights: each rule assigns a layer's weights and outputs to neurons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fed.matching.neuron_ids import NEUTRAL, PINNED, ParameterView, TracedActivation
from lightning_fed.matching.tracer import Call, Rule, Tracer

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def convolution(tracer: Tracer, call: Call) -> Any:
    """Assigns a convolution's weights and outputs to neurons, also if grouped, depthwise or transposed."""
    arguments = call.arguments
    weight, groups = arguments["weight"], arguments["groups"]
    is_transposed = call.name.startswith("conv_transpose") or arguments.get("transposed", False)
    activation = tracer.activation(arguments["input"])
    if not isinstance(weight, ParameterView) or len(activation.shape) != len(weight.shape):
        return tracer.unknown_result(call)
    channels = tracer.along(activation, 1)
    in_axis, out_axis = (0, 1) if is_transposed else (1, 0)
    if groups == 1:
        tracer.read(weight, in_axis, channels)
        out = tracer.axis(weight, out_axis, "out")
    elif groups == len(channels) and (
        not is_transposed or weight.shape[1] == 1
    ):  # depthwise: one output group per channel
        out = tracer.axis(weight, 0, "out")
        tracer.couple_vectors([TracedActivation.of(out)], channels.repeat_interleave(len(out) // len(channels)))
    elif is_transposed:
        return tracer.unknown_result(call)
    else:
        for part in channels.chunk(groups):
            tracer.read(weight, 1, part)
        out = tracer.axis(weight, 0, "out")
        tracer.keep_within(TracedActivation.of(out.view(groups, -1)), {0})
    tracer.couple_vectors([arguments["bias"]], out)
    return _along(out, 1, call.shape)


def linear(tracer: Tracer, call: Call) -> Any:
    """Assigns a linear layer's weights and outputs to neurons. Rows of the weight are outputs, columns are inputs."""
    weight = call.arguments["weight"]
    if not isinstance(weight, ParameterView):
        return tracer.unknown_result(call)
    tracer.read(weight, 1, tracer.along(call.arguments["input"], -1))
    out = tracer.axis(weight, 0, "out")
    tracer.couple_vectors([call.arguments["bias"]], out)
    return _along(out, -1, call.shape)


def matmul(tracer: Tracer, call: Call) -> Any:
    """Assigns a matrix product's weights and outputs to neurons."""
    return _product(tracer, call, call.arguments["input"], call.tensors[-1], call.shape)


def addmm(tracer: Tracer, call: Call) -> Any:
    """Assigns weights and outputs to neurons, for a matrix product plus an added tensor, such as a bias."""
    bias, first, second = call.tensors
    product = _product(tracer, call, first, second, call.shape)
    return tracer.pointwise([product, bias], call.shape)


def attention(tracer: Tracer, call: Call) -> Any:
    """Assigns queries, keys, values and outputs in scaled dot-product attention to neurons."""
    query, key, value = (tracer.activation(call.arguments[name]) for name in ("query", "key", "value"))
    if len({len(activation.shape) for activation in (query, key, value)}) > 1 or call.arguments.get("enable_gqa"):
        return tracer.unknown_result(call)
    tracer.pin(call.arguments.get("attn_mask"))
    transposed_key = TracedActivation(key.ids.transpose(-1, -2), (*key.shape[:-2], key.shape[-1], key.shape[-2]))
    shape = (*call.shape[:-1], key.shape[-2])
    scores = _product(tracer, call, query, transposed_key, shape)
    return call.results(_product(tracer, call, scores, value, call.shape))


def batch_norm(tracer: Tracer, call: Call) -> Any:
    """Assigns weights, statistics and outputs in batch and instance normalization to neurons."""
    names = ("weight", "bias", "running_mean", "running_var")
    channels = tracer.along(call.arguments["input"], 1)
    tracer.couple_vectors([call.arguments.get(name) for name in names], channels)
    return call.results(_along(channels, 1, call.shape))


def group_norm(tracer: Tracer, call: Call) -> Any:
    """Assigns channels in group normalization to neurons. Permutations keep the channels in a group together."""
    channels = tracer.along(call.arguments["input"], 1)
    groups: int = call.arguments["num_groups" if "num_groups" in call.arguments else "group"]
    tracer.couple_vectors([call.arguments.get(name) for name in ("weight", "bias")], channels)
    if groups == 1:
        tracer.union_find.constrain(channels, "within")
    elif groups < len(channels):
        for part in channels.chunk(groups):
            tracer.union_find.constrain(part, "block")
    return call.results(_along(channels, 1, call.shape))


def layer_norm(tracer: Tracer, call: Call) -> Any:
    """Assigns weights and outputs in layer normalization and RMS normalization to neurons."""
    activation = tracer.activation(call.arguments["input"])
    rank = len(activation.shape)
    dims = set(range(rank - len(call.arguments["normalized_shape"]), rank))
    if activation.varying & dims:
        tracer.keep_within(activation, activation.varying - dims)
    vectors = [call.arguments.get(name) for name in ("weight", "bias")]
    present = [vector for vector in vectors if isinstance(vector, TracedActivation | ParameterView)]
    return call.results(tracer.pointwise([activation, *present], call.shape))


def embedding(tracer: Tracer, call: Call) -> Any:
    """Assigns an embedding's weights and outputs to neurons. Columns of the weight are neurons."""
    weight = call.arguments["weight"]
    if not isinstance(weight, ParameterView):
        return tracer.unknown_result(call)
    tracer.union_find.pin(tracer.axis(weight, 0, "vec"))
    return _along(tracer.axis(weight, 1, "out"), -1, call.shape)


def prelu(tracer: Tracer, call: Call) -> Any:
    """Assigns a PReLU activation's weights and outputs to neurons."""
    activation, weight = tracer.activation(call.arguments["input"]), call.arguments["weight"]
    if weight.shape == (1,):
        return activation
    channels = tracer.along(activation, 1)
    tracer.couple_vectors([weight], channels)
    return _along(channels, 1, call.shape)


def recurrent(tracer: Tracer, call: Call) -> Any:
    """Assigns a recurrent layer's weights and outputs to neurons, for example in an LSTM."""
    arguments = call.arguments
    gates, hidden = _GATES[call.name], arguments["hx"]
    hidden = hidden if isinstance(hidden, list | tuple) else [hidden]
    if "params" not in arguments or not all(isinstance(parameter, ParameterView) for parameter in arguments["params"]):
        return tracer.unknown_result(call)
    directions = 2 if arguments["bidirectional"] else 1
    cells = arguments["num_layers"] * directions
    params = list(arguments["params"])
    per_cell = len(params) // cells
    biases = 2 if arguments["has_biases"] else 0
    value, outs, states = arguments["input"], [], []
    for cell in range(cells):
        inner, outer, *rest = params[cell * per_cell : (cell + 1) * per_cell]
        state = tracer.union_find.add(inner.shape[0] // gates)  # a neuron has one weight row per gate
        out = state
        if len(rest) > biases:  # projected hidden state
            tracer.read(rest[-1], 1, state)
            out = tracer.axis(rest[-1], 0, "out")
        _gate_rows(tracer, [inner, outer], rest[:biases], state, gates)
        tracer.read(outer, 1, out)
        tracer.read(inner, 1, tracer.along(value, -1))
        outs.append(out)
        states.append(state)
        if cell % directions == directions - 1:
            value = _along(torch.cat(outs[-directions:]), -1, call.shape)
    if not all(bool((tracer.activation(state).ids == NEUTRAL).all()) for state in hidden):  # not zeros
        tracer.pin(TracedActivation.of(torch.cat([*outs, *states])))
        for state in hidden:
            tracer.pin(state)
    lasts = zip((outs, states), call.shapes[1:], strict=False)
    return call.results(
        value, *[TracedActivation(torch.stack(last)[:, None], shape) for last, shape in lasts if shape is not None]
    )


def recurrent_cell(tracer: Tracer, call: Call) -> Any:
    """Assigns a recurrent cell's weights and outputs to neurons, for example in ``nn.LSTMCell``."""
    arguments = call.arguments
    gates, hidden = _GATES[call.name.removesuffix("_cell")], arguments["hx"]
    hidden = hidden if isinstance(hidden, list | tuple) else [hidden]
    inner, outer = arguments["w_ih"], arguments["w_hh"]
    if not isinstance(inner, ParameterView) or not isinstance(outer, ParameterView):
        return tracer.unknown_result(call)
    state = tracer.axis(outer, 1, "in")
    _gate_rows(tracer, [inner, outer], [arguments.get("b_ih"), arguments.get("b_hh")], state, gates)
    tracer.read(inner, 1, tracer.along(arguments["input"], -1))
    for hidden_state in hidden:
        tracer.union_find.unite(tracer.along(hidden_state, -1), state)
    return call.results(*[_along(state, -1, shape) for shape in call.shapes if shape is not None])


def _along(ids: Tensor, dim: int, shape: Sequence[int]) -> TracedActivation:
    return TracedActivation(
        ids.view([-1 if index == dim % len(shape) else 1 for index in range(len(shape))]), tuple(shape)
    )


def _gate_rows(
    tracer: Tracer, weights: Sequence[ParameterView], biases: Sequence[Any], state: Tensor, gates: int
) -> None:
    for weight in weights:
        tracer.union_find.unite(tracer.axis(weight, 0, "out"), state.repeat(gates))
    tracer.couple_vectors(biases, state.repeat(gates))


def _product(
    tracer: Tracer,
    call: Call,
    first: TracedActivation | ParameterView,
    second: TracedActivation | ParameterView,
    shape: Sequence[int],
) -> TracedActivation:
    """Assigns a matrix product's weights and outputs to neurons."""
    if isinstance(second, ParameterView) and len(second.shape) == 2 and isinstance(first, TracedActivation):
        tracer.read(second, 0, tracer.along(first, -1))
        return _along(tracer.axis(second, 1, "out"), -1, shape)
    is_left = isinstance(first, ParameterView) and len(first.shape) == 2
    if isinstance(first, ParameterView) and is_left and isinstance(second, TracedActivation) and len(second.shape) > 1:
        tracer.read(first, 1, tracer.along(second, -2))
        return _along(tracer.axis(first, 0, "out"), -2, shape)
    left, right = tracer.activation(first), tracer.activation(second)
    if min(len(left.shape), len(right.shape)) < 2:
        return _untracked(tracer, call, left, right, shape)
    rows, columns = left.ids.shape[-2] > 1, right.ids.shape[-1] > 1
    if left.ids.shape[-1] > 1 or right.ids.shape[-2] > 1:  # sum over neurons
        if rows or columns:
            return _untracked(tracer, call, left, right, shape)
        summed_right = right.ids.transpose(-1, -2).expand(*right.ids.shape[:-2], 1, right.shape[-2])
        summed_left = left.ids.expand(*left.ids.shape[:-1], left.shape[-1])
        tracer.union_find.unite(summed_left, summed_right)
        summed = TracedActivation.of(torch.where(summed_left != NEUTRAL, summed_left, summed_right))
        tracer.keep_within(summed, summed.varying - {summed.ids.ndim - 1})
        return TracedActivation.filled(PINNED, shape)
    if rows and columns:
        return _untracked(tracer, call, left, right, shape)
    factors = (
        TracedActivation(left.ids, (*left.shape[:-1], 1)),
        TracedActivation(right.ids, (*right.shape[:-2], 1, right.shape[-1])),
    )
    return tracer.pointwise(factors, shape)


def _untracked(
    tracer: Tracer, call: Call, left: TracedActivation, right: TracedActivation, shape: Sequence[int]
) -> TracedActivation:
    tracer.unknown[call.name] += 1
    tracer.pin(left)
    tracer.pin(right)
    return TracedActivation.filled(PINNED, shape)


_KINDS: list[tuple[str, Rule]] = [
    ("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution", convolution),
    ("linear", linear),
    ("bmm matmul mm", matmul),
    ("addmm baddbmm", addmm),
    ("scaled_dot_product_attention", attention),
    (
        "_native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training batch_norm"
        " cudnn_batch_norm instance_norm native_batch_norm",
        batch_norm,
    ),
    ("group_norm native_group_norm", group_norm),
    ("layer_norm native_layer_norm rms_norm", layer_norm),
    ("embedding", embedding),
    ("prelu", prelu),
    ("gru lstm rnn_relu rnn_tanh", recurrent),
    ("gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell", recurrent_cell),
]

# Rules by operation name.
LAYERS: dict[str, Rule] = {name: rule for names, rule in _KINDS for name in names.split()}
