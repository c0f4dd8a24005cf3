"""Steps of a probed run → a Recipe's phases: load, then steps in the order of one branch.

In: the run's events, the names and rules of its requests. Out: a Recipe whose sizes follow from rows and length. The
own branch is what was recorded; another is its own step, with what the first step makes beside put in. Pure NumPy.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from vramprobe.choices import PhaseName
from vramprobe.log.depth import Growth
from vramprobe.log.log import Log, PhaseMark
from vramprobe.log.pairing import scripts_of
from vramprobe.log.shapes import Shape, ShapeRules
from vramprobe.profile.analyzed_rank import AnalyzedRank, MicroStep
from vramprobe.profile.causes import as_cell
from vramprobe.profile.phase_spans import PhaseSpan
from vramprobe.profile.raw import RawPhase
from vramprobe.profile.steps_by_shape import ONCE, NamedSteps
from vramprobe.recipe.recipe import Recipe

_Anchor = tuple[bool, int]  # whether it is a request, its name
_BEGINNING = (True, -1)
_STEPS_OF_BRANCH = 3
_PHASES: dict[str, PhaseName] = {"forward": "forward", "backward": "backward", "zero_grad": "zero_grad"}


@dataclass(frozen=True)
class StepEvents:
    """A step that ran on a batch of ``shape``, with its phases."""

    units: Sequence[MicroStep]
    shape: Shape
    spans: Sequence[PhaseSpan]


class _LogWriter:
    """Events of a new log, one after the other; blocks are numbered from 1 on."""

    def __init__(self, seen: AnalyzedRank, names: NamedSteps, causes: np.ndarray) -> None:
        self._seen, self._names, self._causes = seen, names, causes
        self._events: list[int] = []  # block, ~block for its free, 0 where the cache is emptied
        self._made: list[int] = [0]  # by number: the position of the run's block that it is like
        self._frees: list[int] = []
        self._marks: list[PhaseMark] = []

    def allocate(self, like: int) -> int:
        """A block like number ``like`` of the run's; -> its own number."""
        self._settle()
        self._made.append(like - 1)
        self._events.append(len(self._made) - 1)
        return len(self._made) - 1

    def free(self, number: int) -> None:
        self._frees.append(number)

    def empty(self) -> None:
        self._settle()
        self._events.append(0)

    def mark(self, name: str, step: int | None, micro_step: int | None) -> None:
        """The phase that ends here."""
        self._settle()
        start = self._marks[-1].events.stop if self._marks else 0
        known: PhaseName = _PHASES.get(name, "load" if step is None else "optimizer_step")
        self._marks.append(PhaseMark(known, step, micro_step, range(start, len(self._events))))

    def _settle(self) -> None:
        """Frees that follow each other stand in order of age (log/pairing.py)."""
        self._events += [~number for number in sorted(self._frees)]
        self._frees.clear()

    def recipe(self, shape: Shape) -> Recipe:
        """Return what was written, as it is on a batch of ``shape``."""
        like, events = np.array(self._made), np.array(self._events, np.int64)
        blocks = np.where(events < 0, ~events, events)
        rules, rule_of_block = self._rules(like)
        every = ShapeRules(rule_of_block, tuple(rules), np.zeros(len(like), np.int64))
        log = Log(
            size_bytes=np.where(events < 0, -1, 1) * every.sizes(*shape)[blocks],
            blocks=blocks,
            causes=as_cell(self._causes[like])[blocks],
            marks=tuple(self._marks),
            streams=self._seen.streams[like].astype(np.int8)[blocks],
        )
        growths = [
            Growth(one.kinds, one.codes, (), np.stack([one.ranks, np.zeros_like(one.ranks), np.zeros_like(one.ranks)]))
            for one in scripts_of([log])[0]
        ]
        return Recipe(
            marks=log.marks,
            growths=tuple(growths),
            rules=ShapeRules(rule_of_block[blocks], tuple(rules), np.zeros(len(events), np.int64)),
            times=0,
            depths=(),
            checked=None,
            facts={},
            owned_bytes={},
            stack={},
        )

    def _rules(self, like: np.ndarray) -> tuple[list[Mapping[str, Fraction]], np.ndarray]:
        """(the rules that occur, the position of each block's among them); block 0 is no block, and has no bytes."""
        known: dict[tuple[tuple[str, Fraction], ...], int] = {(("1", Fraction(0)),): 0}
        rule_of = np.zeros(len(like), np.int32)
        for number, block in enumerate(like.tolist()):
            if number:
                name = int(self._names.of_block[block])
                size = int(self._seen.lives.sizes[block])
                rule = {"1": Fraction(size)} if name == ONCE else self._names.rule_of(name)
                rule_of[number] = known.setdefault(tuple(rule.items()), len(known))
        return [dict(one) for one in known], rule_of


def recorded_log(
    seen: AnalyzedRank, own_steps: Sequence[int], names: NamedSteps, causes: np.ndarray, shape: Shape
) -> Recipe:
    """The run from its beginning to the end of ``own_steps``, as it was recorded on batches of ``shape``.

    ``causes``: of each block, a position in causes.CAUSES.
    """
    writer = _LogWriter(seen, names, causes)
    _copy(writer, seen, own_steps[-1])
    return writer.recipe(shape)


