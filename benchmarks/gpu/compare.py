"""What the H200 campaign showed: ``python benchmarks/gpu/compare.py OUT`` writes OUT/comparison.md and prints it.

In: the records, predictions and facts under OUT. Out: facts; where the time went; each prediction made before its cell
was run beside what was measured, by method and tier; large QLoRA beside the figures of guides; tokens per second.
Measures nothing and predicts nothing; what is not there is named as missing.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.speed import sweep_time  # noqa: E402
from vramprobe import catalog  # noqa: E402
from vramprobe.errors import VramprobeError  # noqa: E402
from vramprobe.records import store  # noqa: E402
from vramprobe.records.record import RunRecord  # noqa: E402
from vramprobe.sweep.card import Rate, card_seen, hourly_rate  # noqa: E402

PREDICTIONS = ("predictions.json", "predictions-fitted.json")
ENGINES, TIERS = ("formula", "trace"), ("allocated", "reserved", "device")
#: From so many parameters on, a QLoRA cell is one of those that guides print "70B" for.
LARGE_PARAMS = 65e9
#: What the issue asks of stage 2 on a fit to stage 1: mean and worst error; of device, worst under-prediction.
TARGETS = {"allocated": (0.01, 0.03), "reserved": (0.03, None), "device": (0.02, 0.03)}


@dataclass(frozen=True)
class Pair:
    """One measured cell and what was said of it before."""

    engine: str
    tier: str
    method: str
    interval: tuple[int, int, int]  # value, low, high
    measured_bytes: int

    @property
    def error(self) -> float:
        """(predicted − measured) / measured; negative is an under-prediction."""
        return self.interval[0] / self.measured_bytes - 1

    @property
    def is_inside(self) -> bool:
        """Whether the interval holds the measured value."""
        return self.interval[1] <= self.measured_bytes <= self.interval[2]


def pairs_of(content: dict[str, Any], records: dict[str, RunRecord]) -> list[Pair]:
    """Every prediction of a cell that ended well, in each tier that both sides know."""
    found = []
    for cell in content["cells"]:
        record = records.get(cell["fingerprint"])
        if record is None or record.outcome.kind != "ok" or record.peak is None:
            continue
        for engine in ENGINES:
            for tier, interval in (cell[engine] if isinstance(cell[engine], dict) else {}).items():
                if measured := getattr(record.peak, f"{tier}_bytes"):
                    found.append(Pair(engine, tier, cell["method"], tuple(interval), measured))
    return found


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; an unknown value is a dash."""
    lines = [headings, ["---"] * len(headings), *[["–" if cell is None else str(cell) for cell in row] for row in rows]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.2f} %"


def accuracy(pairs: Sequence[Pair]) -> str:
    """By engine, tier and method: number, mean and worst error, worst under-prediction, share inside the interval."""
    rows = []
    for engine in ENGINES:
        for tier in TIERS:
            of_tier = [pair for pair in pairs if (pair.engine, pair.tier) == (engine, tier)]
            for method in (*sorted({pair.method for pair in of_tier}), "all") if of_tier else ():
                group = [pair for pair in of_tier if method in ("all", pair.method)]
                errors = [pair.error for pair in group]
                under = min(errors)
                rows.append(
                    [
                        engine,
                        tier,
                        method,
                        len(group),
                        _percent(statistics.mean(map(abs, errors))),
                        _percent(max(errors, key=abs)),
                        _percent(under) if under < 0 else None,
                        f"{sum(pair.is_inside for pair in group)} of {len(group)}",
                        _meets(tier, errors) if method == "all" else None,
                    ]
                )
    headings = ("engine", "tier", "method", "cells", "mean error", "worst", "worst under", "inside", "asked")
    return table(headings, rows) if rows else "No cell that was predicted has been measured yet.\n"


def _meets(tier: str, errors: Sequence[float]) -> str:
    mean, worst = TARGETS[tier]
    bad = max((-error for error in errors), default=0.0) if tier == "device" else max(map(abs, errors))
    met = statistics.mean(map(abs, errors)) <= mean and (worst is None or bad <= worst)
    what = f", {100 * worst:g} % {'under' if tier == 'device' else 'worst'}" if worst else ""
    return f"{'met' if met else 'missed'}: {100 * mean:g} % mean{what}"


def out_of_memory(content: dict[str, Any], records: dict[str, RunRecord]) -> list[str]:
    """Cells that were predicted and ran out of memory, by id."""
    return [
        cell["cell_id"]
        for cell in content["cells"]
        if (record := records.get(cell["fingerprint"])) is not None and record.outcome.kind == "oom"
    ]


def run_elsewhere(card: str | None, records: Sequence[RunRecord]) -> str | None:
    """A sentence on cells that were run on another GPU than they were predicted for; None where there is none."""
    names = [record.environment.device_name for record in records]
    others = [name for name in names if card is not None and getattr(card_seen(name, 0).gpu, "name", None) != card]
    if not others:
        return None
    where = ", ".join(sorted(set(others)))
    return (
        f"{len(others)} of them on {where}, not on the {card} that they were predicted for: "
        "what a context takes, and where the card ends, differ."
    )


