"""Time limit for one client's training in a round."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning_fed.argument_checks import check_number
from lightning_fed.errors import VisitTimeout

_log = logging.getLogger(__name__)

_AGAIN = 1.0  # seconds until the alarm repeats, for code that swallows the exception


class VisitClock:
    """Timer for a client's training. Raises :class:`~lightning_fed.errors.VisitTimeout` at the time limit.

    The timer only interrupts code in the context :meth:`interrupting`, with the Unix alarm ``SIGALRM``.
    """

    # The alarm interrupts Python code waiting for a file, a lock or a worker process, but not a loop in C.

    def __init__(self, seconds: float) -> None:
        if not 0 < check_number("visit_timeout", seconds) < 1e8:
            raise ValueError(f"Expected `visit_timeout` to be a number of seconds greater than 0, but got {seconds}.")
        self.seconds = seconds
        self.is_up = False
        self._is_interrupting = False
        self._has_warned = False
        self._earlier_alarm: tuple[Any, float, float] | None = None  # handler and seconds of an earlier alarm

    def start(self) -> None:
        self.stop()
        if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
            if not self._has_warned:
                _log.warning(
                    "`visit_timeout` has no effect: it requires Unix, and a fit in the main thread of the process."
                )
            self._has_warned = True
            return
        handler = signal.signal(signal.SIGALRM, self._ring)
        seconds, _ = signal.setitimer(signal.ITIMER_REAL, self.seconds, _AGAIN)
        self._earlier_alarm = handler, seconds, time.monotonic()

    def stop(self) -> None:
        self.is_up = False
        if self._earlier_alarm is None:
            return
        (handler, seconds, since), self._earlier_alarm = self._earlier_alarm, None
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if seconds:
            signal.setitimer(signal.ITIMER_REAL, max(seconds - (time.monotonic() - since), 1e-3))

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Context in which an exception interrupts the code after the time limit."""
        if self.is_up:
            raise self.timeout()
        self._is_interrupting = True
        try:
            yield
        finally:
            self._is_interrupting = False

    @contextmanager
    def visit(self) -> Iterator[None]:
        self.start()
        try:
            with self.interrupting():
                yield
        finally:
            self.stop()

    def timeout(self) -> VisitTimeout:
        return VisitTimeout(f"the client's visit took longer than visit_timeout={self.seconds:g} seconds")

    def _ring(self, number: int, frame: FrameType | None) -> None:
        self.is_up = True
        if self._is_interrupting:
            raise self.timeout()
