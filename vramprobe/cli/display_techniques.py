"""Print techniques: a line each, and below the list how its numbers were made.

In: Techniques, or a Ranking. Out: text on the terminal (rich), plain lines where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from vramprobe.options import as_typed
from vramprobe.techniques.matrix import matrix, parts
from vramprobe.techniques.registry import FRAMEWORKS, KINDS, Technique, bases, exclusions, remarks_of, techniques
from vramprobe.techniques.savings import Saving, savings
from vramprobe.units import GIB, format_bytes

if TYPE_CHECKING:
    from vramprobe.recommend.ranking import Ranked, Ranking

_NAME_WIDTH = 46
_NOTES = (
    "memory: emulated, allocated peak; step time: predicted, and below 3 % no difference that can be told",
    "how to switch each on in TRL, Axolotl, LLaMA-Factory and torchtune: --json, docs/techniques.md",
)


def as_json(listed: Sequence[Technique]) -> list[dict[str, Any]]:
    """Each with its switches and, where it ran, its saving."""
    found = savings()
    return [
        asdict(one)
        | {name: one.switch(name) for name in FRAMEWORKS}
        | {"saving": _saving_json(found[one.id]) if one.id in found else None}
        for one in listed
    ]


def print_techniques(listed: Sequence[Technique]) -> None:
    """By kind and base: saved and lost of each that ran, the largest saving first; then those without a number."""
    console, found = Console(highlight=False), savings()
    for kind in KINDS:
        of_kind = [one for one in listed if one.kind == kind]
        ran = [one for one in of_kind if one.id in found and found[one.id].saved_bytes is not None]
        for base in dict.fromkeys(one.base for one in ran):
            _print_base(console, kind, base, [one for one in ran if one.base == base], found)
        if others := "; ".join(one.name for one in of_kind if one not in ran):
            console.print(f"{kind}, no number (benchmarks/techniques/techniques.md): {others}", soft_wrap=True)
        if of_kind:
            console.print()
    for note in _NOTES:
        console.print(note, soft_wrap=True)


def _print_base(console: Console, kind: str, base: str, ran: list[Technique], found: dict[str, Saving]) -> None:
    of, peak = bases()[base], found[ran[0].id].base_bytes
    console.print(f"{kind}, beside {of.text}, {of.gpu}: {format_bytes(peak)}", soft_wrap=True)
    console.print(f"  {'technique':<{_NAME_WIDTH}} {'saved':>10}  {'of peak':>7}  {'step':>7}  TRL", soft_wrap=True)
    ordered = sorted(ran, key=lambda one: found[one.id].saved_bytes or 0, reverse=True)
    for one in ordered:
        console.print(_line(one, found[one.id]), soft_wrap=True)
    for remark, names in remarks_of(ordered).items():
        console.print(f"  * {', '.join(names)}: {remark}", soft_wrap=True)


def _line(one: Technique, saving: Saving) -> str:
    share, slower = saving.saved_share, saving.slower_share
    step = f"{slower:+.0%}" if slower is not None else "unknown"
    assert saving.saved_bytes is not None  # it ran
    saved = f"{saving.saved_bytes / GIB:+.2f} GiB"
    name = f"{one.name} *" if one.remark else one.name
    return f"  {name:<{_NAME_WIDTH}} {saved:>10}  {share:>7.1%}  {step:>7}  {one.switch('trl')}".rstrip()


def print_ranking(found: Ranking) -> None:
    """One line for each that saves memory, the one that saves most for each percent of time lost first."""
    console = Console(highlight=False)
    now = f"peak {format_bytes(found.peak_bytes)} allocated, a step {found.seconds:.3g} s"
    console.print(f"{found.gpu}: {now}: predicted, not measured", soft_wrap=True)
    if not found.ranked:
        console.print("no technique that is recorded for this cell saves memory")
    else:
        console.print(
            f"  {'technique':<{_NAME_WIDTH}} {'saved':>11}  {'step':>6}  {'GiB per %':>9}  then", soft_wrap=True
        )
    for one in found.ranked:
        console.print(_ranked_line(one), soft_wrap=True)
    console.print(
        f"{len(found.not_known)} more are not recorded for this cell: --record records those that can be; "
        "`vramprobe techniques` shows what each saved",
        soft_wrap=True,
    )


def matrix_json() -> dict[str, Any]:
    """Parts by two, how many pairs ran or are refused; and every refusal."""
    return {"parts": [asdict(one) for one in matrix()], "exclusions": [asdict(one) for one in exclusions()]}


def print_matrix() -> None:
    """A line for each part, a column for each other, and below what is refused."""
    console, names = Console(highlight=False), parts()
    cells = {frozenset((one.part, one.other)): one for one in matrix()}
    console.print("pairs of techniques that ran together in an emulated run, by the part that each takes")
    console.print(f"{'':18}" + "".join(f"{number:>5}" for number in range(1, len(names) + 1)))
    for number, part in enumerate(names, 1):
        row = ("one" if part == other else cells[frozenset((part, other))].short for other in names)
        console.print(f"{number:>3} {part:<14}" + "".join(f"{one:>5}" for one in row))
    console.print("one: one at a time; no: every pair is refused; ·: none ran, which says nothing of whether it works")
    console.print("refused:")
    for one in exclusions():
        console.print(f"  {', '.join(one.techniques)} with {', '.join(one.others)}: {one.why}", soft_wrap=True)


def _ranked_line(one: Ranked) -> str:
    worth = "free" if one.gib_per_percent is None else f"{one.gib_per_percent:.2f}"
    options = " ".join(as_typed(one.options))
    name = techniques()[one.technique].name
    saved = format_bytes(one.saved_bytes)
    return f"  {name:<{_NAME_WIDTH}} {saved:>11}  {one.slower_share:>+6.1%}  {worth:>9}  {one.verdict}  {options}"


def _saving_json(saving: Saving) -> dict[str, Any]:
    return asdict(saving) | {
        "saved_bytes": saving.saved_bytes,
        "saved_share": saving.saved_share,
        "slower_share": saving.slower_share,
    }
