"""Shows Markdown tables as aligned columns in a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from textwrap import wrap

_GAP = "  "
_UNLIMITED = 10**6  # output to a file or pipe
_NARROWEST = 8  # characters of a wrapped column


def draw_tables(text: str, width: int | None = None) -> str:
    r"""Replaces Markdown tables in a text by aligned columns. Other text is unchanged.

    ``width`` is the number of characters in a line, by default the terminal's width. Wide columns wrap.

    Example:
        >>> print(draw_tables("Clients:\n\n| a | n |\n|---|---|\n| long | 1 |\n| two words | 20 |", width=12))
        Clients:
        <BLANKLINE>
        a          n
        --------  --
        long       1
        two       20
        words
    """
    width = width or shutil.get_terminal_size((_UNLIMITED, 0)).columns
    parts = [_draw([read_cells(line) for line in lines], width) if is_table else lines
             for is_table, lines in split_tables(text)]  # fmt: skip
    return "\n".join(line for part in parts for line in part)


def split_tables(text: str) -> list[tuple[bool, list[str]]]:
    """Splits a text into groups of lines, each with a flag: true for a Markdown table."""
    return [(is_table, list(lines)) for is_table, lines in groupby(text.split("\n"), _is_row)]


def _is_row(line: str) -> bool:
    return line[:1] == line[-1:] == "|" != line


def read_cells(line: str) -> list[str]:
    """Reads the cells in a line of a Markdown table."""
    return [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]


def _draw(rows: Sequence[list[str]], width: int) -> Iterator[str]:
    rows = [rows[0], *rows[2:]]  # without the rule
    columns = list(zip_longest(*rows, fillvalue=""))
    widths = _fit_widths([max(map(len, column)) for column in columns], width)
    is_number = [all(cell[:1] in "+-.0123456789" for cell in column[1:]) for column in columns]
    for row in [rows[0], ["-" * size for size in widths], *rows[1:]]:
        wrapped = [wrap(cell, size) if len(cell) > size else [cell] for cell, size in zip(row, widths, strict=False)]
        for line in zip_longest(*wrapped, fillvalue=""):
            cells = zip(line, widths, is_number, strict=False)
            yield _GAP.join(cell.rjust(size) if right else cell.ljust(size) for cell, size, right in cells).rstrip()


def _fit_widths(widths: list[int], width: int) -> list[int]:
    while sum(widths) + len(_GAP) * (len(widths) - 1) > width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return widths
