"""A probed run of a command → its recipe: each request's size as an exact function of rows and length.

In: the raw files of a run whose hook went through shapes of its own batch (hook/probe_batches.py). Out: a
CommandRecipe. One step by shape; requests have common names over all of them, and a shape is held out to check.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from vramprobe.allocator.config import parse_alloc_conf
from vramprobe.errors import VramprobeError
from vramprobe.log.reserved import reserve
from vramprobe.log.shapes import Shape, ShapeRules, shape_rules
from vramprobe.profile.causes import CAUSES, causes_seen_from
from vramprobe.profile.probed_log import ONCE, RequestRules, StepEvents, log_of_steps, recorded_log
from vramprobe.profile.ranks import AnalyzedRank, line_said, see
from vramprobe.profile.raw import RawRank, RawRun, read_run
from vramprobe.profile.request_names import in_order
from vramprobe.profile.step_requests import MicroStep, RequestLog, log_of, units_of
from vramprobe.recipe.command import Branch, CommandRecipe, HeldOutShape, Loose, Switch

_FEWEST_SHAPES = 4
_OWN_STEPS = 3  # of the recipe: later ones repeat the last
_AUTOGRAD = "backward, on a thread of autograd that has no Python line"


class NoCommandRecipe(VramprobeError):
    """A run that leaves no recipe; the message says why."""


def command_recipe(folder: Path, command: Sequence[str], gpu: str) -> CommandRecipe:
    """The recipe of the probed run in ``folder``. Raises NoCommandRecipe."""
    run = read_run(folder)
    raw = _highest(run)
    seen = see(raw, (run.launcher or {}).get("folder"))
    if seen is None:
        raise NoCommandRecipe("no allocations were recorded: the program keeps a memory history of its own")
    probed = ProbedSteps(raw, seen)
    emulator = (run.launcher or {}).get("emulator") or {}
    versions = {name: said for name, said in raw.process.versions.items() if said}
    recipe = CommandRecipe(
        command=tuple(command),
        gpu=gpu,
        shape=probed.base,
        is_cut=len({length for _, length in probed.shapes.values()}) > 1,
        micro_steps=probed.micro_steps,
        alloc_conf=seen.history.allocator.get("alloc_conf"),
        stack={"torch": raw.process.torch or "", **versions, "emulator": str(emulator.get("version"))},
        branches=probed.branches(),
        switches=probed.switches(),
        held_out=(),
    )
    return replace(recipe, held_out=tuple(probed.held_out(recipe)))


def _highest(run: RawRun) -> RawRank:
    probed = [one for one in run.ranks if one.probe is not None and one.probe.get("rows")]
    if probed:
        return max(probed, key=lambda one: max(phase.allocated_peak_bytes for phase in one.phases))
    why = next((one.probe["why"] for one in run.ranks if one.probe), None)
    tail = [line for line in (run.launcher or {}).get("tail") or () if line.strip()]
    if why is None and (run.launcher or {}).get("exit_status"):
        why = f"it ended with an error before its steps were done{f': {tail[-1][:200]}' if tail else ''}"
    raise NoCommandRecipe(why or "it ended before its steps were done")


class ProbedSteps:
    """The steps of one process by shape, their requests named alike over all of them."""

    def __init__(self, raw: RawRank, seen: AnalyzedRank) -> None:
        assert raw.probe is not None
        self.raw, self.seen, self.log = raw, seen, log_of(seen)
        self.base: Shape = (raw.probe["rows"], raw.probe["width"])
        self.micro_steps = raw.probe["micro_steps"]
        plays = {line["step"]: line for line in raw.plays}
        if not plays:
            raise NoCommandRecipe("it ended before another shape of its batch was run: give it more steps")
        self.first = min(plays)
        units = units_of(seen, self.log, range(1, max(plays) + 1), self.micro_steps)
        self.units: dict[int, list[MicroStep]] = {
            step: own for step, own in units.items() if step in plays or step < self.first
        }
        self.shapes: dict[int, Shape] = {
            step: (plays[step]["rows"], plays[step]["width"]) if step in plays else self.base for step in self.units
        }
        self.held = {step for step in self.units if step in plays and plays[step]["held_out"]}
        if not {1, 2, 3} <= set(self.units) or len(set(self.shapes.values())) < _FEWEST_SHAPES:
            ran = len(set(self.shapes.values()) - {self.base})
            raise NoCommandRecipe(
                f"it ended after {ran} other shapes of its batch, and {_FEWEST_SHAPES - 1} are needed: give it more "
                "steps, or more rows of data"
            )
        self.own_steps = [step for step in sorted(self.units) if step < self.first][:_OWN_STEPS]
        self.names = _named(self.log, self.units, self.shapes, self.held, self.micro_steps)
        self.rules, self.loose = self._rules()
        self.orders = {
            step: b"".join(unit.tokens.tobytes() for unit in own) for step, own in self.units.items() if step > 1
        }

    def _rules(self) -> tuple[list[Mapping[str, Fraction]], dict[int, Fraction]]:
        """(a rule of each name, of those that follow none the most bytes by token).

        What was made in the first steps alone is taken for constant.
        """
        fitted = [step for step in self.units if step not in self.held]
        shapes = list(dict.fromkeys(self.shapes[step] for step in fitted))
        table = np.full((len(shapes), len(self.names.tokens)), -1, np.int64)
        for step in fitted:
            for unit in self.units[step]:
                table[shapes.index(self.shapes[step]), self.names.of_block[unit.requested]] = unit.sizes
        rules: list[Mapping[str, Fraction]] = [{}] * table.shape[1]
        loose: dict[int, Fraction] = {}
        is_made = table >= 0
        for mask in np.unique(is_made, axis=1).T:
            columns = np.flatnonzero((is_made == mask[:, None]).all(axis=0))
            own = [shape for shape, has in zip(shapes, mask, strict=True) if has]
            if not own:
                continue
            found = shape_rules({shape: table[shapes.index(shape), columns] for shape in own})
            for at, number in zip(columns.tolist(), found.rule_of.tolist(), strict=True):
                if number >= 0:
                    rules[at] = found.coefficients[number]
                elif own == [self.base]:
                    rules[at] = {"1": Fraction(int(table[shapes.index(self.base), at]))}
                else:
                    rules[at] = _by_tokens({one: int(table[shapes.index(one), at]) for one in own})
                    loose[at] = rules[at]["tokens"]
        return rules, loose

    def branches(self) -> tuple[Branch, ...]:
        """One for each order of requests, the command's own first."""
        return tuple(self._branch(order, steps) for order, steps in self._steps_by_order().items())

    def _steps_by_order(self) -> dict[bytes, list[int]]:
        """The steps of each order of requests; the first has the command's own."""
        found: defaultdict[bytes, list[int]] = defaultdict(list)
        for step in [self.own_steps[-1], *(one for one in self.orders if one >= self.first)]:
            found[self.orders[step]].append(step)
        return found

    def _branch(self, order: bytes, steps: Sequence[int]) -> Branch:
        fitted = [step for step in steps if step not in self.held] or list(steps)
        shapes = tuple(dict.fromkeys(self.shapes[step] for step in steps))
        if order == self.orders[self.own_steps[-1]]:
            recipe = recorded_log(self.seen, self.log, self.own_steps, self._names(), self.base)
            used = self.own_steps[-1]
        else:
            used = next((one for one in fitted if self.orders.get(one - 1) == order), fitted[0])
            recipe = log_of_steps(
                self.seen,
                self.log,
                self.units[self.own_steps[0]],
                self.units[self.own_steps[-1]],
                self._events(used),
                self._names(),
            )
        recipe = replace(recipe, stack={"torch": self.raw.process.torch or ""})
        names = np.concatenate([self.names.of_block[unit.requested] for unit in self.units[used]])
        return Branch(
            shapes=shapes,
            recipe=recipe,
            loose=self._loose_of(names.tolist()),
        )

    def _names(self) -> RequestRules:
        return RequestRules(self.names.of_block, self.rules, self.causes)

    @cached_property
    def causes(self) -> np.ndarray:
        """The cause of each block, seen from the step that made it."""
        seen = self.seen
        causes = np.where(seen.owners.causes < 0, CAUSES.index("other"), seen.owners.causes).astype(np.int8)
        begins = [(span, span.start) for span in seen.spans if span.phase.step is not None]
        for (span, start), (_, stop) in pairwise([*begins, (None, seen.lives.num_events)]):
            if span.phase.step in self.units:
                own = (seen.lives.starts >= start) & (seen.lives.starts < stop)
                causes[own] = causes_seen_from(seen.lives, seen.spans, seen.owners, span)[own]
        return causes

    def _events(self, step: int) -> StepEvents:
        return StepEvents(
            self.units[step], self.shapes[step], [one for one in self.seen.spans if one.phase.step == step]
        )

    def _loose_of(self, names: Sequence[int]) -> tuple[Loose, ...]:
        lines: defaultdict[str, list[Fraction]] = defaultdict(list)
        for name in names:
            if name in self.loose:
                lines[self._line(int(self.names.tokens[name]))].append(self.loose[name])
        largest = sorted(lines.items(), key=lambda one: -sum(one[1]))
        return tuple(Loose(line=line, num_requests=len(its), bytes_per_token=float(sum(its))) for line, its in largest)

    def switches(self) -> tuple[Switch, ...]:
        """Find requests that some branches make and others do not; of branches with the same in another order, each."""
        used = [self.units[of[0]] for of in self._steps_by_order().values()]
        has = np.zeros((len(used), len(self.names.tokens)), bool)
        for number, units in enumerate(used):
            for unit in units:
                has[number, self.names.of_block[unit.requested]] = True
        found = []
        for mask in np.unique(has, axis=1).T:
            if mask.any() and not mask.all():
                own = np.flatnonzero((has == mask[:, None]).all(axis=0))
                line = self._line(int(self.names.tokens[own[0]]))
                found.append(Switch(line=line, num_requests=len(own), is_on=tuple(mask.tolist())))
        alike = Counter(row.tobytes() for row in has)
        for number, row in enumerate(has):
            if alike[row.tobytes()] > 1:
                is_on = tuple(other == number for other in range(len(used)))
                found.append(Switch(line="several lines, in another order", num_requests=0, is_on=is_on))
        return tuple(found)

    def _line(self, token: int) -> str:
        place = self.seen.places.of(self.log.stack_of(token))
        return _AUTOGRAD if place.line is None else line_said(place)

    def held_out(self, recipe: CommandRecipe) -> list[HeldOutShape]:
        """Each shape that no rule was made from: the peak of its step, and what the rules give."""
        found = []
        for step in sorted(self.held):
            own = [one for one in self.raw.phases if one.step == step]
            deep = recipe.branch_of(self.shapes[step]).recipe.deep(self.shapes[step])
            if deep.log is None:
                continue
            last = deep.phases[-1].step
            replayed = reserve(deep.phases, deep.log, parse_alloc_conf(recipe.alloc_conf or ""), empties_cache=False)
            found.append(
                HeldOutShape(
                    shape=self.shapes[step],
                    requested_bytes=max(one.requested_peak_bytes or 0 for one in own),
                    predicted_requested_bytes=max(one.allocated_peak_bytes for one in deep.phases if one.step == last),
                    allocated_bytes=max(one.allocated_peak_bytes for one in own),
                    predicted_allocated_bytes=max(one.allocated_peak_bytes for one in replayed if one.step == last),
                )
            )
        return found


