"""Results of a real GPU beside what was emulated and predicted before: ``python benchmarks/gpu/compare.py FOLDER``.

FOLDER (h200, say) has what ``keep.py`` made of what ``lent.sh`` left in OUT, emulated/ the same of the emulated GPU;
predictions.csv was written before either. Writes FOLDER/README.md, cells.csv and programs.csv; ``--check`` says whether
they are what the records give.
"""

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, as_table, filled, read_csv, write_or_check
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.units import MIB

HERE = Path(__file__).resolve().parent
_TIERS = ("allocated_bytes", "reserved_bytes")
CONTEXT_KEYS = ("context_bytes", "allocated_bytes", "peak_allocated_bytes")


def records_of(folder: Path, sweep: str) -> dict[str, RunRecord]:
    """The sweep's records by cell."""
    for name in (f"{sweep}.jsonl.xz", f"{sweep}.jsonl"):
        if (folder / name).exists():
            return {record.cell_id: record for record in store.read(folder / name, allow_empty=True).records}
    return {}


def cell_rows(folder: Path, sweep: str) -> list[dict[str, Any]]:
    """A row for each cell that was measured: each tier measured, emulated less measured, predicted over measured."""
    measured, emulated = records_of(folder, sweep), records_of(HERE / "emulated", sweep)
    predicted = {
        row["cell_id"]: row for row in read_csv(HERE / "predictions.csv") if row["gpu"] == gpu_of(measured.values())
    }
    return [_cell_row(one, emulated.get(name), predicted.get(name, {})) for name, one in measured.items()]


def gpu_of(records: Iterable[RunRecord]) -> str:
    """The catalog's name of the card."""
    from vramprobe.catalog import gpu_seen

    names = {record.environment.device_name for record in records}
    found = [gpu.short_name for name in sorted(filter(None, names)) if (gpu := gpu_seen(name)) is not None]
    return found[0] if found else "H100-SXM"


def _cell_row(measured: RunRecord, emulated: RunRecord | None, predicted: dict[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "cell": measured.cell_id,
        "measured": measured.outcome.kind,
        "emulated": emulated.outcome.kind if emulated else "not run",
    }
    for tier in _TIERS:
        here = getattr(measured.peak, tier) if measured.peak else None
        there = getattr(emulated.peak, tier) if emulated and emulated.peak else None
        said = int(predicted[tier]) if predicted.get(tier) else None
        row[tier] = here
        row[f"emulated_{tier}"] = there
        row[f"predicted_{tier}"] = said
    row["context_bytes"] = measured.context_bytes
    row["phases"], row["equal_phases"] = _phases(measured, emulated)
    row["step_seconds"] = statistics.median(measured.timing.step_seconds) if _is_timed(measured) else None
    row["predicted_step_seconds"] = float(predicted["step_seconds"]) if predicted.get("step_seconds") else None
    return row


def _is_timed(record: RunRecord) -> bool:
    return record.timing is not None and bool(record.timing.step_seconds)


def _phases(measured: RunRecord, emulated: RunRecord | None) -> tuple[int, int]:
    """Count the phases that were measured, and those whose allocated peak is the emulated one to the byte."""
    if emulated is None or not measured.phases:
        return len(measured.phases or ()), 0
    there = {(one.name, one.step, one.micro_step): one.allocated_peak_bytes for one in emulated.phases}
    equal = sum(there.get((one.name, one.step, one.micro_step)) == one.allocated_peak_bytes for one in measured.phases)
    return len(measured.phases), equal


def _by(key: str, path: Path) -> dict[str, dict[str, Any]]:
    """The lines of a file by one of their values."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row[key]: row for row in map(json.loads, lines)}


def context_rows(folder: Path) -> list[dict[str, Any]]:
    """A row for each case of context.py."""
    here, there = (_by("case", path / "context.jsonl") for path in (folder, HERE / "emulated"))
    return [
        {"case": name}
        | {key: one.get(key) for key in (*CONTEXT_KEYS, "error")}
        | {f"emulated_{key}": there.get(name, {}).get(key) for key in CONTEXT_KEYS}
        for name, one in here.items()
        if name != "card"
    ]


def program_rows(folder: Path) -> list[dict[str, Any]]:
    """A row for each program of programs.py: peaks and seconds of both sides."""
    here, there = (_by("program", path / "programs.jsonl") for path in (folder, HERE / "emulated"))
    asked = {_label(row["command"], row["asked"]): row for row in read_csv(HERE.parent / "truth" / "own_commands.csv")}
    rows = []
    for name, one in sorted(here.items()):
        other = there.get(name)
        row: dict[str, Any] = {"program": name}
        for tier in _TIERS:
            row[f"predicted_{tier}"] = asked[name][f"predicted_{tier}"] if name in asked else None
        for tier in _TIERS:
            row |= {tier: _peak(one, tier), f"emulated_{tier}": _peak(other, tier)}
        rows.append(row)
    return rows


def _label(command: str, shape: str) -> str:
    """The file's name of a program at a shape (programs.py)."""
    return f"{command.replace(' ', '-').replace(',', '')}_{shape.replace(' ', '')}"


def _peak(profile: dict[str, Any] | None, tier: str) -> int | None:
    return ((profile or {}).get("peak") or {}).get(tier)


# -- the page ---------------------------------------------------------------------------------------------------------


def difference(row: dict[str, Any], key: str, other: str = "emulated") -> int | None:
    """Emulated (or predicted) less measured, bytes."""
    here, there = row.get(key), row.get(f"{other}_{key}")
    return None if here is None or there is None else int(there) - int(here)


def _signed(value: int | None) -> str:
    return "–" if value is None else f"{value:+,}" if value else "0"


def _mib(value: int | None) -> str:
    return "–" if value is None else f"{value / MIB:,.2f}"


def _percent(row: dict[str, Any], key: str, other: str) -> str:
    found = difference(row, key, other)
    return "–" if found is None else f"{100 * found / row[key]:+.2f}"


def said(rows: Sequence[dict[str, Any]], key: str, other: str = "emulated") -> str:
    """Say in a line how far one side lies from the other."""
    known = [row for row in rows if difference(row, key, other) is not None]
    if not known:
        return "no row has both sides"
    shares = sorted(abs(difference(row, key, other) or 0) / row[key] for row in known)
    equal = sum(difference(row, key, other) == 0 for row in known)
    ninth = shares[min(len(shares) - 1, int(0.9 * len(shares)))]
    return (
        f"{equal} of {len(known)} to the byte; median {100 * statistics.median(shares):.3f} %, 90 % within "
        f"{100 * ninth:.3f} %, worst {100 * shares[-1]:.3f} %"
    )


def _cells_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        {"cell": row["cell"], "ended": row["measured"], "emulated": row["emulated"]}
        | _tiers(row, "predicted, %")
        | {"phases equal": f"{row['equal_phases']} of {row['phases']}", "context, MiB": _mib(row["context_bytes"])}
        for row in rows
    ]
    return as_table(lines, "lllrrrrrrrr")


