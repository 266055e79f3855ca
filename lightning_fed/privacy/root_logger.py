"""Keeps the root logger without handlers from libraries for privacy accounts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def root_logger_as_it_was() -> Iterator[None]:
    """Context manager to remove all handlers added to the root logger inside the context, for imports of libraries."""
    old_handlers = [*logging.root.handlers]
    try:
        yield
    finally:
        for handler in [*logging.root.handlers]:
            if handler not in old_handlers:
                logging.root.removeHandler(handler)
