"""What happens to atoms in operations with weights: what reads neurons, what makes them, what belongs to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fed.matching.atoms import NEUTRAL, PINNED, ParameterView, Shadow
from lightning_fed.matching.tracer import Call, Rule, Tracer

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def convolution(tracer: Tracer, call: Call) -> Any:
    """Convolutions, also grouped, depthwise and transposed ones."""
    arguments = call.arguments
    weight, groups = arguments["weight"], arguments["groups"]
    is_transposed = call.name.startswith("conv_transpose") or arguments.get("transposed", False)
    shadow = tracer.shadow(arguments["input"])
    if not isinstance(weight, ParameterView) or len(shadow.shape) != len(weight.shape):
        return tracer.unknown_result(call)
    channels = tracer.along(shadow, 1)
    read, made = (0, 1) if is_transposed else (1, 0)
    if groups == 1:
        tracer.read(weight, read, channels)
        out = tracer.axis(weight, made, "out")
    elif groups == len(channels) and (not is_transposed or weight.shape[1] == 1):  # depthwise: made of one each
        out = tracer.axis(weight, 0, "out")
        tracer.belong([Shadow.of(out)], channels.repeat_interleave(len(out) // len(channels)))
    elif is_transposed:
        return tracer.unknown_result(call)
    else:
        for part in channels.chunk(groups):
            tracer.read(weight, 1, part)
        out = tracer.axis(weight, 0, "out")
        tracer.keep_within(Shadow.of(out.view(groups, -1)), {0})
    tracer.belong([arguments["bias"]], out)
    return _along(out, 1, call.shape)


def linear(tracer: Tracer, call: Call) -> Any:
    """A linear layer."""
    weight = call.arguments["weight"]
    if not isinstance(weight, ParameterView):
        return tracer.unknown_result(call)
    tracer.read(weight, 1, tracer.along(call.arguments["input"], -1))
    out = tracer.axis(weight, 0, "out")
    tracer.belong([call.arguments["bias"]], out)
    return _along(out, -1, call.shape)


def matmul(tracer: Tracer, call: Call) -> Any:
    """A product with a parameter, or of two activations."""
    return _product(tracer, call, call.arguments["input"], call.tensors[-1], call.shape)


def addmm(tracer: Tracer, call: Call) -> Any:
    """The same with something added."""
    bias, first, second = call.tensors
    product = _product(tracer, call, first, second, call.shape)
    return tracer.pointwise([product, bias], call.shape)


def attention(tracer: Tracer, call: Call) -> Any:
    """Scaled dot-product attention: two products."""
    query, key, value = (tracer.shadow(call.arguments[name]) for name in ("query", "key", "value"))
    if len({len(shadow.shape) for shadow in (query, key, value)}) > 1 or call.arguments.get("enable_gqa"):
        return tracer.unknown_result(call)
    tracer.pin(call.arguments.get("attn_mask"))
    turned = Shadow(key.atoms.transpose(-1, -2), (*key.shape[:-2], key.shape[-1], key.shape[-2]))
    shape = (*call.shape[:-1], key.shape[-2])
    scores = _product(tracer, call, query, turned, shape)
    return call.results(_product(tracer, call, scores, value, call.shape))


def batch_norm(tracer: Tracer, call: Call) -> Any:
    """Batch or instance normalisation: every channel by itself."""
    names = ("weight", "bias", "running_mean", "running_var")
    channels = tracer.along(call.arguments["input"], 1)
    tracer.belong([call.arguments.get(name) for name in names], channels)
    return call.results(_along(channels, 1, call.shape))


def group_norm(tracer: Tracer, call: Call) -> Any:
    """Group normalisation: channels stay in their group, groups may change places as wholes."""
    channels = tracer.along(call.arguments["input"], 1)
    groups: int = call.arguments["num_groups" if "num_groups" in call.arguments else "group"]
    tracer.belong([call.arguments.get(name) for name in ("weight", "bias")], channels)
    if groups == 1:
        tracer.atoms.mark(channels, "within")
    elif groups < len(channels):
        for part in channels.chunk(groups):
            tracer.atoms.mark(part, "block")
    return call.results(_along(channels, 1, call.shape))


def layer_norm(tracer: Tracer, call: Call) -> Any:
    """Normalisation over the last dimensions."""
    shadow = tracer.shadow(call.arguments["input"])
    rank = len(shadow.shape)
    dims = set(range(rank - len(call.arguments["normalized_shape"]), rank))
    if shadow.varying & dims:
        tracer.keep_within(shadow, shadow.varying - dims)
    vectors = [call.arguments.get(name) for name in ("weight", "bias")]
    present = [vector for vector in vectors if isinstance(vector, Shadow | ParameterView)]
    return call.results(tracer.pointwise([shadow, *present], call.shape))


def embedding(tracer: Tracer, call: Call) -> Any:
    """Rows of a table, chosen by the input: the rows stay, the columns are neurons."""
    weight = call.arguments["weight"]
    if not isinstance(weight, ParameterView):
        return tracer.unknown_result(call)
    tracer.atoms.pin(tracer.axis(weight, 0, "vec"))
    return _along(tracer.axis(weight, 1, "out"), -1, call.shape)


def prelu(tracer: Tracer, call: Call) -> Any:
    """A slope per channel, or one for all."""
    shadow, weight = tracer.shadow(call.arguments["input"]), call.arguments["weight"]
    if weight.shape == (1,):
        return shadow
    channels = tracer.along(shadow, 1)
    tracer.belong([weight], channels)
    return _along(channels, 1, call.shape)


def recurrent(tracer: Tracer, call: Call) -> Any:
    """Recurrent layers: in every gate a row per neuron, and the columns that read the neurons themselves."""
    arguments = call.arguments
    gates, hidden = _GATES[call.name], arguments["hx"]
    hidden = hidden if isinstance(hidden, list | tuple) else [hidden]
    if "params" not in arguments or not all(isinstance(one, ParameterView) for one in arguments["params"]):
        return tracer.unknown_result(call)
    directions = 2 if arguments["bidirectional"] else 1
    cells = arguments["num_layers"] * directions
    params = list(arguments["params"])
    per_cell = len(params) // cells
    biases = 2 if arguments["has_biases"] else 0
    value, outs, states = arguments["input"], [], []
    for cell in range(cells):
        inner, outer, *rest = params[cell * per_cell : (cell + 1) * per_cell]
        state = tracer.atoms.fresh(inner.shape[0] // gates)
        out = state
        if len(rest) > biases:  # a projection of the state
            tracer.read(rest[-1], 1, state)
            out = tracer.axis(rest[-1], 0, "out")
        _gate_rows(tracer, [inner, outer], rest[:biases], state, gates)
        tracer.read(outer, 1, out)
        tracer.read(inner, 1, tracer.along(value, -1))
        outs.append(out)
        states.append(state)
        if cell % directions == directions - 1:
            value = _along(torch.cat(outs[-directions:]), -1, call.shape)
    if not all(bool((tracer.shadow(one).atoms == NEUTRAL).all()) for one in hidden):  # not zeros
        tracer.pin(Shadow.of(torch.cat([*outs, *states])))
        for one in hidden:
            tracer.pin(one)
    lasts = zip((outs, states), call.shapes[1:], strict=False)
    return call.results(
        value, *[Shadow(torch.stack(last)[:, None], shape) for last, shape in lasts if shape is not None]
    )


def recurrent_cell(tracer: Tracer, call: Call) -> Any:
    """One step of a recurrent layer."""
    arguments = call.arguments
    gates, hidden = _GATES[call.name.removesuffix("_cell")], arguments["hx"]
    hidden = hidden if isinstance(hidden, list | tuple) else [hidden]
    inner, outer = arguments["w_ih"], arguments["w_hh"]
    if not isinstance(inner, ParameterView) or not isinstance(outer, ParameterView):
        return tracer.unknown_result(call)
    state = tracer.axis(outer, 1, "in")
    _gate_rows(tracer, [inner, outer], [arguments.get("b_ih"), arguments.get("b_hh")], state, gates)
    tracer.read(inner, 1, tracer.along(arguments["input"], -1))
    for one in hidden:
        tracer.atoms.join(tracer.along(one, -1), state)
    return call.results(*[_along(state, -1, shape) for shape in call.shapes if shape is not None])


def _along(atoms: Tensor, dim: int, shape: Sequence[int]) -> Shadow:
    """A shadow whose atoms differ along one dimension only."""
    return Shadow(atoms.view([-1 if place == dim % len(shape) else 1 for place in range(len(shape))]), tuple(shape))


def _gate_rows(
    tracer: Tracer, weights: Sequence[ParameterView], biases: Sequence[Any], state: Tensor, gates: int
) -> None:
    for weight in weights:
        tracer.atoms.join(tracer.axis(weight, 0, "out"), state.repeat(gates))
    tracer.belong(biases, state.repeat(gates))


def _product(
    tracer: Tracer, call: Call, first: Shadow | ParameterView, second: Shadow | ParameterView, shape: Sequence[int]
) -> Shadow:
    """A matrix product; what differs along both axes that are left is not followed."""
    if isinstance(second, ParameterView) and len(second.shape) == 2 and isinstance(first, Shadow):
        tracer.read(second, 0, tracer.along(first, -1))
        return _along(tracer.axis(second, 1, "out"), -1, shape)
    is_left = isinstance(first, ParameterView) and len(first.shape) == 2
    if isinstance(first, ParameterView) and is_left and isinstance(second, Shadow) and len(second.shape) > 1:
        tracer.read(first, 1, tracer.along(second, -2))
        return _along(tracer.axis(first, 0, "out"), -2, shape)
    left, right = tracer.shadow(first), tracer.shadow(second)
    if min(len(left.shape), len(right.shape)) < 2:
        return _untracked(tracer, call, left, right, shape)
    rows, columns = left.atoms.shape[-2] > 1, right.atoms.shape[-1] > 1
    if left.atoms.shape[-1] > 1 or right.atoms.shape[-2] > 1:  # neurons are summed over
        if rows or columns:
            return _untracked(tracer, call, left, right, shape)
        turned = right.atoms.transpose(-1, -2).expand(*right.atoms.shape[:-2], 1, right.shape[-2])
        own = left.atoms.expand(*left.atoms.shape[:-1], left.shape[-1])
        tracer.atoms.join(own, turned)
        summed = Shadow.of(torch.where(own != NEUTRAL, own, turned))
        tracer.keep_within(summed, summed.varying - {summed.atoms.ndim - 1})
        return Shadow.filled(PINNED, shape)
    if rows and columns:
        return _untracked(tracer, call, left, right, shape)
    made = Shadow(left.atoms, (*left.shape[:-1], 1)), Shadow(right.atoms, (*right.shape[:-2], 1, right.shape[-1]))
    return tracer.pointwise(made, shape)


def _untracked(tracer: Tracer, call: Call, left: Shadow, right: Shadow, shape: Sequence[int]) -> Shadow:
    tracer.unknown[call.name] += 1
    tracer.pin(left)
    tracer.pin(right)
    return Shadow.filled(PINNED, shape)


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

LAYERS: dict[str, Rule] = {name: rule for names, rule in _KINDS for name in names.split()}
"""The rules by the names of operations."""
