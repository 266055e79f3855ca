"""Log lines reach the console of a plain script once, and otherwise the program's handlers."""

import logging

import pytest

from lightning_fed.console import LOGGER, show_log


@pytest.fixture
def plain_script(monkeypatch):
    """Removes pytest's handlers, as in a program without logging setup."""

    def begin():
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        monkeypatch.setattr(LOGGER, "handlers", [])
        LOGGER.setLevel(logging.NOTSET)

    level = LOGGER.level
    yield begin
    LOGGER.setLevel(level)


def lines(capsys):
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err.splitlines()


def test_lines_are_shown_once(capsys, plain_script):
    plain_script()
    show_log()
    show_log()
    logging.getLogger("lightning_fed.rounds").info("3 clients.")
    logging.getLogger("lightning_fed.rounds").debug("Nothing.")
    assert lines(capsys) == ["3 clients."]


def test_a_program_that_sets_up_logging_gets_them_there(capsys, plain_script):
    plain_script()
    show_log()
    taken = []
    handler = logging.Handler()
    handler.emit = taken.append
    logging.getLogger().addHandler(handler)
    logging.getLogger("lightning_fed.rounds").info("3 clients.")
    assert [record.getMessage() for record in taken] == ["3 clients."]
    assert not lines(capsys)


def test_a_program_that_has_set_a_level_keeps_it(capsys, plain_script):
    plain_script()
    LOGGER.setLevel(logging.WARNING)
    show_log()
    logging.getLogger("lightning_fed.rounds").info("3 clients.")
    logging.getLogger("lightning_fed.rounds").warning("A client is excluded.")
    assert lines(capsys) == ["A client is excluded."]
