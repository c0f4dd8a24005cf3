"""Amounts as text and back: bytes are ints everywhere, and only here do they become GiB; durations are seconds."""

from __future__ import annotations

import re

from vramprobe.errors import SpecError

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def format_bytes(num_bytes: int | None) -> str:
    """Human text in binary units, e.g. ``7.32 GiB``; ``-`` where the value is unknown."""
    if num_bytes is None:
        return "-"
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def parse_duration(text: str) -> float:
    """Seconds from ``90s``, ``9m``, ``1.5h`` or a plain number of seconds. Raises SpecError on anything else."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smh]?)\s*", text)
    if not match or float(match[1]) == 0:
        raise SpecError(f"{text!r} is not a duration; write for instance 90s, 9m or 1.5h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
