"""Readings: a claim and the rows of its rule → the figure under each usual set of conditions, and its bounds.

In: data/claim_rules.csv (an expression, and the axes along which it is tried), claim_conditions.csv (what an axis may
be, in words and as settings), claim_names.csv (names that are expressions). A column of the claim closes what it
states. Out: a Reading. What is said of parameters is scaled to the claim's own number, so that 6.74 billion are no
error of 7B.
"""

import ast
import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from vramprobe import catalog
from vramprobe.architecture.expressions import ExpressionError, evaluate, expression
from vramprobe.catalog import Gpu
from vramprobe.catalog.claims import Claim
from vramprobe.catalog.shipped import csv_rows
from vramprobe.literature.figures import Cells, ClaimFigure, NoLaunches, exact
from vramprobe.predict.verdict import usable_bytes
from vramprobe.speed.rates import shipped_counted

Row = dict[str, str]
#: One value of an axis: condition → words, and settings.
_Condition = tuple[dict[str, str], dict[str, Any]]
#: For what is said of all sizes, and the rank of adapters that a claim leaves open.
ANY_SIZE, LORA_R = "llama-3.1-8b", 16
#: Settings that are options of a cell, in the order of a command; others say how it is run, or are numbers themselves.
_OPTIONS = (
    "model", "method", "batch_size", "seq_len", "gradient_checkpointing", "recipe", "optim", "quant", "kbit_prep",
    "lora_r", "lora_targets", "lora_dtype", "attn", "torch_compile",
)  # fmt: skip


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


@dataclass(frozen=True)
class _Names:
    """Names of a row's expressions, for one claim under one set of conditions: a row of claim_names.csv, a setting, a
    number of the claim, of a card, or of a cell (``peak``, or ``after.peak`` of one that the row changes).
    """

    claim: Claim
    claims: Sequence[Claim]
    cells: Cells
    row: Row
    sets: dict[str, Any] = field(default_factory=dict)
    found: dict[str, ClaimFigure] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        return self.figure(name).value

    def figure(self, name: str) -> ClaimFigure:
        """Return the figure of a name. Raises KeyError for an unknown name."""
        if name not in self.found:
            self.found[name] = self._figure(*name.rpartition(".")[::2])
        return self.found[name]

    def filled(self, **more: Any) -> str:
        """Return the row's note with its ``{expression:format}`` filled in; ``more``: further names."""

        def text(found: re.Match[str]) -> str:
            return format(expression(found[1]).value(self.value), found[2] or "")

        self.found.update({name: exact(value) for name, value in more.items()})
        with _naming(self.row):
            return re.sub(r"\{([^{}:]+)(?::([^{}]*))?\}", text, self.row["note"])

    def _figure(self, owner: str, name: str) -> ClaimFigure:
        claim = self.claim
        sets = {"num_gpus": claim.num_gpus or 1, "sharding": "ddp", "batch_size": claim.batch_size or 1}
        sets |= {"model": claim.models[0] if claim.models else ANY_SIZE, "method": claim.method or "lora"}
        sets |= settings(self.row["cell"], claim) | self.sets
        if owner:
            changes = {part.split()[0]: part.strip().partition(" ")[2] for part in self.row["cells"].split(";") if part}
            own = {key.partition(".")[2]: value for key, value in self.sets.items() if key.startswith(f"{owner}.")}
            sets |= settings(changes[owner], claim) | own
        if (line := _expressions().get(name)) is not None:
            found = _figure(line, lambda one: self.figure(f"{owner}.{one}" if owner else one))
            return replace(found, arithmetic=f"({found.arithmetic})")
        if name in sets:
            return exact(sets[name])
        gpu = catalog.find_gpu(sets["card"]) if "card" in sets else claim.gpus[0] if claim.gpus else None
        if (given := _given(name, claim, self.claims, gpu, sets["num_gpus"])) is not None:
            return exact(given)
        options = {key: sets[key] for key in _OPTIONS if sets.get(key) not in (None, False)}
        return self.cells.figure(name, options, sets | {"gpu": gpu})


