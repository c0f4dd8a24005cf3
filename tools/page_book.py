"""Pack the book of recipes for the page: the structure of a run once, and per model the sizes alone (page_parts.py).

In: recipes with the options that they answer. Out: gzipped lines of JSON: an index, then a line for each structure,
then one for each recipe. growth.js reads them and answers as predict/recipe_replay.py does from the same recipe.
"""

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np

from vramprobe.catalog import find_gpu
from vramprobe.log.depth import Growth
from vramprobe.log.log import ALL_CAUSES
from vramprobe.log.shapes import RULES, Shape
from vramprobe.recipe.recipe import Recipe
from vramprobe.recipe.shipped import LIKE_ALL
from vramprobe.records.phase_memory import TRAINING_PHASES

#: Of each event: its kind, which pairs frees, and its rule (the position among the recipe's, or bytes without a rule).
_Slot = tuple[int, int, int]
#: Place of a phase among the book's, and the rules of the slots that are new in it.
_Sizes = list[tuple[int, list[Any]]]


@dataclass(frozen=True, kw_only=True)
class PageRecipe:
    """A recipe, and what it answers: a model under ``options``."""

    model: str
    options: dict[str, Any]
    shapes: Sequence[Shape]
    notes: Sequence[str]
    recipe: Recipe


