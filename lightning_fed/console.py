"""Log lines on the console where a program has not set up logging, and rounds counted from 1, as people do."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("lightning_fed")


class ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the console as long as the root logger has no handlers, which would write all lines once more."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line."""
        if not logging.getLogger().handlers:
            self.setStream(sys.stderr)  # which may have been replaced
            super().emit(record)


@contextmanager
def root_logger_as_it_was() -> Iterator[None]:
    """Removes what handlers a library gives the root logger meanwhile: they are for the program to set up."""
    before = [*logging.root.handlers]
    try:
        yield
    finally:
        for handler in [*logging.root.handlers]:
            if handler not in before:
                logging.root.removeHandler(handler)


def round_number(round: int) -> int:
    """Counts a round from 1, as people do, in log lines, tables, titles and files.

    What programs read counts from 0, as Lightning counts epochs: messages, checkpoints, arguments, the loggers'
    ``epoch``.

    Example:
        >>> f"Round {round_number(0)}"
        'Round 1'

    """
    return round + 1


def show_log() -> None:
    """Has the package's lines shown from ``INFO`` on, where the program has not said otherwise.

    ``logging.getLogger("lightning_fed").setLevel(logging.WARNING)`` leaves warnings only.

    Example:
        >>> show_log()
        >>> [type(handler).__name__ for handler in LOGGER.handlers]
        ['ConsoleHandler']

    """
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    if not LOGGER.handlers:
        LOGGER.addHandler(ConsoleHandler())


show_log()
