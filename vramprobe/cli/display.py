"""What the command line shows: records, predictions, fits and lists. Plans are display_plan.py's, a sweep under way
live.py's.

In: frozen results of the stages. Out: text on the terminal (rich), plain lines where there is none, JSON for machines.
Decides nothing and computes nothing that a stage should. Long because each kind of result has its function here.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from vramprobe import catalog
from vramprobe.units import format_bytes, format_seconds, word_for

if TYPE_CHECKING:
    from pathlib import Path

    from vramprobe.check import CheckReport, Finding
    from vramprobe.literature.calibrate import Calibration
    from vramprobe.literature.claims import Judgement
    from vramprobe.measure.doctor import Diagnosis
    from vramprobe.model.memory_model import MemoryModel
    from vramprobe.predict.evaluate import Evaluation
    from vramprobe.predict.largest import Largest
    from vramprobe.predict.prediction import Prediction, Verdict
    from vramprobe.records.record import Emulation, Moved, RunRecord
    from vramprobe.report.definition import Table

_BAR_WIDTH = 36
_PLACES_PER_RULE = 10
_MAX_READS = 5  # lines that read what was not computed
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


def print_record(record: RunRecord) -> None:
    """One measurement or simulation: the peak, its phase, and a bar for each cause."""
    console = Console(highlight=False)
    how = f"{record.instrument} instrument, {escape(record.environment.device_name)}"
    if record.instrument == "emulated":
        how = f"emulated {escape(record.environment.device_name)}: real CUDA software on no GPU"
    if not record.was_run:
        how = f"simulated on fake tensors for device {record.spec.device}: predicted, not measured"
    console.print(f"[bold]{escape(record.cell_id)}[/]  ({how})", soft_wrap=True)
    if record.outcome.kind != "ok":
        from vramprobe.records.table import describe_outcome

        console.print(f"[red]{record.outcome.kind}[/]: {escape(describe_outcome(record.outcome))}", soft_wrap=True)
    if record.peak is None or record.ledger is None:
        return
    peak, ledger = record.peak, record.ledger
    console.print(f"peak [bold]{format_bytes(peak.allocated_bytes)}[/] allocated, in {peak.phase} of step {peak.step}")
    tiers = {"reserved": peak.reserved_bytes, "device (NVML)": peak.device_bytes, "context": record.context_bytes}
    if record.instrument == "emulated":
        tiers = {"reserved": peak.reserved_bytes, "device, with an assumed context": peak.device_bytes}
    for name, value in tiers.items():
        if value is not None:
            console.print(f"     {format_bytes(value)} {name}")
    if ledger.at_peak is not None:
        console.print(f"\nalive at the peak, {format_bytes(ledger.at_peak.total_bytes)}:")
        parts = {name.removesuffix("_bytes"): size for name, size in ledger.at_peak.parts().items()}
        print_bars(console, parts)
    console.print("\nby phase (last step):")
    last_step = max(phase.step or 0 for phase in record.phases)
    steady = {phase.name: phase.allocated_peak_bytes for phase in record.phases if phase.step == last_step}
    print_bars(console, steady, shares=False)
    if record.spec.is_spread:
        _print_cards(console, record)
    elif record.ranks:
        _print_ranks(console, record)
    console.print(f"\nload peak {format_bytes(peak.load_allocated_bytes)}", end="")
    if record.timing and record.timing.step_seconds:
        console.print(f", step {statistics.median(record.timing.step_seconds):.2f} s untraced", end="")
    console.print()
    if record.emulation is not None:
        print_values(console, record.emulation)


def _print_ranks(console: Console, record: RunRecord) -> None:
    """Each rank's peaks, and its part of the model on the host where it has one there."""
    several = f"{record.spec.num_gpus} ranks under {record.spec.sharding}"
    alone = record.spec.only_rank is not None
    console.print(f"\none of {several}, alone:" if alone else f"\n{several}, the highest above:")
    for rank in record.ranks:
        if rank.peak is None:
            continue
        said = f"{format_bytes(rank.peak.allocated_bytes)} in {rank.peak.phase}, "
        said += f"load {format_bytes(rank.peak.load_allocated_bytes)}"
        said += f", {format_bytes(rank.host_tensors_bytes)} of tensors on the host" if rank.host_tensors_bytes else ""
        console.print(f"  rank {rank.rank:<4} {said}")
    if record.spec.offload != "none":
        _print_host(console, record)
    busiest = max(record.ranks, key=lambda rank: sum(one.link_bytes for one in rank.traffic or ()))
    if busiest.traffic:
        print_traffic(console, f"rank {busiest.rank}", busiest.traffic)


