"""Exceptions that users and extenders meet, and exceptions as text."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class OptionError(ValueError):
    """An option that cannot be right with these data or this model; the command line shows it without a traceback."""


class BadUpdate(ValueError):
    """An update that an aggregator cannot use; its client is left out of the round and named in the log.

    Aggregators raise it in :meth:`Aggregator.receive <lightning_fed.Aggregator.receive>`, with the reason in words,
    before they keep anything of the update.

    Example:
        >>> raise BadUpdate("it sends no prototypes")
        Traceback (most recent call last):
        lightning_fed.errors.BadUpdate: it sends no prototypes

    """


class BadUpdates(ValueError):
    """Updates that turn out not to fit when all of a round are there.

    Args:
        reasons: The reason for every client that is left out; a key that is no client's (a sum of several) stands for
            all of them.

    """

    def __init__(self, reasons: Mapping[str | int, str]) -> None:
        super().__init__("; ".join(f"{client!r}: {reason}" for client, reason in reasons.items()))
        self.reasons = dict(reasons)


class ClientFault(Exception):
    """A fault of one client, which is left out of the round; the fit goes on with the others.

    Callbacks raise it on the client's side, in
    :meth:`~lightning_fed.callbacks.FederatedCallback.on_client_receive`,
    :meth:`~lightning_fed.callbacks.FederatedCallback.on_client_batch` and
    :meth:`~lightning_fed.callbacks.FederatedCallback.on_client_end`, with the reason in words. Any other exception
    there is the program's, and ends the fit.

    Example:
        >>> raise ClientFault("its images have 4 channels instead of 3")
        Traceback (most recent call last):
        lightning_fed.errors.ClientFault: its images have 4 channels instead of 3

    """


class VisitTimeout(Exception):
    """A visit that took longer than ``visit_timeout``; its client is left out of the round."""


def describe(error: BaseException) -> str:
    """An exception in one line.

    Example:
        >>> describe(KeyError("image"))
        "KeyError: 'image'"

    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def without_frames(error: _Error) -> _Error:
    """The exception with its traceback as a note, which unlike frames keeps nothing alive that was in use there."""
    error.add_note("".join(traceback.format_exception(error)))
    return error.with_traceback(None)
