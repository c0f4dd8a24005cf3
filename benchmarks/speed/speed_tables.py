"""The tables of both pages of training speed: errors by group, what intervals hold, what was fitted.

In: log errors, log(predicted / published) of tokens per second. Out: Markdown.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.tables import as_markdown
from vramprobe.speed.rates import Condition, SpeedFit


class Grouped(NamedTuple):
    """A step's group, its log error, and whether its interval holds it; None where it has none."""

    group: str
    error: float
    is_inside: bool | None


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def signed(error: float | None) -> str:
    """A log error as a signed share."""
    return "" if error is None else f"{100 * (math.exp(error) - 1):+.1f} %"


def spread(errors: Iterable[float]) -> tuple[int, float, float, float]:
    """(number, median, 90 % below, worst) of |predicted / published - 1|, of log errors."""
    sizes = sorted(abs(math.exp(error) - 1) for error in errors)
    return len(sizes), statistics.median(sizes), sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)], sizes[-1]


def told(errors: Iterable[float]) -> list[str]:
    """Return the number and the spread of the errors in words."""
    count, *sizes = spread(errors)
    return [str(count), *map(percent, sizes)]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(as_markdown(head, "l" + "r" * (len(head) - 1), lines)) + "\n"


def held(inside: Sequence[bool]) -> str:
    """The share that lies in the interval."""
    return percent(sum(inside) / len(inside)) if inside else "-"


def groups_table(name: str, steps: Sequence[Grouped]) -> str:
    """A line for each group, in alphabetical order."""
    lines = []
    for group in sorted({one.group for one in steps}):
        own = [one for one in steps if one.group == group]
        inside = [one.is_inside for one in own if one.is_inside is not None]
        lines.append([group, *told(one.error for one in own), held(inside)])
    return table([name, "steps", "median", "90 % below", "worst", "in the interval"], lines)


def coverage_table(inside: Iterable[tuple[Condition, bool]]) -> str:
    """Tabulate how many steps lie in their interval, by whether the card was seen and by what the interval goes by."""
    found = list(inside)
    kinds: dict[str, list[bool]] = {"all": [is_inside for _, is_inside in found]}
    kinds["card seen"] = [is_inside for condition, is_inside in found if condition != "card never seen"]
    for name in ("usual", "short steps", "card never seen"):
        kinds[name] = [is_inside for condition, is_inside in found if condition == name]
    lines = [[name, str(len(own)), held(own)] for name, own in kinds.items() if own]
    return table(["steps", "number", "in the interval"], lines)


def rates_table(fit: SpeedFit, expected: Mapping[str, tuple[float, float]]) -> str:
    """Each rate beside what was expected of it, and the half-widths."""
    values = fit.rates.model_dump()
    lines = [[name, f"{values[name]:g}", f"{value:g}"] for name, (value, _) in expected.items()]
    lines += [[f"half-width, {name}", f"× or ÷ {math.exp(width):.2f}", "-"] for name, width in fit.half_widths.items()]
    return table(["rate", "value", "expected"], lines)