def _print_host(console: Console, record: RunRecord) -> None:
    """What all that ran holds on the host, and what its processes had there at most."""
    held = sum(rank.host_tensors_bytes or 0 for rank in record.ranks)
    resident = [rank.host_peak_bytes for rank in record.ranks if rank.host_peak_bytes is not None]
    pinned = sum(rank.host_pinned_bytes or 0 for rank in record.ranks)
    said = f", {format_bytes(pinned)} of pinned blocks" if pinned else ""
    said += f", {format_bytes(sum(resident))} resident in the processes at most" if resident else ""
    console.print(f"  on the host, in all: {format_bytes(held)} of tensors{said}", soft_wrap=True)


def _print_cards(console: Console, record: RunRecord) -> None:
    """Each card's peaks, and which parts of the model lie on it."""
    console.print(f'\none process over {record.spec.num_gpus} cards (device_map="auto"), the highest above:')
    for card in record.ranks:
        if card.peak is not None:
            said = f"{format_bytes(card.peak.allocated_bytes)} in {card.peak.phase}, "
            console.print(f"  card {card.rank:<4} {said}load {format_bytes(card.peak.load_allocated_bytes)}")
        if card.modules is not None:
            console.print(f"            {escape(_in_short(card.modules)) or 'nothing of the model'}", soft_wrap=True)


def _in_short(modules: Sequence[str]) -> str:
    """Modules' names, and a run of numbered ones as its first and last: ``model.layers.0 to 15``."""
    runs: list[tuple[str, str, str]] = []  # all but the last word of a name; the first and the last one's last word
    for name in modules:
        stem, _, last = name.rpartition(".")
        before = runs[-1] if runs else ("", "", "")
        if last.isdecimal() and before[0] == stem and before[2].isdecimal() and int(before[2]) + 1 == int(last):
            runs[-1] = (stem, before[1], last)
        else:
            runs.append((stem, last, last))
    named = [(f"{stem}.{first}" if stem else first, first, last) for stem, first, last in runs]
    return ", ".join(name if first == last else f"{name} to {last}" for name, first, last in named)


def print_traffic(console: Console, whose: str, traffic: Sequence[Moved]) -> None:
    """What a rank asks its collectives to move in a step, and what goes over its link for it."""
    total = format_bytes(sum(one.link_bytes for one in traffic))
    console.print(f"\n{whose} sends {total} a step over its link, by a ring:")
    for one in traffic:
        kind = one.kind.replace("_", "-")
        console.print(
            f"  {one.phase:<15}{kind:<15}{one.num_calls:>5} calls {format_bytes(one.payload_bytes):>11}, "
            f"{format_bytes(one.link_bytes):>11} sent", soft_wrap=True,
        )  # fmt: skip


def print_values(console: Console, emulation: Emulation) -> None:
    """Who read values that the emulated card did not compute, and whether other values would allocate otherwise."""
    if emulation.num_reads:
        steering = [read for read in emulation.reads if read.could_have_steered]
        console.print(
            f"values: {emulation.num_reads} reads of what was not computed, {emulation.num_steering_reads or 0} of "
            f"which could have steered the program{':' if steering else ''}", soft_wrap=True,
        )  # fmt: skip
        for read in steering[:_MAX_READS]:
            where = read.line or read.torch_line or "no Python line"
            console.print(f"  {escape(where)}  {escape(read.operator)}, {read.num_reads} times", soft_wrap=True)
    else:
        console.print("values: nothing that was not computed was read by the host")
    if (verified := emulation.verification) is not None:
        contents = ", ".join(verified.contents)
        if verified.same:
            said = f"the same {verified.num_events} allocations and frees whether uncomputed values are {contents}"
        else:
            said = f"[red]allocations depend on values[/] ({contents}): {escape(verified.parted_at or '')}"
        console.print(f"verified: {said}", soft_wrap=True)


