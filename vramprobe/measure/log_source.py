"""The log of a cell on a CUDA GPU, real or emulated: torch's own memory history with marks of phases and layers.

In: an instrument, and the workload that it watches. Out: a Log. Marks are positions among the allocator's events, by
its counters of allocations and frees, so no clock is compared. It keeps no tensor and changes no autograd graph.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vramprobe.choices import PhaseName
from vramprobe.log.log import OUTSIDE, LayerMark, Log, PhaseMark
from vramprobe.log.trace import Event, Owned, log_of
from vramprobe.measure.cuda import begin_history
from vramprobe.workload.images import is_vision
from vramprobe.workload.storages import Storages

_SIGNS = {"alloc": 1, "free_requested": -1}
_MAX_EVENTS = 8_000_000


class LogSource:
    """An observer between a workload and its instrument, which keeps what a Log needs. ``start`` begins the history."""

    def __init__(self, observer: Any, ordinal: int = 0) -> None:
        self._observer, self._ordinal = observer, ordinal
        self._marks: list[PhaseMark] = []
        self._layers: list[LayerMark] = []
        self._owned: list[Owned] = []
        self._entered: list[LayerMark] = []
        self._first = 0

    def start(self) -> None:
        """Begin torch's memory history, without stacks."""
        begin_history(context=None, max_entries=_MAX_EVENTS)
        self._first = self._position()

    @contextmanager
    def phase(self, name: PhaseName, step: int | None = None, micro_step: int | None = None) -> Iterator[None]:
        """One phase of the instrument's, marked."""
        with self._observer.phase(name, step, micro_step):
            start = self._position()
            self._layers.append(OUTSIDE._replace(position=start))
            self._entered.clear()
            yield
            torch.cuda.synchronize(self._ordinal)
            self._marks.append(PhaseMark(name, step, micro_step, range(start, self._position())))
            self._layers.append(OUTSIDE._replace(position=self._position()))

    def holds(self, cause: str, storages: Storages, step: int | None = None) -> None:
        """Storages that stand now and whose cause is known."""
        self._observer.holds(cause, storages, step)
        self._owned.append(Owned(cause, self._position() - 1, frozenset(storages)))

    def watch_layers(self, model: nn.Module, depth: int | None) -> None:
        """Mark the layers of each stack of ``depth`` layers, a vision tower's apart; of a compiled model none."""
        if depth is None or getattr(model, "_compiled_call_impl", None) is not None:
            return
        stacks = [
            module
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == depth and not is_vision(name)
        ]
        for stack, layers in enumerate(stacks):
            for number, layer in enumerate(layers):
                layer.register_forward_pre_hook(self._entering(stack, number))
                layer.register_forward_hook(self._leaving(stack, number))

    def log(self) -> Log:
        """End the history and return it."""
        trace = torch.cuda.memory._snapshot()["device_traces"][self._ordinal]
        torch.cuda.memory._record_memory_history(enabled=None)
        events, numbers, streams = _events_of(trace)

        def before(position: int) -> int:
            return bisect_left(numbers, position - self._first)

        def at(position: int) -> int:  # behind where the cache was emptied between two phases, which is of neither
            return max(before(position), bisect_right(numbers, position - self._first) - 1)

        stops = [before(one.events.stop) for one in self._marks]
        starts = [0, *stops[:-1]]  # what happens between two phases, as FSDP1's no_sync does, is the next one's
        for number, one in enumerate(self._marks[1:], 1):
            between = range(stops[number - 1], at(one.events.start))
            emptied = next((position for position in reversed(between) if events[position].size_bytes == 0), None)
            if emptied is not None:  # what came before is the last one's, and where the cache was emptied of neither
                stops[number - 1], starts[number] = emptied, emptied + 1
        return log_of(
            events,
            [
                PhaseMark(one.name, one.step, one.micro_step, range(*ends))
                for one, *ends in zip(self._marks, starts, stops, strict=True)
            ],
            [replace(one, position=at(one.position)) for one in self._owned],
            [one._replace(position=at(one.position)) for one in self._layers],
            streams,
        )

    def _position(self) -> int:
        """Allocations and frees so far."""
        counted = torch._C._cuda_memoryStats(self._ordinal)["allocation"]["all"]
        return counted["allocated"] + counted["freed"]

    def _mark(self, stack: int, layer: int, visit: str) -> LayerMark:
        mark = LayerMark(self._position(), stack, layer, visit)
        self._layers.append(mark)
        return mark

    def _entering(self, stack: int, layer: int) -> Any:
        def enter(module: nn.Module, args: Any) -> None:
            self._entered.append(self._layers[-1])
            self._mark(stack, layer, "forward")

        return enter

    def _leaving(self, stack: int, layer: int) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            before = self._entered.pop() if self._entered else OUTSIDE
            if before.visit == "backward":  # a recomputed forward: the layer's backward goes on
                self._mark(before.stack, before.layer, "backward")
            else:
                self._mark(stack, layer, "after")
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, torch.Tensor) and hidden.grad_fn is not None:
                hidden.grad_fn.register_prehook(lambda gradients: self._mark(stack, layer, "backward") and None)

        return leave


def _events_of(trace: list[dict[str, Any]]) -> tuple[list[Event], list[int], list[int]]:
    """The history as Events, and for each the number of allocations and frees before it, and its block's stream.

    An event of 0 bytes is where the cache was emptied.
    """
    events, numbers, streams, count, was_emptied = [], [], [], 0, False
    known = {0: 0}
    for entry in trace:
        action = entry["action"]
        if action in _SIGNS:
            events.append(Event(entry["addr"], _SIGNS[action] * entry["size"], entry["time_us"] * 1000))
            numbers.append(count)
            streams.append(known.setdefault(entry["stream"], len(known)))
            count, was_emptied = count + 1, False
        elif action == "segment_free" and not was_emptied:
            events.append(Event(0, 0, entry["time_us"] * 1000))
            numbers.append(count)
            streams.append(0)
            was_emptied = True
    return events, numbers, streams