def predicted(out: Path, records: dict[str, RunRecord]) -> Iterator[str]:
    """A section for each file of predictions."""
    for name in PREDICTIONS:
        path = out / name if (out / name).exists() else ROOT / "results" / "h200" / name
        if not path.exists():
            yield f"\n### {name}\n\nNot made: `stage.sh predict` makes it, before stage 2.\n"
            continue
        content = json.loads(path.read_text())
        known = [records[cell["fingerprint"]] for cell in content["cells"] if cell["fingerprint"] in records]
        made_at = datetime.fromisoformat(content["made_at"])
        late = sum(datetime.fromisoformat(record.started_at) < made_at for record in known)
        fit = content["fit"]
        told = f"fitted on {fit['num_records']} records of {fit['device_name']}" if fit else "without a fit"
        yield f"\n### {name}: {told}\n\nMade at {content['made_at']} by commit {content['commit']}"
        yield f"{' (with changes)' if content['dirty'] else ''}, {len(known)} of {len(content['cells'])} cells run "
        yield f"since{f', {late} BEFORE it was made' if late else ''}.\n\n"
        if elsewhere := run_elsewhere(content["card"], known):
            yield f"{elsewhere}\n\n"
        yield accuracy(pairs_of(content, records))
        if ooms := out_of_memory(content, records):
            yield f"\nOut of memory: {', '.join(ooms)}.\n"


def large_qlora(records: Sequence[RunRecord]) -> str:
    """Large QLoRA cells, measured, and below them what guides print."""
    rows = [
        [record.cell_id, *(_gb(getattr(record.peak, f"{tier}_bytes")) for tier in TIERS), record.spec.kbit_prep]
        for record in records
        if record.spec.method == "qlora"
        and record.peak
        and record.outcome.kind == "ok"
        and record.spec.num_params >= LARGE_PARAMS
    ]
    guides = [
        [claim.id, claim.statement, _span(claim), claim.unit]
        for claim in catalog.list_claims()
        if claim.method == "qlora"
        and (claim.params_b or 0) * 1e9 >= LARGE_PARAMS
        and claim.quantity in ("peak", "min VRAM")
    ]
    measured = table(("measured", *(f"{tier}, GB" for tier in TIERS), "preparation"), rows) if rows else "None yet.\n"
    return f"{measured}\n{table(('claim', 'says', 'figure', 'unit'), guides)}"


def _gb(num_bytes: int | None) -> str | None:
    return None if num_bytes is None else f"{num_bytes / 1e9:.1f}"


def _span(claim: catalog.Claim) -> str:
    ends = [f"{end:g}" for end in (claim.low, claim.high) if end is not None]
    return " to ".join(dict.fromkeys(ends))


def speed(records: Sequence[RunRecord]) -> str:
    """Tokens per second of timed steps, and what a billion tokens cost at the catalog's price of the card."""
    rows = []
    for record in records:
        if record.outcome.kind == "ok" and record.timing and record.timing.step_seconds:
            seconds = statistics.median(record.timing.step_seconds)
            rate = record.spec.num_tokens * record.spec.grad_accum / seconds
            price = _rate(record)
            dollars = None if price is None else f"{price.usd_per_hour / 3600 / rate * 1e9:,.0f}"
            rows.append([record.cell_id, len(record.timing.step_seconds), f"{seconds:.4f}", f"{rate:,.0f}", dollars])
    headings = ("cell", "timed steps", "seconds a step", "tokens a second", "$ per 10⁹ tokens")
    return table(headings, rows) if rows else "Nothing timed yet.\n"


def _rate(record: RunRecord) -> Rate | None:
    machine = record.environment
    if machine.nvml_total_bytes is None:
        return None
    try:
        return hourly_rate(card_seen(machine.device_name, machine.nvml_total_bytes))
    except VramprobeError:
        return None


def facts(out: Path) -> str:
    """Stage 0's facts, those that do not hold first."""
    path = out / "facts.json"
    if not path.exists():
        return "Not checked yet: `stage.sh 0`.\n"
    words = {True: "holds", False: "**does not hold**", None: "not known"}
    rows = [
        [words[fact["holds"]], fact["name"], fact["expected"], fact["found"], fact["unit"], fact["note"]]
        for fact in sorted(json.loads(path.read_text()), key=lambda fact: fact["holds"] is not False)
    ]
    return table(("", "fact", "expected", "found", "unit", "note"), rows)


def page(out: Path) -> str:
    """The whole page."""
    journals = store.journals(out)
    by_folder = {journal.parent.name: store.read(journal).records for journal in journals}
    everything = [record for records in by_folder.values() for record in records]
    latest = store.latest_by_fingerprint(everything)
    counts: dict[str, int] = {}
    for record in everything:
        counts[record.outcome.kind] = counts.get(record.outcome.kind, 0) + 1
    devices = ", ".join(sorted({record.environment.device_name for record in everything})) or "nothing"
    timed = [record for name, records in by_folder.items() if "speed" in name for record in records]
    return "\n".join(
        [
            "# The campaign, compared\n",
            "Made by `benchmarks/gpu/compare.py`; do not edit.\n",
            f"Measured on {devices}: {len(everything)} attempts, "
            f"{', '.join(f'{number} {kind}' for kind, number in counts.items())}.\n",
            "## Facts\n",
            facts(out),
            "## Where the time went\n",
            sweep_time.table(journals),
            "## Predictions made before their cells were run\n",
            "".join(predicted(out, latest)),
            "## QLoRA of 70B beside what guides print\n",
            large_qlora(list(latest.values())),
            "## Speed\n",
            speed(timed),
        ]
    )


def main() -> None:
    out = Path(sys.argv[1])
    try:
        text = page(out)
    except VramprobeError as error:
        sys.exit(f"compare.py: {error}")
    (out / "comparison.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
