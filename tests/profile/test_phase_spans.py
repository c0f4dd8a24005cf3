"""Events of each phase, where one step was traced and its neighbors are shorter than the clocks differ."""

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


def history_of(actions: list[str], sizes: list[int], after_us: list[int], traced: str, last_us: int) -> RawHistory:
    """One block after another, each at its own address, freed at the last one's."""
    held = [4096 * (1 + index) for index in range(len(actions))]
    addresses = [held[index - (action != "alloc")] for index, action in enumerate(actions)]
    return RawHistory(
        device=0,
        traced=traced,
        first_ns=FIRST_NS,
        last_ns=FIRST_NS + last_us * 1000,
        actions=array("b", [ACTIONS[action] for action in actions]),
        addresses=array("Q", addresses),
        sizes=array("q", sizes),
        times_us=array("q", [FIRST_NS // 1000 + after for after in after_us]),
        streams=array("Q", [0] * len(actions)),
        stacks_of=array("i", [-1] * len(actions)),
        stacks=(),
    )


def spans(phases: tuple[RawPhase, ...], history: RawHistory) -> list[tuple[str, int, int, bool | None]]:
    seen = see(RawRank(process=RawProcess(pid=1), phases=phases, history=history))
    return [(span.phase.name, span.start, span.stop, span.closes) for span in seen.spans]


def test_a_phase_closes_whose_process_waited_before_its_end() -> None:
    """50 ms after its last event on a loaded machine, and torch's clock a millisecond behind Python's: the next phase's
    first event seems to be before the end, and the phase's own last one is far from it."""
    history = history_of(["alloc", "alloc"], [100, 200], [100, 49_900], "all", 60_000)
    phases = (phase("load", 0, 50_100, 100), phase("forward", 50_100, 51_000, 300))
    assert spans(phases, history) == [("load", 0, 1, True), ("forward", 1, 2, True)]


def test_phases_beside_a_traced_step_have_none_of_its_events() -> None:
    """The one before ended with as much alive as the step's own forward does: it must not take that for its end."""
    history = history_of(["alloc", "alloc", "free_requested"], [100, 200, 200], [100, 200, 300], "step", 420)
    phases = (
        phase("zero_grad", -700, -50, 300),
        phase("forward", -50, 250, 300),
        phase("backward", 250, 400, 100),
        phase("forward", 400, 500, 300),
    )
    assert spans(phases, history) == [("forward", 0, 2, True), ("backward", 2, 3, True)]
