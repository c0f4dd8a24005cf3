"""Print a plan: its cells in the order of running, a sentence in sum, the JSON of both.

In: a frozen Plan. Out: text on the terminal (rich), plain lines where there is none, and mappings for machines.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from vramprobe.report.formats import terminal
from vramprobe.sweep.resume import NO_ATTEMPT_YET
from vramprobe.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from vramprobe.sweep.plan import Plan, PlanRow

_MOST_REASONS = 10


def print_plan(plan: Plan) -> None:
    """The cells in the order of running, then how many fit, the time and the cost."""
    console = Console(highlight=False)
    titles = ("", "verdict", "predicted peak", "from", "to", "about")
    titles += (*(("padding", "truncated") if plan.data else ()), "cell")
    rows = []
    for row in plan.rows:
        peak = row.prediction.peak_allocated_bytes if row.prediction else None
        sizes = [format_bytes(size) for size in (peak.value, peak.low, peak.high)] if peak else ["-", "", ""]
        verdict = row.verdict if plan.card and (row.is_run or row.action == "skip") else ""
        about = format_seconds(row.seconds) if row.is_run else ""
        of_data = _shares(plan, row) if plan.data else ()
        rows.append((row.action, verdict, *sizes, about, *of_data, row.spec.cell_id))
    terminal.show_whole(titles, rows, left=("", "verdict", "cell"))
    told = [row for row in plan.rows if _is_worth_a_word(row)]
    for row in told[:_MOST_REASONS]:
        console.print(f"[yellow]{row.action}[/] {escape(row.spec.cell_id)}: {escape(row.reason)}", soft_wrap=True)
    if len(told) > _MOST_REASONS:
        console.print(f"… and {len(told) - _MOST_REASONS} more with a reason; --json tells all")
    for note, count in Counter(row.note for row in plan.rows if row.note).items():
        console.print(f"[yellow]no prediction[/] for {count}: {escape(note)}", soft_wrap=True)
    console.print(plan_in_words(plan), markup=False, soft_wrap=True)


def _shares(plan: Plan, row: PlanRow) -> tuple[str, str]:
    """Format the share of padding in the computed tokens, and the share of the data's rows that are truncated."""
    found = plan.data[row.spec.fingerprint]
    return f"{100 * found.padding_share:.1f} %", f"{100 * found.num_truncated / found.num_rows:.2g} %"


def _is_worth_a_word(row: PlanRow) -> bool:
    """Return True if the reason says more than the row: not for new or kept cells, nor those skipped on the numbers
    shown.
    """
    if row.action == "skip":
        return row.skipped is not None and row.skipped.why == "dominated"
    return row.action in ("stale", "quarantined") or (row.action == "run" and row.reason != NO_ATTEMPT_YET)


def plan_in_words(plan: Plan) -> str:
    """One line: what is run and kept, what fits, how long it takes and what it costs."""
    actions = ", ".join(f"{count} {action}" for action, count in plan.actions().items()) or "nothing"
    twice = sum(row.replicates for row in plan.rows)
    text = f"{plural(len(plan.rows) - twice, 'cell')}{f', {twice} of them twice' if twice else ''}: {actions}"
    if plan.card is not None:
        verdicts = plan.verdicts()
        shown = [f"{verdicts[name]} {name}" for name in ("fits", "risky", "certain oom", "unknown") if name in verdicts]
        card = f"emulated {plan.card.name}" if plan.card.is_emulated else plan.card.name
        text += f"; on {card} ({format_bytes(plan.card.total_bytes)}): {', '.join(shown) or 'nothing to run'}"
    text += f"; about {format_seconds(plan.seconds)}"
    if plan.rate is not None:
        text += f", ${plan.dollars:.2f} at ${plan.rate.usd_per_hour:.2f}/h ({plan.rate.source})"
    num_predicted = sum(row.prediction is not None for row in plan.rows)
    if num_predicted:
        text += f"; {num_predicted} predicted by recipes"
        text += f" and a fit of {plural(plan.fit.num_records, 'record')}" if plan.fit is not None else ""
    return f"{text}; estimated, not measured"


def plan_as_json(plan: Plan, *, with_cells: bool) -> dict[str, Any]:
    """The plan for machines, ``with_cells`` or in sum.

    - ``kind``: planned
    - ``total``: cells
    - ``actions``, ``verdicts``: cells by what is done with them, and those to run by whether they will fit
    - ``card``: name and total_bytes of the GPU, and whether it is emulated; null on a CPU
    - ``expected_seconds``, ``expected_dollars``: for all that is run; dollars are null without a price
    - ``usd_per_hour``, ``price_source``: of one GPU
    - ``fit``: the data that predictions were fitted to; null without a fit
    """
    cells = [
        {
            "cell_id": row.spec.cell_id,
            "fingerprint": row.spec.fingerprint,
            "action": row.action,
            "reason": row.reason,
            "verdict": row.verdict,
            "peak_allocated_bytes": row.prediction and row.prediction.peak_allocated_bytes.model_dump(),
            "note": row.note,
            "expected_seconds": round(row.seconds, 1),
        }
        | ({"data": asdict(plan.data[row.spec.fingerprint])} if plan.data else {})
        for row in plan.rows
    ]
    return {
        "kind": "planned",
        "total": len(plan.rows),
        "actions": plan.actions(),
        "verdicts": plan.verdicts(),
        "card": plan.card
        and {"name": plan.card.name, "total_bytes": plan.card.total_bytes, "is_emulated": plan.card.is_emulated},
        "expected_seconds": round(plan.seconds, 1),
        "expected_dollars": plan.dollars and round(plan.dollars, 4),
        "usd_per_hour": plan.rate and plan.rate.usd_per_hour,
        "price_source": plan.rate and plan.rate.source,
        "fit": plan.fit and plan.fit.data_fingerprint,
    } | ({"cells": cells} if with_cells else {})
