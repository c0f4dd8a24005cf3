"""What the command line shows a person: records, predictions, fits, lists and a sweep's progress.

In: frozen results of the stages. Out: text on the terminal (rich), plain lines where there is none, JSON lines for
machines. Decides nothing and computes nothing that a stage should.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from vramprobe import catalog
from vramprobe.table import describe_outcome
from vramprobe.units import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from vramprobe.check import CheckReport, Finding
    from vramprobe.measure.runner import Progress as Event
    from vramprobe.measure.runner import RunSummary
    from vramprobe.memory_model import MemoryModel
    from vramprobe.predict import Prediction, Verdict
    from vramprobe.record import RunRecord

_BAR_WIDTH = 36
_PLACES_PER_RULE = 10


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on stderr while something runs; nothing off a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def print_record(record: RunRecord) -> None:
    """One measurement: the peak, its phase, and a bar for each cause."""
    console = Console(highlight=False)
    device = escape(record.environment.device_name)
    console.print(f"[bold]{escape(record.cell_id)}[/]  ({record.instrument} instrument, {device})", soft_wrap=True)
    if record.outcome.kind != "ok":
        console.print(f"[red]{record.outcome.kind}[/]: {escape(describe_outcome(record.outcome))}", soft_wrap=True)
    if record.peak is None or record.ledger is None:
        return
    peak, ledger = record.peak, record.ledger
    console.print(f"peak [bold]{format_bytes(peak.allocated_bytes)}[/] allocated, in {peak.phase} of step {peak.step}")
    tiers = {"reserved": peak.reserved_bytes, "device (NVML)": peak.device_bytes, "context": record.context_bytes}
    for name, value in tiers.items():
        if value is not None:
            console.print(f"     {format_bytes(value)} {name}")
    if ledger.at_peak is not None:
        console.print(f"\nalive at the peak, {format_bytes(ledger.at_peak.total_bytes)}:")
        parts = {name.removesuffix("_bytes"): size for name, size in ledger.at_peak.parts().items()}
        _print_bars(console, parts)
    console.print("\nby phase (last step):")
    last_step = max(phase.step or 0 for phase in record.phases)
    steady = {phase.name: phase.allocated_peak_bytes for phase in record.phases if phase.step == last_step}
    _print_bars(console, steady, shares=False)
    console.print(f"\nload peak {format_bytes(peak.load_allocated_bytes)}", end="")
    if record.timing and record.timing.step_seconds:
        console.print(f", step {statistics.median(record.timing.step_seconds):.2f} s untraced", end="")
    console.print()


def print_prediction(prediction: Prediction, verdict: Verdict | None) -> None:
    """One prediction: the interval, the phase, a bar for each term, the verdict for a GPU."""
    console = Console(highlight=False)
    peak = prediction.peak_allocated_bytes
    console.print(
        f"peak [bold]{format_bytes(peak.value)}[/] allocated ({format_bytes(peak.low)} to {format_bytes(peak.high)}), "
        f"in {prediction.peak_phase}: predicted, not measured",
        soft_wrap=True,
    )
    for name in ("reserved_bytes", "device_bytes"):
        tier = getattr(prediction, name)
        if tier is not None:
            low, high = format_bytes(tier.low), format_bytes(tier.high)
            console.print(f"     {format_bytes(tier.value)} {name.removesuffix('_bytes')} ({low} to {high})")
    _print_bars(console, prediction.terms)
    for warning in prediction.warnings:
        console.print(f"[yellow]note[/]: {escape(warning)}", soft_wrap=True)
    if verdict is not None:
        console.print(f"[bold]{verdict.gpu}: {verdict.verdict}[/] ({verdict.reason})", soft_wrap=True)


def print_check(report: CheckReport) -> None:
    """What was found, rule by rule, with the first places of each; the last line is the verdict."""
    console = Console(highlight=False, emoji=False)
    by_rule: dict[tuple[str, str], list[Finding]] = {}
    for finding in sorted(report.findings, key=lambda finding: finding.severity):  # errors first
        by_rule.setdefault((finding.severity, finding.rule), []).append(finding)
    for (severity, rule), findings in by_rule.items():
        console.print(f"[{'red' if severity == 'error' else 'yellow'}]{severity}[/]: {rule}, {len(findings)} found")
        said = None
        for finding in findings[:_PLACES_PER_RULE]:
            if finding.message != said:
                console.print(f"  {_printable(finding.message)}", markup=False, soft_wrap=True)
                said = finding.message
            console.print(f"    {_printable(finding.where)}", markup=False, soft_wrap=True)
        if (more := len(findings) - _PLACES_PER_RULE) > 0:
            console.print(f"  and {more} more; --json lists all")
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.outcomes.items())) or "none"
    console.print(f"{_plural(report.num_records, 'record')} in {_plural(len(report.files), 'file')}: {kinds}")
    console.print(
        f"replicated: {report.num_replicated_cells} of {report.num_cells} cells (about 5 % show that it repeats)"
    )
    errors = sum(finding.severity == "error" for finding in report.findings)
    counts = f"{_plural(errors, 'error')}, {_plural(len(report.findings) - errors, 'warning')}"
    verdict = "passes" if report.ok else "fails"
    console.print(f"[bold]{verdict}[/]: {counts}{' (strict: none is allowed)' if report.strict else ''}")


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _printable(text: str) -> str:
    """Others' text on one line: what moves the cursor or starts a line of its own is shown by its code."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def print_fit(model: MemoryModel, path: Path) -> None:
    """What was fitted, how well, and where it was written."""
    console = Console(highlight=False)
    console.print(
        f"{model.num_records} records of {len(model.models)} models ({escape(', '.join(model.models))}), "
        f"{model.instrument} instrument, {escape(model.device_name)}",
        soft_wrap=True,
    )
    if model.num_lower_bounds:
        console.print(f"{model.num_lower_bounds} out-of-memory records as lower bounds")
    for reason, count in model.left_out.items():
        console.print(f"[yellow]left out[/] {count}: {escape(reason)}", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for title in ("relative error", "records", "mean", "worst"):
        table.add_column(title, justify="left" if title == "relative error" else "right")
    groups = dict(model.residuals)
    if model.leave_one_model_out is not None:
        groups["on a model left out"] = model.leave_one_model_out.overall
    for name, errors in groups.items():
        table.add_row(name, str(errors.num_records), f"{errors.mean_absolute:.3%}", f"{errors.worst_absolute:.3%}")
    console.print(table)
    coefficients = ", ".join(f"{term} {value:.4f}" for term, value in model.coefficients.items())
    console.print(f"coefficients: {coefficients}; constant {format_bytes(model.constant_bytes)}", soft_wrap=True)
    for warning in model.warnings:
        console.print(f"[yellow]note[/]: {escape(warning)}", soft_wrap=True)
    console.print(f"written to {escape(str(path))}", soft_wrap=True)


def print_report(paths: Iterable[Path]) -> None:
    """The head of the report's first page, up to the cells that the fit has seen, and the files written."""
    console = Console(highlight=False, markup=False)
    for path in paths:
        if path.name == "measured.md":
            console.print(path.read_text().split("\n## In the fit\n")[0].split("\n---\n")[0], soft_wrap=True)
    for path in paths:
        console.print(str(path), soft_wrap=True)


def print_models(entries: Iterable[catalog.ModelEntry]) -> None:
    """The catalog's models."""
    table = Table(box=None, pad_edge=False)
    for title, justify in (("model", "left"), ("parameters", "right"), ("type", "left"), ("hub id", "left")):
        table.add_column(title, justify=justify)
    for entry in entries:
        table.add_row(entry.name, f"{entry.n_params:,}", entry.model_type, entry.hf_id)
    Console(highlight=False).print(table)


def print_gpus(gpus: Iterable[catalog.Gpu]) -> None:
    """The catalog's GPUs with the cheapest on-demand price of one."""
    table = Table(box=None, pad_edge=False)
    for title in ("gpu", "short name", "reported", "architecture", "from $/h"):
        table.add_column(title, justify="right" if title in ("reported", "from $/h") else "left")
    for gpu in gpus:
        hourly = [price.usd_per_gpu_hour for price in catalog.list_prices(gpu.short_name) if price.terms == "on-demand"]
        cheapest = f"{min(hourly):.2f}" if hourly else "-"
        table.add_row(gpu.name, gpu.short_name, format_bytes(gpu.total_bytes), gpu.arch, cheapest)
    Console(highlight=False).print(table)


def print_summary(summary: RunSummary) -> None:
    """How a sweep ended, and how to go on."""
    console = Console(highlight=False)
    for note in summary.notes:
        console.print(f"[yellow]note[/]: {escape(note)}", soft_wrap=True)
    done = ", ".join(f"{count} {kind}" for kind, count in sorted(summary.counts().items())) or "nothing to run"
    console.print(
        f"{done}; {summary.kept} kept of {summary.total} cells → {escape(str(summary.journal))}", soft_wrap=True
    )
    if summary.stopped_by:
        console.print(f"stopped by {summary.stopped_by}; run the same command again to go on")


@contextmanager
def sweep_progress(*, as_json: bool) -> Iterator[Callable[[Event], None]]:
    """A sweep's events: a live bar with an ETA on a terminal, one line per cell elsewhere, JSON lines if asked."""
    console = Console(stderr=True, highlight=False)
    if as_json:
        yield _print_event_json
    elif not console.is_terminal:
        yield _print_event_line
    else:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                   TimeElapsedColumn(), TextColumn("{task.fields[eta]}"))  # fmt: skip
        with Progress(*columns, console=console, transient=True) as bar:
            yield _LiveBar(bar).show


