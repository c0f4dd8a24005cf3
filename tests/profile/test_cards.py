"""Verdicts for other cards: by replay of the run's own allocations, and none where kernels differ."""

from pathlib import Path
from typing import Any

import pytest
from profile_factory import Script, write_launcher

from vramprobe.catalog import find_gpu, list_gpus
from vramprobe.emulate.cards import card_properties
from vramprobe.errors import UnknownName
from vramprobe.profile.analyse import analyse
from vramprobe.profile.cards import MARGIN_BYTES
from vramprobe.records.profile import CardVerdict
from vramprobe.units import GIB, MIB

H100: dict[str, Any] = {"device_name": "NVIDIA H100 80GB HBM3", "capability": [9, 0]}
USABLE_3090 = card_properties("RTX-3090").total_bytes - find_gpu("RTX-3090").context_bytes


def run(
    folder: Path, *sizes: int, freed: int = 0, emptied: bool = False, num_alloc_retries: int = 0, **process: object
) -> Path:
    """Blocks of these sizes, one after the other; the first ``freed`` go before the last is asked for."""
    script = Script(**process)
    with script.phase("load"):
        for number, size in enumerate(sizes[:-1]):
            script.alloc((number + 1) << 36, size)
        for number in range(freed):
            script.free((number + 1) << 36)
        if emptied:
            script.event("segment_free", 1 << 36, sizes[0])
            script.reserved -= sizes[0]
        script.alloc(99 << 36, sizes[-1])
    script.say("end", why="exit", num_alloc_retries=num_alloc_retries, num_ooms=0)
    script.write(folder)
    write_launcher(folder)
    return folder


def verdict(folder: Path, gpu: str, script: Script | None = None, **launcher: object) -> CardVerdict:
    """Return the verdict on the run in ``folder``, or on this one, which is written there."""
    if script is not None:
        script.write(folder)
        write_launcher(folder, **launcher)
    (found,) = analyse(folder, gpus=[gpu]).cards
    return found


def test_one_that_fits_has_its_headroom(tmp_path: Path) -> None:
    found = verdict(run(tmp_path, 3 * GIB, GIB), "RTX-3090")
    assert (found.verdict, found.gpu) == ("fits", "RTX-3090")
    assert (found.reserved_bytes, found.usable_bytes) == (4 * GIB, USABLE_3090)
    assert found.headroom_bytes == USABLE_3090 - 4 * GIB


def test_where_the_cpu_shares_the_memory_its_part_is_not_for_tensors(tmp_path: Path) -> None:
    """DGX Spark: 122,570 MiB, of which the context and 16 GiB for the CPU are set aside, even where it ran there."""
    usable = card_properties("GB10").total_bytes - find_gpu("GB10").context_bytes - 16 * GIB
    for name in ("few", "many"):
        (tmp_path / name).mkdir()
    few = verdict(run(tmp_path / "few", 3 * GIB, GIB), "GB10")
    assert (few.verdict, few.usable_bytes) == ("fits", usable)
    on_it = {"device_name": "NVIDIA GB10", "capability": [12, 1], "device_total_bytes": 122570 * MIB}
    many = verdict(run(tmp_path / "many", 100 * GIB, 8 * GIB, **on_it), "GB10")
    assert (many.verdict, many.headroom_bytes) == ("does not fit", None)


def test_more_tensors_than_memory_do_not_fit(tmp_path: Path) -> None:
    found = verdict(run(tmp_path, 30 * GIB, GIB, **H100), "RTX-3090")
    assert found.verdict == "does not fit"
    assert found.headroom_bytes is None
    assert "31.00 GiB of tensors" in found.why


def test_a_cache_that_goes_back_in_time_fits(tmp_path: Path) -> None:
    """12 + 8 GiB, the 12 freed, then 14: 34 GiB reserved where there is room, 22 where the cache must go back."""
    folder = run(tmp_path, 12 * GIB, 8 * GIB, 14 * GIB, freed=1, **H100)
    large, small = verdict(folder, "H100-SXM"), verdict(folder, "RTX-3090")
    assert (large.verdict, large.reserved_bytes) == ("fits", 34 * GIB)
    assert (small.verdict, small.reserved_bytes) == ("fits", 22 * GIB)
    assert "after giving back its cache 1 times" in small.why


