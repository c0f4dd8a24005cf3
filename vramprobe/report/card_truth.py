"""Measured and emulated records of the same cells → a page: how true the emulation is on one GPU, cell by cell.

In: the records of a real GPU and of its emulation. Out: a Document, and what it comes to in a few lines. Never runs a
cell, and leaves none out: one that only one side finished is shown with both outcomes.
"""

import csv
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vramprobe.catalog import gpu_seen
from vramprobe.catalog.contexts import COLUMNS, ContextRow, own_contexts, own_rows
from vramprobe.recommend.step_cost import speed_at_hand
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.records.table import describe_outcome
from vramprobe.records.whole_file import replacing
from vramprobe.report.columns import ByteUnit, provenance, shortened, signed_percent
from vramprobe.report.definition import Column, Document, Table
from vramprobe.report.formats import files_of
from vramprobe.report.publish import publish
from vramprobe.sweep.stages import read_records
from vramprobe.units import KIB, MIB, format_bytes

_MIB = ByteUnit("MiB", MIB, 1)
_TIERS = ("allocated", "reserved", "context")
_LIBRARIES = ("torch", "transformers", "bitsandbytes")
_BOTH_EMULATED = (
    "Both sides are emulated: the first ran where a real GPU would. This shows that the command works and repeats, and "
    "nothing about a GPU."
)


def card_truth_document(measured: Sequence[RunRecord], emulated: Sequence[RunRecord], command: str) -> Document:
    """The page. Of several attempts at a cell the one that counts is taken (store.latest_by_fingerprint)."""
    rows = truth_rows(measured, emulated)
    known = [row for row in rows if row["first_allocated_bytes"] is not None]
    both = [row for row in known if row["emulated_allocated_bytes"] is not None]
    timed = [row for row in rows if row["first_step_seconds"] is not None]
    differing = [row for row in rows if row["first_outcome"] != row["emulated_outcome"]]
    is_emulated = any(record.instrument == "emulated" for record in measured)
    first = "first, emulated" if is_emulated else "on the GPU"
    tables = [
        _tier_table("Peak allocated", "allocated", both, first),
        _tier_table("Peak reserved", "reserved", both, first),
        _tier_table("Context: device memory that torch does not account for", "context", both, first),
        Table(title="Step time", columns=_time_columns(first), rows=timed, otherwise="No cell has a step time."),
        Table(
            title="Other outcomes", columns=_outcome_columns(first), rows=differing, otherwise="Every cell ended alike."
        ),
    ]
    device = measured[0].environment.device_said if measured else "no GPU"
    return Document(
        name="truth",
        title=f"{'Emulated twice' if is_emulated else 'Measured and emulated'}: {device}",
        about=[_BOTH_EMULATED if is_emulated else "Each cell ran on the GPU and on its emulation. " + _ABOUT],
        tables=tables,
        data=Table(title="All cells", columns=_data_columns(first), rows=rows),
        remarks=truth_in_words(rows),
        origin=provenance(measured),
        command=command,
    )


_ABOUT = (
    "Differences are emulated less measured. Step times are predicted from the counted launches of the nearest recipe "
    "at hand, where there is one, as an emulated GPU computes nothing."
)


class CardTruth(NamedTuple):
    """The files of a page, the Markdown first, and what it comes to."""

    files: list[Path]
    lines: list[str]


def card_truth_gpu(folder: str | Path) -> str | None:
    """The GPU of the records in ``folder``/measured, by the catalog's name; None where the catalog has none."""
    names = {record.environment.device_name for record in read_records(Path(folder) / "measured")}
    known = [gpu for name in sorted(names) if (gpu := gpu_seen(name)) is not None]
    return known[0].short_name if known else None


def card_truth(folder: str | Path) -> CardTruth:
    """Write the page of the records in ``folder``/measured and ``folder``/emulated beside them; of a real GPU keep the
    context, for later verdicts on it.
    """
    folder = Path(folder)
    measured, emulated = read_records(folder / "measured"), read_records(folder / "emulated")
    document = card_truth_document(measured, emulated, f"vramprobe calibrate-gpu -o {folder}")
    lines = list(document.remarks)
    if (row := context_row(measured)) is not None:
        lines.append(f"context: {row.mib:g} MiB at most, {_kept(row)}")
    return CardTruth(publish(folder, files_of(document)), lines)


def context_row(measured: Iterable[RunRecord]) -> ContextRow | None:
    """The most that cells on a real GPU took beside torch's reserved memory, as a row of data/contexts.csv; None
    without such cells, or for a GPU that the catalog does not have.
    """
    found = [record for record in store.latest_by_fingerprint(measured).values() if _shows_context(record)]
    if not found:
        return None
    most = max(found, key=lambda record: record.context_bytes or 0)
    gpu, environment = gpu_seen(most.environment.device_name), most.environment
    if gpu is None or most.context_bytes is None:
        return None
    versions = (f"{name} {environment.versions[name]}" for name in _LIBRARIES if environment.versions.get(name))
    return ContextRow(
        gpu=gpu.name,
        board=environment.device_name,
        loaded="step",
        mib=round(most.context_bytes / MIB, 3),
        driver=environment.driver_version or "",
        libraries=", ".join(versions),
        what=f"the most of {len(found)} cells: NVML less torch's reserved memory",
        grade="measured",
        source=f"vramprobe calibrate-gpu, {most.started_at[:10]}",
    )


def keep_row(row: ContextRow) -> Path:
    """Write the row into the user's own figures, in place of another one of its card; return the file."""
    rows = [*(one for one in own_rows() if one.gpu != row.gpu), row]
    file = own_contexts()
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as part, part.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS)
        writer.writeheader()
        writer.writerows(one._asdict() for one in rows)
    own_rows.cache_clear()
    return file


