"""Prevents libraries for privacy accounting from adding handlers to the root logger."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def root_logger_as_it_was() -> Iterator[None]:
    """On exit, removes all handlers added to the root logger in the context."""
    old_handlers = [*logging.root.handlers]
    try:
        yield
    finally:
        for handler in [*logging.root.handlers]:
            if handler not in old_handlers:
                logging.root.removeHandler(handler)
