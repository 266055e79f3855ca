"""Public exceptions, and formatting of exceptions."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class OptionError(ValueError):
    """Raised for an option that does not fit the data or the model."""


class BadUpdate(ValueError):
    """Raised for an invalid update, to exclude the client from the round. The message is logged.

    An aggregation rule raises this error in :meth:`Aggregator.receive <lightning_fed.Aggregator.receive>`, before
    storing anything from the update.

    Example:
        >>> raise BadUpdate("the client sends no prototypes")
        Traceback (most recent call last):
        lightning_fed.errors.BadUpdate: the client sends no prototypes
    """


class BadUpdates(ValueError):
    """Raised if updates are found invalid after all clients have trained.

    ``reasons`` maps client names to reasons. With secure sums, the key ``"sum"`` stands for all clients in the round.
    """

    def __init__(self, reasons: Mapping[str | int, str]) -> None:
        super().__init__("; ".join(f"{client!r}: {reason}" for client, reason in reasons.items()))
        self.reasons = dict(reasons)


class ClientFault(Exception):
    """Raised if a client fails. The round continues without this client.

    Callbacks may raise this error in :meth:`~lightning_fed.callbacks.FederatedCallback.on_client_receive`,
    :meth:`~lightning_fed.callbacks.FederatedCallback.on_client_batch` and
    :meth:`~lightning_fed.callbacks.FederatedCallback.on_client_end`. Other exceptions end the fit.

    Example:
        >>> raise ClientFault("the client's images have 4 channels instead of 3")
        Traceback (most recent call last):
        lightning_fed.errors.ClientFault: the client's images have 4 channels instead of 3
    """


class VisitTimeout(Exception):
    """Raised if a client's training in a round takes longer than ``visit_timeout`` seconds."""


def describe(error: BaseException) -> str:
    """Formats an exception as one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def without_frames(error: _Error) -> _Error:
    """Replaces an exception's traceback by a text note."""
    # A traceback keeps local variables alive.
    error.add_note("".join(traceback.format_exception(error)))
    return error.with_traceback(None)
