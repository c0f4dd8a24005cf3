"""Published training steps, counted and made into seconds: ``python benchmarks/speed/counted_steps.py`` (minutes).

Rates are fitted to the journal (counted_steps.jsonl), each source and each card is left out in turn, and
counted_steps.md, .csv and vramprobe/data/rates/counted.json, which ships, are written; then counted_later.md and .csv:
each step of counted_later.jsonl, to which no rate is fitted, beside its prediction by the rates that ship and by a fit
without its source. ``--check`` writes nothing and fails where one of them is not what the journals give.

Nothing is emulated here: the journals have what the second step of a source's own command launched in the libraries of
its day, or its cell in today's, two shallow versions extrapolated; commit 587d4fd7 has the scripts that counted them.
"""

import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.speed.counted_fit import CountedStep, from_record
from benchmarks.speed.rates_fit import (
    EXPECTED,
    card_of,
    fit_rates,
    fit_speed,
    inside_intervals,
    left_out_errors,
    log_error,
    rates_of,
    source_of,
)
from benchmarks.speed.speed_tables import (
    Grouped,
    coverage_table,
    groups_table,
    held,
    rates_table,
    signed,
    spread,
    table,
    told,
)
from benchmarks.tables import as_csv, filled, write_or_check
from vramprobe.catalog import find_gpu
from vramprobe.catalog.shipped import data_file
from vramprobe.speed.counted import Count, CountRow, time_of
from vramprobe.speed.rates import Condition, SpeedFit, shipped_counted

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
#: Of a record, as a table names its step.
NAMES = ("source", "line", "url", "what", "card", "num_gpus", "how")
#: Sources whose attention is FlashAttention's first version or its Triton twin. FlashAttention-2 is about twice as fast
#: (its paper, arXiv 2307.08691), so theirs has the operations of so many of it.
FIRST_FLASH, FIRST_FLASH_SLOWER = ("llm-foundry",), 2.0
#: "multinode 2x2": what their network takes is not counted.
_TWO_MACHINES = (1061, 1062)
Record = dict[str, Any]


def journal(path: Path = JOURNAL) -> list[Record]:
    """Every record that there is."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps() -> list[tuple[Record, CountedStep]]:
    """The journal's records and what they say of a step, in the order of their sources and lines."""
    records = sorted(journal(), key=lambda one: (one["source"], one["line"] or 0, one["url"]))
    return [(record, step_of(record)) for record in records]


def step_of(record: Record) -> CountedStep:
    """Return the counted step of a record."""
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
    """Say why no rate is fitted to a step, nor its error counted with those that were left out; None for all others."""
    is_gathered = any(kind == "all_gather" for kind, *_ in record["link_bytes"])
    if record["is_padded"]:
        return "padded batches"
    if record["line"] in _TWO_MACHINES:
        return "two machines"
    return "slow PCIe" if record["source"] == "fsdp_qlora" and record["card"] == "RTX-3090" and is_gathered else None


class Timed(NamedTuple):
    """A step and its log errors: by what has not seen it (a fit without its source; of steps set aside the fit to the
    others; of later ones the rates that ship), and by others."""

    record: Record
    step: CountedStep
    error: float
    by_card: float | None = None
    alone: float | None = None  # by what was expected of each rate
    without: float | None = None  # of a later step, by a fit without its source
    condition: Condition | None = None
    is_inside: bool | None = None

    @property
    def cards(self) -> str:
        """The record's card, and how many of it."""
        number = self.record.get("num_gpus", 1)
        return self.record["card"] if number == 1 else f"{number} × {self.record['card']}"

    @property
    def unclaimed(self) -> int:
        return self.step.count.num_launches - self.step.count.num_claimed


def findings() -> tuple[SpeedFit, list[Timed]]:
    """Everything is fitted, and left out, here (minutes)."""
    found = steps()
    whole = [one for record, one in found if why_aside(record) is None]
    by_source, by_card = (
        {id(one): error for pairs in left_out_errors(whole, by).values() for one, error in pairs}
        for by in (source_of, card_of)
    )
    inside = {id(one): (condition, is_inside) for one, condition, is_inside in inside_intervals(whole)}
    expected = rates_of([math.log(value) for value, _ in EXPECTED.values()])
    digest = hashlib.sha256(JOURNAL.read_bytes()).hexdigest()[:16]
    fit = fit_speed(whole, f"counted_steps.jsonl, sha256 {digest}", spread(by_source.values())[1])
    return fit, [
        Timed(
            record,
            one,
            by_source[id(one)] if id(one) in by_source else log_error(one, fit.rates),
            by_card.get(id(one)),
            log_error(one, expected),
            None,
            *inside.get(id(one), (None, None)),
        )
        for record, one in found
    ]


def later() -> list[Timed]:
    """Every step of counted_later.jsonl, in the order of sources and lines."""
    fit, fitted = shipped_counted(), [one for record, one in steps() if why_aside(record) is None]
    records = sorted(journal(LATER), key=lambda one: (one["source"], one["line"]))
    without = {
        source: fit_rates([one for one in fitted if one.source != source])
        for source in {record["source"] for record in records}
    }
    found = []
    for record in records:
        step = step_of(record)
        error = log_error(step, fit.rates)
        is_inside = abs(error) <= fit.half_widths[step.condition(fit)]
        found.append(Timed(record, step, error, without=log_error(step, without[step.source]), is_inside=is_inside))
    return found


