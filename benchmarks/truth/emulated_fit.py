"""The fit for CUDA that ships: ``python benchmarks/truth/emulated_fit.py`` (some minutes; torch is not needed).

From results/emulated/records.jsonl.xz, the emulated cells of the sweeps emulated-*.yaml, it makes
vramprobe/data/fits/emulated.json of the cells below 10B, and emulated_fit.csv and emulated_fit.md: what that fit says
of the cells above, which it has never seen, and of all cells of UNSEEN_CARDS. ``--collect FOLDER`` puts what the
folders of ``vramprobe run`` under it have into the records' file, without each record's phases and reads; ``--check``
says whether emulated_fit.md is what emulated_fit.csv says, whether the fit is of these records, and whether it says of
published runs what reproduce.csv does.
"""

from __future__ import annotations

import argparse
import lzma
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, as_table, filled, read_csv
from vramprobe import catalog
from vramprobe.model.card_fit import CardFit, load_fit, save_fit
from vramprobe.predict.evaluate import is_outside, predicted
from vramprobe.predict.expected import fit_records
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.units import published

ROOT = Path(__file__).parents[2]
TABLE, PAGE = (Path(__file__).with_suffix(end) for end in (".csv", ".md"))
RECORDS = ROOT / "results" / "emulated" / "records.jsonl.xz"
FIT = ROOT / "vramprobe" / "data" / "fits" / "emulated.json"
REPRODUCED = Path(__file__).with_name("reproduce.csv")
Row = dict[str, Any]
#: Nothing of theirs is fitted. Their cells were first looked at when the way of fitting had been chosen; since then the
#: differences that they showed have been followed, event by event, to the requests that the arithmetic lacked.
UNSEEN_CARDS = frozenset({"H200", "L4", "L40S", "RTX-3090", "RTX-5090"})
_TIERS = ("allocated", "reserved")
_WIDE = 1.0  # percent: differences from here on are listed with a cause


def collect(folder: Path) -> list[RunRecord]:
    """The latest record of each cell on each card, also of RECORDS, without what no table is made of; in order."""
    found = {(record.environment.device_name, record.fingerprint): record for record in read_records()}
    for path in sorted(folder.rglob("records.jsonl")):
        for record in store.latest_by_fingerprint(store.read(path.parent, allow_empty=True).records).values():
            found[record.environment.device_name, record.fingerprint] = record
    kept = [
        record.model_copy(
            update={
                "phases": [],
                "ledger": None,
                "emulation": record.emulation and record.emulation.model_copy(update={"reads": []}),
            }
        )
        for record in found.values()
        if record.outcome.kind in ("ok", "oom")
    ]
    return sorted(kept, key=lambda record: (record.environment.device_name, record.cell_id, record.fingerprint))


def write_records(records: list[RunRecord]) -> None:
    """One line of JSON each, compressed."""
    RECORDS.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(record.to_json_line() + "\n" for record in records)
    RECORDS.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def read_records() -> list[RunRecord]:
    """What write_records wrote."""
    return list(store.read(RECORDS).records)


def basis() -> str:
    """What the published runs that were repeated say of emulated ones, in one sentence."""
    errors = [abs(float(row["difference_percent"])) for row in read_csv(REPRODUCED) if row["difference_percent"]]
    return (
        f"which reproduce published A100 runs within {math.ceil(10 * max(errors)) / 10:g} % "
        "(benchmarks/truth/reproduce.md); no GPU was measured"
    )


def card_of(record: RunRecord) -> str:
    gpu = catalog.gpu_seen(record.environment.device_name)
    return gpu.short_name if gpu else str(record.environment.device_name)


def row_of(record: RunRecord, model: CardFit) -> Row:
    """One held-out cell: what the fit says, what was emulated, and whether it lies within the interval."""
    prediction = predicted(record, model)
    assert record.peak is not None
    row: Row = {
        "gpu": card_of(record),
        "cell": record.cell_id,
        "method": record.spec.method,
        "family": record.spec.model_type,
        "num_params": record.facts.num_params if record.facts else "",
        "phase": record.peak.phase,
        "is_outside": int(is_outside(record, model)),
    }
    pairs = (
        (record.peak.allocated_bytes, prediction.peak_allocated_bytes),
        (record.peak.reserved_bytes, prediction.reserved_bytes),
    )
    for tier, (was, said) in zip(_TIERS, pairs, strict=True):
        assert was is not None
        assert said is not None
        row |= {
            f"emulated_{tier}_bytes": was,
            f"predicted_{tier}_bytes": said.value,
            f"{tier}_error_percent": published(round(100 * (said.value / was - 1), 4)),
            f"{tier}_is_inside": int(said.low <= was <= said.high),
        }
    return row


