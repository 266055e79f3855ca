"""Public exceptions, and exceptions as text."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class OptionError(ValueError):
    """Invalid option for the given data or model. The command line prints the error without a traceback."""


class BadUpdate(ValueError):
    """Invalid update. The client is excluded from the round; the message states the reason for the log.

    :meth:`Aggregator.receive <lightning_fed.Aggregator.receive>` raises the exception before any change to the state.

    Example:
        >>> raise BadUpdate("it sends no prototypes")
        Traceback (most recent call last):
        lightning_fed.errors.BadUpdate: it sends no prototypes
    """


class BadUpdates(ValueError):
    """Invalid updates, detected once the round is complete: reason by excluded client.

    A key that is not a client, such as a sum's key, stands for all clients.
    """

    def __init__(self, reasons: Mapping[str | int, str]) -> None:
        super().__init__("; ".join(f"{client!r}: {reason}" for client, reason in reasons.items()))
        self.reasons = dict(reasons)


class ClientFault(Exception):
    """Failure of one client. The round excludes the client, and the fit continues; any other exception stops the fit.

    Callbacks raise the exception on the client, with the reason, in
    :meth:`~lightning_fed.callbacks.FederatedCallback.on_client_receive`,
    :meth:`~lightning_fed.callbacks.FederatedCallback.on_client_batch` and
    :meth:`~lightning_fed.callbacks.FederatedCallback.on_client_end`.

    Example:
        >>> raise ClientFault("its images have 4 channels instead of 3")
        Traceback (most recent call last):
        lightning_fed.errors.ClientFault: its images have 4 channels instead of 3
    """


class VisitTimeout(Exception):
    """Visit longer than ``visit_timeout``. The client is excluded from the round."""


def describe(error: BaseException) -> str:
    """Formats an exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def without_frames(error: _Error) -> _Error:
    """Replaces the traceback by a note. Frames would keep local variables alive."""
    error.add_note("".join(traceback.format_exception(error)))
    return error.with_traceback(None)
