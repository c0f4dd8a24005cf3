"""Signals: SIGINT, SIGTERM and SIGHUP end a verb at once; a sweep's running cell, and the sweep once it is recorded."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_SECONDS = 0.1


def signals_that_end() -> tuple[signal.Signals, ...]:
    """SIGINT, SIGTERM and, unless it is ignored, SIGHUP: nohup has us ignore it, and go on when the terminal goes."""
    return _CAUGHT if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else (signal.SIGINT, signal.SIGTERM)


class ExitOnSignal:
    """Within ``caught`` a signal unwinds like an exit with 128 + its number, at any moment.

    An exit is lost where Python or an extension swallows it: in a destructor, in a weak reference's callback (each
    import has one), as the cause of another error (pydantic's core). So it is raised again until something unwinds.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._is_within = False

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Take the signals over, for good: this process leaves afterwards."""
        self._is_within = True
        for number in signals_that_end():
            signal.signal(number, self._arrived)
        try:
            yield
        finally:
            self._is_within, number = False, self._number
            self.answered()
            if number is not None:  # whatever has become of the exit on the way
                raise SystemExit(128 + number) from None

    def answered(self) -> None:
        """Raise it no more: whoever caught the exit leaves in its own way."""
        if self._number is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._number = None

    def _arrived(self, number: int, frame: object) -> None:
        if self._is_within:
            self._number = number
            sys.unraisablehook = _say_all_but_exits
            signal.signal(signal.SIGALRM, self._again)
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS, _AGAIN_SECONDS)
        raise SystemExit(128 + number)

    def _again(self, alarm: int, frame: object) -> None:
        number = self._number
        if number is None:
            return
        if signal.getsignal(number) != self._arrived:  # who has taken the signals over since knows what to do
            self.answered()
            signal.raise_signal(number)
        elif not _is_leaving():
            raise SystemExit(128 + number)


#: Of this process, whose command line leaves by it.
exit_on_signal = ExitOnSignal()


def _is_leaving() -> bool:
    """Return True within a ``finally``, an ``except`` or an ``__exit__`` that an exit has reached."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, SystemExit):
        error = error.__context__
    return error is not None


def _say_all_but_exits(unraisable: Any) -> None:
    if not issubclass(unraisable.exc_type, SystemExit):
        sys.__unraisablehook__(unraisable)


@contextlib.contextmanager
def handled_by(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Within, :func:`signals_that_end` call ``handler``; beside the main thread, which alone gets them, none does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in signals_that_end()}
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)


@contextlib.contextmanager
def woken_by_signals() -> Iterator[int | None]:
    """Yield a descriptor that can be read once a signal has come, None beside the main thread.

    A signal does not interrupt a blocking call that it precedes by a moment, nor one that another thread receives it
    for: its handler would wait until the call returns.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    awake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    before = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    try:
        yield awake
    finally:
        signal.set_wakeup_fd(before)
        os.close(awake)
        os.close(wakes)


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
        with handled_by(self._arrived):
            yield self

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