def test_fragments_that_cannot_go_back_do_not_fit(tmp_path: Path) -> None:
    """A free half of a segment whose other half is in use serves nobody who needs more."""
    script = Script(**H100)
    with script.phase("load"):
        script.alloc(1 << 36, 16 * GIB)
        script.free(1 << 36)
        script.alloc(1 << 36, 8 * GIB)  # the front of that segment
        script.alloc(2 << 36, 9 * GIB)
    found = verdict(tmp_path, "RTX-3090", script)
    assert (found.verdict, found.reserved_bytes) == ("does not fit", None)
    assert "the replay runs out" in found.why


@pytest.mark.parametrize(
    ("total_bytes", "num_alloc_retries", "reserved"),
    [
        (80 * GIB, 0, 22 * GIB),  # the program did it: torch never was short of room
        (80 * GIB, 1, 22 * GIB),  # it was once, but not then: there was room for 34 GiB
        (34 * GIB, 1, 34 * GIB),  # the card was full, which another need not be
    ],
)
def test_a_cache_that_the_program_emptied_is_emptied(
    total_bytes: int, num_alloc_retries: int, reserved: int, tmp_path: Path
) -> None:
    folder = run(
        tmp_path,
        12 * GIB,
        8 * GIB,
        14 * GIB,
        freed=1,
        emptied=True,
        num_alloc_retries=num_alloc_retries,
        device_name="NVIDIA A100-SXM4-80GB",
        capability=[8, 0],
        device_total_bytes=total_bytes,
    )
    assert verdict(folder, "H100-SXM").reserved_bytes == reserved


@pytest.mark.parametrize(
    ("over", "answer"),
    [
        (-MARGIN_BYTES - 2 * MIB, "fits"),
        (-MARGIN_BYTES + 2 * MIB, "unknown"),
        (MARGIN_BYTES - 2 * MIB, "unknown"),
        (MARGIN_BYTES + 2 * MIB, "does not fit"),
    ],
)
def test_near_its_end_another_card_is_unknown(over: int, answer: str, tmp_path: Path) -> None:
    """Workspaces differ between cards; on its own the run is its own proof."""
    whole = (USABLE_3090 + over) // (2 * MIB) * (2 * MIB)
    folder = run(tmp_path, GIB, whole - GIB, **H100)
    assert verdict(folder, "RTX-3090").verdict == answer
    own = run(tmp_path, GIB, whole - GIB, device_name="NVIDIA GeForce RTX 3090", capability=[8, 6])
    assert verdict(own, "RTX-3090").verdict == "fits"


@pytest.mark.parametrize(
    ("gpu", "process"), [("T4", {}), ("RTX-3090", {"device_name": "Tesla T4", "capability": [7, 5]}), ("MI300X", {})]
)
def test_other_kernels_are_not_judged(gpu: str, process: dict[str, object], tmp_path: Path) -> None:
    found = verdict(run(tmp_path, GIB, GIB, **process), gpu)
    assert found.verdict == "unknown"
    assert "its kernels differ" in found.why


def test_an_old_card_knows_itself(tmp_path: Path) -> None:
    assert verdict(run(tmp_path, GIB, GIB, device_name="Tesla T4", capability=[7, 5]), "T4").verdict == "fits"


def test_all_are_those_of_the_catalog(tmp_path: Path) -> None:
    folder = run(tmp_path, GIB, GIB)
    found = analyse(folder, gpus="all").cards
    assert [one.gpu for one in found] == [gpu.short_name for gpu in list_gpus()]
    with pytest.raises(UnknownName):
        analyse(folder, gpus=["RTX-1"])


def out_of_memory(folder: Path, requested: int, **launcher: object) -> Path:
    """10 GiB, then one of ``requested`` that is not served."""
    script = Script()
    with script.phase("load"):
        script.alloc(1 << 36, 10 * GIB)
        script.event("oom", 0, requested)
    script.say("oom", requested_bytes=requested, allocated_bytes=10 * GIB, phase="load", stack=[])
    script.write(folder)
    write_launcher(folder, **launcher)
    return folder


def test_one_that_ran_out_says_as_much_as_was_seen(tmp_path: Path) -> None:
    folder = out_of_memory(tmp_path, 20 * GIB, exit_status=1)
    assert verdict(folder, "RTX-4090").verdict == "does not fit"
    assert verdict(folder, "A10").verdict == "does not fit"  # 30 GiB are too many for it
    larger = verdict(folder, "A100-80GB-SXM")
    assert larger.verdict == "unknown"
    assert "what follows was not seen" in larger.why


