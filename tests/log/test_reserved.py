"""The tiers of a log, by hand on a history of nine blocks."""

from collections.abc import Sequence

import numpy as np
import pytest

from vramprobe.allocator.config import parse_alloc_conf
from vramprobe.log.log import Log, PhaseMark
from vramprobe.log.pairing import log_from, scripts_of
from vramprobe.log.reserved import reserve
from vramprobe.measure.observation import order_of_tiers
from vramprobe.records.phase_memory import PhaseMemory
from vramprobe.units import MIB

STEP = ("forward", "backward", "zero_grad")
EXPANDABLE = "expandable_segments:True"

#: Bytes by block, in order; a block that comes again is freed. 1 holds, as the weights do; 2 is made in loading alone.
PHASES: list[tuple[str, int | None, list[tuple[int, int]]]] = [
    ("load", None, [(1, 30 * MIB), (2, 5 * MIB), (2, 0)]),
    ("batch", None, [(3, 1000)]),
    ("forward", 1, [(4, 15 * MIB)]),
    ("backward", 1, [(5, 6 * MIB), (5, 0), (6, 3 * MIB), (4, 0)]),
    ("zero_grad", 1, [(6, 0)]),
    ("forward", 2, [(7, 15 * MIB)]),
    ("backward", 2, [(8, 6 * MIB), (8, 0), (9, 3 * MIB), (7, 0)]),
    ("zero_grad", 2, [(9, 0)]),
]


def log_of(events: list[tuple[int, int]], marks: list[PhaseMark], **more: np.ndarray) -> Log:
    """A log of blocks and their bytes, in order."""
    blocks, sizes = (np.array(column) for column in zip(*events, strict=True))
    return Log(sizes, blocks, np.zeros(len(events), dtype=np.int8), marks, **more)


def a_history() -> tuple[Log, list[PhaseMemory]]:
    """:data:`PHASES`, and the phases of a record of three steps, which hold nothing yet."""
    sizes: dict[int, int] = {}
    events: list[tuple[int, int]] = []
    marks = []
    for name, step, lines in PHASES:
        start = len(events)
        for block, size in lines:
            events.append((block, size or -sizes[block]))
            sizes[block] = size
        marks.append(PhaseMark(name, step, None, range(start, len(events))))
    steps = [(name, step) for name, step, _ in PHASES] + [(name, 3) for name, step, _ in PHASES if step == 2]
    empty = [PhaseMemory(name=name, step=step, allocated_end_bytes=0, allocated_peak_bytes=0) for name, step in steps]
    return log_of(events, marks), empty


def reserved(conf: str = "") -> list[PhaseMemory]:
    history, phases = a_history()
    return reserve(phases, history, parse_alloc_conf(conf))


def in_mib(phases: list[PhaseMemory], tier: str, moment: str) -> Sequence[float]:
    return [getattr(phase, f"{tier}_{moment}_bytes") / MIB for phase in phases]


def test_tiers_by_hand() -> None:
    """The 30 MiB get a segment of their own, the 5 MiB one of 20 that goes before training, the 1000 B one of 2.

    The 15 MiB get one of 16, of which the last MiB is too little to split off. 6 and 3 MiB share one of 20.
    """
    one = reserved()
    kib = 1024 / MIB
    idle, few = 30 + kib, 1000 / MIB
    steps = [idle + 16, idle + 3, idle] * 3
    assert in_mib(one, "allocated", "end") == [30, idle, *steps]
    assert in_mib(one, "allocated", "peak") == [35, idle, *[idle + 16, idle + 22, idle + 3] * 3]
    assert in_mib(one, "requested", "peak") == [35, 30 + few, *[few + 45, few + 51, few + 33] * 3]
    assert in_mib(one, "active", "end") == in_mib(one, "allocated", "end")
    assert in_mib(one, "reserved", "end") == [50, 52, 48, *[68] * 8]
    assert in_mib(one, "reserved", "peak") == [50, 52, 48, *[68] * 8]
    assert order_of_tiers(one) == []
    assert [(phase.name, phase.step) for phase in one][-3:] == [(name, 3) for name in STEP]


def test_expandable_segments_by_hand() -> None:
    """Granules of 20 MiB: the 5 MiB lie behind the 30, and of those two granules none is free before training.

    The 15 MiB take the last 10 and 5 of a third granule, whose other 15 hold the 6 MiB and the 3 MiB.
    """
    one = reserved(EXPANDABLE)
    assert in_mib(one, "reserved", "end") == [40, 42, *[62] * 9]
    assert in_mib(one, "allocated", "peak")[2] == 45 + 1024 / MIB  # nothing is too little to split off


@pytest.mark.parametrize(("stream", "reserved_mib"), [(0, 20), (1, 40)])
def test_a_cached_block_serves_its_own_stream_alone(stream: int, reserved_mib: int) -> None:
    """6 MiB freed on one stream are there for 6 MiB on the same, and not for those on another."""
    events = [(block, sign * 6 * MIB) for block in (1, 2) for sign in (1, -1)]
    streams = np.array([0, 0, stream, stream], dtype=np.int8)
    log = log_of(events, [PhaseMark("forward", 2, 1, range(4))], streams=streams)
    again = log_from(scripts_of([log])[0], log.marks)
    phase = PhaseMemory(name="forward", step=2, allocated_end_bytes=0, allocated_peak_bytes=6 * MIB)
    for one in (log, again):
        assert reserve([phase], one)[0].reserved_peak_bytes == reserved_mib * MIB


@pytest.mark.parametrize(
    ("events", "reserved_mib"),
    [
        ([(1, 20), (1, -20), (2, 20)], 20),
        ([(1, 20), (1, -20), (2, 20), (1, 0)], 40),  # given back only now
        ([(1, 20), (1, -20), (0, 0), (2, 40)], 40),  # the cache is emptied
        ([(1, 20), (1, -20), (2, 0), (2, 0), (3, 40)], 60),  # of a block of no bytes, of which no shape says more
    ],
)
def test_an_event_of_no_bytes(events: list[tuple[int, int]], reserved_mib: int) -> None:
    mark = PhaseMark("forward", 2, 1, range(len(events)))
    log = log_of([(block, size * MIB) for block, size in events], [mark])
    phase = PhaseMemory(name="forward", step=2, allocated_end_bytes=0, allocated_peak_bytes=40 * MIB)
    assert reserve([phase], log, empties_cache=False)[0].reserved_peak_bytes == reserved_mib * MIB