class _LiveBar:
    """State of the live display: one task, and the times of finished cells for the ETA."""

    def __init__(self, bar: Progress) -> None:
        self._bar, self._task, self._eta = bar, None, _Eta()

    def show(self, event: Event) -> None:
        if self._task is None:
            self._task = self._bar.add_task("", total=event.total, eta="")
        eta = self._eta.after(event)
        if event.kind != "started":
            self._bar.console.print(escape(_event_text(event)), soft_wrap=True)
        done = event.index if event.kind != "started" else event.index - 1
        self._bar.update(self._task, completed=done, description=escape(event.spec.cell_id), eta=eta)


class _Eta:
    """Time left, from the median of the cells this run has finished."""

    def __init__(self) -> None:
        self._began = 0.0
        self._seconds: list[float] = []

    def after(self, event: Event) -> str:
        if event.kind == "started":
            self._began = time.monotonic()
        elif event.kind == "finished":
            self._seconds.append(time.monotonic() - self._began)
        if not self._seconds:
            return ""
        left = event.total - event.index + (event.kind == "started")
        return f"about {statistics.median(self._seconds) * left:.0f} s left"


def _print_event_line(event: Event) -> None:
    if event.kind != "started":
        print(_event_text(event), file=sys.stderr, flush=True)


def _print_event_json(event: Event) -> None:
    record = event.record
    line = {
        "kind": event.kind,
        "index": event.index,
        "total": event.total,
        "cell_id": event.spec.cell_id,
        "reason": event.reason,
        "outcome": record and record.outcome.kind,
        "peak_allocated_bytes": record and record.peak and record.peak.allocated_bytes,
        "log": str(event.log) if record and record.outcome.kind != "ok" else None,
    }
    print(json.dumps(line), flush=True)


def _event_text(event: Event) -> str:
    head = f"[{event.index}/{event.total}] {event.spec.cell_id}"
    if event.record is None:
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


def _print_bars(console: Console, sizes: dict[str, int], *, shares: bool = True) -> None:
    top = max(sizes.values(), default=0) or 1
    width = max(len(name) for name in sizes)
    total = sum(sizes.values()) or 1
    for name, size in sizes.items():
        bar = "█" * round(_BAR_WIDTH * size / top)
        share = f"  {size / total:6.1%}" if shares else ""
        console.print(f"  {name:<{width}}  {format_bytes(size):>11}{share}  {bar}")
