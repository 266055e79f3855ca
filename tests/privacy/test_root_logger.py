"""Libraries add no handlers to the root logger."""

import logging

import pytest

from lightning_fed.privacy.root_logger import root_logger_as_it_was


def test_a_library_that_sets_up_logging(monkeypatch):
    """Even if the library raises; the program's handlers stay."""
    own = logging.NullHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [own])

    @root_logger_as_it_was()
    def set_up():
        logging.getLogger().addHandler(logging.StreamHandler())
        raise RuntimeError

    with pytest.raises(RuntimeError):
        set_up()
    assert logging.getLogger().handlers == [own]