def test_what_could_not_be_served_is_asked_for_again(tmp_path: Path) -> None:
    """17 GiB in all, but 8 of the first 16 lie in the way of the last 9."""
    script = Script()
    with script.phase("load"):
        script.alloc(1 << 36, 16 * GIB)
        script.free(1 << 36)
        script.alloc(1 << 36, 8 * GIB)
        script.event("oom", 0, 9 * GIB)
    script.say("oom", requested_bytes=9 * GIB, allocated_bytes=8 * GIB, phase="load", stack=[])
    assert verdict(tmp_path, "A10", script, exit_status=1).verdict == "does not fit"
    assert verdict(tmp_path, "L40").verdict == "unknown"


def test_one_that_ran_out_and_went_on_is_judged_by_its_own_card_alone(tmp_path: Path) -> None:
    folder = out_of_memory(tmp_path, 20 * GIB)
    assert verdict(folder, "RTX-4090").verdict == "fits"
    assert verdict(folder, "A100-80GB-SXM").verdict == "unknown"


def test_without_a_history_the_counters_decide_what_they_can(tmp_path: Path) -> None:
    folder = run(tmp_path, 12 * GIB, 8 * GIB, 14 * GIB, freed=1, **H100)
    next(folder.glob("*.history")).unlink()
    assert verdict(folder, "H100-SXM").verdict == "fits"
    assert verdict(folder, "RTX-3090").verdict == "unknown"  # 22 GiB allocated, 34 GiB reserved
    assert verdict(folder, "L4").verdict == "does not fit"


def test_nothing_to_judge(tmp_path: Path) -> None:
    write_launcher(tmp_path)
    assert verdict(tmp_path, "L4").why == "nothing was seen to use a GPU"


def test_the_rank_that_needs_the_most_decides(tmp_path: Path) -> None:
    for rank, size in enumerate((GIB, 7 * GIB, 2 * GIB)):
        run(tmp_path, GIB, size, pid=100 + rank, rank=rank)
    assert verdict(tmp_path, "RTX-3090").reserved_bytes == 8 * GIB


def test_a_replay_that_misses_the_run_itself_is_trusted_less(tmp_path: Path) -> None:
    """torch reserved 2 GiB more than the replay: what lies within that of the card's end is unknown."""
    script = Script(**H100)
    with script.phase("load"):
        script.alloc(1 << 36, 22 * GIB)
    script.say("end", why="exit", num_alloc_retries=0, num_ooms=0)
    assert verdict(tmp_path, "RTX-3090", script).verdict == "fits"
    script.lines[1]["reserved_peak_bytes"] += 2 * GIB
    assert verdict(tmp_path, "RTX-3090", script).verdict == "unknown"


def test_settings_that_are_not_modelled_leave_the_counters(tmp_path: Path) -> None:
    script = Script()
    with script.phase("load"):
        script.alloc(1 << 36, GIB)
    history = script.history() | {"allocator": {"alloc_conf": "backend:cudaMallocAsync"}}
    script.history = lambda: history  # type: ignore[method-assign]
    assert verdict(tmp_path, "RTX-3090", script).verdict == "fits"


def test_frees_of_what_nobody_requested_are_passed_over(tmp_path: Path) -> None:
    script = Script()
    with script.phase("load"):
        script.alloc(1 << 36, GIB)
        script.free(1 << 36)
        for action in ("free_requested", "free_completed", "free_completed"):
            script.event(action, 1 << 36, GIB)
    assert verdict(tmp_path, "RTX-3090", script).reserved_bytes == GIB


def test_segments_lie_where_they_lay(tmp_path: Path) -> None:
    """Two holes of 100 MiB: the lower one serves, in the segment that cannot go back, so that the other one can."""
    first, second, kept, other = ((number + 1) << 36 for number in range(4))
    script = Script()
    with script.phase("load"):
        script.alloc(first, 200 * MIB)
        script.free(first)
        script.alloc(first, 100 * MIB)
        script.alloc(kept, 100 * MIB)
        script.alloc(second, 100 * MIB)
        script.free(first, second)
        script.alloc(first, 100 * MIB)
        script.event("segment_free", 2**40 + 200 * MIB, 100 * MIB)
        script.reserved -= 100 * MIB
        script.alloc(other, 150 * MIB)
    script.say("end", why="exit", num_alloc_retries=0, num_ooms=0)
    assert verdict(tmp_path, "RTX-3090", script).reserved_bytes == 350 * MIB
