"""Amounts as text and back: bytes are ints everywhere, and only here do they become GiB; durations are seconds."""

from __future__ import annotations

import re

from vramprobe.errors import SpecError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

#: Decimal units (vendors' GB) and binary units (what allocators and nvidia-smi count in).
BYTES_PER_UNIT = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
                  "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024**4}  # fmt: skip

_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?i?B)\s*", re.IGNORECASE)


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


def parse_bytes(text: str) -> int:
    """Read ``24GiB``, ``80 GB`` or ``512B``; units are case-insensitive. Raises SpecError on anything else."""
    match = _QUANTITY.fullmatch(text)
    if not match:
        raise SpecError(f"{text!r} is not an amount of memory; write a number and a unit, for instance 24GiB or 80GB")
    number, unit = match.groups()
    by_lower = {name.lower(): size for name, size in BYTES_PER_UNIT.items()}
    return int(float(number) * by_lower[unit.lower()])
