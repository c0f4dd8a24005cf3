"""Monitors beside a run that this process waits for: the cards' use by NVML, and a warning of a full host.

In: NVML, some twenty times a second; the free memory of the host or of this control group, twice a second. Out: a
CardSeen for each card, its highest use by all processes: between the marks of the hook nobody else sees what the driver
hands out (on an emulated card, and without NVML, there are none); one line, once, as an emulated run that swaps takes
minutes for seconds, or is killed. The threads have ended when the run has.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from vramprobe.measure.nvml import NvmlDevice, open_device, visible_gpus
from vramprobe.units import format_bytes

_CARDS_EVERY_SECONDS = 0.05
_HOST_EVERY_SECONDS = 0.5
#: Free memory at which it is said: this share of the host, and at most so much.
_SHARE, _MOST_BYTES = 0.08, 4 << 30


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


@dataclass(kw_only=True)
class CardSeen:
    """One card. ``before_bytes``: in use when the command started; ``peak_bytes``: the highest seen until it ended."""

    uuid: str
    before_bytes: int | None = None
    peak_bytes: int | None = None


@contextmanager
def seen_from_outside(*, emulated: bool) -> Iterator[list[CardSeen]]:
    """Within: the cards are looked at, some twenty times a second."""
    found = (
        []
        if emulated
        else [(CardSeen(uuid=uuid), device) for uuid, _ in visible_gpus() if (device := open_device(uuid)) is not None]
    )
    _look(found)
    for card, _ in found:
        card.before_bytes = card.peak_bytes
    with looking(lambda: _look(found), _CARDS_EVERY_SECONDS) if found else nullcontext():
        yield [card for card, _ in found]


def _look(found: list[tuple[CardSeen, NvmlDevice]]) -> bool:
    """Note what each card has in use; never enough."""
    for card, device in found:
        used = device.used_bytes()
        if used is not None:
            card.peak_bytes = max(used, card.peak_bytes or 0)
    return False


@contextmanager
def warned_of_a_full_host(say: Callable[[str], None], *, free: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Within: ``say`` hears of it as soon as ``free()`` -> (free, whole), in bytes, is nearly none."""

    def look() -> bool:
        free_bytes, whole_bytes = free()
        if free_bytes >= min(_SHARE * whole_bytes, _MOST_BYTES):
            return False
        say(
            f"this machine's memory is nearly full: {format_bytes(free_bytes)} of {format_bytes(whole_bytes)} left. "
            "When it is, the run is killed or becomes very slow: end it (Ctrl-C; what was seen is shown), then "
            "run one rank (--only-rank 0 --world-size N), use fewer DataLoader workers, or load the model on "
            "the GPU (device_map) instead of the host"
        )
        return True

    with looking(look, _HOST_EVERY_SECONDS):
        yield
