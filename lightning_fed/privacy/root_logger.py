"""Keeps the root logger without handlers from libraries for privacy accounts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def root_logger_as_it_was() -> Iterator[None]:
    """Context to remove the root logger's added handlers at the end, because only programs should add handlers."""
    old_handlers = [*logging.root.handlers]
    try:
        yield
    finally:
        for handler in [*logging.root.handlers]:
            if handler not in old_handlers:
                logging.root.removeHandler(handler)
