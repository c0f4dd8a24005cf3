"""Rules: a claim and the rows of its rule → its Reading: the figure under each usual set of conditions, and its bounds.

In: data/claim_rules.csv (an expression over named facts, and the axes along which it is tried) and
data/claim_conditions.csv (what an axis may be, in words and as settings). A column of the claim closes what it states.
Out: Readings. What is said of parameters is scaled to the claim's own number, so that 6.74 billion are no error of 7B.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from vramprobe import catalog
from vramprobe.catalog import Claim
from vramprobe.catalog.shipped import csv_rows
from vramprobe.literature.claims.cells import Cells, Source
from vramprobe.literature.claims.names import ANY_SIZE, ExpressionNames, Row, settings
from vramprobe.literature.expressions import ExpressionError, evaluate, expression
from vramprobe.predict.bisection import first_of

#: Beyond this many GPUs no answer is sought.
MAX_GPUS = 4096
Words = dict[str, str]
Mode = Literal["value", "low", "high"]


@dataclass(frozen=True, kw_only=True)
class ClaimFigure:
    """Result ``arithmetic`` of an expression, in ``unit``; the truth should lie from ``low`` to ``high``."""

    value: float
    low: float
    high: float
    unit: str
    engine: str  # formula | arithmetic | estimate | cuda on <device> | emulated <device>
    arithmetic: str
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True)
class ClaimCase:
    """The figure under one set of conditions: what varies → how it is here, in words."""

    conditions: dict[str, str]
    figure: ClaimFigure


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Interpretation of a claim.

    ``cases``: every usual set of conditions, the most usual first; none for what is no matter of memory. ``floor`` and
    ``ceiling``: what nothing can be below or above. ``others``: less usual conditions, tried where the claim fails.
    ``floor_is``: what the floor is made of, for the sentence that names it.
    ``ruled_out``: what makes the claim impossible whatever its number, such as a run too large for its card.
    ``note``: why the figure is what it is.
    """

    cases: tuple[ClaimCase, ...]
    note: str
    floor: ClaimFigure | None = None
    floor_is: str = ""
    ceiling: ClaimFigure | None = None
    ruled_out: ClaimFigure | None = None
    others: Callable[[], Iterator[ClaimCase]] = lambda: iter(())


def reading_of(claim: Claim, claims: Sequence[Claim], cells: Cells) -> Reading:
    """Interpret the claim. Raises ExpressionError, naming the rule and its row, for a row that is wrong."""
    rule = _Rule(claim, claims, cells)
    ruled_out = min(rule.figures("ruled out"), key=lambda one: one[0].value, default=None)
    if ruled_out is not None and ruled_out[0].value > 1:
        return Reading(cases=(), ruled_out=ruled_out[0], note=ruled_out[1])
    cases = tuple(rule.cases("case"))
    floor = min(rule.figures("floor"), key=lambda one: one[0].value, default=None)
    return Reading(
        cases=cases,
        floor=floor and floor[0],
        floor_is=floor[1] if floor else "",
        ceiling=max((found for found, _ in rule.figures("ceiling")), key=lambda one: one.value, default=None),
        note=rule.note(),
        others=lambda: itertools.chain(rule.cases("case", "others"), rule.cases("other")),
    )


