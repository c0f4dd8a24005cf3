"""A run's prediction on several GPUs on the command line: those that hold it, then the others by reason.

In: OnGpus. Out: a table, and lines. Decides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from vramprobe.report.definition import Column, Table
from vramprobe.report.formats import terminal
from vramprobe.units import format_bytes

if TYPE_CHECKING:
    from vramprobe.predict.from_run import OnGpu


def print_gpus(found: Sequence[OnGpu]) -> None:
    """A row for each GPU that holds the run, the smallest first; the others in lines."""
    console = Console(highlight=False)
    held = [one for one in found if one.verdict is not None and one.verdict.verdict != "does not fit"]
    held.sort(key=lambda one: one.verdict.usable_bytes)
    columns = [
        Column("gpu", "GPU", lambda one: one.gpu),
        Column("verdict", "verdict", lambda one: one.verdict.verdict),
        Column("usable_bytes", "usable", lambda one: one.verdict.usable_bytes, format_bytes, is_number=True),
    ]
    if held:
        terminal.show([Table(title="", columns=columns, rows=held)], [], console)
    others: defaultdict[str, list[str]] = defaultdict(list)
    for one in found:
        if one.verdict is None:
            others[f"[yellow]not judged[/]: {escape(one.why)}"].append(one.gpu)
        elif one.verdict.verdict == "does not fit":
            others["[red]does not fit[/]"].append(one.gpu)
    for why, names in others.items():
        console.print(f"{why}: {escape(', '.join(names))}")
