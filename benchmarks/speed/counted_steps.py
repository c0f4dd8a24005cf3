"""Published training steps, counted and made into seconds: ``python benchmarks/speed/counted_steps.py`` (minutes).

``--run`` counts rows of published_speed.csv that are in no journal yet: of fms-acceleration and torchtune by the
source's own command, else by their cell; ``--line 6`` these lines, ``--source NAME`` these sources, ``--most 20`` so
many. They go to counted_later.jsonl, to which no rate is fitted (counted_later.py). Without it nothing is emulated:
rates are fitted to the journal, each source and each card is left out in turn, and counted_steps.md, .csv and
vramprobe/data/rates/counted.json, which ships, are written. ``--check`` writes nothing and fails where one of them is
not what the journal gives.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.speed import torchtune_rows
from benchmarks.speed.counted_fit import CountedStep
from benchmarks.speed.counted_rows import (
    as_record,
    count_cell,
    count_command,
    count_torchtune,
    from_record,
    recipe_of,
)
from benchmarks.speed.published_steps import (
    FIRST_FLASH,
    FIRST_FLASH_SLOWER,
    SpeedCase,
    SpeedRow,
    observations,
)
from benchmarks.speed.rates_fit import (
    EXPECTED,
    card_of,
    fit_speed,
    inside_intervals,
    left_out_errors,
    log_error,
    rates_of,
    source_of,
)
from benchmarks.speed.speed_model import coverage_table, percent, spread, table
from benchmarks.tables import as_csv, filled, read_csv, write_or_check
from vramprobe.catalog import find_gpu
from vramprobe.catalog.shipped import data_file
from vramprobe.speed.counted import Count, CountRow, time_of
from vramprobe.speed.rates import Condition, SpeedFit

OUT = Path(__file__).resolve().with_suffix(".md")
ROWS, JOURNAL = OUT.with_suffix(".csv"), OUT.with_suffix(".jsonl")
LATER = OUT.with_name("counted_later.jsonl")
SHIPPED = data_file("rates/counted.json")
#: Steps of one source and day that differ by a plugin, kernel or compiler alone: a line, or the prototype's name.
PAIRS: list[tuple[int | str, int | str]] = [
    (6, "mistral_full_foak_4"),
    (10, 12),
    (19, "mistral_qlora_none_4"),
    ("mistral_qlora_none_4", "mistral_qlora_foak_4"),
    ("llama8_qlora_foak_4", "llama8_qlora_liger_4"),
    ("powerlm_lora_none_4", "powerlm_lora_foak_4"),
    ("mixtral_qlora_none_4", "mixtral_qlora_foak_4"),
]
_COLUMNS = ("source", "step", "card", "counted by", "published tokens/s", "error, source left out", "without any step")
#: Of a record, as a table names its step.
NAMES = ("source", "line", "url", "what", "card", "num_gpus", "how")
#: "multinode 2x2": what their network takes is not counted.
_TWO_MACHINES = (1061, 1062)
Record = dict[str, Any]
Errors = dict[int, float]  # number of a step → log(predicted / published)


def journal(path: Path = JOURNAL) -> list[Record]:
    """Every record that there is."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps() -> list[tuple[Record, CountedStep]]:
    """The journal's records and what they say of a step, in the order of their sources and lines."""
    records = sorted(journal(), key=lambda one: (one["source"], one["line"] or 0, one["url"]))
    return [(record, step_of(record)) for record in records]


def step_of(record: Record) -> CountedStep:
    """What a record says of a step."""
    count = from_record(record)
    return CountedStep(
        source=record["source"],
        count=with_first_flash(count) if record["source"] in FIRST_FLASH else count,
        gpu=find_gpu(record["card"]),
        tokens=record["tokens"],
        tokens_per_second=record["published"],
    )


def with_first_flash(count: Count) -> Count:
    """With as many operations of PyTorch's attention as take the time of the first FlashAttention's."""

    def slower(row: CountRow) -> CountRow:
        is_attention = row.what == "attention"
        return dataclasses.replace(row, flops=round(row.flops * FIRST_FLASH_SLOWER)) if is_attention else row

    return dataclasses.replace(count, rows=tuple(map(slower, count.rows)))


def why_aside(record: Record) -> str | None:
    """Why no rate is fitted to a step, and none of the errors of what was left out is its; None for all others."""
    is_gathered = any(kind == "all_gather" for kind, *_ in record["link_bytes"])
    if record["is_padded"]:
        return "padded batches"
    if record["line"] in _TWO_MACHINES:
        return "two machines"
    return "slow PCIe" if record["source"] == "fsdp_qlora" and record["card"] == "RTX-3090" and is_gathered else None


