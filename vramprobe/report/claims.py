"""Judged claims → Markdown, CSV and JSON, the same bytes each time, and a table for the terminal.

In: Judgements. Out: file name → content, or a rich table. Rounds and words; judges nothing.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from vramprobe.catalog import Claim
from vramprobe.claims import VERDICTS, Judgement
from vramprobe.claims.judge import TOLERANCE, Case, amount, text_of
from vramprobe.report.render import Column, to_csv, to_markdown

_STYLES = {"holds": "green", "depends": "yellow", "understates": "red", "overstates": "red", "impossible": "bold red"}
_ABOUT = f"""Each figure that guides print, with a verdict that is worked out anew whenever this page is made:

- **holds**: under every usual set of conditions that the claim leaves open
- **depends**: under some; the column says on what, and how many agree
- **understates**, **overstates**: under none, ours being higher or lower
- **impossible**: below what the weights alone take, or beyond the card's peak rate
- **not about memory**: a rate or a share of time, which arithmetic cannot settle

Usual conditions: the models a size stands for, 512 to 4,096 tokens, one sequence, checkpointing on and off, five
recipes of full fine-tuning, three k-bit preparations; what a claim states is kept. A claim agrees where its range meets
ours within {TOLERANCE:.0%} (rounding), read as GB or as GiB. Ours goes from what tensors take to what nvidia-smi may
show. "The card" is its usable memory: what it reports, less 1 GiB for the context. Nothing here was measured unless the
engine is `cuda`.
"""


def text_files(judgements: Sequence[Judgement], command: str) -> dict[str, bytes]:
    """claims.md, claims.csv and claims.json; ``command`` rebuilds them."""
    parts = ["# Published claims, checked\n", _ABOUT, f"{in_words(judgements)}.\n"]
    for source in dict.fromkeys(one.claim.source for one in judgements):
        rows = [one for one in judgements if one.claim.source == source]
        parts += [f"## {source}\n", to_markdown(_COLUMNS, rows)]
    parts += ["## How each figure is made\n", *(_details(one) for one in judgements)]
    footer = f"---\n\nRebuild this page:\n\n```\n{command}\n```\n"
    return {
        "claims.md": "\n".join([*parts, footer]).encode(),
        "claims.csv": to_csv(_COLUMNS, judgements).encode(),
        "claims.json": (as_json(judgements) + "\n").encode(),
    }


def as_json(judgements: Sequence[Judgement]) -> str:
    """One object per claim; a number beyond all bounds is null."""
    objects = [
        {column.name: value for column in _COLUMNS if (value := column.value(one)) is not None}
        | {"depends_on": list(one.depends_on),
           "sources": [{"command": s.command, "reads": s.reads, "value": s.value} for s in one.sources]}
        for one in judgements
    ]  # fmt: skip
    return json.dumps(objects, indent=1, ensure_ascii=False)


def in_words(judgements: Sequence[Judgement]) -> str:
    """How many claims got each verdict."""
    counts = Counter(one.verdict for one in judgements)
    kinds = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    return f"{len(judgements)} claim{'s' if len(judgements) != 1 else ''}: {kinds or 'none'}"


def table(judgements: Sequence[Judgement]) -> Table:
    """For the terminal: what is said, the verdict, our figure and the sentence why."""
    shown = Table(box=None, pad_edge=False)
    for title in ("id", "claim", "says", "verdict", "ours", "why"):
        shown.add_column(title, overflow="fold", no_wrap=title == "id", ratio=2 if title in ("claim", "why") else None)
    for one in judgements:
        style = _STYLES.get(one.verdict, "dim")
        words = (one.claim.statement, says(one.claim), _verdict(one), _ours(one), one.reason)
        claim, said, verdict, ours, why = (escape(text) for text in words)
        shown.add_row(one.claim.id, claim, said, f"[{style}]{verdict}[/]", ours, why)
    return shown


def says(claim: Claim) -> str:
    """The claim's figure with its unit."""
    if claim.unit == "bool":
        return "fits" if claim.low else "does not fit"
    low, high = claim.low, claim.high
    if low is None and high is None:
        return "a definition"
    if low is None or high is None:
        return f"up to {text_of(high, claim.unit)}" if low is None else f"over {text_of(low, claim.unit)}"
    return text_of(low, claim.unit) if low == high else f"{text_of(low, claim.unit)} to {text_of(high, claim.unit)}"


