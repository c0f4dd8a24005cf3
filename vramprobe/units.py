"""Amounts as text and back: bytes are ints everywhere, and only here do they become GiB; durations are seconds.

And the one place where a number gets the digits with which it is published, the same from every processor.
And what the numbers of a record are called.
"""

import re
from typing import Any

from vramprobe.errors import SpecError

KIB = 1024
MIB = 1024**2
GIB = 1024**3
#: Bytes of an element.
ITEMSIZE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int8": 1, "bool": 1, "int32": 4}
#: Significant digits of a published number. Between processors (OpenBLAS's kernels for AVX-512, AVX2 and SSE2) the
#: fits' covariances and the constants' standard errors differ by up to 1.5e-10 of themselves; nobody reads a seventh.
NUM_PUBLISHED_DIGITS = 6
#: What is nearer to 0 is published as 0: of 1 TB it is a byte, and sums that cancel end somewhere below it.
SMALLEST_PUBLISHED = 1e-12


def word_for(instrument: str) -> str:
    """Return the word for the numbers of an instrument, wherever they are shown: measured or emulated."""
    return "emulated" if instrument == "emulated" else "measured"


def published(value: Any) -> Any:
    """``value`` as it is published: a float with the digits that do not depend on the processor, all else as it is."""
    if not isinstance(value, float):
        return value
    return 0.0 if abs(value) < SMALLEST_PUBLISHED else float(f"{value:.{NUM_PUBLISHED_DIGITS}g}")


def plural(count: int, noun: str) -> str:
    """``1 cell``, ``2 cells``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def requests_at_once(number: float, length_tokens: int) -> str:
    """Format the capacity of a KV cache, e.g. ``2.50 requests of 8,192 tokens``."""
    return f"{number:,.2f} requests of {length_tokens:,} tokens"


def format_bytes(num_bytes: int | None) -> str:
    """Human text in binary units, e.g. ``7.32 GiB``; ``-`` where the value is unknown."""
    if num_bytes is None:
        return "-"
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"


def signed_bytes(num_bytes: int | None) -> str:
    """A change with its sign, e.g. ``+512.00 MiB``; ``-`` where it is unknown."""
    return f"{'+' if num_bytes is not None and num_bytes > 0 else ''}{format_bytes(num_bytes)}"


def unit_of(num_bytes: int) -> tuple[str, int]:
    """The unit in which to write amounts up to ``num_bytes``, for instance along an axis: its name and its bytes."""
    return next(((name, size) for name, size in (("GiB", GIB), ("MiB", MIB)) if num_bytes >= size), ("KiB", KIB))


def short_bytes(num_bytes: int) -> str:
    """The exact amount without a space, in the largest binary unit that divides it: ``24GiB``; parse_bytes reads it."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return f"{num_bytes}B"


def parse_bytes(text: str) -> int:
    """Bytes from ``24GiB``, ``24564 MiB``, ``80GB`` (decimal) or ``1073741824B``. Raises SpecError on anything else."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMG]i?B|B)\s*", text)
    if not match or float(match[1]) == 0:
        raise SpecError(f"{text!r} is not an amount of memory; write for instance 24GiB, 24564MiB or 80GB")
    size = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "KB": 10**3, "MB": 10**6, "GB": 10**9}[match[2]]
    return round(float(match[1]) * size)


def parse_share(text: str) -> float:
    """A share from ``5%`` or ``0.05``, from 0 to 1. Raises SpecError on anything else."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(%?)\s*", text)
    share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= share <= 1:
        raise SpecError(f"{text!r} is not a share; write for instance 5% or 0.05, from 0 to 100%")
    return share


def format_seconds(seconds: float) -> str:
    """Human text for a duration: ``8.4 s``, ``41 s``, ``9 min``, ``2.5 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def short_seconds(seconds: float) -> str:
    """Three digits with the unit that suits: ``1.23 s``, ``45.6 ms``, ``789 µs``."""
    unit, size = _unit_of_seconds(seconds)
    return f"{_three_digits(seconds / size)} {unit}"


def spread_of_seconds(seconds: float, low: float, high: float) -> str:
    """Format seconds with an interval in their unit: ``420 ms (307 to 576)``."""
    unit, size = _unit_of_seconds(seconds)
    return f"{_three_digits(seconds / size)} {unit} ({_three_digits(low / size)} to {_three_digits(high / size)})"


def _unit_of_seconds(seconds: float) -> tuple[str, float]:
    return ("s", 1) if seconds >= 1 else ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def parse_duration(text: str) -> float:
    """Seconds from ``90s``, ``9m``, ``1.5h``, ``2d`` or a number of seconds. Raises SpecError on anything else."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhd]?)\s*", text)
    if not match or float(match[1]) == 0:
        raise SpecError(f"{text!r} is not a duration; write for instance 90s, 9m, 1.5h or 2d")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}[match[2]]


def parse_count(text: str) -> int:
    """A whole number from ``50M``, ``1.5B``, ``300k`` or ``50_000_000``. Raises SpecError on anything else."""
    match = re.fullmatch(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([kKMBGT]?)\s*", text)
    factor = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
    count = round(float(re.sub("[_,]", "", match[1])) * factor[match[2]]) if match else 0
    if count < 1:
        raise SpecError(f"{text!r} is not a number of tokens; write for instance 50M, 1.5B, 300k or 50000000")
    return count


def parse_length(text: str) -> int:
    """Tokens from ``2048``, ``2_048`` or, in steps of 1,024, ``2k`` and ``1M``. Raises SpecError on anything else."""
    match = re.fullmatch(r"\s*([+-]?[0-9][0-9_,]*)\s*([kKmM]?)\s*", text)
    if not match:
        raise SpecError(f"{text!r} is not a length in tokens; write for instance 2048, or 2k, which is 2,048")
    return int(re.sub("[_,]", "", match[1])) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]


def short_count(count: float) -> str:
    """Three digits in thousands, millions or billions: ``50M``, ``1.5B``, ``12.3k``."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{float(f'{count / size:.3g}'):g}{unit}"
    return f"{float(f'{count:.3g}'):g}"


def format_hours(hours: float) -> str:
    """Human text for hours of rent: ``40 s``, ``12 min``, ``3.4 h``, ``41 h``, ``6.2 days``."""
    unit, size = _unit_of_hours(hours)
    return f"{few_digits(hours / size)} {unit}"


def spread_of_hours(hours: float, low: float, high: float) -> str:
    """Format hours with an interval in their unit: ``49 min (29 to 83)``."""
    unit, size = _unit_of_hours(hours)
    return f"{few_digits(hours / size)} {unit} ({few_digits(low / size)} to {few_digits(high / size)})"


def _unit_of_hours(hours: float) -> tuple[str, float]:
    if hours < 1 / 60:
        return "s", 1 / 3600
    return ("min", 1 / 60) if hours < 1.5 else ("h", 1) if hours < 72 else ("days", 24)


def few_digits(value: float) -> str:
    """Two digits or all before the point: ``1.9``, ``17``, ``1,240``."""
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def spread_of_usd(usd: float, low: float, high: float) -> str:
    """Format US dollars with an interval: ``$3.26 (1.93 to 5.48)``."""
    return f"{format_usd(usd)} ({format_usd(low)[1:]} to {format_usd(high)[1:]})"


def format_usd(usd: float) -> str:
    """Human text for US dollars: ``$0.0031``, ``$0.42``, ``$17.30``, ``$1,240``."""
    if 0 < usd < 0.01:
        return f"${usd:.4f}"
    return f"${usd:,.2f}" if usd < 100 else f"${usd:,.0f}"