def _by_tokens(sizes: Mapping[Shape, int]) -> Mapping[str, Fraction]:
    """The most bytes by token of any shape that ran."""
    return {"tokens": max(Fraction(size, rows * length) for (rows, length), size in sizes.items())}


@dataclass(frozen=True)
class NamedBlocks:
    """``of_block``: the name of each block's request, ONCE for one outside the steps; ``tokens``: of each name."""

    of_block: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True)
class RequestOrder:
    """Units of one micro-step that request in one order; of each request its name, and the bytes by shape."""

    tokens: np.ndarray
    names: np.ndarray
    sizes: Mapping[Shape, np.ndarray]
    rules: ShapeRules

    def at(self, shape: Shape) -> np.ndarray:
        """Bytes of each request, -1 where no rule says."""
        known = self.sizes.get(shape)
        return np.where(self.rules.rule_of < 0, -1, self.rules.sizes(*shape)) if known is None else known


def _named(
    log: RequestLog, units: Mapping[int, list[MicroStep]], shapes: Mapping[int, Shape], held: set[int], micro_steps: int
) -> NamedBlocks:
    """Requests of two orders have one name where their lines come in one order, and the rules of the order with more
    shapes give the other's bytes."""
    of_block, tokens = np.full(len(log.sizes), ONCE), np.zeros(0, np.int64)
    for number in range(micro_steps):
        groups: defaultdict[bytes, list[int]] = defaultdict(list)
        for step, own in units.items():
            groups[own[number].tokens.tobytes()].append(step)
        known: list[RequestOrder] = []
        fitted = {key: [step for step in steps if step not in held] or steps for key, steps in groups.items()}
        for key in sorted(groups, key=lambda key: -len({shapes[step] for step in fitted[key]})):
            sizes = {shapes[step]: units[step][number].sizes for step in fitted[key]}
            its = units[groups[key][0]][number].tokens
            names = max((_matched(one, its, sizes) for one in known), key=_num_named, default=np.full(len(its), -1))
            is_new = names < 0
            names[is_new] = len(tokens) + np.arange(is_new.sum())
            tokens = np.concatenate([tokens, its[is_new]])
            known.append(RequestOrder(its, names, sizes, shape_rules(sizes)))
            for step in groups[key]:
                of_block[units[step][number].requested] = names
    _name_first_batch(log, units, of_block)
    return NamedBlocks(of_block, tokens)


