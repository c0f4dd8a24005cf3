"""Judged claims → a Document (a table per source), and JSON; how each figure is made stands below the Markdown.

In: Judgements. Out: file name → content, or a Document. Words; judges nothing.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vramprobe.catalog.claims import Claim
from vramprobe.literature.claims import TOLERANCE, VERDICTS, Judgement, amount, text_of
from vramprobe.literature.readings import ClaimCase
from vramprobe.report.definition import Column, Document, Table, rows_of
from vramprobe.report.formats import files_of, markdown
from vramprobe.units import plural, published

if TYPE_CHECKING:
    import pandas as pd

_ABOUT = (
    "Each figure that guides print, with a verdict that is worked out anew whenever this page is made.",
    "Usual conditions: the models a size stands for, 512 to 4,096 tokens, one sequence, checkpointing on and off, five "
    "recipes of full fine-tuning, three k-bit preparations; what a claim states is kept. A claim agrees where its "
    f"range meets ours within {TOLERANCE:.0%} (rounding), read as GB or as GiB. Ours goes from what tensors take to "
    'what nvidia-smi may show. "The card" is its usable memory: what it reports, less what the driver and a CUDA '
    "context take. Nothing here was measured unless it comes from cuda.",
)
#: Said where a figure comes from an emulated GPU.
EMULATED_FIGURES = "What comes from an emulated GPU says so: the real CUDA software ran, on no card."
_MEANINGS = {
    "holds": "under every usual set of conditions that the claim leaves open",
    "depends": "under some of them; the column says on what, and how many agree",
    "understates": "under none: ours is higher",
    "overstates": "under none: ours is lower",
    "impossible": "below what the weights alone take, or beyond the card's peak rate",
    "not about memory": "a rate or a share of time, which arithmetic cannot settle",
}


def claims_document(judgements: Sequence[Judgement], command: str = "") -> Document:
    """claims: how many got each verdict, then a table per source."""
    frame = _frame(judgements)
    verdicts = frame.verdict.value_counts().reindex(VERDICTS, fill_value=0).rename("num_claims").reset_index()
    verdicts["means"] = verdicts.verdict.map(_MEANINGS)
    tables = [Table(title="Verdicts", columns=_VERDICT_COLUMNS, rows=rows_of(verdicts))]
    for source, found in frame.groupby("source", sort=False):
        tables.append(Table(title=str(source), columns=COLUMNS, rows=rows_of(found)))
    emulated = any(one.figure is not None and one.figure.engine.startswith("emulated") for one in judgements)
    return Document(
        name="claims",
        title="Published claims, checked",
        tables=tables,
        about=[*_ABOUT, *([EMULATED_FIGURES] if emulated else []), f"{in_words(frame.verdict)}."],
        data=Table(title="Claims", columns=COLUMNS, rows=rows_of(frame)),
        command=command,
    )


def text_files(judgements: Sequence[Judgement], command: str) -> dict[str, bytes]:
    """claims in every format, and claims.json; ``command`` rebuilds them."""
    document = claims_document(judgements, command)
    details = "\n".join(["## How each figure is made\n", *(_details(one) for one in judgements)])
    return files_of(document) | {
        "claims.md": markdown.page(document, details).encode(),
        "claims.json": (as_json(judgements) + "\n").encode(),
    }


def for_terminal(judgements: Sequence[Judgement]) -> Table:
    """One table of all: what is said, the verdict, our figure and the sentence why."""
    names = ("id", "statement", "claimed", "verdict_in_words", "ours_in_words", "reason")
    columns = [column for column in COLUMNS if column.name in names]
    return Table(title="Claims", columns=columns, rows=rows_of(_frame(judgements)))


def as_json(judgements: Sequence[Judgement]) -> str:
    """One object per claim; a number beyond all bounds is null."""
    objects = [
        {name: published(value) for name, value in row.items() if value is not None}
        | {
            "depends_on": list(one.depends_on),
            "sources": [{"command": s.command, "reads": s.reads, "value": s.value} for s in one.sources],
        }
        for one, row in zip(judgements, rows_of(_frame(judgements)), strict=True)
    ]
    return json.dumps(objects, indent=1, ensure_ascii=False)


def in_words(verdicts: Iterable[str]) -> str:
    """Return the number of claims with each verdict, in words."""
    counts = Counter(verdicts)
    kinds = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    return f"{plural(counts.total(), 'claim')}: {kinds or 'none'}"


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
    """Return how many usual sets of conditions agree, and on which side the others are."""
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
        lines += [
            f"- {name} ({_words(case)}): `{case.figure.arithmetic}` = {amount(case.figure)}"
            for name, case in (("least", one.least), ("most", one.most))
            if case and case.figure.value != figure.value
        ]
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


def _words(case: ClaimCase) -> str:
    return ", ".join(case.conditions.values())


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _frame(judgements: Sequence[Judgement]) -> pd.DataFrame:
    """A row per claim."""
    import pandas as pd

    return pd.DataFrame([_row(one) for one in judgements], columns=[column.name for column in COLUMNS])


def _row(one: Judgement) -> dict[str, Any]:
    claim, figure = one.claim, one.figure
    row = {name: getattr(claim, name) for name in ("id", "source", "topic", "statement", "quantity")}
    row |= {name: getattr(one, name) for name in ("verdict", "holds_under", "reason", "note")}
    row |= {
        "claimed": says(claim),
        "depends_on": ", ".join(one.depends_on) or None,
        "verdict_in_words": _verdict(one),
        "agreement": _agreement(one),
        "ours_in_words": _ours(one),
        "conditions": ", ".join(one.conditions.values()) or None,
        "commands": " && ".join(source.command for source in one.sources) or None,
    }
    if figure is not None:
        row |= {"figure": _finite(figure.value), "figure_low": _finite(figure.low), "figure_high": _finite(figure.high)}
        row |= {name: getattr(figure, name) for name in ("unit", "engine", "arithmetic")}
    for end in ("least", "most"):
        if case := getattr(one, end):
            row |= {end: _finite(case.figure.value), f"{end}_conditions": _words(case)}
    return row


_VERDICT_COLUMNS = [
    Column("verdict", "verdict"),
    Column("num_claims", "claims", is_number=True),
    Column("means", "means: the claim holds", is_prose=True),
]
#: Name → heading; without one, of the CSV and the JSON alone.
_HEADINGS = {
    "id": "id", "source": None, "topic": None, "statement": "claim", "quantity": None, "claimed": "says",
    "verdict": None, "depends_on": None, "verdict_in_words": "verdict", "agreement": "usual conditions",
    "ours_in_words": "ours", "figure": None, "figure_low": None, "figure_high": None, "unit": None, "conditions": None,
    "least": None, "least_conditions": None, "most": None, "most_conditions": None, "engine": "from",
    "holds_under": None, "reason": "why", "note": None, "arithmetic": None, "commands": None,
}  # fmt: skip
COLUMNS = [Column(name, heading, is_prose=name in ("statement", "reason")) for name, heading in _HEADINGS.items()]
