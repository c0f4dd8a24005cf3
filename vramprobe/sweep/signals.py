"""Signals: SIGINT, SIGTERM and SIGHUP end the running cell at once, and the sweep once that is recorded."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def signals_that_end() -> tuple[signal.Signals, ...]:
    """SIGINT, SIGTERM and, unless it is ignored, SIGHUP: nohup has us ignore it, and go on when the terminal goes."""
    return _CAUGHT if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal asked the sweep to end; not an Exception, so that nothing on the way swallows it."""

    @property
    def name(self) -> str:
        return self.args[0]


class Signals:
    """SIGINT, SIGTERM and SIGHUP while a sweep runs: they end the running cell, and the sweep once it is recorded.

    Outside ``raising`` a signal is only noted, so that no line is half written. Only the main thread can catch them.
    """

    def __init__(self) -> None:
        self.stopped_by: str | None = None
        self._raising = False

    @contextlib.contextmanager
    def caught(self) -> Iterator[Signals]:
        """Take the signals over; give them back at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {signum: signal.signal(signum, self._arrived) for signum in signals_that_end()}
        try:
            yield self
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Within, a signal raises Stopped at once; so does one that came before."""
        self._raising = True
        try:
            if self.stopped_by is not None:
                raise Stopped(self.stopped_by)
            yield
        finally:
            self._raising = False

    def _arrived(self, signum: int, frame: object) -> None:
        self.stopped_by = signal.Signals(signum).name
        if self._raising:
            self._raising = False
            raise Stopped(self.stopped_by)
