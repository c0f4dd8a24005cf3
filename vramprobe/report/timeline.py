"""A run → live memory over one of its steps, by cause; timeline_file.py makes a page or a picture of it.

In: a Subject (profile/timeline.py, recorded_timeline.py) and its Log. Out: a frozen Timeline of about MAX_COLUMNS
columns at most; each shows the highest moment of its events, so that no peak is lost to the byte. Needs no
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from vramprobe.log.blocks import lives_of
from vramprobe.log.log import ALL_CAUSES

if TYPE_CHECKING:
    from vramprobe.log.log import Log, PhaseMark

#: More than a screen's width has points, and few enough for a page that any mail program takes.
MAX_COLUMNS = 1500
#: From the bottom: what stands between two steps, then what comes and goes.
STACK = (
    *("weights", "optimizer_state", "batch", "other", "workspaces", "cast_copies", "gradients"),
    *("checkpoint_store", "saved_activations", "logits", "recomputed_layer", "optimizer_temporaries", "temporaries"),
)
#: What a timeline's numbers are, by their word (units.word_for).
SAID = {"emulated": "emulated: the real CUDA software on no GPU", "measured": "measured on the GPU that is named"}
_NUM_LARGEST = 5
_HEADROOM = 1.05
_MIN_SHARE = 0.07  # of the width for each phase, so that an optimizer's step of two events can be seen and named


@dataclass(frozen=True)
class TimelineSpan:
    """One phase: its columns, from ``first`` up to, not including, ``stop``, and its amounts."""

    name: str
    micro_step: int | None
    first: int
    stop: int
    num_events: int
    peak_bytes: int
    end_bytes: int
    reserved_peak_bytes: int | None


@dataclass(frozen=True)
class Alike:
    """Blocks of one size and cause that are alive at one moment."""

    cause: str
    size_bytes: int
    num_blocks: int


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Subject of a timeline. ``word``: the word for its numbers (units.word_for); ``footer``: how they were made.

    ``allocated_bytes``: the peak with the allocator's rounding, where ``tier`` of the timeline is without.
    """

    name: str
    word: str
    footer: str
    step: int | None  # null for what is outside the steps, as load
    tier: str
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None


@dataclass(frozen=True)
class Timeline:
    """One step; arrays have a value, or a row, per column.

    ``live_bytes``: columns × causes, as in ``causes`` (from the bottom of the stack). ``events``: how many of the step
    have happened at the moment that a column shows. ``edges``: where columns begin and end, from 0 to 1, one more than
    columns. ``largest``: the largest blocks alive then. The bytes are of ``subject.tier``: allocated, or requested
    where the allocator's rounding is known apart.
    """

    subject: Subject
    causes: tuple[str, ...]
    live_bytes: np.ndarray
    events: np.ndarray
    num_events: int
    edges: np.ndarray
    phases: tuple[TimelineSpan, ...]
    largest: tuple[tuple[Alike, ...], ...]

    @property
    def total_bytes(self) -> np.ndarray:
        """Live bytes per column."""
        return self.live_bytes.sum(axis=1)

    @property
    def peak_column(self) -> int:
        """The column of the highest moment."""
        return int(self.total_bytes.argmax())

    @property
    def peak_bytes(self) -> int:
        """The highest moment of the step."""
        return int(self.total_bytes.max())

    @property
    def scale_bytes(self) -> float:
        """The end of the scale: a little above the highest amount, reserved memory with it."""
        return _HEADROOM * max([self.peak_bytes, *(phase.reserved_peak_bytes or 0 for phase in self.phases)])

    def boundaries(self) -> list[tuple[int, int]]:
        """Return, for each change of phase, the first column of the next and the bytes alive on both sides."""
        totals = self.total_bytes.tolist()
        return [(phase.stop, min(totals[phase.stop - 1 : phase.stop + 1])) for phase in self.phases[:-1]]

    def phase_at(self, column: int) -> TimelineSpan:
        """The phase that a column belongs to."""
        return next(phase for phase in self.phases if column < phase.stop)


