"""The simulated instrument: a workload's phases over the Recorder's events.

In: a workload that announces its phases, on fake tensors. Out: an Observation, with the phases and the ledger of a
measured run. It holds a predictor's numbers and no measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING

from vramprobe.log.log import OwnedBlocks, PhaseMark
from vramprobe.log.trace import Event, Holding
from vramprobe.measure.observation import Observation, composition_at_peak
from vramprobe.records.record import PhaseMemory, PhaseName

if TYPE_CHECKING:  # both load torch, and who reads a history needs none
    from vramprobe.simulate.fake.recorder import Recorder
    from vramprobe.workload.storages import Storages


class SimulatedInstrument:
    """Watches a Recorder; the same words as the instruments that measure."""

    name = "simulated"

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.marks: list[PhaseMark] = []
        self.owned: list[OwnedBlocks] = []
        self._running: tuple[PhaseName, int | None] | None = None

    @contextmanager
    def phase(self, name: PhaseName, step: int | None = None, micro_step: int | None = None) -> Iterator[None]:
        """One phase; recorded also when it raises."""
        self._running, start = (name, step), len(self._recorder.events)
        self._recorder.thread = "autograd" if name == "backward" else "main"
        try:
            yield
        finally:
            self.marks.append(PhaseMark(name, step, micro_step, range(start, len(self._recorder.events))))

    def holds(self, cause: str, storages: Storages, step: int | None = None) -> None:
        """These storages, standing now, have this cause. What the Recorder never saw is not the allocator's."""
        blocks = {
            ptr: size_bytes for key, size_bytes in storages.items() if (ptr := self._recorder.ptr_of(key)) is not None
        }
        self.owned.append(OwnedBlocks(cause, step, len(self._recorder.events) - 1, blocks))

    def last_phase(self) -> tuple[PhaseName, int | None] | None:
        """The phase that runs or ran last, with its step; None before the first."""
        return self._running

    def settle(self) -> None:
        """Between load and training: nothing to do."""

    def finish(self) -> Observation:
        """The phases so far."""
        workspaces = dict.fromkeys(self._recorder.workspaces.values(), self._recorder.blas_workspace_bytes)
        if workspaces:
            self.owned.append(OwnedBlocks("other", None, len(self._recorder.events) - 1, workspaces))
        return observe(self._recorder.events, self.marks, self.owned)


def observe(events: list[Event], marks: list[PhaseMark], owned: list[OwnedBlocks]) -> Observation:
    """Events and phases → the Observation of a run."""
    totals = list(accumulate(event.size_bytes for event in events))
    phases = [_phase_memory(mark, totals) for mark in marks]
    holdings = [(one.step, Holding(one.cause, one.position, frozenset(one.blocks))) for one in owned]
    return Observation(
        phases=phases,
        held_bytes={one.cause: sum(one.blocks.values()) for one in owned},
        at_peak=composition_at_peak(events, totals, phases, [mark.events for mark in marks], holdings),
    )


def _phase_memory(mark: PhaseMark, totals: list[int]) -> PhaseMemory:
    before = totals[mark.events.start - 1] if mark.events.start > 0 else 0
    inside = [before, *totals[mark.events.start : mark.events.stop]]
    return PhaseMemory(
        name=mark.name,
        step=mark.step,
        micro_step=mark.micro_step,
        allocated_end_bytes=inside[-1],
        allocated_peak_bytes=max(inside),
    )
