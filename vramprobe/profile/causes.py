"""Assign a cause to each block of a run: weights, gradients, optimizer state by what was held; the rest by its life.

In: a process's log, the spans of its phases and what the hook saw held. Out: a cause for each block, as seen from one
phase, and a Live that adds up to the byte. What nobody holds has the causes of every log (log/blocks.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vramprobe.log.blocks import NONE, Lives, blocks_at, causes_of
from vramprobe.log.log import CAUSES as CELL_CAUSES
from vramprobe.profile.history_log import HistoryLog
from vramprobe.profile.phase_spans import PhaseSpan, events_until
from vramprobe.profile.raw import RawHeld
from vramprobe.records.profile_memory import Live

#: Those of a cell, an inference engine's, and the copies of the weights that a framework's optimizer steps.
CAUSES = (*CELL_CAUSES, "engine_weights", "kv_cache", "master_weights")
#: Those that are held, the first of several first: an engine's model runs forwards, too.
_HELD = ("engine_weights", "kv_cache", "weights", "gradients", "master_weights", "optimizer_state")
#: Those of a cell in the place of the others.
_AS_CELL = {"engine_weights": "weights", "kv_cache": "other", "master_weights": "optimizer_state"}
_POSITION_AS_CELL = np.array([CELL_CAUSES.index(_AS_CELL.get(cause, cause)) for cause in CAUSES], np.int8)


@dataclass(frozen=True)
class Owners:
    """Per block: the position in CAUSES of who holds it, NONE for nobody; and the name of the parameter in it."""

    causes: np.ndarray  # int8
    names: dict[int, str]
    #: Steps (of RawPhase) in which gradients were seen held.
    gradients_in: frozenset[int | None]


def owners_of(history_log: HistoryLog, lives: Lives, spans: Sequence[PhaseSpan], held: Sequence[RawHeld]) -> Owners:
    """A block is a holding's if one of the holding's storages lies in it while both are alive; the first of _HELD."""
    causes = np.full(len(lives.sizes), NONE, dtype=np.int8)
    names: dict[int, str] = {}
    steps = set()
    known = [one for one in held if one.cause in _HELD]
    for one in sorted(known, key=lambda one: (_HELD.index(one.cause), one.time_ns)):
        num_events, step = _moment(history_log, spans, one.time_ns)
        if one.cause == "gradients":
            steps.add(step)
        addresses = sorted(one.storages)
        found = blocks_at(lives, history_log.addresses, np.array(addresses, dtype=np.uint64), num_events)
        for address, block in zip(addresses, found.tolist(), strict=True):
            if block == NONE:
                continue
            if causes[block] == NONE:
                causes[block] = CAUSES.index(one.cause)
            if address in one.names:
                names.setdefault(block, one.names[address])
    return Owners(causes, names, frozenset(steps))


def _moment(history_log: HistoryLog, spans: Sequence[PhaseSpan], time_ns: int) -> tuple[int, int | None]:
    """Return the number of events before a time, and the step; within its phase, whose ends are known better than any
    time.
    """
    count = events_until(history_log, time_ns)
    for span in spans:
        if span.phase.start_ns <= time_ns <= span.phase.end_ns:
            return min(max(count, span.start), span.stop), span.phase.step
    return count, None


def causes_seen_from(lives: Lives, spans: Sequence[PhaseSpan], owners: Owners, span: PhaseSpan) -> np.ndarray:
    """The cause of each block, a position in CAUSES, as seen from the step of ``span``.

    What is older than the step's first forward (a batch, a workspace) is other; so is what outlives the next step
    (DDP's buckets, a library's workspace), and what outlives a phase outside the steps (load, evaluation).
    """
    step = span.phase.step
    of_step = [one for one in spans if step is not None and one.phase.step == step] or [span]
    forwards = [range(one.start, one.stop) for one in of_step if one.phase.name == "forward"]
    of_next = [one.stop for one in spans if step is not None and one.phase.step == step + 1]
    outlived = [span.stop] if step is None else of_next[-1:]
    return causes_of(lives, owners.causes, forwards, forwards[0].start if forwards else of_step[0].start, outlived)


def as_cell(causes: np.ndarray) -> np.ndarray:
    """Positions in CAUSES as positions in those of a cell, which know no engine and no master weights."""
    return _POSITION_AS_CELL[causes]


def composition(lives: Lives, causes: np.ndarray, alive: np.ndarray) -> Live:
    """The bytes of these blocks by cause."""
    parts = {f"{cause}_bytes": int(lives.sizes[alive & (causes == at)].sum()) for at, cause in enumerate(CAUSES)}
    return Live(total_bytes=sum(parts.values()), **parts)
