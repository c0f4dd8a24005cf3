"""A look every so many seconds, in a thread beside a run that this process waits for.

In: what looks. Out: nothing; the thread has ended when the run has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def looking(look: Callable[[], bool], every_seconds: float) -> Iterator[None]:
    """Within: ``look`` is called every ``every_seconds``, until it says that it has seen enough."""
    ended = threading.Event()

    def look_on() -> None:
        while not ended.wait(every_seconds) and not look():
            pass

    thread = threading.Thread(target=look_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