def _kept(row: ContextRow) -> str:
    try:
        return f"for later verdicts on this GPU in {keep_row(row)}"
    except (OSError, RuntimeError) as error:  # no home folder, or one that is read-only
        return f"not kept for later verdicts: {error}"


def _shows_context(record: RunRecord) -> bool:
    is_one = record.instrument == "cuda" and not record.spec.is_sharded
    return is_one and record.outcome.kind == "ok" and record.context_bytes is not None


def truth_rows(measured: Iterable[RunRecord], emulated: Iterable[RunRecord]) -> list[dict[str, Any]]:
    """One row per cell that was measured: both sides of each tier, their difference, and the step time."""
    others = store.latest_by_fingerprint(emulated)
    return [_row(one, others.get(one.fingerprint)) for one in store.latest_by_fingerprint(measured).values()]


def truth_in_words(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Summarize the rows: a line for each tier, one for the step times, one for cells with another outcome."""
    lines = []
    for tier in _TIERS:
        found = [row for row in rows if row[f"{tier}_difference_bytes"] is not None]
        if not found:
            lines.append(f"{tier}: no cell has both sides")
            continue
        errors = [abs(row[f"{tier}_difference_bytes"]) for row in found]
        worst = max(found, key=lambda row: abs(row[f"{tier}_difference_bytes"]))
        exact = sum(error <= KIB for error in errors)
        lines.append(
            f"{tier}: {exact} of {len(found)} cells within 1 KiB; mean difference "
            f"{format_bytes(round(statistics.mean(errors)))}, worst {format_bytes(max(errors))} ({worst['cell_id']})"
        )
    ratios = [row["step_ratio"] for row in rows if row["step_ratio"] is not None]
    if ratios:
        lines.append(
            f"step time: predicted over measured {statistics.median(ratios):.2f} in the median of {len(ratios)} cells, "
            f"{min(ratios):.2f} to {max(ratios):.2f}"
        )
    differing = sum(row["first_outcome"] != row["emulated_outcome"] for row in rows)
    lines.append(f"outcome: {differing} of {len(rows)} cells ended otherwise")
    return lines


def _row(measured: RunRecord, emulated: RunRecord | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "cell_id": measured.cell_id,
        "first_outcome": measured.outcome.kind,
        "emulated_outcome": emulated.outcome.kind if emulated is not None else "not run",
        "first_detail": describe_outcome(measured.outcome),
        "emulated_detail": describe_outcome(emulated.outcome) if emulated is not None else "",
    }
    for tier in _TIERS:
        here, there = _tier(measured, tier), _tier(emulated, tier)
        known = here is not None and there is not None
        row[f"first_{tier}_bytes"], row[f"emulated_{tier}_bytes"] = here, there
        row[f"{tier}_difference_bytes"] = there - here if known else None
        row[f"{tier}_error"] = (there - here) / here if known and here else None
    seconds, predicted = _step_seconds(measured), None
    gpu = gpu_seen(measured.environment.device_name)
    if seconds is not None and gpu is not None:
        made = speed_at_hand(measured.spec, gpu, near=True)  # None: no recipe, or no peak of the card
        predicted = made.seconds if made else None
    row |= {"first_step_seconds": seconds, "predicted_step_seconds": predicted}
    return row | {"step_ratio": predicted / seconds if seconds and predicted is not None else None}


def _tier(record: RunRecord | None, tier: str) -> int | None:
    if record is None or record.outcome.kind != "ok":
        return None
    if tier == "context":
        return record.context_bytes
    return getattr(record.peak, f"{tier}_bytes") if record.peak else None


def _step_seconds(record: RunRecord) -> float | None:
    """The median of the timed steps; an emulated GPU has none."""
    return record.timing.median_step_seconds if record.outcome.kind == "ok" and record.timing else None


def _tier_table(title: str, tier: str, rows: Sequence[dict[str, Any]], first: str) -> Table:
    found = [row for row in rows if row[f"{tier}_difference_bytes"] is not None]
    return Table(title=title, columns=_tier_columns(tier, first), rows=found, otherwise="No cell has both sides.")


def _tier_columns(tier: str, first: str) -> list[Column]:
    return [
        Column("cell_id", "cell"),
        _MIB.amount(f"first_{tier}_bytes", first),
        _MIB.amount(f"emulated_{tier}_bytes", "emulated"),
        Column(
            f"{tier}_difference_bytes", "difference, KiB", text=lambda value: f"{value / KIB:+,.1f}", is_number=True
        ),
        Column(f"{tier}_error", "%", text=lambda value: signed_percent(100 * value), is_number=True),
    ]


def _time_columns(first: str) -> list[Column]:
    return [
        Column("cell_id", "cell"),
        Column("first_step_seconds", f"{first}, s", text=lambda value: f"{value:.4f}", is_number=True),
        Column("predicted_step_seconds", "predicted, s", text=lambda value: f"{value:.4f}", is_number=True),
        Column("step_ratio", "predicted over measured", text=lambda value: f"{value:.2f}", is_number=True),
    ]


def _outcome_columns(first: str) -> list[Column]:
    return [
        Column("cell_id", "cell"),
        Column("first_outcome", first),
        Column("first_detail", "why", text=shortened, is_prose=True),
        Column("emulated_outcome", "emulated"),
        Column("emulated_detail", "why, emulated", text=shortened, is_prose=True),
    ]


def _data_columns(first: str) -> list[Column]:
    amounts = [column for tier in _TIERS for column in _tier_columns(tier, first)[1:]]
    return [*_outcome_columns(first), *amounts, *_time_columns(first)[1:]]
