"""A sweep under way, as it is shown: a live table on a terminal, one line per cell elsewhere, JSON lines for machines.

In: the runner's events, and its summary. Out: text on stderr, or JSON lines on stdout; the summary is on stdout.
Decides nothing. The keys of the JSON lines are listed with the functions that make them: plan_as_json
(display_plan.py), event_as_json and summary_as_json.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from vramprobe.cli.display_plan import plan_as_json, plan_in_words
from vramprobe.cli.tally import Tally, became, prediction_error, worst_error
from vramprobe.records import store
from vramprobe.records.phase_memory import TRAINING_PHASES
from vramprobe.records.table import describe_outcome
from vramprobe.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from vramprobe.sweep.progress import Progress, RunSummary

_STYLES = {"oom": "yellow", "skipped": "dim", "failed": "bold red", "kept": "dim", "quarantined": "red"}
_WITH_LOG = ("oom", "failed", "interrupted")
_REFRESHES_PER_SECOND = 4
_MAX_FAILURES_LISTED = 10
_MAX_DETAIL = 400  # characters of an error's message in a line; the record has all of it


@contextmanager
def sweep_progress(*, as_json: bool) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that displays a sweep's events while it runs."""
    if as_json:
        yield _print_json
        return
    tally, console = Tally(), Console(stderr=True, highlight=False)
    if not (sys.stderr.isatty() and console.is_interactive):
        yield lambda event: _print_line(event, tally)
        return
    from rich.live import Live

    with Live(
        get_renderable=lambda: progress_table(tally),
        console=console,
        refresh_per_second=_REFRESHES_PER_SECOND,
        transient=True,
        redirect_stdout=False,
    ):
        yield lambda event: _print_above(event, tally, console)


def print_summary(summary: RunSummary, *, as_json: bool) -> None:
    """Print how a sweep ended, and how to go on."""
    if as_json:
        print(json.dumps(summary_as_json(summary)))
        return
    console = Console(highlight=False)
    for note in summary.notes:
        console.print(Text.assemble(("note", "yellow"), f": {_one_line(note)}"), soft_wrap=True)
    for line, style in _summary_lines(summary):
        console.print(Text(_one_line(line), style=style), soft_wrap=True)


def event_as_json(event: Progress) -> dict[str, Any]:
    """One event that concerns a cell, for machines. What is not known, or means nothing for this kind, is null.

    A cell that is ``started`` may be ``left`` after all, where loading the libraries has used up the time.

    - ``kind``: kept, quarantined, skipped, started, finished, or left (not started, for want of time, money or cells)
    - ``index``, ``total``: the cell's place in the plan, from 1, and the plan's length
    - ``cell_id``, ``fingerprint``: the cell
    - ``attempt_id``: as in the journal; of a kept cell that of the record it has
    - ``reason``: why it is run, kept, quarantined, skipped or left
    - ``outcome``, ``detail``: what became of it, and one line on what went wrong
    - ``skipped``: what a skip rests on: why (dominated or predicted), evidence, evidence_attempt_id
    - ``peak_allocated_bytes``, ``predicted_bytes``: measured, and predicted before
    - ``prediction_error``: predicted less measured, over measured
    - ``expected_seconds``: for this cell, at the pace when it was started
    - ``seconds``, ``dollars``: used by the sweep so far
    - ``left_seconds``: expected until the end, this cell included where it has just started
    - ``log``: the file that the cell's process writes to; gone, and null, after a good one
    - ``node``: the machine of a fleet that ran the cell (``--on``); null on this machine
    """
    record, row, rate = event.record, event.cell, event.plan.rate
    is_gone = event.log is None or (record is not None and record.outcome.kind == "ok")
    return {
        "kind": event.kind,
        "index": event.index,
        "total": event.total,
        "cell_id": row.spec.cell_id,
        "fingerprint": row.spec.fingerprint,
        "attempt_id": row.record.attempt_id if event.kind == "kept" and row.record else event.attempt_id,
        "reason": event.reason,
        "outcome": record and record.outcome.kind,
        "detail": (record and describe_outcome(record.outcome)) or None,
        "skipped": record.outcome.model_dump(exclude={"kind"}) if record and event.kind == "skipped" else None,
        "peak_allocated_bytes": record and record.peak and record.peak.allocated_bytes,
        "predicted_bytes": row.prediction and row.prediction.peak_allocated_bytes.value,
        "prediction_error": record and prediction_error(row, record),
        "expected_seconds": _rounded(event.expected_seconds, 1),
        "seconds": _rounded(event.seconds, 1),
        "dollars": rate and _rounded(rate.dollars(event.seconds), 4),
        "left_seconds": _rounded(event.left_seconds, 1),
        "log": None if is_gone else str(event.log),
        "node": event.node,
    }


