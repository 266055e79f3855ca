"""Public exceptions, and exceptions as text."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class OptionError(ValueError):
    """Invalid option for the given data or model. The command line prints the error without a traceback."""


class BadUpdate(ValueError):
    """Invalid update. The client is excluded from the round and logged.

    Aggregators raise the exception in :meth:`Aggregator.receive <lightning_fed.Aggregator.receive>` before any change
    to their state. The message states the reason.

    Example:
        >>> raise BadUpdate("it sends no prototypes")
        Traceback (most recent call last):
        lightning_fed.errors.BadUpdate: it sends no prototypes
    """


class BadUpdates(ValueError):
    """Invalid updates, detected once the round is complete.

    Args:
        reasons: Reason for each excluded client. An unknown key, such as the key of a sum, stands for all clients.
    """

    def __init__(self, reasons: Mapping[str | int, str]) -> None:
        super().__init__("; ".join(f"{client!r}: {reason}" for client, reason in reasons.items()))
        self.reasons = dict(reasons)


class ClientFault(Exception):
    """Failure of one client. The client is excluded from the round, and the fit continues with the other clients.

    Callbacks raise the exception on the client, in
    :meth:`~lightning_fed.callbacks.FederatedCallback.on_client_receive`,
    :meth:`~lightning_fed.callbacks.FederatedCallback.on_client_batch` and
    :meth:`~lightning_fed.callbacks.FederatedCallback.on_client_end`. The message states the reason. Any other exception
    stops the fit.

    Example:
        >>> raise ClientFault("its images have 4 channels instead of 3")
        Traceback (most recent call last):
        lightning_fed.errors.ClientFault: its images have 4 channels instead of 3
    """


class VisitTimeout(Exception):
    """Visit longer than ``visit_timeout``. The client is excluded from the round."""


def describe(error: BaseException) -> str:
    """Formats an exception in one line.

    Example:
        >>> describe(KeyError("image"))
        "KeyError: 'image'"
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def without_frames(error: _Error) -> _Error:
    """Replaces the traceback by a note. Frames would keep local variables alive."""
    error.add_note("".join(traceback.format_exception(error)))
    return error.with_traceback(None)
