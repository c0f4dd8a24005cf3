"""Sample NVML while a command runs: the cards' highest use by all processes, from outside of them.

In: nothing. Out: a CardSeen for each card. Between the marks of the hook nobody else sees what the driver hands out; on
an emulated card there is nothing else to see. Without NVML there are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from vramprobe.measure.nvml import NvmlDevice, open_device, visible_gpus
from vramprobe.profile.looking import looking

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
    with looking(lambda: _look(found), _EVERY_SECONDS) if found else nullcontext():
        yield [card for card, _ in found]


def _look(found: list[tuple[CardSeen, NvmlDevice]]) -> bool:
    """Note what each card has in use; never enough."""
    for card, device in found:
        used = device.used_bytes()
        if used is not None:
            card.peak_bytes = max(used, card.peak_bytes or 0)
    return False
