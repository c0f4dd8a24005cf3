"""Print the fewest GPUs: a row for each kind of sharding, within the terminal's width.

In: frozen answers. Out: text on the terminal (rich), plain lines where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from vramprobe.units import format_bytes

if TYPE_CHECKING:
    from vramprobe.predict.fewest import MinGpus


def print_min_gpus(found: Sequence[MinGpus], left_out: Mapping[str, Sequence[str]]) -> None:
    """Print the number of GPUs that each kind of sharding needs, and the bytes on each of so many (``on``)."""
    from vramprobe.report.definition import Column, Table
    from vramprobe.report.formats.terminal import show

    if not found:
        return
    columns = [
        Column("sharding", "sharding", lambda one: one.sharding),
        Column("num_gpus", "fits", lambda one: one.num_gpus or "none", is_number=True),
        Column("tight_num_gpus", "tight", lambda one: one.tight_num_gpus, is_number=True),
        Column("verdict_num_gpus", "on", lambda one: one.verdict_num_gpus, is_number=True),
        Column("value", "each", lambda one: one.verdict.needed_bytes.value, format_bytes, is_number=True),
        Column("high", "up to", lambda one: one.verdict.needed_bytes.high, format_bytes, is_number=True),
        Column("usable_bytes", "of", lambda one: one.verdict.usable_bytes, format_bytes, is_number=True),
    ]
    if any(one.host_bytes for one in found):
        columns.append(Column("host_bytes", "on a host", lambda one: one.host_bytes, format_bytes, is_number=True))
    console = Console(highlight=False)
    how = "of 1, 2, 4 … 128, by recordings of the first rank, emulated"
    console.print(f"fewest {escape(found[0].verdict.gpu)} {how}:")
    show([Table(title="fewest", columns=columns, rows=found)], [], console)
    for reason, kinds in left_out.items():
        console.print(f"[yellow]note[/]: without {', '.join(kinds)}: {escape(reason)}")
