"""Logs of shallow models extended in depth, held against the log that the same generator writes for the deep one."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from vramprobe.log.depth import deep_of, growth_of
from vramprobe.log.log import OUTSIDE, LayerMark, Log, PhaseMark
from vramprobe.log.pairing import Kinds, Script, log_from, scripts_of
from vramprobe.log.reserved import reserve
from vramprobe.log.trace import Event, log_of

WINDOW, FULL = "window", "full"


class Program:
    """A training step written down: a stack of layers of given kinds, whose saved blocks are all of one size."""

    def __init__(self, kinds: list[str]) -> None:
        self.kinds = kinds
        self.events: list[Event] = []
        self.marks: list[PhaseMark] = []
        self.layers: list[LayerMark] = []
        self._next = 512

    def alloc(self, size: int) -> int:
        self._next += 512
        self.events.append(Event(self._next, size, len(self.events)))
        return self._next

    def free(self, address: int) -> None:
        size = next(event.size_bytes for event in self.events if event.ptr == address)
        self.events.append(Event(address, -size, len(self.events)))

    def at(self, layer: int, visit: str) -> None:
        self.layers.append(LayerMark(len(self.events), 0, layer, visit))

    def phase(self, name: str, run: Callable[[], None]) -> None:
        start = len(self.events)
        self.layers.append(OUTSIDE._replace(position=start))
        run()
        self.marks.append(PhaseMark(name, 1, None, range(start, len(self.events))))

    def log(self) -> Log:
        saved: list[list[int]] = []
        self.phase("forward", lambda: self._forward(saved))
        self.phase("backward", lambda: self._backward(saved))
        return log_of(self.events, self.marks, [], self.layers)

    def _forward(self, saved: list[list[int]]) -> None:
        for layer, kind in enumerate(self.kinds):
            self.at(layer, "forward")
            kept = [self.alloc(10_240), self.alloc(10_240)]
            scratch = self.alloc(4_096 if kind == WINDOW else 8_192)
            kept.append(self.alloc(10_240))
            self.free(scratch)
            saved.append(kept)
            self.at(layer, "after")

    def _backward(self, saved: list[list[int]]) -> None:
        for layer in reversed(range(len(self.kinds))):
            self.at(layer, "backward")
            first, second, third = saved[layer]
            order = (third, first, second) if self.kinds[layer] == FULL else (first, third, second)
            gradient = self.alloc(2_048)
            for block in order:  # one size, another order in each kind of layer, with an event between
                self.free(block)
                self.free(self.alloc(512))
            self.free(gradient)


def kinds(depth: int, period: int) -> list[str]:
    return [FULL if layer % period == period - 1 else WINDOW for layer in range(depth)]


@pytest.mark.parametrize("period", [1, 2, 6])
def test_a_log_is_extended_event_for_event(period: int) -> None:
    shallowest = period * -(-2 // period)
    depths = [shallowest + times * period for times in range(3)]
    deep = shallowest + 7 * period
    logs = [Program(kinds(depth, period)).log() for depth in [*depths, deep]]
    scripts = scripts_of(logs, lambda layer: layer % period)
    grown = [growth_of(runs[:3]).at(7) for runs in zip(*scripts, strict=True)]
    for made, seen in zip(grown, scripts[3], strict=True):
        assert made.codes.tolist() == seen.codes.tolist()
        assert made.ranks.tolist() == seen.ranks.tolist()
    extended = log_from(grown, logs[0].marks)
    seen = log_from(scripts[3], logs[3].marks)
    for name in ("size_bytes", "blocks", "causes"):
        assert np.array_equal(getattr(extended, name), getattr(seen, name)), name


def test_a_block_that_is_turned_stands_where_json_can_say_it() -> None:
    """A layer allocates and frees its newest, and the end looks the same but for the block that it frees."""
    kinds = Kinds(np.array([512]), np.array([0]), np.array([0]))
    runs = [
        Script(kinds, np.array([1, *[1, -1] * layers, 1, -1]), np.array([0, *[0, 0] * layers, 0, 1]))
        for layers in range(3)
    ]
    growth = growth_of(runs)
    assert growth is not None
    assert json.dumps(growth.blocks) == "[[2, 2]]"


def test_without_the_layers_marks_frees_of_one_size_in_two_kinds_of_layers_are_not_told_apart() -> None:
    """Marks tell kinds of layers apart: without them the prototype paired frees of 10 MiB wrongly in Gemma 3."""
    depths = [6, 12, 18]
    logs = [Program(kinds(depth, 6)).log() for depth in depths]
    marked = scripts_of(logs, lambda layer: layer % 6)
    bare = scripts_of([Log(log.size_bytes, log.blocks, log.causes, log.marks) for log in logs])
    assert len(marked[0][0].kinds.size_bytes) > len(bare[0][0].kinds.size_bytes)


def test_layers_that_do_not_repeat_have_no_growth() -> None:
    logs = [Program(kind).log() for kind in ([WINDOW], [WINDOW, FULL], [WINDOW, FULL, WINDOW])]
    forward = [script[0] for script in scripts_of(logs)]
    assert growth_of(forward) is None


def test_the_cache_is_emptied_where_the_log_says() -> None:
    """Two segments of 20 MiB stay reserved unless an event of 0 bytes empties the cache between them."""
    large = 20 << 20

    def reserved(with_emptying: bool) -> int:
        events = [Event(512, large, 0), Event(512, -large, 1)]
        events += [Event(0, 0, 2)] * with_emptying
        events += [Event(1024, 2 * large, 3), Event(1024, -2 * large, 4)]
        mark = PhaseMark("forward", 2, 1, range(0, len(events)))
        log = log_of(events, [mark], [])
        deep = deep_of(log_from(scripts_of([log])[0], [mark]))
        (own,), (again,) = (reserve(deep.phases, one) for one in (log, deep.log))
        assert own == again
        return own.reserved_peak_bytes

    assert reserved(False) == 3 * large
    assert reserved(True) == 2 * large
