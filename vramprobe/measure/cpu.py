"""The cpu instrument: the CPU allocator's own events, every allocation and free, with the resident set beside them.

In: a workload that announces its phases. Out: an Observation. Sees what torch's allocator hands out (tensors, operator
temporaries, bitsandbytes' buffers); it does not see what libraries malloc for themselves, which RSS includes.
"""

import gc
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import RecordScope
from torch.autograd.profiler import profile, record_function

from vramprobe.choices import PhaseName
from vramprobe.log.trace import Event, Owned
from vramprobe.measure.observation import Observation, composition_at_peak
from vramprobe.records.phase_memory import PhaseMemory
from vramprobe.workload.storages import Storages

_MARK = "vramprobe"


class CpuInstrument:
    """Watches between ``start`` and ``finish``; must start before the weights are made."""

    name = "cpu"

    def __init__(self) -> None:
        self._process = psutil.Process(os.getpid())
        self._phases: list[tuple[PhaseName, int | None, int | None, int | None]] = []  # name, step, micro step, rss
        self._held: list[tuple[str, int | None, Storages, int]] = []  # cause, step, storages, phases so far
        self._observation: Observation | None = None

    def start(self) -> None:
        """Begin to trace. The profiler keeps no tensor and no shape, so it moves no number.

        torch.profiler itself would record every operator too, at seconds a cell; of the scopes only our marks are kept.
        """
        settings = profile(use_cpu=True, profile_memory=True)
        _prepare_profiler(settings.config(), settings.kineto_activities)
        _enable_profiler(settings.config(), settings.kineto_activities, {RecordScope.USER_SCOPE})

    @contextmanager
    def phase(self, name: PhaseName, step: int | None = None, micro_step: int | None = None) -> Iterator[None]:
        """One phase; recorded also when it raises, so that a failure keeps what was seen before it."""
        number = len(self._phases)
        self._phases.append((name, step, micro_step, None))
        try:
            with record_function(f"{_MARK}:{number}"):
                yield
        finally:
            self._phases[number] = (name, step, micro_step, self._process.memory_info().rss)

    def holds(self, cause: str, storages: Storages, step: int | None = None) -> None:
        """These storages, standing now, have this cause."""
        self._held.append((cause, step, storages, len(self._phases)))

    def last_phase(self) -> tuple[PhaseName, int | None] | None:
        """The phase that runs or ran last, with its step; None before the first."""
        return self._phases[-1][:2] if self._phases else None

    def settle(self) -> None:
        """Between load and training: nothing to do, the CPU allocator keeps no cache."""

    def finish(self) -> Observation:
        """Stop tracing and put the events in order; asked again (a timed step failed), the same answer."""
        if self._observation is None:
            gc.disable()  # hundreds of thousands of small objects at once, none of them garbage
            try:
                self._observation = self._stop()
            finally:
                gc.enable()
        return self._observation

    def _stop(self) -> Observation:
        events, totals, marks = _read_tree(_disable_profiler().experimental_event_tree())
        if totals:  # what this process held before start is not the cell's
            before_bytes = totals[0] - events[0].size_bytes
            totals = [total - before_bytes for total in totals]
        times_ns = [event.time_ns for event in events]
        spans = [_positions(times_ns, marks[number]) for number in range(len(self._phases)) if number in marks]
        phases = [_phase_memory(described, span, totals) for described, span in zip(self._phases, spans, strict=False)]
        holdings = (  # not looked at in a run that was cut short, whose phases may lack their marks
            (step, Owned(cause, spans[phases_so_far - 1].stop - 1, frozenset(storages)))
            for cause, step, storages, phases_so_far in self._held
        )
        return Observation(
            phases=phases,
            held_bytes={cause: sum(storages.values()) for cause, _, storages, _ in self._held},
            at_peak=composition_at_peak(events, totals, phases, spans, holdings),
            inconsistencies=_gaps(events, totals),
        )


def _read_tree(tree: list[Any]) -> tuple[list[Event], list[int], dict[int, tuple[int, int]]]:
    """(allocation events in order, allocated total after each, phase number → (start, end) in ns)."""
    found: list[tuple[Event, int]] = []
    mapped: set[int] = set()  # a checkpoint's files, announced like allocations but with a reserved size
    marks: dict[int, tuple[int, int]] = {}
    todo = tree[::-1]
    while todo:
        node = todo.pop()
        if node.name == "[memory]":
            extra = node.extra_fields
            if extra.total_reserved:
                mapped.add(extra.ptr)
            found.append((Event(extra.ptr, extra.alloc_size, node.start_time_ns), extra.total_allocated))
            continue
        todo.extend(node.children[::-1])
        if node.name.startswith(f"{_MARK}:"):
            marks[int(node.name.split(":")[1])] = (node.start_time_ns, node.start_time_ns + node.duration_time_ns)
    found = [pair for pair in found if not (pair[1] == 0 and pair[0].ptr in mapped)]
    found.sort(key=lambda pair: pair[0].time_ns)
    return [event for event, _ in found], [total for _, total in found], marks


def _positions(times_ns: list[int], mark: tuple[int, int]) -> range:
    """The events inside a phase, by position; empty, but in its place, where nothing was allocated or freed."""
    return range(bisect_left(times_ns, mark[0]), bisect_right(times_ns, mark[1]))


def _phase_memory(described: tuple[Any, ...], span: range, totals: list[int]) -> PhaseMemory:
    name, step, micro_step, rss_bytes = described
    before = totals[span.start - 1] if span.start > 0 else 0
    inside = [before, *totals[span.start : span.stop]]
    return PhaseMemory(
        name=name,
        step=step,
        micro_step=micro_step,
        allocated_end_bytes=inside[-1],
        allocated_peak_bytes=max(inside),
        rss_end_bytes=rss_bytes,
    )


def _gaps(events: list[Event], totals: list[int]) -> list[str]:
    """The allocator's running total must be the sum of its events; a gap means events were lost or out of order."""
    gaps = sum(
        total != before + event.size_bytes for before, event, total in zip([0, *totals], events, totals, strict=False)
    )
    return [f"{gaps} of {len(events)} allocation events do not add up to the allocator's running total"] if gaps else []