def _matched(one: RequestOrder, tokens: np.ndarray, sizes: Mapping[Shape, np.ndarray]) -> np.ndarray:
    """The names of requests that are also those of ``one``, by line and bytes at all shapes; -1 for the others."""
    theirs = np.stack([one.tokens, *(one.at(shape) for shape in sizes)], axis=1)
    ours = np.stack([tokens, *sizes.values()], axis=1)
    _, keys = np.unique(np.concatenate([theirs, ours]), axis=0, return_inverse=True)
    own, other = in_order(keys.ravel()[: len(theirs)], keys.ravel()[len(theirs) :])
    names = np.full(len(tokens), -1)
    names[other] = one.names[own]
    ends = np.stack([np.append(own, len(one.tokens)), np.append(other, len(tokens))], axis=1)
    for (start, first), (stop, last) in zip([(-1, -1), *ends.tolist()], ends.tolist(), strict=False):
        if np.array_equal(
            one.tokens[start + 1 : stop], tokens[first + 1 : last]
        ):  # as many, of bytes that no rule says
            names[first + 1 : last] = one.names[start + 1 : stop]
    return names


def _num_named(names: np.ndarray) -> int:
    return int((names >= 0).sum())


def _name_first_batch(log: RequestLog, units: Mapping[int, list[MicroStep]], of_block: np.ndarray) -> None:
    """The first batch is there before the first step: what the same line requests again, of the same size, in the
    second step has the name of that."""
    again = {(int(log.tokens[block]), int(log.sizes[block])): int(of_block[block]) for block in units[2][-1].requested}
    for block in range(int(units[1][0].requested[0])):
        of_block[block] = again.get((int(log.tokens[block]), int(log.sizes[block])), ONCE)
