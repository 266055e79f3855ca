"""Shows the log on the console by default, and formats names, Markdown tables and the numbers of rounds."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from lightning_fed.lazy_names import find_feature

LOGGER = logging.getLogger("lightning_fed")


class ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes log lines to the console, unless the root logger has handlers that would write the lines again."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.setStream(sys.stderr)  # `sys.stderr` may have been replaced
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        terminal = find_feature("lightning_fed.report.terminal") if "\n|---" in text else None
        return text if terminal is None else str(terminal.draw_tables(text))


def round_number(round: int) -> int:
    """One-based round number for log lines, tables, titles and file names.

    Messages, checkpoints, arguments and the logged ``epoch`` count rounds from 0, like Lightning's epochs.
    """
    return round + 1


def list_first(names: Sequence[object]) -> str:
    """Lists the first five names in a sequence, and the number of further names.

    Example:
        >>> list_first("abcdefg")
        "'a', 'b', 'c', 'd', 'e' and 2 more"
    """
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more


def markdown_table(rows: Sequence[Sequence[str]], alignment: str = "---") -> str:
    """Formats a Markdown table from header and rows. Vertical bars in cells are replaced by slashes.

    Example:
        >>> print(markdown_table([["client", "loss"], ["a", "0.5"]]))
        | client | loss |
        |---|---|
        | a | 0.5 |
    """
    head, *lines = (f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)
    return "\n".join([head, f"|---|{f'{alignment}|' * (len(rows[0]) - 1)}", *lines])


def show_log() -> None:
    """Shows the package's log on the console, from level ``INFO``, unless the program configured the logger.

    ``logging.getLogger("lightning_fed").setLevel(logging.WARNING)`` restricts the log to warnings.
    """
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    if not LOGGER.handlers:
        LOGGER.addHandler(ConsoleHandler())


show_log()
