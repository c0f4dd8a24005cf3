"""Print memory that grows with each step.

In: a rank's MemoryGrowth or None. Out: lines on the terminal. Decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from vramprobe.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from vramprobe.records.profile_memory import KeptList, MemoryGrowth

_NUM_PLACES = 10


def print_growth(console: Console, growth: MemoryGrowth | None) -> None:
    """The slope, the step that fills the GPU, the lines that allocate it, the collections that keep it."""
    if growth is None:
        return
    full = "" if growth.full_at_step is None else f"; the GPU is full at step {growth.full_at_step:,} (predicted)"
    console.print(
        f"\n[yellow]memory grows[/] by {format_bytes(growth.bytes_per_step)} with each step (steps "
        f"{growth.first_step} to {growth.last_step}){full}. Allocated at:"
    )
    for one in growth.by_line[:_NUM_PLACES]:
        console.print(f"  {format_bytes(one.bytes_per_step):>11}  {escape(one.place)}", soft_wrap=True)
    for kept in growth.kept:
        console.print(f"  kept by {escape(_said(kept))}")


def _said(kept: KeptList) -> str:
    graph = f", {kept.num_with_graph} with their graph" if kept.num_with_graph else ""
    where = f", added to at {', '.join(kept.added_at)}" if kept.added_at else f" in {kept.function} of {kept.file}"
    return f"{kept.name}: {kept.num_tensors} tensors{graph}{where}"
