"""Checks the user's Trainer arguments for names reserved for the federation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def check_options(trainer: Mapping[str, Any] | None, reserved: Collection[str]) -> dict[str, Any]:
    """Returns the user's arguments for ``L.Trainer``. Raises an error for ``reserved`` names, set by the federation."""
    if not (trainer is None or isinstance(trainer, Mapping)):
        raise TypeError(f"Expected `trainer` to be a mapping of arguments of `L.Trainer`, but got {trainer!r}.")
    options = dict(trainer or {})
    refused = [name for name in options if name in reserved]
    if refused:
        raise ValueError(
            f"Expected `trainer` without {list(reserved)}, because the federation sets these arguments, "
            f"but got {refused}."
        )
    return options
