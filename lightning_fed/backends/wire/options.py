"""Check of the arguments of a half's Trainer, some of which the federation sets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def check_options(trainer: Mapping[str, Any] | None, ours: Collection[str]) -> dict[str, Any]:
    """Checks arguments of ``L.Trainer`` for names that the federation sets.

    Args:
        trainer: The user's arguments.
        ours: Names that the federation sets.

    Raises:
        TypeError: If it is no mapping.
        ValueError: If it has one of those names.

    Example:
        >>> check_options({"accelerator": "cpu"}, ["callbacks"])
        {'accelerator': 'cpu'}

    """
    if not (trainer is None or isinstance(trainer, Mapping)):
        raise TypeError(f"Expected `trainer` to be a mapping of arguments of `L.Trainer`, but got {trainer!r}.")
    options = dict(trainer or {})
    refused = [name for name in options if name in ours]
    if refused:
        raise ValueError(f"Expected `trainer` without {list(ours)}, which are set here, but got {refused}.")
    return options
