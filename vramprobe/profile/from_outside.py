"""What NVML says of the cards while a command runs: their highest use by everybody, from outside its processes.

In: nothing. Out: a CardSeen for each card. Between the marks of the hook nobody else sees what the driver hands out; on
an emulated card there is nothing else to see. Without NVML there are none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vramprobe.measure.nvml import NvmlDevice, open_device, visible_gpus

_EVERY_SECONDS = 0.05


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
    ended = threading.Event()
    looking = threading.Thread(target=_look_until, args=(ended, found), daemon=True)
    if found:
        looking.start()
    try:
        yield [card for card, _ in found]
    finally:
        ended.set()
        if found:
            looking.join()


def _look_until(ended: threading.Event, found: list[tuple[CardSeen, NvmlDevice]]) -> None:
    while not ended.wait(_EVERY_SECONDS):
        _look(found)


def _look(found: list[tuple[CardSeen, NvmlDevice]]) -> None:
    for card, device in found:
        used = device.used_bytes()
        if used is not None:
            card.peak_bytes = max(used, card.peak_bytes or 0)