def print_snapshot(record: RunRecord, snapshot: Path | None) -> None:
    """Where the snapshot is and what opens it, or why there is none."""
    if snapshot is None:
        return
    console = Console(highlight=False)
    why = [warning for warning in record.warnings if warning.startswith("no snapshot:")]
    if record.outcome.kind not in ("ok", "invalid"):
        why.append(f"no snapshot: the cell ended as {record.outcome.kind} before that step")
    for text in why:
        console.print(f"[yellow]note[/]: {escape(text)}", soft_wrap=True)
    if not why:
        console.print(f"snapshot written to {escape(str(snapshot))}; open it at pytorch.org/memory_viz", soft_wrap=True)


def print_simulation(record: RunRecord, verdict: Verdict | None, timeline: Path | None = None) -> None:
    """A simulated record, its warnings, the verdict for a GPU, a timeline's place; how long it took is for stderr."""
    print_record(record)
    console = Console(highlight=False)
    for warning in record.warnings:
        if not warning.startswith("simulated:"):  # said in the first line
            console.print(f"[yellow]note[/]: {escape(warning)}", soft_wrap=True)
    _print_libraries(console, record.environment.versions)
    _print_verdict(console, verdict)
    if timeline is not None:
        console.print(f"timeline written to {escape(str(timeline))}", soft_wrap=True)
    if record.timing is not None:
        told = f"simulated in {format_seconds(record.timing.total_seconds)}"
        Console(stderr=True, highlight=False).print(told, style="dim")


def print_prediction(prediction: Prediction, verdict: Verdict | None) -> None:
    """One prediction: the interval, the phase, a bar for each term, the verdict for a GPU."""
    console = Console(highlight=False)
    peak = prediction.peak_allocated_bytes
    console.print(
        f"peak [bold]{format_bytes(peak.value)}[/] allocated ({format_bytes(peak.low)} to {format_bytes(peak.high)}), "
        f"in {prediction.peak_phase}: predicted, not measured",
    )
    for name in ("reserved_bytes", "device_bytes"):
        tier = getattr(prediction, name)
        if tier is not None:
            low, high = format_bytes(tier.low), format_bytes(tier.high)
            console.print(f"     {format_bytes(tier.value)} {name.removesuffix('_bytes')} ({low} to {high})")
    rest = {"constant": prediction.constant_bytes}
    print_bars(console, prediction.terms | ({} if prediction.constant_bytes <= 0 else rest))
    if (fit := prediction.fit) is not None:
        mean = fit.mean_absolute_error
        error = "" if mean is None else f", {_percent(mean)} off on a model left out"
        console.print(
            f"fit: {fit.num_records} records of {len(fit.models)} models on {fit.device_name} ({fit.instrument})"
            f"{error}",
        )  # fmt: skip
    for warning in prediction.warnings:
        console.print(f"[yellow]note[/]: {escape(warning)}")
    _print_libraries(console, prediction.libraries)
    _print_verdict(console, verdict)


def _print_libraries(console: Console, versions: Mapping[str, str | None]) -> None:
    """What a number holds for that was not measured."""
    from vramprobe.catalog.libraries import in_words

    console.print(f"holds for {escape(in_words(versions))}; other versions: docs/versions.md")


def _print_verdict(console: Console, verdict: Verdict | None) -> None:
    if verdict is not None:
        console.print(f"[bold]{verdict.gpu}: {verdict.verdict}[/] ({escape(verdict.reason)})")


def print_largest(found: Largest) -> None:
    """The largest that fits and the largest that is tight, with what else bounds them."""
    console = Console(highlight=False)
    name = {"batch_size": "batch size", "seq_len": "sequence length", "model": "model"}[found.question]
    for what, answer in (("fits", found.fits), ("is tight", found.tight)):
        if answer is None:
            if what == "fits":
                console.print(f"{escape(found.gpu)}: none fits with room to spare")
            continue
        console.print(
            f"{escape(found.gpu)}: the largest {name} that {what} is [bold]{answer.value}[/] ({answer.verdict.reason})",
        )
    for note in found.notes:
        console.print(f"[yellow]note[/]: {escape(note)}")
    if found.not_judged:
        console.print(f"[yellow]not judged[/]: {', '.join(found.not_judged)}; --json says why")
    shown = found.fits or found.tight
    if shown is not None:
        for warning in shown.prediction.warnings:
            console.print(f"[yellow]note[/]: {escape(warning)}")


