"""Launches of a step, from shallow runs to the whole model and to other batch shapes, by operator and shape.

In: the counts of one step at several depths, and at one depth of several rows and lengths, as emulate/values/count
wrote them. Out: one of the same kind at the cell's own depth: every figure is linear in the number of layers, and the
last depth must agree; and LaunchRules, which give it at any rows and length as log/shapes.py does bytes.
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np

from vramprobe.log.depth import NotLinear, line_of
from vramprobe.log.shapes import Shape, ShapeRules, has_ranks, shape_rules

_SUMS = ("calls", "flops", "read", "written", "launches")
#: Of other operators the bytes alone decide; the shapes of those over all weights differ from depth to depth.
_BY_SHAPE = ("product", "attention")
_EMBEDDING = "aten::embedding"
#: What tells calls of one step apart, beside their shapes; at another batch shape they come in the same order. Not the
#: line: which one a backward's call belongs to is not the same in every run.
_SAME = ("phase", "what", "name", "dtype")
#: Figures that follow from a batch shape. Launches do not: a kernel over more than 2^31 elements is launched in parts,
#: a few in thousands.
_SUMMED = ("flops", "read", "written")
_NUMBER = re.compile(r"\d+")

Launches = dict[str, Any]
#: What of a step's count follows from rows and length: of each row its figures, then the numbers of its shapes.
LaunchRules = ShapeRules


def launches_of(counts: Sequence[Mapping[str, Any]], times: int) -> Launches | None:
    """Return the count at ``times`` periods more than the first depth; None where the depths are not on a line.

    ``counts``: of three depths, then of one that must follow from them; or of the whole model's alone.
    """
    sums = [_sums(count) for count in counts]
    if len(sums) == 1:
        return _count(sums[0])
    keys = {key: None for one in sums for key in one}
    full = [{key: one.get(key, (0,) * len(_SUMS)) for key in keys} for one in sums]
    try:
        if any(_exact(key, _line(full, key, 3)) != _exact(key, full[3][key]) for key in keys):
            return None
        return _count({key: _line(full, key, times) for key in keys})
    except NotLinear:
        return None


def _line(depths: Sequence[Mapping[Any, tuple[int, ...]]], key: Any, times: int) -> tuple[int, ...]:
    figures = list(zip(*(one[key] for one in depths[:3]), strict=True))
    exact = [line_of(values, times) for values in _exact(key, figures)]
    between = [first + (third - first) * times // 2 for first, _, third in figures[len(exact) :]]
    return (*exact, *between)


def _exact(key: tuple[Any, ...], figures: Sequence[Any]) -> Sequence[Any]:
    """Leave out the launches of an optimizer, the last figure: it takes so many weights at a time, and a layer more may
    be no launch more, or two."""
    return figures[:-1] if key[0] == "optimizer" else figures


def _sums(count: Mapping[str, Any]) -> dict[tuple[Any, ...], tuple[int, ...]]:
    """The figures by what they are of: rows without lines, collectives, and the driver's launches."""
    found: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for row in count["rows"]:
        key, own = _key_of(row), tuple(row[name] for name in _SUMS)
        found[key] = tuple(map(sum, zip(found.get(key, (0,) * len(own)), own, strict=True)))
    for kind, ranks, calls, num_bytes in count["moved"]:
        found["moved", kind, ranks] = (calls, num_bytes, 0, 0, 0)
    others = _launches_of_optimizer(found)
    found["driver",] = (count["num_launches"] - others, count["num_claimed"] - others, 0, 0, 0)
    return found


def _launches_of_optimizer(sums: Mapping[tuple[Any, ...], tuple[int, ...]]) -> int:
    return sum(own[-1] for key, own in sums.items() if key[0] == "optimizer")