def as_page(fit: SpeedFit, found: Sequence[Timed]) -> str:
    """The table as Markdown."""
    used = [one for one in found if why_aside(one.record) is None]
    ways = {
        "count, source left out": [one.error for one in used],
        "count, card left out": [one.by_card for one in used],
        "count, kernel tables alone (no training step)": [one.alone for one in used],
        "count, fitted to all (not a test)": [log_error(one.step, fit.rates) for one in used],
        "steps set aside, by the fit to the others": [one.error for one in found if one not in used],
    }
    shares = [one.step.count.unclaimed_share for one in found]
    head = ["source", "step", "card", "counted by", "published tokens/s", "error, source left out", "without any step"]
    return filled(
        OUT,
        num=len(found),
        sources=len({one.step.source for one in found}),
        cards=len({one.step.gpu.short_name for one in found}),
        several=sum(one.record.get("num_gpus", 1) > 1 for one in found),
        commands=sum(one.record["how"] != "cell" for one in found),
        claimed=sum(share == 0 for share in shares),
        most=f"{100 * max(shares):.1f}",
        prototype=sum(one.record["how"] == "prototype" for one in found),
        left_out=table(
            ["way", "steps", "median", "90 % below", "worst"], [[name, *told(own)] for name, own in ways.items()]
        ),
        coverage=coverage_table((one.condition, one.is_inside) for one in found if one.condition is not None),
        groups=groups_table(
            "source, card",
            [Grouped(f"{one.step.source}, {one.step.gpu.short_name}", one.error, one.is_inside) for one in found],
        ),
        pairs=table(["slower", "faster", "published", "predicted"], _pairs(found)),
        rates=rates_table(fit, EXPECTED),
        steps=table(head, [[*_named(one), signed(one.error), signed(one.alone)] for one in found]),
    )


def _named(one: Timed) -> list[str]:
    return [*(one.record[name] for name in ("source", "what")), one.cards, one.record["how"], _published(one)]


def _published(one: Timed) -> str:
    return f"{one.step.tokens_per_second:,.0f}"


def as_rows(fit: SpeedFit, found: Sequence[Timed]) -> str:
    """Every step as CSV, with its seconds by class."""
    lines = []
    for one in found:
        seconds = time_of(one.step.count, one.step.gpu, fit=fit).by_class
        lines.append(
            {name: one.record.get(name) or "" for name in NAMES}
            | {
                "published_tokens_per_s": f"{one.step.tokens_per_second:.4g}",
                "error_source_left_out": signed(one.error),
                "error_card_left_out": signed(one.by_card),
                "error_tables_alone": signed(one.alone),
                "in_interval": {True: "yes", False: "no", None: ""}[one.is_inside],
                "unclaimed_launches": one.unclaimed,
            }
            | {f"seconds_{name}": f"{value:.4g}" for name, value in sorted(seconds.items())}
        )
    return as_csv(lines)


def _pairs(found: Sequence[Timed]) -> list[list[str]]:
    """Those that the journal has both steps of."""
    known = {one.record["line"] or one.record["what"]: one for one in found}
    lines = []
    for slower, faster in PAIRS:
        if slower in known and faster in known:
            one, other = known[slower], known[faster]
            published = math.log(other.step.tokens_per_second / one.step.tokens_per_second)
            names = [f"{each.record['what']} ({each.record['how']})" for each in (one, other)]
            lines.append([*names, signed(published), signed(published + other.error - one.error)])
    return lines


def as_page_of_later(found: Sequence[Timed]) -> str:
    """The tables of later steps as Markdown."""
    groups: dict[str, list[Timed]] = {"all": list(found)}
    for one in found:
        groups.setdefault(f"{one.record['source']}, {one.cards}", []).append(one)
    lines = []
    for name, own in groups.items():
        inside = held([bool(one.is_inside) for one in own])
        lines.append([name, *told(one.error for one in own), inside, told(one.without for one in own)[1]])
    head = ["steps", "number", "median", "90 % below", "worst", "in the 80 % interval", "median, source left out"]
    columns = ["source", "line", "step", "card", "counted by", "published tokens/s", "error", "source left out"]
    every = []
    for one in found:
        source, *more = _named(one)
        every.append([source, str(one.record["line"]), *more, signed(one.error), signed(one.without)])
    page = LATER.with_suffix(".md")
    return filled(page, num=len(found), groups=table(head, lines), steps=table(columns, every))


def as_rows_of_later(found: Sequence[Timed]) -> str:
    """As CSV."""
    return as_csv(
        {name: one.record[name] for name in NAMES}
        | {
            "published_tokens_per_s": f"{one.step.tokens_per_second:.4g}",
            "error": signed(one.error),
            "error_source_left_out": signed(one.without),
            "in_interval": "yes" if one.is_inside else "no",
            "unclaimed_launches": one.unclaimed,
        }
        for one in found
    )


def main() -> None:
    check = "--check" in sys.argv
    fit, found = findings()
    texts = {OUT: as_page(fit, found), ROWS: as_rows(fit, found), SHIPPED: fit.model_dump_json(indent=1) + "\n"}
    if not check:
        write_or_check(texts, "speed/counted_steps.py", check=False)  # the later steps are predicted by what ships
    texts |= files_of_later()
    write_or_check(texts, "speed/counted_steps.py", check=check)


def files_of_later() -> dict[Path, str]:
    """counted_later.md and .csv."""
    found = later()
    return {LATER.with_suffix(".md"): as_page_of_later(found), LATER.with_suffix(".csv"): as_rows_of_later(found)}


if __name__ == "__main__":
    main()
