"""Packs optimizer state into a flat dictionary of tensors, for the client store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.messages import State

OPTIMIZER = "optimizer:"
"""Prefix for names in packed optimizer state."""

HYPERPARAMETERS = ("lr", "initial_lr", "momentum", "betas", "weight_decay")
"""Options of parameter groups set by schedulers and users."""

_GROUP = "group"


def pack_optimizers(optimizers: Sequence[Optimizer]) -> State:
    """Packs optimizer buffers (such as momentum) and step counts into a flat dictionary."""
    packed: State = {}
    for number, optimizer in enumerate(optimizers):
        counted = {f"{_GROUP}{place}": numbers for place, numbers in enumerate(_counted(optimizer))}
        for parameter, buffers in [*_buffers(optimizer).items(), *counted.items()]:
            for name, value in buffers.items():
                key = f"{OPTIMIZER}{number}:{parameter}:{name}"
                if isinstance(value, Tensor):
                    packed[f"{key}:tensor"] = value
                elif isinstance(value, int | float):
                    packed[f"{key}:number"] = torch.tensor(value, dtype=torch.float64 if type(value) is float else None)
                elif value is not None:
                    raise TypeError(
                        f"Expected the state of {type(optimizer).__name__} to hold tensors and numbers, but {name!r} "
                        f"is a {type(value).__name__}: use optimizer_state='reset'."
                    )
    return packed


def unpack_optimizers(optimizers: Sequence[Optimizer], packed: Mapping[str, Tensor]) -> None:
    """Restores the result of :func:`pack_optimizers`. Hyper-parameters do not change."""
    states: list[dict[Any, dict[str, Any]]] = [{} for _ in optimizers]
    for key, value in packed.items():
        number, parameter, name, kind = key.removeprefix(OPTIMIZER).split(":")
        index: Any = int(parameter) if parameter.lstrip("-").isdigit() else parameter
        buffer = value.clone() if kind == "tensor" else value.item()
        states[int(number)].setdefault(index, {})[name] = buffer
    for optimizer, state in zip(optimizers, states, strict=True):
        groups = [{**group, **state.pop(f"{_GROUP}{place}", {})} for place, group in enumerate(_groups(optimizer))]
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _buffers(optimizer: Optimizer) -> dict[Any, Any]:
    # Empty for Lightning's placeholder in a module without optimizers.
    buffers: dict[Any, Any] = optimizer.state_dict().get("state", {})
    return buffers


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = optimizer.state_dict().get("param_groups", [])
    return groups


def _counted(optimizer: Optimizer) -> list[dict[str, Any]]:
    # Numbers that differ from the optimizer's defaults, without hyper-parameters.
    return [
        {
            name: value
            for name, value in group.items()
            if name not in HYPERPARAMETERS
            and isinstance(value, int | float | Tensor)
            and (isinstance(value, Tensor) or value != optimizer.defaults.get(name))
        }
        for group in _groups(optimizer)
    ]
