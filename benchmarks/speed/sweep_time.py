"""Where a sweep's time went: ``python benchmarks/speed/sweep_time.py RESULTS`` prints a row per journal.

In: the records of sweeps that ran one cell after the other. Out: attempts per minute and shares of the wall time: load,
the first step (warm-up), the other steps, attempts that did not end well, and the rest, which is the instrument's
(processes, contexts, traces, records). The wall runs from the first attempt's start to the last one's end; where
nothing ran for over a minute the sweep had stopped, and that time is nobody's. Loading the libraries is before it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from vramprobe.records import store
from vramprobe.records.record import RunRecord

#: No attempt for so long, and the sweep had been stopped.
PAUSE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class SweepTime:
    """Seconds of one sweep by cause; they add up to ``wall_seconds``."""

    num_attempts: int
    wall_seconds: float
    load_seconds: float
    warm_up_seconds: float | None  # null where the records are older than the field; then it is among the steps
    step_seconds: float  # traced after the first, under the allocator's history, timed
    failed_seconds: float  # whole attempts without a full run: out of memory, errors, interrupted

    @property
    def overhead_seconds(self) -> float:
        """What is nobody's load and nobody's step."""
        known = self.load_seconds + (self.warm_up_seconds or 0.0) + self.step_seconds + self.failed_seconds
        return self.wall_seconds - known

    def row(self) -> list[str]:
        """Attempts, minutes, attempts per minute, and shares in percent."""
        minutes = self.wall_seconds / 60
        parts = (self.load_seconds, self.warm_up_seconds, self.step_seconds, self.failed_seconds, self.overhead_seconds)
        shares = ["–" if part is None else f"{100 * part / self.wall_seconds:.0f} %" for part in parts]
        return [str(self.num_attempts), f"{minutes:.1f}", f"{self.num_attempts / minutes:.1f}", *shares]


HEADINGS = ("attempts", "minutes", "a minute", "load", "first step", "other steps", "failed", "overhead")


def sweep_time(records: Iterable[RunRecord]) -> SweepTime | None:
    """The time of one journal's attempts; None where none was run."""
    attempts = [record for record in records if record.timing]
    if not attempts:
        return None
    spans = sorted((start := _start(record), start + record.timing.total_seconds) for record in attempts)
    pauses = [later[0] - earlier[1] for earlier, later in pairwise(spans) if later[0] - earlier[1] > PAUSE_SECONDS]
    whole = [record.timing for record in attempts if record.timing.traced_seconds is not None]
    first = [timing.first_step_seconds for timing in whole]
    warm_up = sum(first) if None not in first else None
    steps = sum(timing.traced_seconds + (timing.history_seconds or 0.0) + sum(timing.step_seconds) for timing in whole)
    return SweepTime(
        num_attempts=len(attempts),
        wall_seconds=max(end for _, end in spans) - spans[0][0] - sum(pauses),
        load_seconds=sum(timing.load_seconds or 0.0 for timing in whole),
        warm_up_seconds=warm_up,
        step_seconds=steps - (warm_up or 0.0),
        failed_seconds=sum(record.timing.total_seconds for record in attempts if record.timing.traced_seconds is None),
    )


def _start(record: RunRecord) -> float:
    return datetime.fromisoformat(record.started_at).timestamp()


def table(journals: Sequence[Path]) -> str:
    """A Markdown table, a row for each journal's sweep."""
    found = [(journal.parent.name, sweep_time(store.read(journal).records)) for journal in journals]
    rows = [[name, *time.row()] for name, time in found if time is not None]
    lines = [["sweep", *HEADINGS], ["---", *["---:"] * len(HEADINGS)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    print(table(store.journals(sys.argv[1])), end="")
