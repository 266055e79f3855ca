"""Checks for arguments, with uniform errors."""

from __future__ import annotations

import difflib
import math
import numbers
from typing import Any, get_args

_MOST_LISTED = 16  # names in an error with a hint


def check_option(name: str, value: object, allowed: Any) -> None:
    """Checks an argument against the allowed values.

    Args:
        name: Name of the argument.
        value: The argument.
        allowed: The allowed values, a sequence or a ``Literal``.

    Raises:
        ValueError: If the argument is another value.
    """
    known = get_args(allowed) or allowed
    if value not in known:
        near = difflib.get_close_matches(str(value), known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        some = f"one of {list(known)}" if len(known) <= _MOST_LISTED or not near else f"one of {len(known)} names"
        raise ValueError(f"Expected `{name}` to be {some}, but got {value!r}.{hint}")


def check_count(name: str, value: object, lowest: int = 1) -> int:
    """Checks and converts a whole number.

    Args:
        name: Name of the argument.
        value: The argument; NumPy's numbers are accepted, a bool is not.
        lowest: Smallest allowed number.

    Raises:
        ValueError: If the argument is invalid.

    Example:
        >>> check_count("local_epochs", 2)
        2
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"Expected `{name}` to be a whole number, but got {value!r}.")
    if value < lowest:
        raise ValueError(f"Expected `{name}` to be at least {lowest}, but got {value}.")
    return int(value)


def check_number(name: str, value: object) -> float:
    """Checks and converts a real number.

    Args:
        name: Name of the argument.
        value: The argument; NumPy's numbers are accepted, a bool is not.

    Raises:
        ValueError: If the argument is invalid.

    Example:
        >>> check_number("server_lr", 1)
        1.0
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"Expected `{name}` to be a number, but got {value!r}.")
    return float(value)


def check_positive(name: str, value: object) -> float:
    """Checks and converts a finite number greater than 0.

    Args:
        name: Name of the argument.
        value: The argument.

    Raises:
        ValueError: If the argument is invalid.

    Example:
        >>> check_positive("clip", 2)
        2.0
    """
    number = check_number(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"Expected `{name}` to be greater than 0 and finite, but got {value}.")
    return number


def check_nonnegative(name: str, value: object) -> float:
    """Checks and converts a finite number of at least 0.

    Args:
        name: Name of the argument.
        value: The argument.

    Raises:
        ValueError: If the argument is invalid.

    Example:
        >>> check_nonnegative("mu", 0)
        0.0
    """
    number = check_number(name, value)
    if not 0 <= number < math.inf:
        raise ValueError(f"Expected `{name}` to be at least 0 and finite, but got {value}.")
    return number


def check_inside(name: str, value: object) -> float:
    """Checks and converts a number in (0, 1).

    Args:
        name: Name of the argument.
        value: The argument.

    Raises:
        ValueError: If the argument is invalid.

    Example:
        >>> check_inside("delta", 1e-5)
        1e-05
    """
    number = check_number(name, value)
    if not 0 < number < 1:
        raise ValueError(f"Expected `{name}` to be in (0, 1), but got {value}.")
    return number


def check_share(name: str, value: object) -> float:
    """Checks and converts a number in [0, 1).

    Args:
        name: Name of the argument.
        value: The argument.

    Raises:
        ValueError: If the argument is invalid.

    Example:
        >>> check_share("momentum", 0.9)
        0.9
    """
    share = check_number(name, value)
    if not 0 <= share < 1:
        raise ValueError(f"Expected `{name}` to be in [0, 1), but got {value}.")
    return share