@dataclass(frozen=True)
class _Rule:
    """The rows that a claim is judged by."""

    claim: Claim
    claims: Sequence[Claim]
    cells: Cells

    def rows(self, *parts: str) -> list[Row]:
        found = _rules().get(self.claim.rule)
        if found is None:
            raise ExpressionError(f"claim {self.claim.id} has the rule {self.claim.rule!r}; there is no such row")
        return [row for row in found if row["part"] in parts]

    def cases(self, part: str, axes: str = "axes") -> Iterator[ClaimCase]:
        parts = (part, "fewest") if part == "case" else (part,)
        for row in self.rows(*parts):
            if not row[axes] and axes != "axes":
                continue
            for words, names in self.conditions(row, axes):
                with _naming(row):
                    if row["where"] and not expression(row["where"]).value(names.value):
                        continue
                    made = _fewest(row, names) if row["part"] == "fewest" else _figure(row, names)
                yield ClaimCase(words, made)

    def figures(self, part: str) -> Iterator[tuple[ClaimFigure, str]]:
        """Yield the figures of a bound, one for each of its conditions, with the sentence about it."""
        for row in self.rows(part):
            for _, names in self.conditions(row, "axes"):
                with _naming(row):
                    found = _figure(row, names)
                    names.more |= {"value": found.value, "arithmetic": found.arithmetic}
                    yield found, _filled(row["note"], names)

    def note(self) -> str:
        asides = [case.figure.value for case in self.cases("aside")]
        row = self.rows("case", "fewest", "aside")[0]
        names = self._names(row, {}, {"least": min(asides, default=0), "most": max(asides, default=0)})
        with _naming(row):
            return _filled(row["note"], names)

    def _names(self, row: Row, sets: dict[str, Any], more: dict[str, Any] | None = None) -> ExpressionNames:
        return ExpressionNames(self.claim, self.claims, self.cells, row, sets, more or {})

    def conditions(self, row: Row, axes: str) -> Iterator[tuple[Words, ExpressionNames]]:
        """Every set of conditions of a row, the last axis changing first; the words of ``^`` ones stand before all."""
        names = row[axes].split()
        with _naming(row):
            several = [_axis(name.removeprefix("^"), self.claim) for name in names]
        said = dict([row["says"].split(": ", 1)]) if row["says"] else {}
        for values in itertools.product(*several):
            pairs = list(zip(names, values, strict=True))
            ordered = sorted(pairs, key=lambda pair: (pair[0] == "GPU", not pair[0].startswith("^")))
            words = {key: text for _, (found, _) in ordered for key, text in found.items()}
            sets = {key: value for _, (_, found) in pairs for key, value in found.items()}
            yield words | said, self._names(row, sets)


class _naming:
    """Errors of a row that name it."""

    def __init__(self, row: Row) -> None:
        self._row = row

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyError | ValueError | TypeError | ZeroDivisionError | ExpressionError):
            row, why = self._row, f"unknown {error}" if isinstance(error, KeyError) else error  # an axis is looked up
            raise ExpressionError(
                f"claim_rules.csv, rule {row['rule']!r}, {row['part']} {row['expression']!r}: {why}"
            ) from error


def _figure(row: Row, names: ExpressionNames) -> ClaimFigure:
    """The ClaimFigure of a row's expression; without ``low`` and ``high`` its interval is that of its facts."""
    line, used = expression(row["expression"]), {}

    def text_of(name: str) -> str:
        used[name] = names.fact(name)
        return used[name].text

    written = line.written(names.value, text_of)
    value = evaluate(written)
    names.more["value"] = value

    def end(mode: Mode) -> float:
        def of(name: str) -> Any:
            return getattr(names.fact(name), mode) if name != "value" else value

        return float(expression(row[mode] or row["expression"]).value(of))

    exact = not row["low"] and all(fact.low == fact.value == fact.high for fact in used.values())
    engines = dict.fromkeys(fact.engine for fact in used.values() if fact.engine)
    return ClaimFigure(
        value=value,
        low=value if exact else end("low"),
        high=value if exact else end("high"),
        unit=row["unit"] or names.claim.unit,
        engine=row["engine"] or " and ".join(engines) or "arithmetic",
        arithmetic=written,
        sources=tuple(dict.fromkeys(fact.source for fact in used.values() if fact.source)),
    )