def count_row(row: SpeedRow, case: SpeedCase, published: float, *, uv: str, limit_seconds: float) -> Record:
    """The record of one row. Raises RuntimeError where its run fails. A cell stands for all repeats of a
    configuration, ``published``; a command for the row itself.
    """
    recipe = recipe_of(row)
    if recipe is not None:
        count, how = count_command(recipe, uv=uv, limit_seconds=limit_seconds), recipe.stack
        published = row.tokens_per_s_per_gpu or published
    elif (command := torchtune_rows.command_of(row)) is not None:
        count, how = count_torchtune(command, uv=uv, limit_seconds=limit_seconds), "torchtune-0.6.1"
    else:
        count, how = count_cell(row, case, limit_seconds=limit_seconds), "cell"
    return {
        "line": row.line,
        "source": row.family,
        "url": row.url_or_path,
        "what": f"{row.model} {row.method} {case.spec.batch_size} x {case.spec.seq_len}",
        "card": case.gpu.short_name,
        "num_gpus": case.num_gpus,
        "tokens": case.spec.num_tokens * case.spec.grad_accum,
        "published": published,
        "how": how,
        "is_padded": "mean real tokens" in row.notes,
    } | as_record(count)


def campaign(given: argparse.Namespace) -> None:
    """Count what is left, one after the other."""
    known = {one["line"] for path in (JOURNAL, LATER) for one in journal(path)}
    todo = [found for found in observations() if found[2].num_gpus <= given.gpus and found[0].line not in known]
    todo = [found for found in todo if given.line is None or found[0].line in given.line]
    todo = [found for found in todo if given.source is None or found[0].family in given.source]
    for row, case, one in todo[: given.most]:
        started = time.monotonic()
        try:
            record = count_row(row, case, one.tokens_per_second, uv=given.uv, limit_seconds=given.limit)
            with LATER.open("a") as out:
                out.write(json.dumps(record, separators=(",", ":")) + "\n")
            told = f"{record['num_launches'] - record['num_claimed']} of {record['num_launches']} launches unclaimed"
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            told = f"failed: {str(error)[-1500:]}"
        print(f"line {row.line} {row.family} {row.model}: {told}; {time.monotonic() - started:.0f} s", flush=True)


class Findings(NamedTuple):
    """What the journal gives: errors by the number of the step, those set aside by the fit to the others."""

    records: tuple[Record, ...]
    steps: tuple[CountedStep, ...]
    fit: SpeedFit
    by_source: Errors
    by_card: Errors
    alone: Errors
    aside: Errors
    inside: dict[int, tuple[Condition, bool]]

    @property
    def shown(self) -> Errors:
        """Of every step the error by what has not seen it."""
        return self.by_source | self.aside


def findings() -> Findings:
    """Everything is fitted, and left out, here (minutes)."""
    found = steps()
    records, everything = zip(*found, strict=True)
    number = {id(one): at for at, one in enumerate(everything)}
    whole = [one for record, one in found if why_aside(record) is None]
    by_source, by_card = (
        {number[id(one)]: error for pairs in left_out_errors(whole, by).values() for one, error in pairs}
        for by in (source_of, card_of)
    )
    expected = rates_of([math.log(value) for value, _ in EXPECTED.values()])
    digest = hashlib.sha256(JOURNAL.read_bytes()).hexdigest()[:16]
    fit = fit_speed(
        whole, f"counted_steps.jsonl, sha256 {digest}", spread(math.exp(error) - 1 for error in by_source.values())[1]
    )
    return Findings(
        records=records,
        steps=everything,
        fit=fit,
        by_source=by_source,
        by_card=by_card,
        alone={at: log_error(one, expected) for at, one in enumerate(everything)},
        aside={number[id(one)]: log_error(one, fit.rates) for record, one in found if why_aside(record)},
        inside={number[id(one)]: (condition, is_inside) for one, condition, is_inside in inside_intervals(whole)},
    )


def as_page(found: Findings) -> str:
    """The table as Markdown."""
    known = arithmetic(found)
    ways = [
        ("count, source left out", found.by_source),
        ("count, card left out", found.by_card),
        ("count, kernel tables alone (no training step)", {at: found.alone[at] for at in found.by_source}),
        ("arithmetic, source left out, of those that it has", known),
        ("count of the same", {at: found.by_source[at] for at in known}),
        (
            "count, fitted to all (not a test)",
            {at: log_error(found.steps[at], found.fit.rates) for at in found.by_source},
        ),
        ("steps set aside, by the fit to the others", found.aside),
    ]
    shares = [one.count.unclaimed_share for one in found.steps]
    return filled(
        OUT,
        num=len(found.steps),
        sources=len({one.source for one in found.steps}),
        cards=len({one.gpu.short_name for one in found.steps}),
        several=sum(record.get("num_gpus", 1) > 1 for record in found.records),
        commands=sum(record["how"] != "cell" for record in found.records),
        claimed=sum(share == 0 for share in shares),
        most=f"{100 * max(shares):.1f}",
        prototype=sum(record["how"] == "prototype" for record in found.records),
        left_out=table(
            ["way", "steps", "median", "90 % below", "worst"],
            [[name, *told(one.values())] for name, one in ways if one],
        ),
        coverage=coverage_table(found.inside.values()),
        groups=table(["source, card", "steps", "median", "90 % below", "worst", "in the interval"], _groups(found)),
        pairs=table(["slower", "faster", "published", "predicted"], _pairs(found)),
        rates=table(["rate", "value", "expected"], _rates(found.fit)),
        steps=table(_COLUMNS, [_line(found, at) for at in range(len(found.steps))]),
    )


