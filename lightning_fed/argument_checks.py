"""Checks of arguments, with uniform error messages."""

from __future__ import annotations

import difflib
import math
import numbers
from typing import Any, get_args

_MOST_LISTED = 16  # maximum number of names listed in an error


def check_option(name: str, value: object, allowed: Any) -> None:
    """Raises ``ValueError`` if ``allowed`` (a sequence or a ``Literal``) does not contain the argument's value."""
    known = get_args(allowed) or allowed
    if value not in known:
        near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)  # `nu` is close to `mu`
        hint = f" Did you mean {near[0]!r}?" if near else ""
        some = f"one of {list(known)}" if len(known) <= _MOST_LISTED or not near else f"one of {len(known)} names"
        raise ValueError(f"Expected `{name}` to be {some}, but got {value!r}.{hint}")


def check_count(name: str, value: object, lowest: int = 1) -> int:
    """Checks and converts an integer of at least ``lowest``. NumPy integers are accepted, but not a bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"Expected `{name}` to be a whole number, but got {value!r}.")
    if value < lowest:
        raise ValueError(f"Expected `{name}` to be at least {lowest}, but got {value}.")
    return int(value)


def check_number(name: str, value: object) -> float:
    """Checks a real number, and converts the number to float. NumPy numbers are accepted, but not a bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"Expected `{name}` to be a number, but got {value!r}.")
    return float(value)


def check_positive(name: str, value: object) -> float:
    """Checks and converts a finite number greater than 0."""
    number = check_number(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"Expected `{name}` to be greater than 0 and finite, but got {value}.")
    return number


def check_nonnegative(name: str, value: object) -> float:
    """Checks a finite number of at least 0, and converts the number to float."""
    number = check_number(name, value)
    if not 0 <= number < math.inf:
        raise ValueError(f"Expected `{name}` to be at least 0 and finite, but got {value}.")
    return number


def check_inside(name: str, value: object) -> float:
    """Checks a number in (0, 1), and converts the number to float."""
    number = check_number(name, value)
    if not 0 < number < 1:
        raise ValueError(f"Expected `{name}` to be in (0, 1), but got {value}.")
    return number


def check_share(name: str, value: object) -> float:
    """Checks and converts a number in [0, 1)."""
    share = check_number(name, value)
    if not 0 <= share < 1:
        raise ValueError(f"Expected `{name}` to be in [0, 1), but got {value}.")
    return share
