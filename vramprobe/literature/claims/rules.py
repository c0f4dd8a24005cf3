"""Rules: a claim and the rows of its rule → its Reading: the figure under each usual set of conditions, and its bounds.

In: data/claim_rules.csv (an expression over named facts, and the axes along which it is tried) and
data/claim_conditions.csv (what an axis may be, in words and as settings). A column of the claim closes what it states.
Out: Readings. What is said of parameters is scaled to the claim's own number, so that 6.74 billion are no error of 7B.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from vramprobe import catalog
from vramprobe.catalog import Claim, Gpu
from vramprobe.catalog.shipped import csv_rows
from vramprobe.literature.claims.cells import Cells, Fact, Source
from vramprobe.literature.expressions import ExpressionError, evaluate, expression
from vramprobe.predict.verdict import CONTEXT_ALLOWANCE_BYTES, NCCL_ALLOWANCE_BYTES, usable_bytes
from vramprobe.speed.rates import shipped_speed

Row = dict[str, str]
Words = dict[str, str]
Mode = Literal["value", "low", "high"]
#: For what is said of all sizes, and the rank of adapters that a claim leaves open.
ANY_SIZE, LORA_R = "llama-3.1-8b", 16
#: Settings that are options of a cell, in the order of a command; others say how it is run, or are facts themselves.
_OPTIONS = ("recipe", "optim", "quant", "kbit_prep", "lora_r", "lora_targets", "attn")
_FIRST = ("model", "method", "batch_size", "seq_len", "gradient_checkpointing")
#: The most GPUs of a job that are tried.
_MOST_GPUS = 2**12


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What ``arithmetic`` gives, in ``unit``; the truth should lie from ``low`` to ``high``."""

    value: float
    low: float
    high: float
    unit: str
    engine: str  # formula | arithmetic | estimate | cuda on <device> | emulated <device>
    arithmetic: str
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True)
class Case:
    """The figure under one set of conditions: what varies → how it is here, in words."""

    conditions: dict[str, str]
    figure: Figure


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a claim is taken to mean.

    ``cases``: every usual set of conditions, the most usual first; none for what is no matter of memory. ``floor`` and
    ``ceiling``: what nothing can be below or above. ``others``: less usual conditions, tried where the claim fails.
    ``floor_is``: what the floor is made of, for the sentence that names it.
    ``ruled_out``: what makes the claim impossible whatever its number, such as a run too large for its card.
    ``note``: why the figure is what it is.
    """

    cases: tuple[Case, ...]
    note: str
    floor: Figure | None = None
    floor_is: str = ""
    ceiling: Figure | None = None
    ruled_out: Figure | None = None
    others: Callable[[], Iterator[Case]] = lambda: iter(())


def reading_of(claim: Claim, claims: Sequence[Claim], cells: Cells) -> Reading:
    """What the claim is taken to mean. Raises ExpressionError, naming the rule and its row, for a row that is wrong."""
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


def cells_of(claim: Claim) -> list[dict[str, Any]]:
    """The options of the cells under the claim's usual conditions, the most usual first."""
    rule = _Rule(claim, [claim], Cells())
    found = [names.options() for row in rule.rows("case") for _, names in rule.conditions(row, "axes")]
    return list({tuple(options.items()): options for options in found}.values())


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

    def cases(self, part: str, axes: str = "axes") -> Iterator[Case]:
        parts = (part, "fewest") if part == "case" else (part,)
        for row in self.rows(*parts):
            if not row[axes] and axes != "axes":
                continue
            for words, names in self.conditions(row, axes):
                with _naming(row):
                    if row["where"] and not expression(row["where"]).value(names.value):
                        continue
                    made = _fewest(row, names) if row["part"] == "fewest" else _figure(row, names)
                yield Case(words, made)

    def figures(self, part: str) -> Iterator[tuple[Figure, str]]:
        """Of a bound under each of its conditions: the figure, and the sentence about it."""
        for row in self.rows(part):
            for _, names in self.conditions(row, "axes"):
                with _naming(row):
                    found = _figure(row, names)
                    names.more |= {"value": found.value, "arithmetic": found.arithmetic}
                    yield found, _filled(row["note"], names)

    def note(self) -> str:
        asides = [case.figure.value for case in self.cases("aside")]
        row = self.rows("case", "fewest", "aside")[0]
        names = _Names(self, row, {}, {"least": min(asides, default=0), "most": max(asides, default=0)})
        with _naming(row):
            return _filled(row["note"], names)

    def conditions(self, row: Row, axes: str) -> Iterator[tuple[Words, _Names]]:
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
            yield words | said, _Names(self, row, sets)


class _naming:
    """Errors of a row that name it."""

    def __init__(self, row: Row) -> None:
        self._row = row

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyError | ValueError | TypeError | ZeroDivisionError | ExpressionError):
            row, why = self._row, f"unknown {error}" if isinstance(error, KeyError) else error
            raise ExpressionError(
                f"claim_rules.csv, rule {row['rule']!r}, {row['part']} {row['expression']!r}: {why}"
            ) from error


