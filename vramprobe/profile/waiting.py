"""Progress of a run of minutes, each minute: its phase and the function of the program that takes its time.

In: the ``.doing`` files of the run's folder, every two seconds. Out: a line a minute; a run of seconds says nothing.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vramprobe.profile.doing import Doing, doing_of
from vramprobe.profile.looking import looking

_EVERY_SECONDS, _LOOK_SECONDS = 60.0, 2.0


@contextmanager
def told_each_minute(say: Callable[[str], None], folder: Path, homes: list[str]) -> Iterator[None]:
    """Within: ``say`` hears what the run in ``folder`` is doing, and which function takes its time."""
    begun = time.monotonic()
    seen: Counter[str] = Counter()
    until = begun + _EVERY_SECONDS

    def look() -> bool:
        nonlocal until
        doing = latest(folder)
        if doing is None:
            return False
        seen[re.sub(r":\d+", "", doing.place(homes))] += 1  # a loop has several lines
        if time.monotonic() < until or doing.phase == "generation":  # which says so itself (hook/generation.py)
            return False
        place, times = seen.most_common(1)[0]
        often = f"; seen {times / seen.total():.0%} of the time at {place}" if place else ""
        say(f"{(time.monotonic() - begun) / 60:.0f} min so far: {doing.progress()}{often}")
        seen.clear()
        until = time.monotonic() + _EVERY_SECONDS
        return False

    with looking(look, _LOOK_SECONDS):
        yield


def latest(folder: Path) -> Doing | None:
    """Return the latest activity of the process that uses a GPU, or of any; None where none has written yet."""
    found = []
    for path in folder.glob("*.doing"):
        try:
            doing = doing_of(path.read_text(errors="replace"))
            found += [] if doing is None else [(doing.phase is not None, path.stat().st_mtime_ns, doing)]
        except OSError:  # it has just ended
            continue
    return max(found, key=lambda one: one[:2])[2] if found else None
