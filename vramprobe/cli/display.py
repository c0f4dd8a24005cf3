"""Print fits, checks and lists. Predictions are display_prediction.py's, records display_record.py's, plans
display_plan.py's, a sweep under way live.py's.

In: frozen results of the stages. Out: text on the terminal (rich), plain lines where there is none, JSON for machines.
Decides nothing and computes nothing that a stage should.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from vramprobe import catalog
from vramprobe.cli.folded import on_one_line
from vramprobe.report.definition import Column, Table
from vramprobe.report.formats import terminal
from vramprobe.units import format_bytes, format_seconds, plural, word_for

if TYPE_CHECKING:
    from pathlib import Path

    from vramprobe.catalog.profiled import ProfiledModel
    from vramprobe.check import CheckReport, Finding
    from vramprobe.literature.calibrate import Calibration
    from vramprobe.literature.claims import Judgement
    from vramprobe.measure.doctor import Diagnosis
    from vramprobe.model.card_fit import CardFit, Spread
    from vramprobe.predict.evaluate import Evaluation

_PLACES_PER_RULE = 10
#: What a card adds to a prediction: the median, and how far nine in ten further records stay.
_FIT_COLUMNS = (
    Column("records", "records of"),
    Column("num_records", "n", is_number=True),
    Column("allocated", "allocated", is_number=True),
    Column("reserved", "reserved", is_number=True),
    Column("device", "device − reserved", is_number=True),
)
_STATUS_STYLES = {"ok": "green", "warning": "yellow", "failed": "red", "absent": "dim"}


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on stderr while something runs; nothing off a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def print_doctor(diagnosis: Diagnosis) -> None:
    """One line per finding, with what to do below it, and the verdict at the end."""
    console = Console(highlight=False)
    width = max(len(finding.name) for finding in diagnosis.findings)
    for finding in diagnosis.findings:
        status = f"[{_STATUS_STYLES[finding.status]}]{finding.status:<7}[/]"
        console.print(f"{status}  {escape(finding.name.ljust(width))}  {escape(finding.detail)}", soft_wrap=True)
        if finding.advice is not None:
            console.print(f"{'':<{width + 11}}→ {escape(finding.advice)}", soft_wrap=True)
    style = "green" if diagnosis.ready else "red"
    console.print(
        f"[bold {style}]{escape(diagnosis.verdict)}[/]  ({format_seconds(diagnosis.seconds)})", soft_wrap=True
    )


def print_evaluation(found: Evaluation) -> None:
    """Errors by group, verdicts by GPU where one can fail, and what says nothing; not every record."""
    from vramprobe.report import evaluation

    document = evaluation.evaluation_document(found)
    _print_tables(document.tables[:-1], document.remarks)


def print_check(report: CheckReport) -> None:
    """Print the findings, rule by rule, with the first places of each; the last line is the verdict."""
    console = Console(highlight=False, emoji=False)
    by_rule: dict[tuple[str, str], list[Finding]] = {}
    for finding in sorted(report.findings, key=lambda finding: finding.severity):  # errors first
        by_rule.setdefault((finding.severity, finding.rule), []).append(finding)
    for (severity, rule), findings in by_rule.items():
        console.print(f"[{'red' if severity == 'error' else 'yellow'}]{severity}[/]: {rule}, {len(findings)} found")
        said = None
        for finding in findings[:_PLACES_PER_RULE]:
            if finding.message != said:
                console.print(f"  {on_one_line(finding.message)}", markup=False, soft_wrap=True)
                said = finding.message
            console.print(f"    {on_one_line(finding.where)}", markup=False, soft_wrap=True)
        if (more := len(findings) - _PLACES_PER_RULE) > 0:
            console.print(f"  and {more} more; --json lists all")
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.outcomes.items())) or "none"
    emulated = report.instruments.get("emulated", 0)
    said = f" ({emulated} of them emulated, not measured on a GPU)" if emulated else ""
    console.print(f"{plural(report.num_records, 'record')} in {plural(len(report.files), 'file')}: {kinds}{said}")
    console.print(
        f"replicated: {report.num_replicated_cells} of {report.num_cells} cells (about 5 % show that it repeats)"
    )
    errors = sum(finding.severity == "error" for finding in report.findings)
    counts = f"{plural(errors, 'error')}, {plural(len(report.findings) - errors, 'warning')}"
    verdict = "passes" if report.ok else "fails"
    console.print(f"[bold]{verdict}[/]: {counts}{' (strict: none is allowed)' if report.strict else ''}")


def print_fit(model: CardFit, path: Path) -> None:
    """Print a fit: its records, a table of what the card adds to a prediction, what was left out, and its file."""
    console = Console(highlight=False)
    console.print(
        f"{model.num_records} records of {plural(len(model.models), 'model')} ({escape(', '.join(model.models))}), "
        f"measured on {escape(model.card)}",
        soft_wrap=True,
    )
    _print_tables([_fit_table(model)])
    for reason, count in model.left_out.items():
        console.print(f"[yellow]left out[/] {count}: {escape(reason)}", soft_wrap=True)
    for warning in model.warnings:
        console.print(f"[yellow]note[/]: {escape(warning)}", soft_wrap=True)
    console.print(f"written to {escape(str(path))}", soft_wrap=True)


def _fit_table(model: CardFit) -> Table:
    """Return a row for all records and one per method with enough of its own; a column that no record fills is left
    out.
    """
    gaps, empty = model.gaps, dict.fromkeys(column.name for column in _FIT_COLUMNS)
    device = gaps.device_over_reserved_bytes
    whole = {
        "records": "all",
        "num_records": gaps.num_records,
        "allocated": in_percent(gaps.allocated),
        "reserved": gaps.reserved and in_percent(gaps.reserved),
        "device": device and _in_bytes(device),
    }
    methods = [empty | {"records": name, "allocated": in_percent(own)} for name, own in gaps.by_method.items()]
    rows = [whole, *methods]
    filled = [column for column in _FIT_COLUMNS if any(row[column.name] is not None for row in rows)]
    return Table(title="Measured over predicted memory", columns=filled, rows=rows)


def in_percent(spread: Spread) -> str:
    """Return a ratio's median, and how far nine in ten further records stay: ``100.02 ± 0.31 %``."""
    return f"{100 * spread.value:.2f} ± {100 * (spread.high - spread.value):.2f} %"