def log_of_steps(
    seen: AnalyzedRank,
    first: Sequence[MicroStep],
    usual: Sequence[MicroStep],
    template: StepEvents,
    names: NamedSteps,
    causes: np.ndarray,
) -> Recipe:
    """Load as it was recorded, then steps like ``template``; in the first of them also what the run's ``first`` step
    requests beside its ``usual`` ones."""
    writer = _LogWriter(seen, names, causes)
    number_of = _copy(writer, seen, 0)
    others = {name for unit in (*usual, *template.units) for name in names.of_block[unit.requested].tolist()}
    beside = [
        _beside(unit, names, others, set(names.of_block[own.requested].tolist()))
        for unit, own in zip(first, template.units, strict=True)
    ]
    first_batch = {int(name): block for block in number_of if (name := names.of_block[block - 1]) != ONCE}
    last = {name: number_of.pop(block) for name, block in first_batch.items()}
    for step in range(1, _STEPS_OF_BRANCH + 1):
        last = _play(writer, seen, names, template, step, last, beside if step == 1 else None, number_of)
        if step == 1:  # the run's own second step and those after free some of it
            later = MicroStep(seen, step + 1, first[-1].stop, usual[-1].stop)
            for block in set((later.freed + 1).tolist()) & set(number_of):
                writer.free(number_of.pop(block))
    return writer.recipe(template.shape)


def _copy(writer: _LogWriter, seen: AnalyzedRank, last_step: int) -> dict[int, int]:
    """Write all phases up to that step, 0 for those before the first; -> the run's blocks by their new number."""
    number_of, start = dict[int, int](), 0
    for span in seen.spans:
        if span.phase.step is not None and span.phase.step > last_step:
            break
        if span.phase.step is None and last_step and start and _steps_are_over(seen, span, last_step):
            break
        _put(writer, seen.allocator_events(start, span.stop), number_of)
        writer.mark(span.phase.name, span.phase.step, span.phase.micro_step)
        start = span.stop
    return number_of


def _steps_are_over(seen: AnalyzedRank, span: PhaseSpan, last_step: int) -> bool:
    return span.start >= max(one.stop for one in seen.spans if one.phase.step == last_step)


def _beside(unit: MicroStep, names: NamedSteps, others: set[int], anchors: set[int]) -> dict[_Anchor, list[int]]:
    """Requests of what is not among ``others``, and frees of it, by the event before them that is among ``anchors``."""
    found: defaultdict[_Anchor, list[int]] = defaultdict(list)
    anchor, own, first = _BEGINNING, set(), int(unit.requested[0]) + 1
    for event in unit.seen.allocator_events(unit.start, unit.stop):
        if not event:
            continue
        block, is_request = max(event, ~event), event > 0
        name = int(names.of_block[block - 1])
        if name in anchors and block >= first:
            anchor = (is_request, name)
        elif (is_request and name not in others) or block in own or (block < first and not is_request):
            own.add(block)
            found[anchor].append(event)
    return found


def _play(
    writer: _LogWriter,
    seen: AnalyzedRank,
    names: NamedSteps,
    template: StepEvents,
    step: int,
    last: dict[int, int],
    beside: Sequence[Mapping[_Anchor, list[int]]] | None,
    number_of: dict[int, int],
) -> dict[int, int]:
    """Write one step; -> by name the blocks of it that the next one frees."""
    own: dict[int, int] = {}
    ends: defaultdict[int, list[RawPhase]] = defaultdict(list)
    for span in template.spans:
        ends[span.stop].append(span.phase)
    first, stop = int(template.units[0].requested[0]) + 1, template.units[-1].stop
    for micro_step, unit in enumerate(template.units):
        more = beside[micro_step] if beside is not None else {}
        _put(writer, more.get(_BEGINNING, ()), number_of)
        for at, event in enumerate(seen.allocator_events(unit.start, unit.stop), unit.start + 1):
            if event == 0:
                writer.empty()
            elif event is not None:
                name = int(names.of_block[max(event, ~event) - 1])
                if event > 0:
                    own[name] = writer.allocate(event)
                    _put(writer, more.get((True, name), ()), number_of)
                elif (number := (own if ~event >= first else last).pop(name, None)) is not None:
                    writer.free(number)
                    _put(writer, more.get((False, name), ()), number_of)
            if at == stop:  # those of the step before that this one did not free under a name of its own
                while last:
                    writer.free(last.popitem()[1])
            for phase in ends[at]:
                writer.mark(phase.name, step, phase.micro_step)
    requested = np.concatenate([unit.requested for unit in template.units])
    kept = set(names.of_block[requested[seen.lives.ends[requested] == seen.lives.num_events]].tolist())
    return {name: number for name, number in own.items() if name not in kept}


def _put(writer: _LogWriter, events: Sequence[int | None], number_of: dict[int, int]) -> None:
    """Write events of the run; ``number_of``: by the number of its block the new one's."""
    for event in events:
        if event == 0:
            writer.empty()
        elif event is not None and event > 0:
            number_of[event] = writer.allocate(event)
        elif event is not None and ~event in number_of:
            writer.free(number_of.pop(~event))
