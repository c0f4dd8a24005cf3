"""Published steps that were counted after the rates had been fitted: ``python benchmarks/speed/counted_later.py``.

In: counted_later.jsonl, which ``counted_steps.py --run`` adds to; the rates that ship, and the steps that they were
fitted to. Out: counted_later.md and .csv: each step beside its prediction by the rates that ship, which have not seen
it, and by a fit without its source. ``--check`` writes nothing and fails where they are not what the files give.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.speed.counted_fit import CountedStep
from benchmarks.speed.counted_steps import (
    LATER,
    NAMES,
    Record,
    cards_of,
    journal,
    signed,
    step_of,
    steps,
    told,
    why_aside,
)
from benchmarks.speed.rates_fit import fit_rates, log_error
from benchmarks.speed.speed_model import percent, table
from benchmarks.tables import as_csv, filled, write_or_check
from vramprobe.speed.rates import shipped_counted

OUT = Path(__file__).resolve().with_suffix(".md")


class Later(NamedTuple):
    """A step and its log errors: by the rates that ship, and by a fit without its source."""

    record: Record
    step: CountedStep
    error: float
    left_out: float
    is_inside: bool

    @property
    def kind(self) -> str:
        """Its source and cards, as a line of the table."""
        return f"{self.record['source']}, {cards_of(self.record)}"


def findings() -> list[Later]:
    """Every step of the file, in the order of sources and lines."""
    fit = shipped_counted()
    fitted = [one for record, one in steps() if why_aside(record) is None]
    without = {}
    found = []
    for record in sorted(journal(LATER), key=lambda one: (one["source"], one["line"])):
        step = step_of(record)
        if step.source not in without:
            without[step.source] = fit_rates([one for one in fitted if one.source != step.source])
        error = log_error(step, fit.rates)
        is_inside = abs(error) <= fit.half_widths[step.condition(fit)]
        found.append(Later(record, step, error, log_error(step, without[step.source]), is_inside))
    return found


def as_page(found: Sequence[Later]) -> str:
    """The tables as Markdown."""
    groups: dict[str, list[Later]] = {"all": list(found)}
    for one in found:
        groups.setdefault(one.kind, []).append(one)
    head = ["steps", "number", "median", "90 % below", "worst", "in the 80 % interval", "median, source left out"]
    lines = []
    for name, some in groups.items():
        inside = percent(sum(one.is_inside for one in some) / len(some))
        lines.append([name, *told(one.error for one in some), inside, told(one.left_out for one in some)[1]])
    every = [
        [
            one.record["source"],
            str(one.record["line"]),
            one.record["what"],
            cards_of(one.record),
            one.record["how"],
            f"{one.step.tokens_per_second:,.0f}",
            signed(one.error),
            signed(one.left_out),
        ]
        for one in found
    ]
    columns = ["source", "line", "step", "card", "counted by", "published tokens/s", "error", "source left out"]
    return filled(OUT, num=len(found), groups=table(head, lines), steps=table(columns, every))


def as_rows(found: Sequence[Later]) -> str:
    """As CSV."""
    return as_csv(
        [
            {name: one.record[name] for name in NAMES}
            | {
                "published_tokens_per_s": f"{one.step.tokens_per_second:.4g}",
                "error": signed(one.error),
                "error_source_left_out": signed(one.left_out),
                "in_interval": "yes" if one.is_inside else "no",
                "unclaimed_launches": one.step.count.num_launches - one.step.count.num_claimed,
            }
            for one in found
        ]
    )


def main() -> None:
    found = findings()
    texts = {OUT: as_page(found), OUT.with_suffix(".csv"): as_rows(found)}
    write_or_check(texts, "speed/counted_later.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