def digest_of(*files: Path) -> str:
    """Return the SHA-256 of files, to tell whether what was made of them is still theirs."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def packed_book(entries: Iterable[PageRecipe], axes: Mapping[str, Sequence[Any]], digest: str = "") -> bytes:
    """Return the book's bytes; the same entries give the same ones.

    ``axes``: the options that can be chosen, with their values, also those that no entry has. ``digest``: of what the
    entries were read from.
    """
    phases: dict[str, int] = {}
    structures: dict[str, int] = {}
    made = []
    for entry in sorted(entries, key=order):
        places, sizes = _parts(entry.recipe, phases)
        structure = _line([[[mark.name, mark.step] for mark in entry.recipe.marks], places])
        made.append((entry, structures.setdefault(structure, len(structures)), sizes))
    groups = _groups(made)
    options = [text for text, _ in Counter(json.dumps(entry.options) for entry, _, _ in made).most_common()]
    index = {
        "digest": digest,
        "workspace_bytes": find_gpu(LIKE_ALL).blas_workspace_bytes,
        "causes": ALL_CAUSES,
        "training": TRAINING_PHASES,
        "features": RULES,
        "axes": axes,
        "options": [json.loads(text) for text in options],
        "counts": [len(phases), len(structures)],
        "entries": [
            [entry.model, options.index(json.dumps(entry.options)), entry.shapes, number] for entry, number, _ in made
        ],
    }
    lines = [_line(index), *(f"[{text},{_line(groups[place][0])}]" for text, place in phases.items()), *structures]
    for entry, _, sizes in made:
        own = [rules[slot] for place, rules in sizes for slot in groups[place][1]]
        lines.append(_line([entry.recipe.times, list(entry.notes), own]))
    return gzip.compress("\n".join(lines).encode(), 9, mtime=0)


def order(entry: PageRecipe) -> tuple[Any, ...]:
    """Return the place of an entry in a book: next to what is most like it."""
    return json.dumps(entry.options), entry.model, tuple(entry.shapes)


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _groups(made: Sequence[tuple[PageRecipe, int, _Sizes]]) -> dict[int, tuple[list[int], list[int]]]:
    """Return by phase: of each new slot the group that it shares its rule with in all recipes, and the groups' first
    slots."""
    by_place: dict[int, list[list[Any]]] = {}
    for _, _, sizes in made:
        for place, rules in sizes:
            by_place.setdefault(place, []).append(rules)
    found = {}
    for place, all_rules in by_place.items():
        numbers: dict[str, int] = {}
        firsts: list[int] = []
        group_of = []
        for slot, rules in enumerate(zip(*all_rules, strict=True)):
            key = _line(rules)
            if key not in numbers:
                numbers[key] = len(firsts)
                firsts.append(slot)
            group_of.append(numbers[key])
        found[place] = group_of, firsts
    return found


def _parts(recipe: Recipe, pool: dict[str, int]) -> tuple[list[int], _Sizes]:
    """Return the places of a recipe's phases in the ``pool`` of all, -1 and below for one that came before in it; and
    the rules of the slots that each phase is the first to have.
    """
    rules, kinds = recipe.rules, recipe.growths[0].kinds
    assert rules is not None
    codes = np.concatenate([growth.codes for growth in recipe.growths])
    beside = np.where(rules.rule_of < 0, rules.fallback, 0)
    slots = list(zip((np.abs(codes) - 1).tolist(), rules.rule_of.tolist(), beside.tolist(), strict=True))
    coder, texts = _Coder(), [_rule(rule) for rule in rules.coefficients]
    first_of_kind: dict[int, int] = {}
    places: list[int] = []
    known: dict[Any, int] = {}
    sizes: _Sizes = []
    start = 0
    for growth in recipe.growths:
        assert growth.ranks is not None, "a recipe pairs all its frees"
        own = slots[start : start + len(growth.codes)]
        start += len(own)
        key = (growth.codes.tobytes(), growth.blocks, growth.ranks.tobytes(), tuple(own))
        if key in known:
            places.append(-1 - known[key])
            continue
        known[key], num_before = len(places), len(coder.slots)
        events = coder.codes(own, growth)
        new = list(coder.slots.items())[num_before:]
        packed = _line(
            [
                growth.blocks,
                events,
                [_runs(row) for row in growth.ranks],
                [number - first_of_kind.setdefault(kind, number) for (kind, _, _), number in new],
                [int(kinds.causes[kind]) for (kind, _, _), _ in new],
                [int(kinds.streams[kind]) for (kind, _, _), _ in new],
            ]
        )
        places.append(pool.setdefault(packed, len(pool)))
        sizes.append((places[-1], [texts[rule] if rule >= 0 else [0, left] for (_, rule, left), _ in new]))
    return places, sizes


class _Coder:
    """Slots in the order of their first event, and events as few numbers.

    -n: n times, the event that followed the last time that the one before it occurred; 1: the first of a new slot; else
    2 and twice the number of other slots since this one's last event, plus 1 for a free.
    """

    def __init__(self) -> None:
        self.slots: dict[_Slot, int] = {}
        self._latest: list[int] = []
        self._following: dict[int, int] = {}

    def codes(self, slots: Sequence[_Slot], growth: Growth) -> list[int]:
        """Return the numbers of a phase's events."""
        found, before = [0], 0
        for slot, sign in zip(slots, np.sign(growth.codes).tolist(), strict=True):
            is_new = slot not in self.slots
            number = self.slots.setdefault(slot, len(self.slots))
            event = sign * (number + 1)
            at = None if is_new else self._latest.index(number)
            if at is not None:
                del self._latest[at]
            self._latest.insert(0, number)
            if self._following.get(before) == event and found[-1] <= 0:
                found[-1] -= 1
            elif self._following.get(before) == event:
                found.append(-1)
            else:
                found.append(1 if at is None else 2 + 2 * at + (sign < 0))
            self._following[before] = event
            before = event
        return found[found[0] == 0 :]


def _runs(row: np.ndarray) -> list[int]:
    """Return a row of mostly zeros as pairs: the zeros before a value, and the value."""
    at = np.flatnonzero(row)
    zeros = np.diff(at, prepend=-1) - 1
    return np.stack([zeros, row[at]], axis=1).ravel().tolist()


def _rule(rule: Any) -> list[Any]:
    """Return a rule as the position of its features in RULES and a whole coefficient of each; last, what the sum is
    divided by, if that is not 1."""
    shared = lcm(*(Fraction(factor).denominator for factor in rule.values()))
    whole = [int(factor * shared) for factor in rule.values()]
    return [RULES.index(tuple(rule)), *whole, *([shared] if shared > 1 else [])]
