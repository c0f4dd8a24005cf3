"""A line before the host's memory is full: an emulated run that swaps takes minutes for seconds, or is killed.

In: /proc/meminfo and the memory limit of this control group, twice a second. Out: one line, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vramprobe.profile.looking import looking
from vramprobe.units import format_bytes

_EVERY_SECONDS = 0.5
#: Free memory at which it is said: this share of the host, and at most so much.
_SHARE, _MOST_BYTES = 0.08, 4 << 30
_GROUP = Path("/sys/fs/cgroup")


@contextmanager
def warned_of_a_full_host(say: Callable[[str], None], *, free: Callable[[], tuple[int, int] | None]) -> Iterator[None]:
    """Within: ``say`` hears of it as soon as ``free()`` -> (free, whole), in bytes, is nearly none."""

    def look() -> bool:
        seen = free()
        if seen is None:
            return True
        if seen[0] >= min(_SHARE * seen[1], _MOST_BYTES):
            return False
        say(
            f"this machine's memory is nearly full: {format_bytes(seen[0])} of {format_bytes(seen[1])} left. "
            "When it is, the run is killed or becomes very slow: end it (Ctrl-C; what was seen is shown), then "
            "run one rank (--only-rank 0 --world-size N), use fewer DataLoader workers, or load the model on "
            "the GPU (device_map) instead of the host"
        )
        return True

    with looking(look, _EVERY_SECONDS):
        yield


def free_host_bytes() -> tuple[int, int] | None:
    """(free, whole) of this machine, or of the control group that limits it; None where neither is said."""
    found = []
    with suppress(OSError, ValueError, KeyError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(tuple(int(lines[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal")))
    with suppress(OSError, ValueError):
        limit, used = (int((_GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        files = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        found.append((limit - used + int(files.get("inactive_file", 0)), limit))  # as the kernel frees it first
    return min(found, default=None)
