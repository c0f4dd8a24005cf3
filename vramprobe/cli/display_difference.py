"""Print the difference of two profiles: tiers, time, settings, causes, lines.

In: a Difference. Out: text on the terminal (rich), at most as wide as it. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from vramprobe.cli.display_step_time import print_time_difference
from vramprobe.cli.folded import on_one_line, print_place
from vramprobe.units import format_bytes, signed_bytes

if TYPE_CHECKING:
    from vramprobe.profile.diff import Difference, ProfileChange

_NUM_LINES = 10


def print_difference(difference: Difference) -> None:
    """The tiers, the causes and the lines that grew or shrank."""
    console = Console(highlight=False, emoji=False)
    for side, name, phase in (
        ("before", difference.before, difference.before_phase),
        ("after", difference.after, difference.after_phase),
    ):
        at = f", live at the peak in {phase}" if phase else ""
        console.print(f"{side:<6}  {escape(on_one_line(name))}{escape(at)}")
    console.print()
    _print_changes(console, difference.tiers)
    if difference.time is not None:
        print_time_difference(console, difference.time)
    if difference.settings:
        console.print("\nsettings that differ:")
    for one in difference.settings:
        console.print(f"  {escape(f'{one.what}: {one.before} → {one.after}')}")
    changed = [one for one in difference.causes if one.grown_bytes]
    if difference.causes:
        console.print("\nby cause, at the peak:" if changed else "\nby cause: no change")
        _print_changes(console, changed)
    if difference.lines:
        console.print("\nby line:")
        for one in difference.lines[:_NUM_LINES]:
            print_place(console, signed_bytes(one.grown_bytes), one.what)
        if (more := len(difference.lines) - _NUM_LINES) > 0:
            console.print(f"  and {more} more; --json lists all")
    for warning in difference.warnings:
        console.print(f"[yellow]note[/]: {escape(on_one_line(warning))}")


def _print_changes(console: Console, changes: Sequence[ProfileChange]) -> None:
    width = max((len(one.what) for one in changes), default=0)
    for one in changes:
        before, after = format_bytes(one.before_bytes), format_bytes(one.after_bytes)
        console.print(f"  {one.what:<{width}}  {before:>11} → {after:>11}  {signed_bytes(one.grown_bytes):>12}")
