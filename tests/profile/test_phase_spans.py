"""Which events are which phase's, where one step was traced and its neighbours are shorter than the clocks differ."""

from __future__ import annotations

from array import array

from vramprobe.profile.analyzed_rank import see
from vramprobe.profile.hook.history import ACTIONS
from vramprobe.profile.raw import RawHistory, RawPhase, RawProcess, RawRank

FIRST_NS = 1_700_000_000_000_000_000


def phase(name: str, start_us: int, end_us: int, requested_end_bytes: int) -> RawPhase:
    return RawPhase(
        name=name,
        step=1,
        start_ns=FIRST_NS + start_us * 1000,
        end_ns=FIRST_NS + end_us * 1000,
        allocated_end_bytes=requested_end_bytes,
        allocated_peak_bytes=300,
        requested_end_bytes=requested_end_bytes,
    )


def test_phases_beside_a_traced_step_have_none_of_its_events() -> None:
    """The one before ended with as much alive as the step's own forward does: it must not take that for its end."""
    alloc, free = ACTIONS["alloc"], ACTIONS["free_requested"]
    times_us = [FIRST_NS // 1000 + after for after in (100, 200, 300)]
    history = RawHistory(
        device=0,
        traced="step",
        first_ns=FIRST_NS,
        last_ns=FIRST_NS + 420_000,
        actions=array("b", [alloc, alloc, free]),
        addresses=array("Q", [4096, 8192, 8192]),
        sizes=array("q", [100, 200, 200]),
        times_us=array("q", times_us),
        streams=array("Q", [0, 0, 0]),
        stacks_of=array("i", [-1, -1, -1]),
        stacks=(),
    )
    phases = (
        phase("zero_grad", -700, -50, 300),
        phase("forward", -50, 250, 300),
        phase("backward", 250, 400, 100),
        phase("forward", 400, 500, 300),
    )
    seen = see(RawRank(process=RawProcess(pid=1), phases=phases, history=history))
    assert seen is not None
    assert [(span.phase.name, span.start, span.stop, span.closes) for span in seen.spans] == [
        ("forward", 0, 2, True),
        ("backward", 2, 3, True),
    ]
