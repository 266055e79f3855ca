"""Shows the log on the console, and formats names and tables."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from lightning_fed.lazy_names import find_feature

LOGGER = logging.getLogger("lightning_fed")


class ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes log lines to the console, unless the root logger already writes the lines."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.setStream(sys.stderr)  # `sys.stderr` may have been replaced
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        terminal = find_feature("lightning_fed.report.terminal") if "\n|---" in text else None
        return text if terminal is None else str(terminal.draw_tables(text))


def round_number(round: int) -> int:
    """Converts a round's index, from 0, to the number shown to users, from 1."""
    return round + 1


def list_first(names: Sequence[object]) -> str:
    """Lists the first five names, and counts the others.

    Example:
        >>> list_first("abcdefg")
        "'a', 'b', 'c', 'd', 'e' and 2 more"
    """
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more


def markdown_table(rows: Sequence[Sequence[str]], alignment: str = "---") -> str:
    """Formats rows as a Markdown table. The first row is the header.

    Example:
        >>> print(markdown_table([["client", "loss"], ["a", "0.5"]]))
        | client | loss |
        |---|---|
        | a | 0.5 |
    """
    head, *lines = (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)
    return "\n".join([head, f"|---|{f'{alignment}|' * (len(rows[0]) - 1)}", *lines])


def show_log() -> None:
    """Shows the package's log on the console from level ``INFO``, unless the program configured the logger."""
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    if not LOGGER.handlers:
        LOGGER.addHandler(ConsoleHandler())


show_log()