def _group(name: str, rows: list[Row]) -> Row:
    line: Row = {"held out": name, "cells": len(rows)}
    for tier in _TIERS:
        errors = [abs(float(row[f"{tier}_error_percent"])) for row in rows]
        inside = statistics.mean(int(row[f"{tier}_is_inside"]) for row in rows)
        line |= {f"{tier}: mean": f"{statistics.mean(errors):.3f}", f"{tier}: worst": f"{max(errors):.2f}"}
        line[f"{tier}: inside, %"] = f"{100 * inside:.0f}"
    return line


def is_unseen_card(row: Row) -> bool:
    return row["gpu"] in UNSEEN_CARDS


_Key = Callable[[Row], str]


def summary(rows: list[Row], model: CardFit) -> str:
    """The errors on larger models, then on cards that nothing was fitted to, then each large one with its cause."""
    larger, elsewhere = [row for row in rows if not is_unseen_card(row)], [row for row in rows if is_unseen_card(row)]
    wide = [row for row in rows if max(abs(float(row[f"{tier}_error_percent"])) for tier in _TIERS) >= _WIDE]
    shown = [
        [row["cell"], row["gpu"], *(f"{float(row[f'{tier}_error_percent']):+.2f}" for tier in _TIERS)] for row in wide
    ]
    head = [f"off by {_WIDE:g} % or more, unexplained", "card", "allocated, %", "reserved, %"]
    return filled(
        PAGE,
        records=model.num_records,
        models=len(model.models),
        cards=", ".join(model.cards),
        larger=_errors(larger, lambda row: row["method"], lambda row: row["gpu"], lambda row: row["family"]),
        elsewhere=_errors(elsewhere, lambda row: row["method"], lambda row: row["gpu"]),
        wide=["", *as_markdown(head, "llrr", shown)] if wide else [],
    )


def _errors(rows: list[Row], *keys: _Key) -> list[str]:
    lines = [_group("all", rows)]
    for key in keys:
        names = sorted({key(row) for row in rows})
        lines += [_group(name, [row for row in rows if key(row) == name]) for name in names]
    return as_table(lines, "l" + "r" * 7)


def read_rows() -> list[Row]:
    return read_csv(TABLE)


def stale() -> list[str]:
    """What is not as the records and tables say."""
    model, records = load_fit(FIT), read_records()
    found = []
    if TABLE.with_suffix(".md").read_text() != summary(read_rows(), model):
        found.append(f"{TABLE.stem}.md is not what {TABLE.name} says")
    fitted = {record.fingerprint for record in records if is_fitted(record)}
    if not set(model.fingerprints) <= fitted:
        found.append(f"{FIT.name} is fitted to cells that are not in {RECORDS.name}")
    if model.basis != basis():
        found.append(f"{FIT.name} says {model.basis!r} where {REPRODUCED.name} says {basis()!r}")
    return found


def is_at_ease(record: RunRecord) -> bool:
    """Whether its card had room for all that the allocator kept; where it had not, recipes.py judges."""
    return record.outcome.kind == "ok" and not record.num_alloc_retries


def is_fitted(record: RunRecord) -> bool:
    return is_at_ease(record) and not record.held_out and card_of(record) not in UNSEEN_CARDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collect", type=Path)
    parser.add_argument("--check", action="store_true")
    words = parser.parse_args()
    if words.check:
        complaints = stale()
        raise SystemExit("; ".join([*complaints, "run python benchmarks/truth/emulated_fit.py"]) if complaints else 0)
    if words.collect:
        write_records(collect(words.collect))
    records = read_records()
    model = fit_records([one for one in records if is_fitted(one)]).model_copy(update={"basis": basis()})
    save_fit(model, FIT)
    rows = [row_of(record, model) for record in records if is_at_ease(record) and not is_fitted(record)]
    TABLE.write_text(as_csv(rows))
    TABLE.with_suffix(".md").write_text(summary(read_rows(), model))
    print(summary(read_rows(), model).split("\n| off")[0])


if __name__ == "__main__":
    main()