def summary_as_json(summary: RunSummary) -> dict[str, Any]:
    """Return a sweep's results for JSON.

    - ``kind``: summary
    - ``journal``: the file with the records
    - ``total``: cells of the plan
    - ``outcomes``: records of this run by outcome
    - ``kept``, ``quarantined``: cells that were not run, because they had a record, or had never ended
    - ``left``, ``stopped_by``: cells that were not started, and the signal or the limit (max-time, budget, limit)
    - ``seconds``, ``dollars``: used; dollars are null without a price
    - ``worst_prediction_error``: cell_id and error (predicted less measured, over measured); null without any
    - ``failed``: cell_id, attempt_id, outcome and log of each cell that failed
    - ``notes``: what else is to be known
    """
    rate, worst = summary.plan.rate, worst_error(summary.plan.rows, summary.records)
    return {
        "kind": "summary",
        "journal": str(summary.journal),
        "total": len(summary.plan.rows),
        "outcomes": summary.counts(),
        "kept": summary.kept,
        "quarantined": summary.plan.actions().get("quarantined", 0),
        "left": summary.left,
        "stopped_by": summary.stopped_by,
        "seconds": _rounded(summary.seconds, 1),
        "dollars": rate and _rounded(rate.dollars(summary.seconds), 4),
        "worst_prediction_error": worst and {"cell_id": worst[1], "error": worst[0]},
        "failed": [
            {
                "cell_id": record.cell_id,
                "attempt_id": record.attempt_id,
                "outcome": record.outcome.kind,
                "log": str(summary.log_of(record)),
            }
            for record in summary.failed()
        ],
        "notes": summary.notes,
    }


def progress_table(tally: Tally) -> RenderableType:
    """Build the table that the terminal shows while a sweep runs, as of now; any width will do."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    event = tally.event
    if event is None:
        return Text("planning the sweep …")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True, min_width=len("predicted"))
    table.add_column(overflow="fold")
    table.add_row("sweep", ProgressBar(total=event.total, completed=event.total - tally.num_left, width=40))
    if event.row is not None:
        where, cell_id = f"{event.index}/{event.total} ", _one_line(event.row.spec.cell_id)
        table.add_row("cell", Text.assemble((where, "bold"), cell_id))
        table.add_row("", _running_in_words(tally, event))
    counts = [Text(f"{num} {name}", _STYLES.get(name, "")) for name, num in tally.counts.items() if num or name == "ok"]
    table.add_row("cells", Text(", ").join([*counts, Text(f"{tally.num_left} left")]))
    table.add_row("time", _time_in_words(tally, event))
    if event.plan.rate is not None:
        table.add_row("cost", _cost_in_words(tally, event))
    if tally.worst is not None:
        table.add_row("predicted", Text(f"{_signed(tally.worst[0])} at worst, {_one_line(tally.worst[1])}"))
    return Group(table, "")  # a line of its own for the ^C that a terminal echoes; it would shift what is erased


def _running_in_words(tally: Tally, event: Progress) -> str:
    """The running cell's phase and time; nothing while none runs."""
    from vramprobe.measure.isolation import read_phase

    seconds = tally.cell_seconds
    if seconds is None:
        return ""
    if tally.num_running > 1:
        return f"and {tally.num_running - 1} more at once"
    text = format_seconds(seconds)
    if event.expected_seconds:
        text += f" of about {format_seconds(event.expected_seconds)}"
    name, step = (event.status and read_phase(event.status)) or (None, None)
    if name is None:
        return text
    when = "" if step is None else f" of step {step}"
    is_last = (name, step) == (TRAINING_PHASES[-1], event.cell.spec.steps)  # those behind it are not announced
    return f"{text}, in {name}{when}{' or later' if is_last else ''}"


def _time_in_words(tally: Tally, event: Progress) -> str:
    allowed = "" if event.limits.max_seconds == math.inf else f" of {format_seconds(event.limits.max_seconds)}"
    left = f", about {format_seconds(tally.left_seconds)} to go" if tally.left_seconds else ""
    return f"{format_seconds(tally.seconds)}{allowed} used{left}"


def _cost_in_words(tally: Tally, event: Progress) -> str:
    rate, limits = event.plan.rate, event.limits
    assert rate is not None
    spent = rate.dollars(tally.seconds)
    text = f"${spent:.2f} spent"
    if tally.left_seconds:
        text += f", about ${rate.dollars(tally.left_seconds):.2f} to go"
    if limits.limited_by == "budget":
        budget = rate.dollars(limits.max_seconds)
        text += f", ${max(budget - spent, 0):.2f} left of ${budget:.2f}"
    return text


