"""One process's log with all that is asked of it: its blocks' lives, its phases, who held what, which line asked.

In: a RawRank. Out: an AnalyzedRank, or None where it left no history; moments of it, and the micro-steps of its steps.
Judges nothing: ranks.py, rollout.py, growth.py, timeline.py, probe.py and next_steps.py ask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vramprobe.log.blocks import Lives, lives_of
from vramprobe.log.log import Log
from vramprobe.profile.causes import Owners, causes_seen_from, composition, owners_of
from vramprobe.profile.history_log import HistoryLog, read_history_log
from vramprobe.profile.phase_spans import PhaseSpan, spans_of
from vramprobe.profile.places import Location, Places
from vramprobe.profile.raw import RawHistory, RawPhase, RawProcess, RawRank
from vramprobe.records.profile_memory import Live

_MOST_STREAMS = 128  # a log's are int8
_OF_STEP = ("backward", "optimizer_step", "zero_grad")


@dataclass(frozen=True)
class AnalyzedRank:
    """``places``: in words, of the log's lines."""

    history: RawHistory
    history_log: HistoryLog
    lives: Lives
    spans: list[PhaseSpan]
    owners: Owners
    places: Places

    @property
    def log(self) -> Log:
        """All requests and frees of the process."""
        return self.history_log.log

    @cached_property
    def gives_back(self) -> np.ndarray:
        """Mask of the log's events at which the allocator has a block back."""
        return self.log.gives_back

    def allocator_events(self, start: int, stop: int) -> list[int | None]:
        """Events ``start`` to ``stop`` as the allocator sees them: the block of a request, ``~`` of that where it
        has the block back, 0 where its cache is emptied, None for a free while another stream uses the block.
        """
        blocks, sizes, gives_back = (one[start:stop] for one in (self.log.blocks, self.log.size_bytes, self.gives_back))
        events: list[int | None] = np.where(gives_back, ~blocks, blocks).tolist()
        for at in np.flatnonzero((sizes < 0) & ~gives_back).tolist():
            events[at] = None
        return events

    @cached_property
    def lines(self) -> np.ndarray:
        """The number of each block's place; -1 for none."""
        return self.history_log.lines[self.lives.starts]

    @cached_property
    def streams(self) -> np.ndarray:
        """The stream of each block."""
        return self.log.each_stream()[self.lives.starts].astype(np.int64)

    @cached_property
    def tokens(self) -> np.ndarray:
        """A number for each block's line and stream together."""
        return self.lines.astype(np.int64) * _MOST_STREAMS + self.streams

    def line_of(self, token: int) -> Location:
        """The place that requests with this token are made at."""
        return self.places.of(token // _MOST_STREAMS)


@dataclass(frozen=True)
class MemoryPoint:
    """Live blocks once ``num_events`` have happened, each with its cause (a position in causes.CAUSES)."""

    span: PhaseSpan
    num_events: int
    causes: np.ndarray
    alive: np.ndarray


def see(raw: RawRank, folder: str | None = None) -> AnalyzedRank | None:
    """The history in a form for questions; None where the process left none, or an empty one.

    ``folder``: the one that the command was started in.
    """
    history_log = read_history_log(raw)
    if history_log is None or raw.history is None:
        return None
    lives = lives_of(history_log.log.size_bytes, history_log.log.blocks)
    spans = spans_of(history_log, lives, raw.phases, raw.history)
    places = Places(raw.history.stacks, homes_of(raw.process, folder))
    owners = owners_of(history_log, lives, spans, raw.history.held)
    return AnalyzedRank(raw.history, history_log, lives, spans, owners, places)


def homes_of(process: RawProcess, folder: str | None) -> list[str]:
    """The folders that the program's own files are named from: its script's, and the one that it was started in."""
    script = process.argv[0] if process.argv else ""
    return [home for home in (script.rpartition("/")[0] if script.startswith("/") else "", folder) if home]


def moment_of_peak(seen: AnalyzedRank) -> MemoryPoint | None:
    """The highest moment of the phase with the highest allocated bytes; of several, one whose gradients were seen.

    Where no such phase was traced, of the traced one with the highest.
    """
    if not seen.spans:
        return None
    span = max(
        seen.spans,
        key=lambda one: (one.phase.allocated_peak_bytes, one.phase.step in seen.owners.gradients_in, -one.start),
    )
    return moment_after(seen, span, seen.lives.highest(span.moments))


def moment_after(seen: AnalyzedRank, span: PhaseSpan, num_events: int) -> MemoryPoint:
    """Return the live blocks once so many events have happened, seen from the step of ``span``."""
    causes = causes_seen_from(seen.lives, seen.spans, seen.owners, span)
    return MemoryPoint(span, num_events, causes, seen.lives.alive_after(num_events))


def alive_at_oom(seen: AnalyzedRank, phase_name: str | None, step: int | None) -> Live | None:
    """Return the live tensors at the last OOM of the history, by cause; None where it has none.

    Its phase did not end: of a forward, what it made and still held counts as saved.
    """
    if not seen.history_log.failed:
        return None
    last = seen.history_log.failed[-1]
    before = [one for one in seen.spans if one.stop <= last.num_events and one.phase.end_ns // 1000 <= last.time_us]
    begun = RawPhase(
        name=phase_name or "other",
        step=step,
        start_ns=before[-1].phase.end_ns if before else 0,
        end_ns=last.time_us * 1000,
        allocated_end_bytes=0,
        allocated_peak_bytes=0,
    )
    span = PhaseSpan(begun, before[-1].stop if before else seen.history_log.num_before, last.num_events, None)
    causes = causes_seen_from(seen.lives, [*before, span], seen.owners, span)
    return composition(seen.lives, causes, seen.lives.alive_after(last.num_events))


@dataclass(frozen=True, eq=False)
class MicroStep:
    """One micro-step of ``step``, 1-based: events ``start`` to ``stop`` of the log; blocks by their position.

    A block is given back where the allocator has it: later than its free where another stream still used it.
    """

    seen: AnalyzedRank
    step: int
    start: int
    stop: int

    @cached_property
    def requested(self) -> np.ndarray:
        """Its blocks, in the order of their requests."""
        return np.arange(*np.searchsorted(self.seen.lives.starts, (self.start, self.stop)))

    @cached_property
    def freed(self) -> np.ndarray:
        """The blocks that it gives back, in order."""
        own = slice(self.start, self.stop)
        return self.seen.log.blocks[own][self.seen.gives_back[own]] - 1

    @cached_property
    def sizes(self) -> np.ndarray:
        """Bytes of its requests."""
        return self.seen.lives.sizes[self.requested]

    @cached_property
    def tokens(self) -> np.ndarray:
        """Return the token of each request's origin."""
        return self.seen.tokens[self.requested]


def micro_steps_of(seen: AnalyzedRank, steps: Sequence[int], num_micro_steps: int) -> dict[int, list[MicroStep]]:
    """The micro-steps of each of these steps that the history has whole.

    One ends with its backward, the last with the optimizer's step or zero_grad: what then comes is the next batch's.
    """
    micro_stops = {
        (one.phase.step, one.phase.micro_step): one.stop for one in seen.spans if one.phase.name == "backward"
    }
    stops = {one.phase.step: one.stop for one in seen.spans if one.phase.name in _OF_STEP}
    begin = next((at for at, one in enumerate(seen.spans) if one.phase.step == 1), 0)
    stops |= {0: seen.spans[begin - 1].stop} if begin else {}  # of what was before the steps
    found = {}
    for step in steps:
        within = [micro_stops.get((step, number)) for number in range(1, num_micro_steps)]
        cuts = [cut for cut in (stops.get(step - 1), *within, stops.get(step)) if cut is not None]
        if len(cuts) == num_micro_steps + 1:
            found[step] = [MicroStep(seen, step, *cuts[number : number + 2]) for number in range(num_micro_steps)]
    return found