@dataclass
class _Names:
    """What a row's expressions may name: a setting, a fact of the claim, of a card or of a cell (``after.peak``)."""

    rule: _Rule
    row: Row
    sets: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        claim = self.rule.claim
        self.sets = _settings(self.row["cell"], claim) | self.sets
        cells = [part.strip().partition(" ") for part in self.row["cells"].split(";")]
        self._cells = {name: _settings(text, claim) for name, _, text in cells}
        self._facts: dict[str, Fact] = {}

    def fact(self, name: str) -> Fact:
        if name not in self._facts:
            owner, _, fact = name.rpartition(".")
            self._facts[name] = self._fact(owner, fact)
        return self._facts[name]

    def value(self, name: str) -> Any:
        return self.fact(name).value

    def options(self, owner: str = "") -> dict[str, Any]:
        """The options of a cell, in the order of its command."""
        claim, changes = self.rule.claim, self._changes(owner)
        found = {
            "model": claim.models[0] if claim.models else ANY_SIZE,
            "method": claim.method or "lora",
            "batch_size": claim.batch_size or 1,
            "seq_len": None,
        }
        for several, known in ((self.sets, _FIRST), (self.sets, _OPTIONS), (changes, (*_FIRST, *_OPTIONS))):
            found |= {key: value for key, value in several.items() if key in known}
        return {key: value for key, value in found.items() if value is not False}

    def _changes(self, owner: str) -> dict[str, Any]:
        """What a named cell has otherwise than the row's own."""
        if not owner:
            return {}
        if owner not in self._cells:
            raise KeyError(owner)
        own = {key.partition(".")[2]: value for key, value in self.sets.items() if key.startswith(f"{owner}.")}
        return self._cells[owner] | own

    def _fact(self, owner: str, name: str) -> Fact:
        changes, claim = self._changes(owner), self.rule.claim
        run = {"num_gpus": claim.num_gpus or 1, "sharding": "ddp"} | self.sets | changes
        if not owner and name in self.more:
            return Fact(self.more[name])
        if name == "card" or (name in run and name not in _FIRST):
            value = self._card(run).short_name if name == "card" else run[name]
            return Fact(value, f"{value:g}" if isinstance(value, float) else str(value), value, value)
        if name in _OF_CARD:
            return _OF_CARD[name](self._card(run), run["num_gpus"])
        if name in _OF_CLAIM:
            return _OF_CLAIM[name](claim, self.rule.claims)
        options = self.options(owner)
        if name == "model":
            return Fact(options["model"])
        return self.rule.cells.fact(name, options, run | {"gpu": self._card(run, any_card=True)})

    def _card(self, run: dict[str, Any], *, any_card: bool = False) -> Gpu | None:
        claim = self.rule.claim
        if "card" in run:
            return catalog.find_gpu(run["card"])
        assert claim.gpus or any_card, "no card"
        return claim.gpus[0] if claim.gpus else None


def _figure(row: Row, names: _Names) -> Figure:
    """The Figure of a row's expression; without ``low`` and ``high`` its interval is that of its facts."""
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
    return Figure(
        value=value,
        low=value if exact else end("low"),
        high=value if exact else end("high"),
        unit=row["unit"] or names.rule.claim.unit,
        engine=row["engine"] or " and ".join(engines) or "arithmetic",
        arithmetic=written,
        sources=tuple(dict.fromkeys(fact.source for fact in used.values() if fact.source)),
    )