def _tiers(row: dict[str, Any], predicted: str) -> dict[str, str]:
    """Each tier measured, emulated less measured, and predicted."""
    return {
        f"{tier}{name}": text
        for tier, key in zip(("allocated", "reserved"), _TIERS, strict=True)
        for name, text in (
            (", MiB", _mib(row[key])),
            (": emulated − measured, B", _signed(difference(row, key))),
            (f": {predicted}", _percent(row, key, "predicted")),
        )
    }


def _times_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        measured, predicted = row["step_seconds"], row["predicted_step_seconds"]
        if measured:
            both = ("–", "–") if predicted is None else (f"{predicted:.4f}", f"{predicted / measured:.2f}")
            lines.append((row["cell"], f"{measured:.4f}", *both))
    return as_markdown(("cell", "measured, s", "predicted, s", "predicted ÷ measured"), "lrrr", lines)


def _context_of_table(row: dict[str, Any]) -> tuple[str, ...]:
    if row["error"]:
        return (row["case"], row["error"][:80], *[""] * 5)
    sizes = [row[side + key] for key in CONTEXT_KEYS[1:] for side in ("", "emulated_")]
    context = (_mib(row["context_bytes"]), _mib(row["emulated_context_bytes"]))
    return (row["case"], *context, *("–" if size is None else f"{size:,}" for size in sizes))


def page(folder: Path) -> str:
    """The page of the folder."""
    cells, boundary = cell_rows(folder, "cells"), cell_rows(folder, "boundary")
    context, programs = context_rows(folder), program_rows(folder)
    card = _by("case", folder / "context.jsonl").get("card", {})
    remarks = folder / "remarks.md"
    loaded = ("loaded", "context, MiB", "emulated", "left allocated, B", "emulated", "allocated peak, B", "emulated")
    return filled(
        HERE / "card.md",
        name=card.get("name", "A GPU"),
        driver=card.get("driver"),
        torch=card.get("torch"),
        cudnn=card.get("cudnn"),
        **{
            f"{what}_{tier}_{by}": said(rows, f"{tier}_bytes", by)
            for what, rows in (("cells", cells), ("programs", programs))
            for tier in ("allocated", "reserved")
            for by in ("emulated", "predicted")
        },
        equal=sum(row["measured"] == row["emulated"] for row in cells + boundary),
        number=len(cells) + len(boundary),
        remarks=remarks.read_text().rstrip() if remarks.exists() else "",
        cells=_cells_table(cells),
        boundary=_cells_table(boundary),
        programs=as_table(
            [{"program": row["program"]} | _tiers(row, "predicted by another shape, %") for row in programs], "lrrrrrr"
        ),
        times=_times_table(cells),
        context=as_markdown(loaded, "lrrrrrr", map(_context_of_table, context)),
    )


def main() -> None:
    """Write the page and its tables, or check them."""
    folder = (HERE / sys.argv[1]).resolve()
    made = {
        folder / "README.md": page(folder),
        folder / "cells.csv": as_csv(cell_rows(folder, "cells") + cell_rows(folder, "boundary")),
        folder / "programs.csv": as_csv(program_rows(folder)),
    }
    write_or_check(made, f"gpu/compare.py {folder.name}", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