def _fewest(row: Row, names: ExpressionNames) -> ClaimFigure:
    """The least number of GPUs on which a rank's need fits, written as what is true of it and of one fewer."""
    line, made = expression(row["expression"]), {}

    def of(num_gpus: int) -> ExpressionNames:
        if num_gpus not in made:
            made[num_gpus] = replace(names, sets=names.sets | {"num_gpus": num_gpus})
        return made[num_gpus]

    def fewest(mode: Mode) -> float:
        def fits(num_gpus: int) -> bool:
            found = of(num_gpus)
            return line.value(lambda name: getattr(found.fact(name), mode)) <= found.value("usable_of_rank")

        many = first_of(fits, MAX_GPUS)
        return math.inf if many is None else many

    def written(num_gpus: int, sign: str) -> tuple[str, Source]:
        found = of(num_gpus)
        need = line.written(found.value, lambda name: found.fact(name).text)
        need = f"({need})" if " " in need else need
        source = found.fact("rank").source
        assert source is not None
        return f"{need} {sign} {found.fact('usable_of_rank').text}", source

    least = fewest("value")
    if least == math.inf:
        return ClaimFigure(value=least, low=least, high=least, unit="GPUs", engine="arithmetic", arithmetic="1e999")
    many = int(least)
    text, *sources = written(many, "<=")
    if many > 1:
        fewer, source = written(many - 1, ">")
        text, sources = f"{text}) * ({fewer}", [*sources, source]
    arithmetic = f"{many} * ({text})"
    return ClaimFigure(
        value=evaluate(arithmetic),
        low=fewest("low"),
        high=fewest("high"),
        unit="GPUs",
        engine="arithmetic",
        arithmetic=arithmetic,
        sources=tuple(sources),
    )


def _filled(note: str, names: ExpressionNames) -> str:
    """A note with its ``{expression:format}`` filled in."""

    def value(found: re.Match[str]) -> str:
        return format(expression(found[1]).value(names.value), found[2] or "")

    return re.sub(r"\{([^{}:]+)(?::([^{}]*))?\}", value, note)


def _axis(name: str, claim: Claim) -> list[tuple[Words, dict[str, Any]]]:
    """Return the values of an axis, (condition → words, settings); a value that the claim states is kept."""
    match name:
        case "model":
            return [({"model": model}, {"model": model}) for model in claim.models or (ANY_SIZE,)]
        case "GPU":
            several = len(claim.gpus) > 1
            return [({"GPU": gpu.short_name} if several else {}, {"card": gpu.short_name}) for gpu in claim.gpus]
        case "provider":
            return _providers(claim)
        case "length" | "other_length" if claim.seq_lens:
            return [({"sequence length": f"{length:,} tokens"}, {"seq_len": length}) for length in claim.seq_lens]
        case "batch" if claim.batch_size:
            return [({"batch": f"batch {claim.batch_size}"}, {"batch_size": claim.batch_size})]
    found = _axes()[name]
    stated = [row for row in found if claim.recipe and claim.recipe in row["stated_as"].split("; ")]
    values = [(_words(row), settings(row["sets"], claim)) for row in stated or found]
    if name == "checkpointing" and claim.gradient_checkpointing is not None:
        values = [one for one in values if one[1]["gradient_checkpointing"] == claim.gradient_checkpointing]
    return values


def _words(row: Row) -> Words:
    keys = row["condition"].split(", ")
    says = row["says"].split(", ") if len(keys) > 1 else [row["says"]]
    return {key: text for key, text in zip(keys, says, strict=True) if text}


def _providers(claim: Claim) -> list[tuple[Words, dict[str, Any]]]:
    """Return the providers that rent out the claim's card and an H100 on the same terms, with both prices."""
    old = {(one.provider, one.terms, one.num_gpus): one for one in catalog.list_prices("H100-SXM")}
    both = {
        one.provider: {"price": one.usd_per_gpu_hour, "old.price": other.usd_per_gpu_hour}
        for one in catalog.list_prices(claim.gpus[0].short_name)
        if one.terms != "spot" and (other := old.get((one.provider, one.terms, one.num_gpus))) is not None
    }
    return [({"provider": provider}, prices) for provider, prices in both.items()]


@cache
def _rules() -> dict[str, list[Row]]:
    return _grouped("claim_rules.csv", "rule")


@cache
def _axes() -> dict[str, list[Row]]:
    return _grouped("claim_conditions.csv", "axis")


def _grouped(file: str, column: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in csv_rows(file):
        found.setdefault(row[column], []).append(row)
    return found