def timeline_over(
    subject: Subject,
    history: Log,
    marks: Sequence[PhaseMark],
    reserved_peaks: Sequence[int | None],
    *,
    has_micro_steps: bool,
    max_columns: int = MAX_COLUMNS,
) -> Timeline:
    """The phases ``marks``, which follow each other, with the highest reserved bytes of each where they are known."""
    history = _with_ordered_frees(history)
    by_cause = [np.cumsum(np.where(history.causes == index, history.size_bytes, 0)) for index in range(len(ALL_CAUSES))]
    totals = np.cumsum(history.size_bytes)
    counts = _columns_of(marks, max_columns)
    moments = [_highest_moments(mark, count, totals) for mark, count in zip(marks, counts, strict=True)]
    at = np.concatenate(moments)
    live = {cause: by_cause[ALL_CAUSES.index(cause)][at] for cause in STACK}
    causes = tuple(cause for cause in STACK if live[cause].any())
    first, stop = marks[0].events.start, marks[-1].events.stop
    return Timeline(
        subject=subject,
        causes=causes,
        live_bytes=np.stack([live[cause] for cause in causes], axis=1),
        events=at + 1 - first,
        num_events=stop - first,
        edges=_edges(_shares(marks), [len(one) for one in moments]),
        phases=_spans(marks, [len(one) for one in moments], totals, reserved_peaks, has_micro_steps=has_micro_steps),
        largest=_largest(history, at),
    )


def _with_ordered_frees(history: Log) -> Log:
    """Frees that follow each other in a phase, the largest first: the libraries free some in a hash table's order."""
    is_free = history.size_bytes < 0
    begins = np.concatenate([[True], is_free[1:] != is_free[:-1]])
    begins[[mark.events.start for mark in history.marks if mark.events]] = True
    index = np.arange(len(history))
    key = np.where(is_free, history.size_bytes * len(ALL_CAUSES) + history.causes, index)
    order = np.lexsort((key, np.cumsum(begins)))
    return replace(
        history, size_bytes=history.size_bytes[order], blocks=history.blocks[order], causes=history.causes[order]
    )


def _moments(mark: PhaseMark) -> range:
    """The positions after which a phase's memory stands: of the event before its first one, and of each of its own."""
    return range(mark.events.start - 1, mark.events.stop)


def _shares(marks: Sequence[PhaseMark]) -> np.ndarray:
    """Each phase's share of the width, by its events, but none too narrow to be seen."""
    sizes = np.array([len(_moments(mark)) for mark in marks], dtype=float)
    shares = np.maximum(sizes / sizes.sum(), min(_MIN_SHARE, 0.5 / len(marks)))
    return shares / shares.sum()


def _columns_of(marks: Sequence[PhaseMark], max_columns: int) -> list[int]:
    """Return the number of columns of each phase: one per point in time, or fewer where there are too many."""
    return [
        min(len(_moments(mark)), max(1, int(max_columns * share)))
        for mark, share in zip(marks, _shares(marks), strict=True)
    ]


def _highest_moments(mark: PhaseMark, num_columns: int, totals: np.ndarray) -> np.ndarray:
    """For each column of a phase, the position at which the most is alive."""
    moments = _moments(mark)
    bounds = np.linspace(moments.start, moments.stop, num_columns + 1).astype(int)
    return np.array([start + int(totals[start:stop].argmax()) for start, stop in pairwise(bounds.tolist())])


def _edges(shares: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    widths = np.concatenate([np.full(count, share / count) for share, count in zip(shares, counts, strict=True)])
    return np.concatenate([[0.0], np.cumsum(widths)])


def _spans(
    marks: Sequence[PhaseMark],
    counts: Sequence[int],
    totals: np.ndarray,
    reserved_peaks: Sequence[int | None],
    *,
    has_micro_steps: bool,
) -> tuple[TimelineSpan, ...]:
    spans, first = [], 0
    for mark, count, reserved in zip(marks, counts, reserved_peaks, strict=True):
        moments = _moments(mark)
        spans.append(
            TimelineSpan(
                name=mark.name,
                micro_step=mark.micro_step if has_micro_steps else None,
                first=first,
                stop=first + count,
                num_events=len(mark.events),
                peak_bytes=int(totals[moments.start : moments.stop].max()),
                end_bytes=int(totals[moments.stop - 1]),
                reserved_peak_bytes=reserved,
            )
        )
        first += count
    return tuple(spans)


def _largest(history: Log, at: np.ndarray) -> tuple[tuple[Alike, ...], ...]:
    """The largest blocks alive at each of these positions, those of one size and cause together."""
    lives = lives_of(history.size_bytes, history.blocks)
    starts, ends = lives.starts, lives.ends
    is_there = (ends > at.min()) & (starts <= at.max())
    starts, ends = starts[is_there], ends[is_there]
    kinds = history.size_bytes[starts] * len(ALL_CAUSES) + history.causes[starts]
    found = []
    for position in at:
        alive, counts = np.unique(kinds[(starts <= position) & (ends > position)], return_counts=True)
        top = zip(alive[: -_NUM_LARGEST - 1 : -1].tolist(), counts[: -_NUM_LARGEST - 1 : -1].tolist(), strict=True)
        found.append(
            tuple(Alike(ALL_CAUSES[kind % len(ALL_CAUSES)], kind // len(ALL_CAUSES), count) for kind, count in top)
        )
    return tuple(found)
