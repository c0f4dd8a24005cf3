"""Assign a cause to each block: weights, gradients, optimizer state by what was held; the rest by when it was made and
freed.

In: Lives, the spans of the phases and what the hook saw held. Out: a cause for each block, as seen from one phase, and
a Live that adds up to the byte. The causes are those of a cell's record (log/trace.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vramprobe.log.log import CAUSES as CELL_CAUSES
from vramprobe.profile.lifetimes import Lives, PhaseSpan
from vramprobe.profile.raw import RawHeld
from vramprobe.records.profile import Live

#: Those of a cell, an inference engine's, and the copies of the weights that a framework's optimizer steps.
CAUSES = (*CELL_CAUSES, "engine_weights", "kv_cache", "master_weights")
_HELD = (
    "engine_weights",
    "kv_cache",
    "weights",
    "gradients",
    "master_weights",
    "optimizer_state",
)  # the engine's model runs forwards too
_NONE = -1


@dataclass(frozen=True)
class Owners:
    """Per block: the position in CAUSES of who holds it, -1 for nobody; and the name of the parameter in it."""

    causes: np.ndarray  # int8
    names: dict[int, str]
    #: Steps (of RawPhase) in which gradients were seen held.
    gradients_in: frozenset[int | None]


def owners_of(lives: Lives, spans: Sequence[PhaseSpan], held: Sequence[RawHeld]) -> Owners:
    """A block is a holding's if one of the holding's storages lies in it while both are alive; the first of _HELD."""
    causes = np.full(len(lives.addresses), _NONE, dtype=np.int8)
    names: dict[int, str] = {}
    steps = set()
    for one in sorted(held, key=lambda one: (_HELD.index(one.cause) if one.cause in _HELD else 9, one.time_ns)):
        if one.cause not in _HELD:
            continue
        moment, step = _moment(lives, spans, one.time_ns)
        if one.cause == "gradients":
            steps.add(step)
        alive = np.flatnonzero(lives.alive_after(moment))
        alive = alive[np.argsort(lives.addresses[alive])]
        found = _blocks_with(lives, alive, np.array(sorted(one.storages), dtype=np.uint64))
        for address, block in zip(sorted(one.storages), found.tolist(), strict=True):
            if block == _NONE:
                continue
            if causes[block] == _NONE:
                causes[block] = CAUSES.index(one.cause)
            if address in one.names:
                names.setdefault(block, one.names[address])
    return Owners(causes, names, frozenset(steps))


def _moment(lives: Lives, spans: Sequence[PhaseSpan], time_ns: int) -> tuple[int, int | None]:
    """Return the number of events before a time, and the step; within its phase, whose ends are known better than any
    time.
    """
    count = int(np.searchsorted(lives.times_us, time_ns // 1000, side="right"))
    for span in spans:
        if span.phase.start_ns <= time_ns <= span.phase.end_ns:
            return min(max(count, span.start), span.stop), span.phase.step
    return max(count, lives.num_before), None


def _blocks_with(lives: Lives, alive: np.ndarray, addresses: np.ndarray) -> np.ndarray:
    """The block that each address lies in, among ``alive`` (by address); -1 where there is none."""
    if not len(alive) or not len(addresses):
        return np.full(len(addresses), _NONE)
    at = np.searchsorted(lives.addresses[alive], addresses, side="right") - 1
    found = alive[np.maximum(at, 0)]
    inside = (at >= 0) & (addresses < lives.addresses[found] + lives.sizes[found].astype(np.uint64))
    return np.where(inside, found, _NONE)


def causes_seen_from(lives: Lives, spans: Sequence[PhaseSpan], owners: Owners, span: PhaseSpan) -> np.ndarray:
    """The cause of each block, a position in CAUSES, as seen from the step of ``span``.

    What nobody holds: made in one of the step's forwards and alive at its end, it is a saved activation; older than the
    first of them (a batch, a workspace), other; else temporary. What outlives the next step, too, is neither saved nor
    temporary but other (DDP's buckets, a library's workspace), and so is what outlives a phase outside the steps (load,
    evaluation).
    """
    of_step = [one for one in spans if span.phase.step is not None and one.phase.step == span.phase.step] or [span]
    start = next((one for one in of_step if one.phase.name == "forward"), of_step[0]).start
    causes = np.full(len(lives.addresses), CAUSES.index("temporaries"), dtype=np.int8)
    for one in of_step:
        if one.phase.name == "forward":
            saved = (lives.starts >= one.start) & (lives.starts < one.stop) & (lives.ends >= one.stop)
            causes[saved] = CAUSES.index("saved_activations")
    causes[lives.starts < start] = CAUSES.index("other")
    of_next = [one.stop for one in spans if span.phase.step is not None and one.phase.step == span.phase.step + 1]
    for stop in [span.stop] if span.phase.step is None else of_next[-1:]:
        causes[lives.ends >= stop] = CAUSES.index("other")
    return np.where(owners.causes == _NONE, causes, owners.causes)


def composition(lives: Lives, causes: np.ndarray, alive: np.ndarray) -> Live:
    """The bytes of these blocks by cause."""
    parts = {f"{cause}_bytes": int(lives.sizes[alive & (causes == at)].sum()) for at, cause in enumerate(CAUSES)}
    return Live(total_bytes=sum(parts.values()), **parts)