def _print_json(event: Progress) -> None:
    line = plan_as_json(event.plan, with_cells=False) if event.kind == "planned" else event_as_json(event)
    print(json.dumps(line), flush=True)


def _print_line(event: Progress, tally: Tally) -> None:
    """One line off a terminal, with what is left and spent; the cells that are left are counted at the end."""
    tally.add(event)
    if event.kind == "planned":
        print(plan_in_words(event.plan), file=sys.stderr, flush=True)
    elif event.kind not in ("started", "left"):
        print(_event_text(event) + _tail(event), file=sys.stderr, flush=True)


def _print_above(event: Progress, tally: Tally, console: Console) -> None:
    """One line above the table; what was there before is in the table alone, it may be much."""
    tally.add(event)
    if event.kind == "planned":
        console.print(Text(plan_in_words(event.plan)), soft_wrap=True)
    elif event.kind not in ("started", "left", "kept"):
        kind = became(event)  # the path of a log is left whole, to be copied; all else breaks between words
        console.print(Text(_event_text(event), style=_STYLES.get(kind, "")), soft_wrap=kind in _WITH_LOG)


def _event_text(event: Progress) -> str:
    parts = [f"[{event.index}/{event.total}] {event.cell.spec.cell_id}"]
    record = event.record
    if event.kind != "finished" or record is None:
        return _one_line("  ".join([*parts, f"{event.kind}: {event.reason}"]))
    peak, outcome = record.peak, record.outcome
    parts.append(outcome.kind)
    if peak is not None:
        error = prediction_error(event.cell, record)
        predicted = "" if error is None else f" (predicted {_signed(error)})"
        parts.append(f"{format_bytes(peak.allocated_bytes)} in {peak.phase}{predicted}")
    if record.timing is not None:
        parts.append(format_seconds(record.timing.total_seconds))
    parts += [f"on {event.node}"] if event.node else []
    if outcome.kind != "ok":
        detail = describe_outcome(outcome)
        parts += [detail if len(detail) <= _MAX_DETAIL else f"{detail[:_MAX_DETAIL]}…", f"log: {event.log}"]
    return _one_line("  ".join(parts))


def _tail(event: Progress) -> str:
    """Format the seconds expected for the rest, and the dollars so far, where they are known."""
    known = [f"about {format_seconds(event.left_seconds)} to go"] if event.left_seconds else []
    known += [f"${event.plan.rate.dollars(event.seconds):.2f} spent"] if event.plan.rate else []
    return f"  [{', '.join(known)}]" if known else ""


def _summary_lines(summary: RunSummary) -> Iterator[tuple[str, str]]:
    """(text, style) of each line below the notes."""
    plan, failed, worst = summary.plan, summary.failed(), worst_error(summary.plan.rows, summary.records)
    for record in failed[:_MAX_FAILURES_LISTED]:
        yield f"{record.outcome.kind}: {record.cell_id}  log: {summary.log_of(record)}", "red"
    if len(failed) > _MAX_FAILURES_LISTED:
        yield f"and {len(failed) - _MAX_FAILURES_LISTED} more that failed", "red"
    done = ", ".join(f"{count} {kind}" for kind, count in sorted(summary.counts().items())) or "nothing run"
    quarantined = plan.actions().get("quarantined", 0)
    at_rest = f"{summary.kept} kept" + (f", {quarantined} quarantined" if quarantined else "")
    yield f"{done}; {at_rest}, {summary.left} left of {plural(len(plan.rows), 'cell')} → {summary.journal}", ""
    used = f"{format_seconds(summary.seconds)} used"
    used += f", ${plan.rate.dollars(summary.seconds):.2f} spent" if plan.rate else ""
    yield used + (f"; prediction error {_signed(worst[0])} at worst, {worst[1]}" if worst else ""), ""
    if summary.stopped_by:
        yield f"stopped by {summary.stopped_by}", "yellow"
    again = sum(record.outcome.kind not in (*store.FINISHED, "skipped") for record in summary.records)
    if summary.left or again:
        tried = [f"{summary.left} left"] * bool(summary.left) + [f"{again} to try again"] * bool(again)
        yield f"run the same command again to go on ({', '.join(tried)})", ""
    if quarantined:
        yield f"run it with --retry-quarantined for the {quarantined} that never ended", ""


def _signed(error: float) -> str:
    return f"{100 * error:+z.2f} %"


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _one_line(text: str) -> str:
    """Ids and messages hold what they like; a line stays one, and a terminal is not told what to do."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
