"""Converts states of optimizers, schedulers and loss scalers for messages between server and client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.messages import Request, State, digest

_LARGE = 1e300


def pack_numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the state of an optimizer or scheduler to JSON values."""
    packed: dict[str, Any] = _pack(state, "")
    return packed


def _pack(value: Any, path: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        # Tables with other keys, such as the milestones of `MultiStepLR`, are constants and equal on both sides.
        return {name: _pack(item, f"{path}.{name}") for name, item in value.items() if isinstance(name, str)}
    if isinstance(value, list | tuple):
        return [_pack(item, path) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise MisconfigurationException(
        "Expected optimizer and scheduler options that can be sent (numbers, strings, and lists of both), but "
        f"{path.lstrip('.')!r} is a {type(value).__name__}."
    )


def fit_numbers(numbers: Any, like: Any, path: str = "") -> Any:
    """Restricts nested ``numbers`` to the keys in ``like``. Raises an error for a missing key or another type.

    Example:
        >>> fit_numbers({"lr": [0.1], "more": 1}, {"lr": [0.2]})
        {'lr': [0.1]}
    """
    if isinstance(like, Mapping) and isinstance(numbers, Mapping) and like.keys() <= numbers.keys():
        return {name: fit_numbers(numbers[name], like[name], f"{path}.{name}") for name in like}
    if isinstance(like, list) and isinstance(numbers, list) and len(like) == len(numbers):
        pairs = zip(numbers, like, strict=True)
        return [fit_numbers(value, model, f"{path}.{index}") for index, (value, model) in enumerate(pairs)]
    if isinstance(like, str) and isinstance(numbers, str):
        return numbers
    if like is None and numbers is None:
        return None
    is_number = isinstance(numbers, int | float) and (numbers == like or abs(numbers) < _LARGE)
    if is_number and (like is None or isinstance(like, int | float)):
        return numbers
    raise ValueError(f"{path.lstrip('.')!r} differs from the server's value in type, length or keys, or is too large")


def name_optimizers(optimizers: Sequence[Optimizer]) -> list[str]:
    """Returns the class names of optimizers. For a wrapper, returns the wrapped optimizer's class name."""
    return [type(getattr(optimizer, "optimizer", optimizer)).__name__ for optimizer in optimizers]


def load_hyperparameters(optimizers: Sequence[Optimizer], groups: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Loads received options such as ``lr`` by optimizer and parameter group."""
    shapes = [len(optimizer.param_groups) for optimizer in optimizers]
    if shapes != [len(options) for options in groups]:
        raise ValueError(
            f"the server's optimizers have {[len(options) for options in groups]} parameter groups, but the client's "
            f"have {shapes}: both need the same model"
        )
    for optimizer, sent in zip(optimizers, groups, strict=True):
        for group, values in zip(optimizer.param_groups, sent, strict=True):
            for name, value in values.items():
                before = group.get(name)
                if isinstance(before, Tensor):
                    before.fill_(value)
                else:
                    group[name] = tuple(value) if isinstance(before, tuple) else value


def load_numbers(owner: Any, numbers: Mapping[str, Any]) -> None:
    """Updates the state of a scheduler or loss scaler (``owner``) with received values."""
    owner.load_state_dict({**owner.state_dict(), **numbers})


def on_device(state: State, device: torch.device) -> State:
    """Moves all tensors of a state to a device."""
    return {name: value.to(device) for name, value in state.items()}


def digest_request(request: Request) -> str:
    """Hashes a client's request for parameter rows."""
    parts = {"rows": request.rows, "extras": request.extras}
    return digest({f"{kind}:{name}": part[name] for kind, part in parts.items() for name in part})
