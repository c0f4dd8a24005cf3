"""A probed run of a command → its recipe: each request's size as an exact function of rows and length.

In: the raw files of a run whose hook went through shapes of its own batch (hook/probe_batches.py). Out: a
CommandRecipe. One step by shape; requests have common names over all of them, and a shape is held out to check.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from vramprobe.allocator.config import parse_alloc_conf
from vramprobe.errors import VramprobeError
from vramprobe.log.blocks import NONE
from vramprobe.log.reserved import reserve
from vramprobe.log.shapes import Shape
from vramprobe.profile.analyzed_rank import AnalyzedRank, MicroStep, micro_steps_of, see
from vramprobe.profile.causes import CAUSES, causes_seen_from
from vramprobe.profile.probed_log import StepEvents, log_of_steps, recorded_log
from vramprobe.profile.ranks import line_said
from vramprobe.profile.raw import RawRank, RawRun
from vramprobe.profile.run_files import read_run
from vramprobe.profile.steps_by_shape import ONCE, named_steps
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
        own = [line for line in raw.warnings if "memory history of its own" in line]
        why = own[0] if own else "this second run ended before they were written"
        raise NoCommandRecipe(f"no allocations were recorded: {why}")
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
        self.raw, self.seen = raw, seen
        self.base: Shape = (raw.probe["rows"], raw.probe["width"])
        self.micro_steps = raw.probe["micro_steps"]
        plays = {line["step"]: line for line in raw.plays}
        if not plays:
            raise NoCommandRecipe("it ended before another shape of its batch was run: give it more steps")
        self.first = min(plays)
        units = micro_steps_of(seen, range(1, max(plays) + 1), self.micro_steps)
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
        self.names = named_steps(seen, self.units, self.shapes, self.held, constant_at=self.base)
        self._name_first_batch()
        self.orders = {
            step: b"".join(unit.tokens.tobytes() for unit in own) for step, own in self.units.items() if step > 1
        }

    def _name_first_batch(self) -> None:
        """The first batch is there before the first step: what the same line requests again, of the same size, in the
        second step has the name of that."""
        of_block, tokens, sizes = self.names.of_block, self.seen.tokens, self.seen.lives.sizes
        again = {(int(tokens[at]), int(sizes[at])): int(of_block[at]) for at in self.units[2][-1].requested}
        for block in range(int(self.units[1][0].requested[0])):
            of_block[block] = again.get((int(tokens[block]), int(sizes[block])), ONCE)

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
            recipe = recorded_log(self.seen, self.own_steps, self.names, self.causes, self.base)
            used = self.own_steps[-1]
        else:
            used = next((one for one in fitted if self.orders.get(one - 1) == order), fitted[0])
            recipe = log_of_steps(
                self.seen,
                self.units[self.own_steps[0]],
                self.units[self.own_steps[-1]],
                self._events(used),
                self.names,
                self.causes,
            )
        recipe = replace(recipe, stack={"torch": self.raw.process.torch or ""})
        names = np.concatenate([self.names.of_block[unit.requested] for unit in self.units[used]])
        return Branch(shapes=shapes, recipe=recipe, loose=self._loose_of(names.tolist()))

    @cached_property
    def causes(self) -> np.ndarray:
        """The cause of each block, seen from the step that made it."""
        seen = self.seen
        causes = np.where(seen.owners.causes == NONE, CAUSES.index("other"), seen.owners.causes).astype(np.int8)
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
            if name in self.names.loose:
                lines[self._line(int(self.names.tokens[name]))].append(self.names.loose[name])
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
        place = self.seen.line_of(token)
        return _AUTOGRAD if place.line is None else line_said(place)

    def held_out(self, recipe: CommandRecipe) -> list[HeldOutShape]:
        """Each shape that no rule was made from: the peak of its step, and what the rules give."""
        found = []
        for step in sorted(self.held):
            own = [one for one in self.raw.phases if one.step == step]
            deep = recipe.branch_of(self.shapes[step]).recipe.deep(self.shapes[step])
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