def _key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what rows are added up by."""
    shapes = row["shapes"] if row["what"] in _BY_SHAPE or row["name"] == _EMBEDDING else ""
    return (
        row["phase"],
        row["what"],
        row["name"],
        shapes,
        row["dtype"],
        row.get("width", 0),
        bool(row.get("is_beside")),
    )


def _count(sums: Mapping[tuple[Any, ...], tuple[int, ...]]) -> Launches:
    rows, moved = [], []
    for key, own in sums.items():
        if key[0] == "moved":
            moved.append([*key[1:], *own[:2]])
        elif key[0] != "driver":
            phase, what, name, shapes, dtype, width, is_beside = key
            words = {"phase": phase, "what": what, "name": name, "shapes": shapes, "dtype": dtype, "width": width}
            rows.append(words | {"is_beside": is_beside} | dict(zip(_SUMS, own, strict=True)))
    launched, claimed, *_ = (one + _launches_of_optimizer(sums) for one in sums["driver",])
    return {"step": 2, "num_launches": launched, "num_claimed": claimed, "unclaimed": {}, "moved": moved, "rows": rows}


def launch_rules(
    launches: Launches, counts: Sequence[Mapping[str, Any]], by_shape: Mapping[Shape, Mapping[str, Any]], times: int
) -> LaunchRules | None:
    """Return how ``launches`` follow from rows and length; None where they do not.

    ``counts``: of the depths that ``launches`` were made from; ``by_shape``: of one depth, the first at the cell's own
    shape. What one call takes at another shape is taken so often as the whole model makes it.
    """
    first = next(iter(by_shape.values()))
    if any(count["moved"] != first["moved"] for count in by_shape.values()):
        return None
    calls = _calls_of(first)
    there = {shape: _calls_there(first, calls, count) for shape, count in by_shape.items()}
    if any(rows is None for rows in there.values()):
        return None
    sizes = {shape: [_numbers(row) for row in rows] for shape, rows in there.items() if rows is not None}
    rules = shape_rules({shape: np.array(list(chain(*rows)), dtype=np.int64) for shape, rows in sizes.items()})
    if rules.num_unexplained:
        return None
    own = next(iter(sizes))
    values, coefficients = list(sizes.values()), iter(rules.rule_of)
    depths = [{_names(row, "shapes"): row["calls"] for row in _calls_of(count)} for count in counts]
    found: dict[tuple[Any, ...], _Rules] = {}
    for at, row in enumerate(calls):
        try:
            times_called = Fraction(_at_depth([one.get(_names(row, "shapes"), 0) for one in depths], times))
        except NotLinear:
            if any(rows[at] != values[0][at] for shape, rows in sizes.items() if not has_ranks([shape, own])):
                return None
            times_called = Fraction(0)  # over all weights at once, whatever the batch
        each = [rules.coefficients[next(coefficients)] for _ in values[0][at]]
        known = found.setdefault(_key_of(row), _Rules())
        known.add(each, values[0][at], times_called / row["calls"])
        if _key_of(row)[3] and known.shapes != each[len(_SUMMED) :]:
            return None  # calls of this row have two shapes elsewhere
    return _as_shape_rules(launches, found, sum(own[2:]))


def launches_at(launches: Launches, rules: LaunchRules, shape: Shape) -> Launches:
    """Return what a step of other rows and length launches."""
    values = iter(rules.sizes(*shape).tolist())
    rows = []
    for row in launches["rows"]:
        figures = {name: next(values) for name in _SUMMED}
        shapes = _NUMBER.sub(lambda number: str(next(values)), row["shapes"])
        rows.append(row | figures | {"shapes": shapes, "width": next(values)})
    return launches | {"rows": rows}


def with_second_micro_step(launches: Launches, gradient_bytes: Sequence[int]) -> Launches:
    """Return what a step of two micro-steps launches: all but the optimizer's twice, and the second's gradients, of
    ``gradient_bytes`` each, are added to those of the first."""
    count, total = len(gradient_bytes), sum(gradient_bytes)
    again = [row for row in launches["rows"] if row["phase"] != "optimizer"]
    rows = [row | {name: 2 * row[name] for name in _SUMS} for row in again]
    add = {"phase": "backward", "what": "other", "name": "aten::add_", "shapes": "", "dtype": "", "width": 0}
    figures = {"calls": count, "flops": 0, "read": 2 * total, "written": total, "launches": count}
    rows += [row for row in launches["rows"] if row["phase"] == "optimizer"] + [add | {"is_beside": False} | figures]
    more = sum(row["launches"] for row in again) + count
    unclaimed = launches["num_launches"] - launches["num_claimed"]
    moved = [[kind, ranks, 2 * calls, 2 * num_bytes] for kind, ranks, calls, num_bytes in launches["moved"]]
    driver = {
        "num_launches": launches["num_launches"] + more + unclaimed,
        "num_claimed": launches["num_claimed"] + more,
    }
    return launches | driver | {"moved": moved, "rows": rows}


def _calls_of(count: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows without lines, one for each of the calls that differ otherwise, in their order."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in count["rows"]:
        known = found.get(key := _names(row, "shapes"))
        if known is None:
            found[key] = {"width": 0} | row
        else:
            known |= {name: known[name] + row[name] for name in _SUMS}
    return list(found.values())


def _names(row: Mapping[str, Any], *more: str) -> tuple[Any, ...]:
    return (*(row[name] for name in (*_SAME, *more)), bool(row.get("is_beside")))


def _calls_there(
    own: Mapping[str, Any], rows: Sequence[dict[str, Any]], other: Mapping[str, Any]
) -> list[dict[str, Any]] | None:
    """Return ``rows``, the :func:`_calls_of` ``own``, with what as many calls take in a count at another shape; None
    where the calls are not the same ones in the same order. Two rows may have the same shapes there, as one of ours may
    not have two.
    """
    if len(own["order"]) != len(other["order"]):
        return None
    place = {_names(row, "shapes"): at for at, row in enumerate(rows)}
    there: dict[int, Mapping[str, Any]] = {}
    for (one, *_), (two, *_) in zip(own["order"], other["order"], strict=True):
        before, now = own["rows"][one], other["rows"][two]
        known = there.setdefault(place[_names(before, "shapes")], now)
        if _names(before) != _names(now) or known["shapes"] != now["shapes"]:
            return None
    if any(_NUMBER.sub("", row["shapes"]) != _NUMBER.sub("", there[at]["shapes"]) for at, row in enumerate(rows)):
        return None
    return [
        row
        | {name: there[at][name] * row["calls"] // there[at]["calls"] for name in _SUMS}
        | {"shapes": there[at]["shapes"], "width": there[at].get("width", 0)}
        for at, row in enumerate(rows)
    ]


def _numbers(row: Mapping[str, Any]) -> list[int]:
    """Return what of a row follows from rows and length: its figures, then the numbers of its shapes and its width."""
    return [*(row[name] for name in _SUMMED), *map(int, _NUMBER.findall(row["shapes"])), row["width"]]


def _at_depth(numbers: Sequence[int], times: int) -> int:
    """Calls of the whole model, from those at its depths. Raises NotLinear."""
    return numbers[0] if len(numbers) == 1 else line_of(tuple(numbers[:3]), times)


class _Rules:
    """Rules of one row of the launches: ``sums`` and ``own``, over all its calls, of the figures and what they are at
    the cell's own shape; ``shapes``, those of the numbers of its shapes. ``rest``: of each figure, what calls over all
    weights at once follow, the rank or nothing, and the factors, of which the whole model has a multiple.
    """

    def __init__(self) -> None:
        self.sums: list[dict[str, Fraction]] = [{} for _ in _SUMMED]
        self.own = [Fraction(0)] * len(_SUMMED)
        self.shapes: list[Mapping[str, Fraction]] = []
        self.rest: list[dict[str, Fraction]] = [{} for _ in _SUMMED]

    def add(self, rules: Sequence[Mapping[str, Fraction]], numbers: Sequence[int], times: Fraction) -> None:
        """Add one kind of call, ``times`` as often as it was counted, by the rules of its :func:`_numbers`."""
        for place, total in enumerate(self.sums):
            for feature, factor in rules[place].items():
                total[feature] = total.get(feature, Fraction(0)) + factor * times
            self.own[place] += numbers[place] * times
            if not times:
                for feature, factor in rules[place].items():
                    self.rest[place][feature] = self.rest[place].get(feature, Fraction(0)) + factor
        self.shapes = self.shapes or list(rules[len(_SUMMED) :])


def _as_shape_rules(launches: Launches, found: Mapping[tuple[Any, ...], _Rules], rank: int) -> LaunchRules:
    """Return the rules of all figures and shapes of ``launches``, which are of ``rank``, in their order; what no call
    gives is constant, or goes with the rank."""
    rules: list[Mapping[str, Fraction]] = []
    for row in launches["rows"]:
        known = found.get(_key_of(row), _Rules())
        for name, own, rule, rest in zip(_SUMMED, known.own, known.sums, known.rest, strict=True):
            left, of_rest = row[name] - own, rest.get("1", Fraction(0)) + rest.get("rank", Fraction(0)) * rank
            shares = rest if of_rest else {"1": Fraction(1)}
            more = {feature: factor * left / (of_rest or 1) for feature, factor in shares.items()}
            rules.append({feature: rule.get(feature, 0) + more.get(feature, 0) for feature in {**rule, **more}})
        if row["shapes"] and known.shapes:
            rules += known.shapes
        else:
            rules += [{"1": Fraction(one)} for one in _numbers(row)[len(_SUMMED) :]]
    kept = [{name: factor for name, factor in rule.items() if factor} for rule in rules]
    unique = {str(sorted(rule.items())): rule for rule in kept}
    places = {text: at for at, text in enumerate(unique)}
    rule_of = np.array([places[str(sorted(rule.items()))] for rule in kept], dtype=np.int32)
    return ShapeRules(rule_of, tuple(unique.values()), np.zeros(len(kept), dtype=np.int64))