def _in_bytes(spread: Spread) -> str:
    return f"{format_bytes(round(spread.value))} ± {format_bytes(round(spread.high - spread.value))}"


def print_calibration(calibration: Calibration) -> None:
    """A table of errors for each quantity, one of measured values for each constant, and what was left out."""
    from vramprobe.report.calibration import calibration_document

    document = calibration_document(calibration)
    where = f"{calibration.instrument} instrument, {calibration.device_name}"
    cells = plural(calibration.num_rows, f"{word_for(calibration.instrument)} cell")
    Console(highlight=False).print(f"{cells}, {escape(where)}\n")
    _print_tables(document.tables, document.remarks)


def _print_tables(tables: Iterable[Table], remarks: Iterable[str] = ()) -> None:
    terminal.show(tables, remarks, Console(highlight=False))


def print_report(paths: Sequence[Path]) -> None:
    """The head of the report's first page, up to the cells that the fit has seen, the files written, what to open."""
    console = Console(highlight=False, markup=False)
    written: dict[Path, list[str]] = {}
    for path in paths:
        written.setdefault(path.with_suffix(""), []).append(path.suffix)
        if path.name == "measured.md":
            head = path.read_text().split("\n## In the fit\n")[0].split("\n---\n")[0]
            console.print("".join(line for line in head.splitlines(True) if not line.startswith("![")), soft_wrap=True)
    for stem, suffixes in written.items():
        console.print(f"{stem}  {' '.join(suffixes)}", soft_wrap=True)
    for path in paths:
        if path.name == "index.html":
            console.print(f"open {path} in a browser: all tables and a calculator", soft_wrap=True)


def print_claims(judged: list[Judgement], out: Path | None, *, as_json: bool) -> None:
    """The verdicts as a table, and how many there are of each."""
    from vramprobe.report import claims

    if as_json:
        print(claims.as_json(judged))
        return
    _print_tables([claims.for_terminal(judged)], [claims.in_words(one.verdict for one in judged)])
    if out is not None:
        Console(highlight=False).print(f"written to {escape(str(out))}", soft_wrap=True)


def print_models(entries: Sequence[catalog.ModelEntry], profiled: Sequence[ProfiledModel]) -> None:
    """The catalog's models, then those that only a profile knows."""
    columns = [
        Column("model", "model", lambda entry: entry.name),
        Column("num_params", "parameters", lambda entry: entry.n_params, "{:,}".format, is_number=True),
        Column("model_type", "type", lambda entry: entry.model_type),
        Column("hf_id", "hub id", lambda entry: entry.hf_id),
    ]
    others = [
        Column("model", "model", lambda one: one.name),
        Column("kind", "kind", lambda one: one.kind),
        Column("hf_id", "hub id", lambda one: one.hf_id),
    ]
    _print_tables(
        [
            Table(title="Models", columns=columns, rows=entries),
            Table(
                title="With images (--images)", columns=others, rows=[one for one in profiled if one.has_counted_images]
            ),
            Table(
                title="Only in profile --emulate GPU --empty-weights",
                columns=others,
                rows=[one for one in profiled if not one.has_counted_images],
            ),
        ]
    )


def print_gpus(gpus: Sequence[catalog.Gpu]) -> None:
    """The catalog's GPUs with the cheapest on-demand price of one."""

    def cheapest(gpu: catalog.Gpu) -> float | None:
        offers = [price for price in catalog.list_prices(gpu.short_name) if price.terms == "on-demand"]
        return min((price.usd_per_gpu_hour for price in offers), default=None)

    columns = [
        Column("gpu", "gpu", lambda gpu: gpu.name),
        Column("short_name", "short name", lambda gpu: gpu.short_name),
        Column("total_bytes", "reported", lambda gpu: gpu.total_bytes, format_bytes, is_number=True),
        Column("arch", "architecture", lambda gpu: gpu.arch),
        Column("usd_per_hour", "from $/h", cheapest, "{:.2f}".format, is_number=True),
    ]
    _print_tables([Table(title="GPUs", columns=columns, rows=gpus)])