def _fewest(row: Row, names: _Names) -> Figure:
    """The least number of GPUs on which a rank's need fits, written as what is true of it and of one fewer."""
    line, made = expression(row["expression"]), {}

    def of(num_gpus: int) -> _Names:
        if num_gpus not in made:
            made[num_gpus] = _Names(names.rule, row, names.sets | {"num_gpus": num_gpus})
        return made[num_gpus]

    def fewest(mode: Mode) -> float:
        def fits(num_gpus: int) -> bool:
            found = of(num_gpus)
            return line.value(lambda name: getattr(found.fact(name), mode)) <= found.value("usable_of_rank")

        many = next((2**power for power in range(_MOST_GPUS.bit_length()) if fits(2**power)), math.inf)
        if many in (1, math.inf):
            return many
        return bisect_left(range(int(many)), True, lo=int(many) // 2 + 1, key=fits)

    def written(num_gpus: int, sign: str) -> tuple[str, Source]:
        found = of(num_gpus)
        need = line.written(found.value, lambda name: found.fact(name).text)
        need = f"({need})" if " " in need else need
        source = found.fact("rank").source
        assert source is not None
        return f"{need} {sign} {found.fact('usable_of_rank').text}", source

    least = fewest("value")
    if least == math.inf:
        return Figure(value=least, low=least, high=least, unit="GPUs", engine="arithmetic", arithmetic="1e999")
    many = int(least)
    text, *sources = written(many, "<=")
    if many > 1:
        fewer, source = written(many - 1, ">")
        text, sources = f"{text}) * ({fewer}", [*sources, source]
    arithmetic = f"{many} * ({text})"
    return Figure(
        value=evaluate(arithmetic),
        low=fewest("low"),
        high=fewest("high"),
        unit="GPUs",
        engine="arithmetic",
        arithmetic=arithmetic,
        sources=tuple(sources),
    )


def _filled(note: str, names: _Names) -> str:
    """A note with its ``{expression:format}`` filled in."""

    def value(found: re.Match[str]) -> str:
        return format(expression(found[1]).value(names.value), found[2] or "")

    return re.sub(r"\{([^{}:]+)(?::([^{}]*))?\}", value, note)


def _settings(text: str, claim: Claim) -> dict[str, Any]:
    """``name=value`` pairs; a name alone is the claim's own value."""
    own = {"lora_r": claim.lora_r or LORA_R, "quant": claim.quant}
    pairs = (pair.partition("=") for pair in text.split())
    return {name: _setting(value) if sign else own[name] for name, sign, value in pairs}


def _setting(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _axis(name: str, claim: Claim) -> list[tuple[Words, dict[str, Any]]]:
    """What an axis may be: (condition → words, settings); what the claim states is kept."""
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
    values = [(_words(row), _settings(row["sets"], claim)) for row in stated or found]
    if name == "checkpointing" and claim.gradient_checkpointing is not None:
        values = [one for one in values if one[1][_FIRST[-1]] == claim.gradient_checkpointing]
    return values


def _words(row: Row) -> Words:
    keys = row["condition"].split(", ")
    says = row["says"].split(", ") if len(keys) > 1 else [row["says"]]
    return {key: text for key, text in zip(keys, says, strict=True) if text}


def _providers(claim: Claim) -> list[tuple[Words, dict[str, Any]]]:
    """Who rents the claim's card and an H100 on the same terms: the prices of both."""
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


def _usable(gpu: Gpu, num_gpus: int) -> Fact:
    """The usable bytes of a card."""
    value = usable_bytes(gpu, device_is_known=False, num_gpus=num_gpus)
    nccl = f" - {NCCL_ALLOWANCE_BYTES:_}" if num_gpus > 1 else ""
    return Fact(value, f"({gpu.total_bytes:_} - {CONTEXT_ALLOWANCE_BYTES:_}{nccl})", value, value)


def _number(value: float, text: str) -> Fact:
    return Fact(value, text, value, value)


def _rate_of(claim: Claim, claims: Sequence[Claim]) -> Fact:
    """The rate that the same guide prints for the same run."""

    def run(one: Claim) -> tuple[Any, ...]:
        return one.source, one.params_b, one.method, one.gpus, one.num_gpus, one.batch_size

    for other in claims:
        if other.quantity == "throughput" and other.low is not None and run(other) == run(claim):
            return _number(other.low, f"{other.low:g}")
    raise ExpressionError(f"claim {claim.id} has no rate to multiply with")


def _price(claim: Claim) -> catalog.Price:
    prices = (one for one in catalog.list_prices(claim.gpus[0].short_name) if one.terms == "on-demand")
    return min(prices, key=lambda one: one.usd_per_gpu_hour)


def _flops(claim: Claim) -> int:
    """Operations per parameter and token: forward 2, backward through frozen weights 2, forward again 2."""
    return 6 if claim.gradient_checkpointing else 4


_OF_CARD: dict[str, Callable[[Any, int], Fact]] = {
    "usable": lambda gpu, num_gpus: _usable(gpu, 1),
    "usable_of_rank": _usable,
    "peak_rate": lambda gpu, num_gpus: _number(gpu.bf16_dense_tflops * 1e12, f"{gpu.bf16_dense_tflops:g}e12"),
    "tflops": lambda gpu, num_gpus: _number(gpu.bf16_dense_tflops, f"{gpu.bf16_dense_tflops:g}"),
    "bandwidth": lambda gpu, num_gpus: _number(gpu.bandwidth_gb_s, f"{gpu.bandwidth_gb_s:g}"),
}
_OF_CLAIM: dict[str, Callable[[Claim, Sequence[Claim]], Fact]] = {
    "claimed": lambda claim, claims: _number((claim.params_b or 0) * 1e9, f"{claim.params_b:g}e9"),
    "rate": _rate_of,
    "flops": lambda claim, claims: _number(_flops(claim), str(_flops(claim))),
    "price": lambda claim, claims: _number(_price(claim).usd_per_gpu_hour, f"{_price(claim).usd_per_gpu_hour:g}"),
    "provider": lambda claim, claims: Fact(_price(claim).provider),
    # how far an estimate may be off of a card of which no two sources publish a step
    "unseen_factor": lambda claim, claims: Fact(math.exp(shipped_speed().half_widths["card never seen"])),
}
