"""The cells that decide the claims, run on emulated cards: ``python benchmarks/truth/claims.py --run``.

A claim that leaves its conditions open is judged under every usual set of them (vramprobe/literature/claims). Of those
about one GPU, three are run: the most usual, the one with the least memory and the one with the most; each once, on
the smallest of CARDS that holds it. ``--run`` does what is still to do, on one card at a time, and keeps it in FOLDER
(interrupted, it goes on); ``--collect`` writes results/emulated/claims from there, a file a card, which
``vramprobe claims --results results`` and ``vramprobe calibrate`` read. Alone it writes from those records claims.md,
claims.csv, and the published formulas scored on the smallest card's cells (formulas.* beside the records); ``--check``
says whether they are what the records give.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vramprobe.catalog import find_gpu
from vramprobe.catalog.claims import Claim, list_claims
from vramprobe.literature.calibrate import calibrate
from vramprobe.literature.claims import Judgement, judge, judge_claims
from vramprobe.literature.figures import Cells, Options
from vramprobe.literature.readings import reading_of
from vramprobe.predict.at_hand import shipped_alone
from vramprobe.predict.questions import cell
from vramprobe.predict.verdict import usable_bytes
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.report.calibration import calibration_document
from vramprobe.report.columns import provenance
from vramprobe.report.formats import files_of
from vramprobe.spec import CellSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, filled, write_or_check

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "out" / "claims"
RECORDS = ROOT / "results" / "emulated" / "claims"
TABLE = Path(__file__).with_suffix(".csv")
#: The smallest first. What is tight on one goes to the next.
CARDS = ("A100-80GB-SXM", "H200", "B200")
Row = dict[str, Any]


class Case(NamedTuple):
    """One set of conditions of a claim, which one cell stands for."""

    claim: Claim
    which: str
    words: str
    options: Options
    spec: CellSpec
    predicted_bytes: int  # allocated


def cases() -> Iterator[Case]:
    """Yield what decides each claim about the memory of one GPU."""
    claims, cells = list_claims(), Cells()
    for claim in claims:
        reading = reading_of(claim, claims, cells)
        judged, seen = judge(claim, reading), set()
        ends = {"most usual": reading.cases[0] if reading.cases else None, "least": judged.least, "most": judged.most}
        for which, case in ends.items():
            sources = case.figure.sources if case is not None else ()
            if case is None or len(sources) != 1 or sources[0].reads != "peak_allocated_bytes.value":
                continue
            if sources[0].command not in seen:
                seen.add(sources[0].command)
                words, options = ", ".join(case.conditions.values()), dict(sources[0].options)
                yield Case(claim, which, words, options, cell(device="cuda", **options), sources[0].value)


def card_of(case: Case) -> str | None:
    """The smallest card on which it should run, with a tenth for what the allocator keeps; None where the largest is
    too small."""
    fitting = (
        card for card in CARDS if 1.1 * case.predicted_bytes <= usable_bytes(find_gpu(card), device_is_known=False)
    )
    return next(fitting, None)


def run(found: Sequence[Case], folder: Path) -> None:
    """Run what has no record in ``folder`` yet, the smallest cells first."""
    by_size = sorted({case.spec.fingerprint: case for case in found}.values(), key=attrgetter("predicted_bytes"))
    for card in CARDS:
        place = folder / card.lower()
        place.mkdir(parents=True, exist_ok=True)
        cells = [dict(case.options) for case in by_size if card_of(case) == card]
        sweep = {"name": "claims", "defaults": {"device": "cuda"}, "cells": cells}
        (place / "sweep.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))
        words = ["run", str(place / "sweep.yaml"), "--emulate", card, "--out", str(place), "--no-skip"]
        subprocess.run([sys.executable, "-m", "vramprobe", *words])


def collect(found: Sequence[Case], folder: Path) -> None:
    """The cases' records of each card, without the phases, which no verdict needs."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    wanted = {case.spec.fingerprint for case in found}
    for card in CARDS:
        kept = []
        place = folder / card.lower()
        records = store.read(place, allow_empty=True).records if place.is_dir() else []
        for key, record in store.latest_by_fingerprint(records).items():
            if key in wanted and record.outcome.kind in ("ok", "oom"):
                kept.append(record.model_copy(update={"phases": []}).to_json_line() + "\n")
        if kept:
            (RECORDS / f"{card.lower()}.jsonl").write_text("".join(sorted(kept)))


