"""The cuda instrument: the caching allocator's counters, reset at each phase, with NVML beside them.

In: a workload that announces its phases. Out: an Observation in three tiers. The counters are exact and cost nothing;
what was alive at the peak comes from one more step under the allocator's own history, which must repeat the peak.
"""

import gc
import os
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import torch

from vramprobe.choices import PhaseName
from vramprobe.errors import VramprobeError
from vramprobe.log.trace import Event, Owned, composition
from vramprobe.measure.ballast import BallastDriver, CudaDriver, hold_the_rest
from vramprobe.measure.nvml import open_device, uuid_of
from vramprobe.measure.observation import Observation
from vramprobe.records.phase_memory import Composition, PhaseMemory
from vramprobe.workload.storages import Storages

_TIERS = {
    "allocated": "allocated_bytes",
    "reserved": "reserved_bytes",
    "requested": "requested_bytes",
    "active": "active_bytes",
}
_SIGNS = {"alloc": 1, "free_completed": -1}  # the history also tells of segments, snapshots and frees requested
#: By then NCCL's watchdog has come round, which it does each tenth of a second.
_WATCHDOG_SECONDS = 0.3
_MAX_HISTORY = 2_000_000  # allocations and frees of one step; a 70B QLoRA step makes well under a million


class CudaInstrument:
    """Watches one of the visible GPUs, between ``start`` and ``finish``; made before the CUDA context exists.

    With ``limit_vram_bytes``, the cell finds what it would find on an empty card of that size (ballast.py).
    """

    name = "cuda"

    def __init__(self, limit_vram_bytes: int | None = None, ordinal: int = 0) -> None:
        self.warnings: list[str] = []  # for the record: what a reader must know about this cell's conditions
        self._limit_bytes, self._ordinal = limit_vram_bytes, ordinal
        self._process = psutil.Process(os.getpid())
        self._phases: list[PhaseMemory] = []
        self._spans_ns: list[tuple[int, int]] = []
        self._running: tuple[PhaseName, int | None] | None = None
        self._held: list[tuple[str, int | None, Storages]] = []
        self.oom_seen: dict[str, int] | None = None  # filled by the allocator at the moment of an OOM
        # Before anything makes a context (importing bitsandbytes does); get_device_properties makes none.
        self._nvml = open_device(uuid_of(torch.cuda.get_device_properties(ordinal), ordinal))
        self._baseline_bytes = self._nvml.used_bytes() if self._nvml else None

    def start(self) -> None:
        """Make the context, hold what the cell must not find, and ask the allocator to tell of any OOM.

        Raises VramprobeError where this GPU cannot be limited to that size.
        """
        if self._ordinal:  # torch's own choice is the first
            torch.cuda.set_device(self._ordinal)
        torch.zeros((), device="cuda")
        if self._limit_bytes is not None:
            torch.cuda.synchronize(self._ordinal)
            self._become_smaller(CudaDriver(), self._limit_bytes)
        torch._C._cuda_attach_out_of_memory_observer(self._note_oom)
        self._reset()

    @contextmanager
    def phase(self, name: PhaseName, step: int | None = None, micro_step: int | None = None) -> Iterator[None]:
        """One phase between two synchronisations, with its own peak."""
        self._running = (name, step)
        self._reset()
        start_ns = time.time_ns()
        yield
        torch.cuda.synchronize(self._ordinal)
        self._phases.append(self._read(name, step, micro_step))
        self._spans_ns.append((start_ns, time.time_ns()))

    def holds(self, cause: str, storages: Storages, step: int | None = None) -> None:
        """These storages, standing now, have this cause."""
        self._held.append((cause, step, storages))

    def last_phase(self) -> tuple[PhaseName, int | None] | None:
        """The phase that runs or ran last, with its step; None before the first."""
        return self._running

    def settle(self) -> None:
        """Between load and training: give back the segments that loading left, so that reserved is training's own."""
        gc.collect()
        torch.cuda.empty_cache()

    def rest(self) -> None:
        """Wait until nothing is freed any more: NCCL's watchdog lets go of what it sent in its own time."""
        torch.cuda.synchronize()
        before_bytes, since = torch.cuda.memory_allocated(), time.monotonic()
        while time.monotonic() - since < _WATCHDOG_SECONDS:
            time.sleep(_WATCHDOG_SECONDS / 10)
            if (now_bytes := torch.cuda.memory_allocated()) != before_bytes:
                before_bytes, since = now_bytes, time.monotonic()

    def finish(self) -> Observation:
        """The counters as they stand; no more phases after this."""
        stats = torch.cuda.memory_stats(self._ordinal)
        return Observation(
            phases=self._phases,
            held_bytes={cause: sum(storages.values()) for cause, _, storages in self._held},
            context_bytes=self._context_bytes(),
            num_alloc_retries=stats.get("num_alloc_retries"),
            inconsistencies=[f"num_ooms is {stats['num_ooms']}"] if stats.get("num_ooms") else [],
        )

    def trace_step(self, step: Callable[[], None], *, is_extra: bool = True) -> Composition | None:
        """Return the composition at the peak of one more steady step, from the allocator's history.

        None where the history does not repeat the counters' peak to the byte. The phases of an extra step are not kept.
        """
        return trace_cards([self], step, is_extra=is_extra)[0]

    def _begin_trace(self) -> tuple[int, dict[str, int]]:
        """(phases so far, the counters), as a step under the history begins."""
        self._spans_ns = []
        return len(self._phases), torch.cuda.memory_stats(self._ordinal)

    def _end_trace(
        self, first_new: int, before: dict[str, int], traces: list[list[dict[str, Any]]], *, is_extra: bool
    ) -> Composition | None:
        events = [
            Event(entry["addr"], _SIGNS[entry["action"]] * entry["size"], entry["time_us"] * 1000)
            for entry in traces[self._ordinal]
            if entry["action"] in _SIGNS
        ]
        alive = None
        # The history holds requested sizes in the releases we know, rounded ones in others: whichever closes is right.
        for tier in ("requested", "allocated"):
            peak_bytes = max(getattr(phase, f"{tier}_peak_bytes") for phase in self._phases[first_new:])
            resident_bytes = before[f"{_TIERS[tier]}.all.current"]
            alive = alive or self._composition(events, resident_bytes, peak_bytes, self._phases[first_new:])
        if is_extra:
            del self._phases[first_new:]
        return alive

    def snapshot_step(self, step: Callable[[], None], path: Path) -> None:
        """One more steady step, nothing of it measured, whose history with Python's stacks goes to ``path``.

        The file is what torch's memory_viz opens. Where that fails, the record has a warning and stays as it is.
        """
        try:
            begin_history(context="all", max_entries=_MAX_HISTORY)
            step()
            torch.cuda.synchronize()
            torch.cuda.memory._dump_snapshot(str(path))
        except Exception as error:
            self.warnings.append(f"no snapshot: {type(error).__name__}: {error}")
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _composition(
        self, events: list[Event], resident_bytes: int, peak_bytes: int, phases: list[PhaseMemory]
    ) -> Composition | None:
        """The history's peak by cause, or None where it is not ``peak_bytes``; what is older than it is resident."""
        totals = list(accumulate((event.size_bytes for event in events), initial=resident_bytes))[1:]
        if not totals or max(totals) != peak_bytes:
            return None
        times_ns = list(accumulate((event.time_ns for event in events), max))  # read on two threads, put in one order
        spans = [range(bisect_left(times_ns, start), bisect_right(times_ns, end)) for start, end in self._spans_ns]
        made_inside = sum(event.size_bytes > 0 for span in spans for event in events[span.start : span.stop])
        if made_inside != sum(event.size_bytes > 0 for event in events):
            return None  # the allocator's clock and ours disagree: between phases garbage may go, but nothing is made
        named = list(zip(phases, spans, strict=True))
        forwards = [span for phase, span in named if phase.name == "forward"]
        after_backward = max(span.stop for phase, span in named if phase.name == "backward") - 1
        held = {cause: storages for cause, _, storages in self._held}
        gradients = Owned("gradients", after_backward, frozenset(held.get("gradients", {})))
        new = composition(events, [gradients], forwards, step_start=0, at=totals.index(peak_bytes))
        resident = {cause: sum(held.get(cause, {}).values()) for cause in ("weights", "optimizer_state", "batch")}
        other_bytes = peak_bytes - new.total_bytes - sum(resident.values())
        if other_bytes < 0:
            return None  # some of what we hold is not in this allocator
        return Composition(
            total_bytes=peak_bytes,
            weights_bytes=resident["weights"],
            gradients_bytes=new.gradients_bytes,
            optimizer_state_bytes=resident["optimizer_state"],
            batch_bytes=resident["batch"],
            saved_activations_bytes=new.saved_activations_bytes,
            temporaries_bytes=new.temporaries_bytes,
            other_bytes=other_bytes,
        )

    def _become_smaller(self, driver: BallastDriver, limit_bytes: int) -> None:
        """Hold the rest of the card. The ballast joins the baseline, so that device use is the cell's own alone."""
        before_bytes = self._nvml.used_bytes() if self._nvml else None
        if before_bytes is None or self._baseline_bytes is None:
            raise VramprobeError("limiting a GPU's memory needs NVML, which tells what the CUDA context takes")
        held = hold_the_rest(driver, limit_bytes=limit_bytes, own_bytes=max(before_bytes - self._baseline_bytes, 0))
        after_bytes = self._nvml.used_bytes()
        moved_bytes = held.held_bytes if after_bytes is None else after_bytes - before_bytes
        self._baseline_bytes += moved_bytes
        self.warnings.append(held.in_words())

    def _reset(self) -> None:
        torch.cuda.synchronize(self._ordinal)
        torch.cuda.reset_peak_memory_stats(self._ordinal)

    def _read(self, name: PhaseName, step: int | None, micro_step: int | None) -> PhaseMemory:
        at_peak = at_end = torch.cuda.memory_stats(self._ordinal)
        if at_end["active_bytes.all.current"] > at_end["allocated_bytes.all.current"]:
            # Freed, and used by another stream: that it has ended is seen as something is asked for, here as anywhere.
            torch.empty(1, device=f"cuda:{self._ordinal}")
            at_end = torch.cuda.memory_stats(self._ordinal)
        values = {
            f"{tier}_{moment}_bytes": stats[f"{key}.all.{counter}"]
            for tier, key in _TIERS.items()
            for moment, stats, counter in (("end", at_end, "current"), ("peak", at_peak, "peak"))
        }
        return PhaseMemory(
            name=name,
            step=step,
            micro_step=micro_step,
            device_used_bytes=self._device_used_bytes(),
            rss_end_bytes=self._process.memory_info().rss,
            **values,
        )

    def _device_used_bytes(self) -> int | None:
        used = self._nvml.used_bytes() if self._nvml else None
        return None if used is None or self._baseline_bytes is None else used - self._baseline_bytes

    def _context_bytes(self) -> int | None:
        """Device − reserved, after full steps: the context has grown by then as kernels were loaded."""
        used = self._device_used_bytes()
        return None if used is None else used - torch.cuda.memory_reserved(self._ordinal)

    def _note_oom(self, device: int, requested: int, device_total: int, device_free: int) -> None:
        if device != self._ordinal:
            return
        self.oom_seen = {
            "requested_bytes": requested,
            "allocated_bytes": torch.cuda.memory_allocated(device),
            "reserved_bytes": torch.cuda.memory_reserved(device),
            "free_bytes": device_free,
        }


def begin_history(*, context: str | None, max_entries: int) -> None:
    """Begin the allocator's history anew. Older torch, as 2.6, has no word for that; it clears what has ended."""
    record = torch.cuda.memory._record_memory_history
    takes_word = "clear_history" in signature(torch.cuda.memory._record_memory_history_impl).parameters
    cleared: dict[str, Any] = {"clear_history": True} if takes_word else {}
    record(enabled="all", context=context, stacks="python", max_entries=max_entries, **cleared)


def trace_cards(
    instruments: Sequence[CudaInstrument], step: Callable[[], None], *, is_extra: bool
) -> list[Composition | None]:
    """For each of one process's cards, what :meth:`CudaInstrument.trace_step` says, of one and the same step."""
    began = [one._begin_trace() for one in instruments]
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=_MAX_HISTORY)
    try:
        step()
        traces = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return [
        one._end_trace(first_new, before, traces, is_extra=is_extra)
        for one, (first_new, before) in zip(instruments, began, strict=True)
    ]