def _given(name: str, claim: Claim, claims: Sequence[Claim], gpu: Gpu | None, num_gpus: int) -> Any:
    """A number of the claim or of a card; None for another name."""
    match name:
        case "params_b":
            return claim.params_b or 0
        case "flops":  # per parameter and token: forward 2, backward through frozen weights 2, forward again 2
            return 6 if claim.gradient_checkpointing else 4
        case "rate":  # that the same guide prints for the same run
            same = ("source", "params_b", "method", "gpus", "num_gpus", "batch_size")
            runs = (one for one in claims if all(getattr(one, name) == getattr(claim, name) for name in same))
            return next(one.low for one in runs if one.quantity == "throughput")
        case "unseen_factor":  # how far an estimate may be off of a card of which no two sources publish a step
            return math.exp(shipped_counted().half_widths["card never seen"])
    if name not in ("card", "price", "provider", "aside") and name not in Gpu.__dataclass_fields__:
        return None
    if gpu is None:
        raise ExpressionError(f"claim {claim.id} names no GPU")
    match name:
        case "card":
            return gpu.short_name
        case "aside":  # of a rank of several, NCCL's buffers, too
            return (gpu.total_bytes or 0) - usable_bytes(gpu, device_is_known=False, num_gpus=num_gpus)
        case "price" | "provider":
            prices = [one for one in catalog.list_prices(gpu.short_name) if one.terms == "on-demand"]
            cheapest = min(prices, key=lambda one: one.usd_per_gpu_hour)
            return cheapest.usd_per_gpu_hour if name == "price" else cheapest.provider
    return getattr(gpu, name)


def settings(text: str, claim: Claim) -> dict[str, Any]:
    """``name=value`` pairs; a name alone is the claim's own value."""
    own = {"lora_r": claim.lora_r or LORA_R, "quant": claim.quant}
    pairs = (pair.partition("=") for pair in text.split())
    return {name: _setting(value) if sign else own[name] for name, sign, value in pairs}


def _setting(text: str) -> Any:
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return text


def reading_of(claim: Claim, claims: Sequence[Claim], cells: Cells) -> Reading:
    """Interpret the claim. Raises ExpressionError, naming the rule and its row, for a row that is wrong."""
    rows = _grouped("claim_rules.csv", "rule").get(claim.rule)
    if rows is None:
        raise ExpressionError(f"claim {claim.id} has the rule {claim.rule!r}; there is no such row")

    def cases(part: str, axes: str = "axes") -> Iterator[tuple[ClaimCase, _Names]]:
        for row in rows:
            if row["part"] == part and (row[axes] or axes == "axes"):
                yield from _cases(axes, _Names(claim, claims, cells, row))

    def ends(part: str) -> list[tuple[ClaimFigure, str]]:
        found = ((case.figure, names) for case, names in cases(part))
        return [(figure, names.filled(value=figure.value, arithmetic=figure.arithmetic)) for figure, names in found]

    ruled_out = min(ends("ruled out"), key=lambda one: one[0].value, default=None)
    if ruled_out is not None and ruled_out[0].value > 1:
        return Reading(cases=(), ruled_out=ruled_out[0], note=ruled_out[1])
    floor = min(ends("floor"), key=lambda one: one[0].value, default=(None, ""))
    asides = [case.figure.value for case, _ in cases("aside")]
    noted = _Names(claim, claims, cells, next(row for row in rows if row["part"] in ("case", "aside")))
    return Reading(
        cases=tuple(case for case, _ in cases("case")),
        floor=floor[0],
        floor_is=floor[1],
        ceiling=max((figure for figure, _ in ends("ceiling")), key=lambda one: one.value, default=None),
        note=noted.filled(least=min(asides, default=0), most=max(asides, default=0)),
        others=lambda: (case for case, _ in itertools.chain(cases("case", "others"), cases("other"))),
    )


def _cases(axes: str, row_names: _Names) -> Iterator[tuple[ClaimCase, _Names]]:
    """Every set of conditions of a row, the last axis changing first; the words of ``^`` ones stand before all."""
    row, claim = row_names.row, row_names.claim
    order = row[axes].split()
    with _naming(row):
        several = [_axis(name.removeprefix("^"), claim) for name in order]
    said = dict([row["says"].split(": ", 1)]) if row["says"] else {}
    for values in itertools.product(*several):
        named = sorted(zip(order, values, strict=True), key=lambda one: (one[0] == "GPU", not one[0].startswith("^")))
        words = {key: text for _, (found, _) in named for key, text in found.items()}
        names = replace(row_names, sets={key: value for _, found in values for key, value in found.items()}, found={})
        with _naming(row):
            if row["where"] and not expression(row["where"]).value(names.value):
                continue
            try:
                found = _figure(row["expression"], names.figure, row["low"], row["high"])
            except NoLaunches:
                continue
        unit, engine = row["unit"] or claim.unit, row["engine"] or found.engine or "arithmetic"
        yield ClaimCase(words | said, replace(found, unit=unit, engine=engine)), names


