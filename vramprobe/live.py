"""A sweep under way, as it is shown: a live bar on a terminal, one line per cell elsewhere, JSON lines for machines.

In: the runner's events. Out: text on stderr, or JSON lines on stdout. Decides nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from vramprobe.display import plan_as_json, plan_in_words
from vramprobe.table import describe_outcome
from vramprobe.units import format_bytes

if TYPE_CHECKING:
    from vramprobe.measure.runner import Progress, RunSummary


@contextmanager
def sweep_progress(*, as_json: bool) -> Iterator[Callable[[Progress], None]]:
    """What to do with a sweep's events while it runs."""
    yield _print_json if as_json else _print_line


def print_summary(summary: RunSummary, *, as_json: bool) -> None:
    """How a sweep ended, and how to go on."""
    plan, kept = summary.plan, summary.plan.actions().get("kept", 0)
    dollars = plan.rate and plan.rate.dollars(summary.seconds)
    if as_json:
        print(json.dumps({
            "kind": "summary", "journal": str(summary.journal), "total": len(plan.rows), "kept": kept,
            "outcomes": summary.counts(), "left": summary.left, "seconds": round(summary.seconds, 1),
            "dollars": dollars and round(dollars, 4), "notes": summary.notes, "stopped_by": summary.stopped_by,
        }))  # fmt: skip
        return
    console = Console(highlight=False)
    for note in summary.notes:
        console.print(f"[yellow]note[/]: {escape(note)}", soft_wrap=True)
    done = ", ".join(f"{count} {kind}" for kind, count in sorted(summary.counts().items())) or "nothing to run"
    console.print(f"{done}; {kept} kept of {len(plan.rows)} cells → {escape(str(summary.journal))}", soft_wrap=True)
    if summary.stopped_by:
        left = f", {summary.left} cells left" if summary.left else ""
        console.print(f"stopped by {summary.stopped_by}{left}; run the same command again to go on")


def _print_line(event: Progress) -> None:
    if event.kind == "planned":
        print(plan_in_words(event.plan), file=sys.stderr, flush=True)
    elif event.kind not in ("started", "left"):  # those that are left are counted at the end
        print(_event_text(event), file=sys.stderr, flush=True)


def _print_json(event: Progress) -> None:
    if event.kind == "planned":
        print(json.dumps(plan_as_json(event.plan, with_cells=False)), flush=True)
        return
    record = event.record
    line = {
        "kind": event.kind,
        "index": event.index,
        "total": event.total,
        "cell_id": event.row.spec.cell_id,
        "reason": event.reason,
        "outcome": record and record.outcome.kind,
        "peak_allocated_bytes": record and record.peak and record.peak.allocated_bytes,
        "log": str(event.log) if record and record.outcome.kind != "ok" else None,
    }
    print(json.dumps(line), flush=True)


def _event_text(event: Progress) -> str:
    head = f"[{event.index}/{event.total}] {event.row.spec.cell_id}"
    if event.kind != "finished":
        return f"{head}  {event.kind}: {event.reason}"
    outcome, peak = event.record.outcome, event.record.peak
    text = f"{head}  {outcome.kind}"
    if peak is not None:
        text += f"  {format_bytes(peak.allocated_bytes)} in {peak.phase}"
    if event.record.timing is not None:
        text += f"  {event.record.timing.total_seconds:.1f} s"
    if outcome.kind != "ok":
        text += f"  {describe_outcome(outcome)}  log: {event.log}"
    return text
