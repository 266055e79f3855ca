"""Markdown tables become columns with the terminal's width."""

import logging

import pytest

from lightning_fed.console import ConsoleHandler
from lightning_fed.report.terminal import draw_tables

TEXT = """Before

| method | val_acc | note |
|---|---:|---|
| `fedavg` | 0.25 ± 0.1 | two clients of three failed |
| central | -1 | - |
| local |  | 3 |

after | not a table"""

WIDE = """Before

method      val_acc  note
-------  ----------  ---------------------------
fedavg   0.25 ± 0.1  two clients of three failed
central          -1  -
local                3

after | not a table"""


def test_a_column_of_numbers_is_aligned_to_the_right():
    assert draw_tables(TEXT, 200) == WIDE


def test_a_narrow_terminal_wraps_the_widest_column():
    lines = draw_tables(TEXT, 34).split("\n")
    assert lines[2:8] == [
        "method      val_acc  note",
        "-------  ----------  -------------",
        "fedavg   0.25 ± 0.1  two clients",
        "                     of three",
        "                     failed",
        "central          -1  -",
    ]


@pytest.mark.parametrize("text", ["no table", "", "|", "a\n\nb\n"])
def test_other_text_is_unchanged(text):
    assert draw_tables(text, 80) == text


def test_a_row_of_hyphens_is_kept():
    assert draw_tables("| a | b |\n|---|---|\n| - | - |", 80) == "a  b\n-  -\n-  -"


def test_the_console_draws_tables_of_the_log(monkeypatch, capsys):
    """The program's handlers receive Markdown."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setenv("COLUMNS", "200")
    record = logging.LogRecord("lightning_fed", logging.INFO, "", 0, "%s", (TEXT,), None)
    ConsoleHandler().emit(record)
    assert capsys.readouterr().err == f"{WIDE}\n"
    assert record.getMessage() == TEXT
