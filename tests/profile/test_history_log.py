"""The hook's history as a Log: what is paired with what, when the allocator has a block back, who emptied the cache."""

from pathlib import Path

import pytest
from profile_factory import SEGMENT, Script

from vramprobe.profile.history_log import HistoryLog, read_history_log
from vramprobe.profile.run_files import read_run

LINE = (("/srv/train.py", 1, "f"),)


def read(folder: Path, script: Script, *, num_alloc_retries: int = 0) -> HistoryLog:
    with script.phase("load"):
        pass
    script.say("end", why="exit", num_alloc_retries=num_alloc_retries, num_ooms=0)
    script.write(folder)
    (raw,) = read_run(folder).ranks
    found = read_history_log(raw)
    return found


def events(found: HistoryLog) -> list[tuple[int, int]]:
    return list(zip(found.log.size_bytes.tolist(), found.log.blocks.tolist(), strict=True))


def test_blocks_from_before_come_first_and_frees_of_nothing_drop_out(tmp_path: Path) -> None:
    script = Script()
    script.before = [(0x1000, 512, 77, -1)]
    script.event("alloc", 0x2000, 100, LINE)
    script.event("free_requested", 0x9000, 5, ())
    script.event("free_requested", 0x1000, 77, ())
    script.event("free_completed", 0x1000, 77, ())
    found = read(tmp_path, script)
    assert events(found) == [(77, 1), (100, 2), (-77, 1)]
    assert (found.num_before, found.addresses.tolist()) == (1, [0x1000, 0x2000])
    assert found.lines.tolist() == [-1, 0, -1]
    assert found.times_us[0] == 0
    assert (found.times_us[1:] > 0).all()


def test_a_block_in_whose_place_another_is_made_was_freed_just_before(tmp_path: Path) -> None:
    """As where CUDA graphs set the allocator back."""
    script = Script()
    script.event("alloc", 0x1000, 100, LINE)
    script.event("alloc", 0x1000, 60, LINE)
    script.event("free_requested", 0x1000, 60, ())
    assert events(read(tmp_path, script)) == [(100, 1), (-100, 1), (60, 2), (-60, 2)]


def test_a_block_that_another_stream_used_is_given_back_later(tmp_path: Path) -> None:
    script = Script()
    script.event("alloc", 0x1000, 100, LINE, stream=0)
    script.event("alloc", 0x2000, 60, LINE, stream=77)
    script.event("free_requested", 0x2000, 60, ())
    script.event("free_requested", 0x1000, 100, ())
    script.event("free_completed", 0x1000, 100, ())
    script.event("free_completed", 0x2000, 60, ())
    found = read(tmp_path, script)
    assert events(found) == [(100, 1), (60, 2), (-60, 2), (-100, 1), (0, 2)]
    assert found.log.each_stream().tolist() == [0, 1, 1, 0, 1]
    assert found.log.gives_back.tolist() == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("num_alloc_retries", "takes", "is_emptied"),
    [(0, False, True), (0, True, True), (1, False, True), (1, True, False)],
)
def test_who_gave_segments_back(num_alloc_retries: int, takes: bool, is_emptied: bool, tmp_path: Path) -> None:
    """The program, unless the card was ever full and a request took another segment in the same moment."""
    script = Script(device_total_bytes=3 * SEGMENT)
    for number in range(3):
        script.event("segment_alloc", number * SEGMENT, SEGMENT)
    script.event("alloc", 0, 100, LINE)
    script.event("segment_free", SEGMENT, SEGMENT)
    script.event("segment_free", 2 * SEGMENT, SEGMENT)
    if takes:
        script.event("segment_alloc", SEGMENT, 2 * SEGMENT)
    script.event("alloc", SEGMENT, 60, LINE)
    found = read(tmp_path, script, num_alloc_retries=num_alloc_retries)
    assert events(found) == [(100, 1), *[(0, 0)] * is_emptied, (60, 2)]
    assert found.log.is_emptied.tolist() == [False, *[True] * is_emptied, False]


def test_a_request_that_could_not_be_served_stands_beside_the_log(tmp_path: Path) -> None:
    script = Script()
    script.event("alloc", 0x1000, 100, LINE)
    script.event("segment_free", SEGMENT, SEGMENT)  # the allocator's own try
    script.event("oom", 0, 4096, ())
    script.event("free_requested", 0x1000, 100, ())
    found = read(tmp_path, script)
    assert events(found) == [(100, 1), (-100, 1)]
    (failed,) = found.failed
    assert (failed.num_events, failed.size_bytes, failed.stream) == (1, 4096, 0)