def _verdict(one: Judgement) -> str:
    if one.verdict != "depends":
        return one.verdict
    return f"depends on {', '.join(one.depends_on)}"


def _agreement(one: Judgement) -> str | None:
    """How many usual sets of conditions agree, and where the others are."""
    total = one.num_agreeing + one.num_above + one.num_below
    if not total:
        return None
    sides = [f"{count} {side}" for count, side in ((one.num_above, "above"), (one.num_below, "below")) if count]
    return f"{one.num_agreeing} of {total} agree" + (f", {', '.join(sides)}" if sides else "")


def _ours(one: Judgement) -> str:
    if one.verdict == "not about memory":
        return f"at most {amount(one.figure)}" if one.figure else "–"
    ends = [amount(case.figure) for case in (one.least, one.most) if case]
    if len(set(ends)) < 2:
        return amount(one.figure) if one.figure else "–"
    return " to ".join(ends)


def _details(one: Judgement) -> str:
    figure = one.figure
    lines = [f"### {one.claim.id}\n", f"{one.claim.statement}: {says(one.claim)}. **{_verdict(one)}**. {one.note}\n"]
    if figure is not None:
        words = ", ".join(one.conditions.values())
        ours = f"ours ({words})" if words else "ours"
        lines.append(f"- {ours}: `{figure.arithmetic}` = {_between(one)}, {figure.engine}")
        lines += [f"- {name} ({_words(case)}): `{case.figure.arithmetic}` = {amount(case.figure)}"
                  for name, case in (("least", one.least), ("most", one.most))
                  if case and case.figure.value != figure.value]  # fmt: skip
    lines += [f"- {_agreement(one)}"] if _agreement(one) else []
    lines += [f"- {one.reason}"] if one.reason != one.note else []
    if one.sources:
        said = [f"{s.command}  # {f'{s.reads}: ' if s.reads else ''}{s.value:_}" for s in one.sources]
        lines.append("\n```\n" + "\n".join(said) + "\n```")
    return "\n".join(lines) + "\n"


def _between(one: Judgement) -> str:
    figure = one.figure
    assert figure is not None
    if figure.low == figure.high:
        return amount(figure)
    high = f"to {text_of(figure.high, figure.unit)}" if math.isfinite(figure.high) else "up"
    return f"{amount(figure)} (from {text_of(figure.low, figure.unit)} {high})"


def _words(case: Case) -> str:
    return ", ".join(case.conditions.values())


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _of_claim(name: str) -> Any:
    return lambda one: getattr(one.claim, name)


def _of_figure(name: str, *, number: bool = False) -> Any:
    def value(one: Judgement) -> Any:
        found = None if one.figure is None else getattr(one.figure, name)
        return _finite(found) if number else found

    return value


def _end(which: str, *, words: bool = False) -> Any:
    def value(one: Judgement) -> Any:
        case = getattr(one, which)
        if case is None:
            return None
        return _words(case) if words else _finite(case.figure.value)

    return value


_COLUMNS = [
    Column("id", "id", _of_claim("id")),
    Column("source", None, _of_claim("source")),
    Column("topic", None, _of_claim("topic")),
    Column("statement", "claim", _of_claim("statement")),
    Column("quantity", None, _of_claim("quantity")),
    Column("claimed", "says", lambda one: says(one.claim)),
    Column("verdict", None, lambda one: one.verdict),
    Column("depends_on", None, lambda one: ", ".join(one.depends_on) or None),
    Column("verdict_in_words", "verdict", _verdict),
    Column("agreement", "usual conditions", _agreement),
    Column("ours_in_words", "ours", _ours),
    Column("figure", None, _of_figure("value", number=True)),
    Column("figure_low", None, _of_figure("low", number=True)),
    Column("figure_high", None, _of_figure("high", number=True)),
    Column("unit", None, _of_figure("unit")),
    Column("conditions", None, lambda one: ", ".join(one.conditions.values()) or None),
    Column("least", None, _end("least")),
    Column("least_conditions", None, _end("least", words=True)),
    Column("most", None, _end("most")),
    Column("most_conditions", None, _end("most", words=True)),
    Column("engine", "from", _of_figure("engine")),
    Column("holds_under", None, lambda one: one.holds_under),
    Column("reason", "why", lambda one: one.reason),
    Column("note", None, lambda one: one.note),
    Column("arithmetic", None, _of_figure("arithmetic")),
    Column("commands", None, lambda one: " && ".join(source.command for source in one.sources) or None),
]