def ran() -> dict[str, RunRecord]:
    """Return what collect wrote, by fingerprint."""
    return store.latest_by_fingerprint(store.read(RECORDS, allow_empty=True).records)


def rows(found: Sequence[Case], records: Mapping[str, RunRecord]) -> list[Row]:
    """A row a case: predicted, and by its run where there is one."""
    made = []
    for case in found:
        record, predicted = records.get(case.spec.fingerprint), case.predicted_bytes
        row: Row = {"claim": case.claim.id, "case": case.which, "conditions": case.words, "cell": case.spec.cell_id}
        row |= {"predicted_bytes": predicted, "card": "", "allocated_bytes": "", "difference_percent": ""}
        if record is not None and record.peak is not None and record.emulation is not None:
            allocated = record.peak.allocated_bytes
            row |= {
                "card": record.emulation.card,
                "allocated_bytes": allocated,
                "difference_percent": f"{100 * (predicted - allocated) / allocated:.3f}",
            }
        elif card_of(case) is None:
            row["card"] = "more than one"
        made.append(row)
    return made


def page(table: Sequence[Row], records: Mapping[str, RunRecord]) -> str:
    """Return the page: how far predictions are off, what the runs decide, and every verdict that they change."""
    before, after = (
        {one.claim.id: one for one in judge_claims(records=given)} for given in ((), list(records.values()))
    )
    by_claim = {key: list(rows) for key, rows in itertools.groupby(table, key=lambda row: row["claim"])}
    whole = [key for key, rows in by_claim.items() if all(row["allocated_bytes"] for row in rows)]
    cells = {row["cell"]: abs(float(row["difference_percent"])) for row in table if row["allocated_bytes"]}
    changed = [key for key in by_claim if before[key].verdict != after[key].verdict]
    beyond = {row["cell"] for row in table if row["card"] == "more than one"}
    by_case_of_claim = []
    for key, found in by_claim.items():
        num_ran = sum(bool(row["allocated_bytes"]) for row in found)
        by_case = {row["case"]: _in_words(row) for row in found}
        usual = by_case.get("most usual", "")
        shown = [by_case.get("least", usual), usual, by_case.get("most", usual)]
        says, so = after[key].claim.statement, after[key].verdict
        by_case_of_claim.append([key, says, so, f"{num_ran} of {len(found)}", *shown])
    head = ["claim", "says", "verdict", "cases run", "least", "most usual", "most"]
    return filled(
        TABLE.with_suffix(".md"),
        ran=len(cells),
        claims=len(by_claim),
        whole=len(whole),
        beyond=len(beyond),
        mean=f"{statistics.mean(cells.values()):.2f}",
        worst=f"{max(cells.values()):.2f}",
        changed=f"Verdicts that the runs change: {', '.join(map(_change(before, after), changed))}."
        if changed
        else "No verdict is another by the runs than by predictions.",
        table=as_markdown(head, "lllrrrr", by_case_of_claim),
    )


def formulas() -> dict[Path, bytes]:
    """The table of the published formulas in every format, scored on the smallest card's cells."""
    path = RECORDS / f"{CARDS[0].lower()}.jsonl"
    records = [one for one in store.read(path).records if one.outcome.kind == "ok"]
    command = f"vramprobe calibrate {path.relative_to(ROOT)}"
    with shipped_alone():
        scores = calibrate(records)
    document = calibration_document(scores, provenance(records), command).of("emulated")
    return {RECORDS / name: content for name, content in files_of(document).items()}


def _change(before: Mapping[str, Judgement], after: Mapping[str, Judgement]) -> Callable[[str], str]:
    return lambda key: f"{key} ({before[key].verdict} predicted, {after[key].verdict} by runs)"


def _in_words(row: Row) -> str:
    value = row["allocated_bytes"]
    return f"{value / 1e9:.1f}" if value else f"({row['predicted_bytes'] / 1e9:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--run", action="store_true", help="run what is still to do, then collect")
    parser.add_argument("--collect", action="store_true", help="write results/emulated/claims from --folder")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where runs are kept")
    parser.add_argument("--check", action="store_true", help="exit code 1 where the table is not what the records give")
    asked = parser.parse_args()
    found = list(cases())
    if asked.run:
        run(found, asked.folder)
    if asked.run or asked.collect:
        collect(found, asked.folder)
    records = ran()
    table = rows(found, records)
    made = {TABLE: as_csv(table), TABLE.with_suffix(".md"): page(table, records)} | formulas()
    write_or_check(made, "truth/claims.py", check=asked.check)


if __name__ == "__main__":
    main()
