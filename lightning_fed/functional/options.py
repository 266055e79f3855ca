"""What functions with named alternatives say to a name they do not know."""

from __future__ import annotations

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
