"""Progress of a run of minutes, each minute: its phase and the function of the program that takes its time.

In: the ``.doing`` files of the run's folder, every two seconds. Out: a line a minute, with a step's pace once one has
ended, and once how to shorten slow steps; a run of seconds says nothing.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vramprobe.profile.doing import Doing, doing_of
from vramprobe.profile.monitors import looking

_EVERY_SECONDS, _LOOK_SECONDS = 60.0, 2.0
_STEP = ("forward", "backward", "optimizer_step", "zero_grad")
_SHORTER = (
    "to shorten the steps: fewer tokens in each (with --folder RUN, vramprobe predict --from RUN then answers for "
    "other lengths, or says why not), or fewer layers"
)
_GENERATION = "; Python launches each token's kernels here: fewer or shorter completions shorten it"
#: For a child to end; torchrun's agent, too.
_WAITS = ("/subprocess.py", "/multiprocessing/popen_fork.py", "/elastic/agent/server/api.py")
#: transformers' own loops in place of a package's kernels.
_LOOP = re.compile(r" (?:torch_\w+|\w*recurrent\w*|\w*chunk\w*|slow_forward)$")
_KERNELS = (
    "; a loop of Python over pieces of each row runs where a kernel is missing (flash-linear-attention, causal-conv1d "
    "or mamba-ssm): with the kernel, steps are shorter and need other memory"
)


class _Pace:
    """Seconds of the steps, as far as looks every two seconds show them."""

    def __init__(self, steps: int | None) -> None:
        self._wanted, self._num_steps, self._began, self._last = steps, 0, None, None
        self._is_within = False  # a step, as far as the last look shows
        self._told: set[str] = set()

    def look(self, doing: Doing) -> None:
        now, self._is_within = time.monotonic(), doing.phase in _STEP
        if doing.num_steps > self._num_steps and self._began is not None:
            self._last = (now - self._began) / (doing.num_steps - self._num_steps)
            self._began = now
        elif self._began is None and (doing.phase in _STEP or doing.num_steps):
            self._began = now
        self._num_steps = doing.num_steps

    def in_words(self, places: Iterable[str]) -> str:
        """Return how long a step and the rest take, and once how to shorten them; empty where no step is slow.

        ``places``: all that were seen since the last time: a backward runs beside the main thread.
        """
        if self._began is None:
            return ""
        under_way = time.monotonic() - self._began
        seconds = max(self._last or 0, under_way if self._is_within else 0)
        if seconds < _EVERY_SECONDS / 2:
            return ""
        said = f"; a step takes {'about' if self._last else 'more than'} {seconds:.0f} s here"
        if self._wanted and self._last and self._wanted > self._num_steps:
            said += f", about {max(seconds * (self._wanted - self._num_steps) - under_way, 0):.0f} s to go"
        hints = [f"; {_SHORTER}", *([_KERNELS] if any(map(_LOOP.search, places)) else [])]
        said += "".join(hint for hint in hints if hint not in self._told)
        self._told.update(hints)
        return said


@contextmanager
def told_each_minute(
    say: Callable[[str], None], folder: Path, homes: list[str], steps: int | None = None
) -> Iterator[None]:
    """Within: ``say`` hears what the run in ``folder`` is doing, which function takes its time, and how long ``steps``
    steps will take.
    """
    begun = time.monotonic()
    seen: Counter[str] = Counter()
    until, pace = begun + _EVERY_SECONDS, _Pace(steps)

    def look() -> bool:
        nonlocal until
        doing = latest(folder)
        if doing is None:
            return False
        pace.look(doing)
        if not _waits_for_another(doing):
            seen[re.sub(r":\d+", "", doing.place(homes))] += 1  # a loop has several lines
        is_generation = doing.phase == "generation"
        if time.monotonic() < until or (is_generation and doing.says_its_pace):  # hook/generation.py
            return False
        place, times = next(iter(seen.most_common(1)), ("", 0))
        often = f"; seen {times / seen.total():.0%} of the time at {place}" if place else ""
        slow = _GENERATION if is_generation else pace.in_words(seen)
        say(f"{(time.monotonic() - begun) / 60:.0f} min so far: {doing.progress()}{often}{slow}")
        seen.clear()
        until = time.monotonic() + _EVERY_SECONDS
        return False

    with looking(look, _LOOK_SECONDS):
        yield


def latest(folder: Path) -> Doing | None:
    """Return the latest activity of the process that uses a GPU, or of any that waits for no other process; None where
    none has written yet. A launcher that looks at the GPU and then waits is not the one whose time counts.
    """
    found = []
    for path in folder.glob("*.doing"):
        try:
            doing = doing_of(path.read_text(errors="replace"))
            if doing is not None:
                uses = (doing.phase is not None, not _waits_for_another(doing), bool(doing.allocated_bytes))
                found.append((uses, path.stat().st_mtime_ns, doing))
        except OSError:  # it has just ended
            continue
    return max(found, key=lambda one: one[:2])[2] if found else None


def _waits_for_another(doing: Doing) -> bool:
    """Return True if a process waits for one that it has started."""
    return bool(doing.stack) and doing.stack[0][0].endswith(_WAITS)