def _line(found: Findings, at: int) -> list[str]:
    record, published = found.records[at], f"{found.steps[at].tokens_per_second:,.0f}"
    errors = [signed(found.shown[at]), signed(found.alone[at])]
    return [record["source"], record["what"], cards_of(record), record["how"], published, *errors]


def cards_of(record: Record) -> str:
    """A record's card, and how many of it."""
    number = record.get("num_gpus", 1)
    return record["card"] if number == 1 else f"{number} × {record['card']}"


def as_rows(found: Findings) -> str:
    """Every step as CSV, with its seconds by class."""
    lines = []
    for at, (record, one) in enumerate(zip(found.records, found.steps, strict=True)):
        seconds = time_of(one.count, one.gpu, fit=found.fit).by_class
        lines.append(
            {name: record.get(name) or "" for name in NAMES}
            | {
                "published_tokens_per_s": f"{one.tokens_per_second:.4g}",
                "error_source_left_out": signed(found.shown[at]),
                "error_card_left_out": signed(found.by_card.get(at)),
                "error_tables_alone": signed(found.alone[at]),
                "in_interval": {True: "yes", False: "no", None: ""}[found.inside.get(at, (None, None))[1]],
                "unclaimed_launches": one.count.num_launches - one.count.num_claimed,
            }
            | {f"seconds_{name}": f"{value:.4g}" for name, value in sorted(seconds.items())}
        )
    return as_csv(lines)


def arithmetic(found: Findings) -> Errors:
    """What speed_model.csv says of the same lines."""
    known = {row["line"]: row for row in read_csv(OUT.with_name("speed_model.csv"))}
    rows = {at: known.get(str(found.records[at]["line"])) for at in found.by_source}
    return {at: math.log(1 + float(row["error_source_left_out"])) for at, row in rows.items() if row is not None}


def _groups(found: Findings) -> list[list[str]]:
    groups: dict[str, list[int]] = {}
    for at, one in enumerate(found.steps):
        groups.setdefault(f"{one.source}, {one.gpu.short_name}", []).append(at)
    lines = []
    for name, which in sorted(groups.items()):
        held = [found.inside[at][1] for at in which if at in found.inside]
        share = percent(sum(held) / len(held)) if held else "-"
        lines.append([name, *told(found.shown[at] for at in which), share])
    return lines


def _pairs(found: Findings) -> list[list[str]]:
    """Those that the journal has both steps of."""
    known = {record["line"] or record["what"]: at for at, record in enumerate(found.records)}
    lines = []
    for slower, faster in PAIRS:
        if slower in known and faster in known:
            one, other = known[slower], known[faster]
            published = math.log(found.steps[other].tokens_per_second / found.steps[one].tokens_per_second)
            predicted = published + found.by_source[other] - found.by_source[one]
            names = [f"{found.records[at]['what']} ({found.records[at]['how']})" for at in (one, other)]
            lines.append([*names, signed(published), signed(predicted)])
    return lines


def _rates(fit: SpeedFit) -> list[list[str]]:
    values = fit.rates.model_dump()
    lines = [[name, f"{values[name]:.3g}", f"{value:g}"] for name, (value, _) in EXPECTED.items()]
    return lines + [
        [f"half-width, {name}", f"× or ÷ {math.exp(width):.2f}", "-"] for name, width in fit.half_widths.items()
    ]


def told(errors: Iterable[float]) -> list[str]:
    """Of log errors: how many, the median, 90 % below, the worst of |predicted / published - 1|."""
    count, *sizes = spread(math.exp(error) - 1 for error in errors)
    return [str(count), *map(percent, sizes)]


def signed(error: float | None) -> str:
    return "" if error is None else f"{100 * (math.exp(error) - 1):+.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="count rows that the journal has not")
    parser.add_argument("--line", type=int, action="append", help="only these lines of published_speed.csv")
    parser.add_argument("--source", action="append", help="only of these sources")
    parser.add_argument("--gpus", type=int, default=8, help="of at most so many GPUs, of which one rank is counted")
    parser.add_argument("--most", type=int, help="no more than so many")
    parser.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="for one run")
    parser.add_argument("--uv", default="uv", help="uv's command, for stacks that are not there yet")
    parser.add_argument("--check", action="store_true", help="say whether the tables are what the journal gives")
    given = parser.parse_args()
    if given.run:
        campaign(given)
        return
    found = findings()
    texts = {OUT: as_page(found), ROWS: as_rows(found), SHIPPED: found.fit.model_dump_json(indent=1) + "\n"}
    write_or_check(texts, "speed/counted_steps.py", check=given.check)


if __name__ == "__main__":
    main()
