"""Print a prediction, and what fits: the largest, the frontier, a run on several GPUs, the fewest GPUs.

In: frozen answers of predict/. Out: text on the terminal (rich), plain lines where there is none. Decides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from vramprobe.catalog import libraries
from vramprobe.cli.display_record import print_bars, print_notes
from vramprobe.units import format_bytes, plural

if TYPE_CHECKING:
    from vramprobe.predict.fewest import MinGpus
    from vramprobe.predict.from_run import OnGpu
    from vramprobe.predict.frontier import Frontier
    from vramprobe.predict.largest import Largest
    from vramprobe.predict.prediction import Prediction
    from vramprobe.predict.unknowns import Unknown
    from vramprobe.predict.verdict import Verdict
    from vramprobe.report.definition import Column

#: A part of a prediction below this share of its peak is printed as 0.0 %.
_LEAST_SHARE = 0.0005


def print_prediction(
    prediction: Prediction,
    verdict: Verdict | None,
    unknowns: Sequence[Unknown] = (),
    largest_part: str = "",
    parts: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """One prediction: the verdict for a GPU first, the interval and its widest unknown, the phase, a bar for each
    term, the largest in words and ``parts``.
    """
    console = Console(highlight=False, emoji=False)
    if verdict is not None:
        console.print(f"[bold]{verdict.gpu}: {verdict.verdict}[/] ({escape(verdict.reason)})")
    peak = prediction.peak_allocated_bytes
    console.print(
        f"peak [bold]{format_bytes(peak.value)}[/] allocated ({format_bytes(peak.low)} to {format_bytes(peak.high)}), "
        f"in {prediction.peak_phase}: predicted, not measured"
    )
    for name in ("reserved_bytes", "device_bytes"):
        tier = getattr(prediction, name)
        if tier is not None:
            low, high = format_bytes(tier.low), format_bytes(tier.high)
            console.print(f"     {format_bytes(tier.value)} {name.removesuffix('_bytes')} ({low} to {high})")
    if unknowns:
        from vramprobe.predict.unknowns import in_words

        console.print(f"     widest unknown: {escape(in_words(unknowns[0]))}")
    print_bars(console, _readable(prediction.shown_terms))
    if largest_part:
        console.print(f"largest part: {escape(largest_part)}")
    for name, said in parts.items():
        console.print(f"  [bold]{name}[/]: {escape(said)}")
    if (fit := prediction.fit) is not None:
        from vramprobe.cli.display import in_percent

        console.print(
            f"fit: {fit.num_records} records of {plural(len(fit.models), 'model')} on {fit.card}, "
            f"{in_percent(fit.allocated_over_predicted)} of what is predicted without it"
        )
    print_notes(console, prediction.warnings)
    console.print(f"valid for {escape(libraries.in_words(prediction.libraries))}; other versions: docs/versions.md")


def _readable(terms: Mapping[str, int]) -> dict[str, int]:
    """Return the terms with those together that would be 0.0 %."""
    small = {name: size for name, size in terms.items() if size < _LEAST_SHARE * sum(terms.values())}
    if len(small) < 2:
        return dict(terms)
    return {name: size for name, size in terms.items() if name not in small} | {"smaller parts": sum(small.values())}


def print_largest(found: Largest) -> None:
    """The largest that fits and the largest that is tight, with what else bounds them."""
    console = Console(highlight=False)
    name = {"batch_size": "batch size", "seq_len": "sequence length", "model": "model"}[found.question]
    for what, answer in (("fits", found.fits), ("is tight", found.tight)):
        if answer is None:
            if what == "fits":
                console.print(f"{escape(found.gpu)}: none fits")
            continue
        console.print(
            f"{escape(found.gpu)}: the largest {name} that {what} is [bold]{answer.value}[/] ({answer.verdict.reason})"
        )
    print_notes(console, found.notes)
    if found.not_judged:
        console.print(f"[yellow]not judged[/]: {', '.join(found.not_judged)}; --json says why")
    if (shown := found.fits or found.tight) is not None:
        print_notes(console, shown.prediction.warnings)


def _print_table(columns: Sequence[Column], rows: Sequence[Any], console: Console) -> None:
    """Print one table without a title; what lays it out is loaded for it alone."""
    from vramprobe.report.definition import Table
    from vramprobe.report.formats import terminal

    terminal.show([Table(title="", columns=columns, rows=rows)], [], console)


def print_frontier(found: Frontier) -> None:
    """A line for each number of rows, with the longest sequences that fit and are tight."""
    from vramprobe.report.definition import Column

    columns = [
        Column("batch_size", "rows", lambda row: row.batch_size, is_number=True),
        Column("fits", "tokens that fit", lambda row: f"{row.fits:,}" if row.fits else "none", is_number=True),
        Column("tight", "tight up to", lambda row: f"{row.tight:,}" if row.tight else "", is_number=True),
    ]
    console = Console(highlight=False)
    console.print(f"{escape(found.gpu)}: the longest sequence for each number of rows, predicted, not measured")
    _print_table(columns, found.rows, console)
    print_notes(console, found.notes)


def print_run_gpus(found: Sequence[OnGpu]) -> None:
    """A row for each GPU that holds the run, the smallest first; the others in lines."""
    from vramprobe.report.definition import Column

    console = Console(highlight=False)
    held = [one for one in found if one.verdict is not None and one.verdict.verdict != "does not fit"]
    held.sort(key=lambda one: one.verdict.usable_bytes if one.verdict else 0)
    columns = [
        Column("gpu", "GPU", lambda one: one.gpu),
        Column("verdict", "verdict", lambda one: one.verdict.verdict),
        Column("usable_bytes", "usable", lambda one: one.verdict.usable_bytes, format_bytes, is_number=True),
    ]
    _print_table(columns, held, console)
    others: defaultdict[str, list[str]] = defaultdict(list)
    for one in found:
        if one.verdict is None:
            others[f"[yellow]not judged[/]: {escape(one.why)}"].append(one.gpu)
        elif one.verdict.verdict == "does not fit":
            others["[red]does not fit[/]"].append(one.gpu)
    for why, names in others.items():
        console.print(f"{why}: {escape(', '.join(names))}")


def print_min_gpus(found: Sequence[MinGpus], left_out: Mapping[str, Sequence[str]]) -> None:
    """Print the number of GPUs that each kind of sharding needs, and the bytes on each of so many (``on``)."""
    from vramprobe.report.definition import Column

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
    _print_table(columns, found, console)
    for reason, kinds in left_out.items():
        console.print(f"[yellow]note[/]: without {', '.join(kinds)}: {escape(reason)}")
