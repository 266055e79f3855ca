"""What is said to options that cannot be right."""

from __future__ import annotations

import numbers
from collections.abc import Sequence


def check_option(name: str, value: object, known: Sequence[str]) -> None:
    """Refuses an option that is not known.

    Args:
        name: Name of the argument.
        value: What was passed.
        known: What may be passed.

    Raises:
        ValueError: If it is none of these.

    """
    if value not in known:
        raise ValueError(f"Expected `{name}` to be one of {list(known)}, but got {value!r}.")


def check_count(name: str, value: object, lowest: int = 1) -> int:
    """A whole number from ``lowest`` on.

    Args:
        name: Name of the argument.
        value: What was passed; numbers of NumPy are fine.
        lowest: Smallest number allowed.

    Raises:
        ValueError: If it is none.

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
    """A real number, of any kind but a bool.

    Args:
        name: Name of the argument.
        value: What was passed; numbers of NumPy are fine.

    Raises:
        ValueError: If it is none.

    Example:
        >>> check_number("server_lr", 1)
        1.0

    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"Expected `{name}` to be a number, but got {value!r}.")
    return float(value)


def check_share(name: str, value: object) -> float:
    """A number from 0 to below 1.

    Args:
        name: Name of the argument.
        value: What was passed.

    Raises:
        ValueError: If it is none.

    Example:
        >>> check_share("momentum", 0.9)
        0.9

    """
    share = check_number(name, value)
    if not 0 <= share < 1:
        raise ValueError(f"Expected `{name}` to be in [0, 1), but got {value}.")
    return share