@contextlib.contextmanager
def _naming(row: Row) -> Iterator[None]:
    """Name the row in its errors."""
    try:
        yield
    except (KeyError, ValueError, TypeError, ZeroDivisionError, ExpressionError) as error:
        why = f"unknown {error}" if isinstance(error, KeyError) else error
        where = f"claim_rules.csv, rule {row['rule']!r}, {row['part']} {row['expression']!r}"
        raise ExpressionError(f"{where}: {why}") from error


def _figure(line: str, figure_of: Callable[[str], ClaimFigure], low: str = "", high: str = "") -> ClaimFigure:
    """The figure of an expression; without ``low`` and ``high`` its interval is that of its parts."""
    used: dict[str, ClaimFigure] = {}

    def text_of(name: str) -> str:
        used[name] = figure_of(name)
        return used[name].arithmetic

    written = expression(line).written(lambda name: figure_of(name).value, text_of)
    value = evaluate(written)

    def end(mode: str, other: str) -> float:
        def of(name: str) -> Any:
            return value if name == "value" else getattr(figure_of(name), mode)

        return float(expression(other or line).value(of))

    is_exact = not low and all(one.low == one.value == one.high for one in used.values())
    return ClaimFigure(
        value=value,
        low=value if is_exact else end("low", low),
        high=value if is_exact else end("high", high),
        arithmetic=written,
        engine=" and ".join(dict.fromkeys(one.engine for one in used.values() if one.engine)),
        sources=tuple(dict.fromkeys(source for one in used.values() for source in one.sources)),
    )


def _axis(name: str, claim: Claim) -> list[_Condition]:
    """Return the values of an axis; a value that the claim states is kept."""
    match name:
        case "model":
            return [({"model": model}, {"model": model}) for model in claim.models or (ANY_SIZE,)]
        case "GPU":
            several = len(claim.gpus) > 1
            return [({"GPU": gpu.short_name} if several else {}, {"card": gpu.short_name}) for gpu in claim.gpus]
        case "provider":  # who rents out the claim's card and an H100 on the same terms
            old = {(one.provider, one.terms, one.num_gpus): one for one in catalog.list_prices("H100-SXM")}
            both = {
                one.provider: {"price": one.usd_per_gpu_hour, "old.price": other.usd_per_gpu_hour}
                for one in catalog.list_prices(claim.gpus[0].short_name)
                if one.terms != "spot" and (other := old.get((one.provider, one.terms, one.num_gpus))) is not None
            }
            return [({"provider": provider}, prices) for provider, prices in both.items()]
    rows = _grouped("claim_conditions.csv", "axis")[name]
    stated = [row for row in rows if claim.recipe and claim.recipe in row["stated_as"].split("; ")]
    values = [_condition(row, settings(row["sets"], claim)) for row in stated or rows]
    own = {"seq_len": claim.seq_lens, "batch_size": [claim.batch_size]}
    own |= {"gradient_checkpointing": [claim.gradient_checkpointing]}
    (key, *others) = values[0][1] or ("",)
    given = [one for one in own.get(key, ()) if one is not None]
    if others or not given:
        return values
    by_value = {sets[key]: (words, sets) for words, sets in values}
    return [by_value.get(one) or _condition(rows[0], {key: one}) for one in given]


def _condition(row: Row, sets: dict[str, Any]) -> _Condition:
    keys = row["condition"].split(", ")
    says = row["says"].split(", ") if len(keys) > 1 else [row["says"]]
    return {key: text.format(**sets) for key, text in zip(keys, says, strict=True) if text}, sets


@cache
def _grouped(file: str, column: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in csv_rows(file):
        found.setdefault(row[column], []).append(row)
    return found


@cache
def _expressions() -> dict[str, str]:
    return {row["name"]: row["expression"] for row in csv_rows("claim_names.csv")}