def print_evaluation(found: Evaluation) -> None:
    """Errors by group, verdicts by GPU where one can fail, and what says nothing; not every record."""
    from vramprobe.report import evaluation

    document = evaluation.evaluation_document(found)
    _print_tables(document.tables[:-1], document.remarks)


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
    emulated = report.instruments.get("emulated", 0)
    said = f" ({emulated} of them emulated, not measured on a GPU)" if emulated else ""
    console.print(f"{_plural(report.num_records, 'record')} in {_plural(len(report.files), 'file')}: {kinds}{said}")
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
    from rich.table import Table as RichTable

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
    table = RichTable(box=None, pad_edge=False)
    for title in ("relative error", "records", "mean", "worst"):
        table.add_column(title, justify="left" if title == "relative error" else "right")
    groups = dict(model.residuals)
    if model.leave_one_model_out is not None:
        groups["on a model left out"] = model.leave_one_model_out.overall
    for name, errors in groups.items():
        table.add_row(name, str(errors.num_records), _percent(errors.mean_absolute), _percent(errors.worst_absolute))
    console.print(table)
    coefficients = ", ".join(f"{term} {value:.4f}" for term, value in model.coefficients.items())
    constants = ", ".join(f"{method} {format_bytes(size)}" for method, size in model.constant_bytes.items())
    console.print(f"coefficients: {coefficients}; constants: {constants}", soft_wrap=True)
    for warning in model.warnings:
        console.print(f"[yellow]note[/]: {escape(warning)}", soft_wrap=True)
    console.print(f"written to {escape(str(path))}", soft_wrap=True)


def print_calibration(calibration: Calibration) -> None:
    """A table of errors for each quantity, one of measured values for each constant, and what was left out."""
    from vramprobe.report.calibration import calibration_document

    document = calibration_document(calibration)
    where = f"{calibration.instrument} instrument, {calibration.device_name}"
    cells = _plural(calibration.num_rows, f"{word_for(calibration.instrument)} cell")
    Console(highlight=False).print(f"{cells}, {escape(where)}\n")
    _print_tables(document.tables, document.remarks)


def _print_tables(tables: Iterable[Table], remarks: Iterable[str] = ()) -> None:
    from vramprobe.report.formats import terminal

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
            console.print(f"open {path} in a browser: all of it, and a calculator", soft_wrap=True)


def print_claims(judged: list[Judgement], out: Path | None, *, as_json: bool) -> None:
    """The verdicts as a table, and how many there are of each."""
    from vramprobe.report import claims

    if as_json:
        print(claims.as_json(judged))
        return
    _print_tables([claims.for_terminal(judged)], [claims.in_words(judged)])
    if out is not None:
        Console(highlight=False).print(f"written to {escape(str(out))}", soft_wrap=True)


def print_models(entries: Sequence[catalog.ModelEntry]) -> None:
    """The catalog's models."""
    from vramprobe.report.definition import Column, Table

    columns = [
        Column("model", "model", lambda entry: entry.name),
        Column("num_params", "parameters", lambda entry: entry.n_params, "{:,}".format, is_number=True),
        Column("model_type", "type", lambda entry: entry.model_type),
        Column("hf_id", "hub id", lambda entry: entry.hf_id),
    ]
    _print_tables([Table(title="Models", columns=columns, rows=entries)])


def print_gpus(gpus: Sequence[catalog.Gpu]) -> None:
    """The catalog's GPUs with the cheapest on-demand price of one."""
    from vramprobe.report.definition import Column, Table

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


def _percent(share: float) -> str:
    return f"{share:.3%}" if share >= 1e-5 or share == 0 else "≤ 0.001%"


def print_bars(console: Console, sizes: dict[str, int], *, shares: bool = True) -> None:
    top = max(sizes.values(), default=0) or 1
    width = max(map(len, sizes), default=0)
    total = sum(sizes.values()) or 1
    for name, size in sizes.items():
        bar = "█" * round(_BAR_WIDTH * size / top)
        share = f"  {size / total:6.1%}" if shares else ""
        console.print(f"  {name:<{width}}  {format_bytes(size):>11}{share}  {bar}")
