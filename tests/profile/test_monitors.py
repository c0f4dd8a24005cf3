"""The cards of a command as NVML sees them, also between two marks; and a line before the host is full."""

import subprocess
import time
from pathlib import Path

import pytest
from emulated import require_emulation
from grids import exhaustive
from run_command import NO_COMPILER, TRAIN

from vramprobe.emulate.enter import entrance
from vramprobe.measure import environment
from vramprobe.profile import monitors
from vramprobe.profile.monitors import CardSeen, seen_from_outside
from vramprobe.profile.ranks import Remarks, rank_profile
from vramprobe.profile.raw import RawPhase, RawProcess, RawRank
from vramprobe.profile.run_files import read_run
from vramprobe.records.profile import last_profile
from vramprobe.units import GIB, MIB

PASSING = (
    NO_COMPILER + "\nimport time, torch\nx = torch.empty(2 << 30, dtype=torch.uint8, device='cuda'); time.sleep(0.5)\n"
)


@pytest.mark.parametrize("words", [(), pytest.param(("--trace", "none"), marks=exhaustive)])
def test_what_comes_and_goes_between_two_marks_is_seen(tmp_path: Path, words: tuple[str, ...]) -> None:
    """On a card that the profile takes for a real one: its NVML is the emulated driver's."""
    require_emulation()
    script = tmp_path / "train.py"
    script.write_text(PASSING + "del x; torch.cuda.empty_cache()\n" + TRAIN.replace("NUM_STEPS", "4"))
    way = entrance("RTX-4090")
    kept = ("--folder", str(tmp_path / "raw"), "--save", str(tmp_path / "p.jsonl"))
    command = way.command("profile", *words, *kept, "--", str(way.python), str(script))
    done = subprocess.run(command, env=way.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / "raw")
    assert max(phase.device_used_bytes or 0 for phase in run.ranks[0].phases) < 2 * GIB
    (card,) = run.launcher["cards"]
    assert 2 * GIB < card["peak_bytes"] < 3 * GIB
    rank = last_profile(tmp_path / "p.jsonl").ranks[0]
    assert 2 * GIB < (rank.peak.device_bytes or 0) < 3 * GIB


def test_where_nothing_is_to_be_seen_nobody_looks() -> None:
    with seen_from_outside(emulated=True) as cards:
        assert cards == []


def with_cards(before_bytes: int) -> tuple[int | None, list[str]]:
    phase = RawPhase(
        name="load", start_ns=0, end_ns=1, allocated_end_bytes=0, allocated_peak_bytes=1, device_used_bytes=5
    )
    raw = RawRank(process=RawProcess(pid=1, device_uuid="a-b"), phases=(phase,))
    remarks = Remarks("rank 0")
    own = CardSeen(uuid="GPU-a-b", before_bytes=before_bytes, peak_bytes=7)
    peak = rank_profile(raw, None, remarks, [CardSeen(uuid="GPU-c", peak_bytes=9 * GIB), own]).peak
    return peak and peak.device_bytes, remarks.texts


def test_a_rank_has_its_own_card_and_others_on_it_are_named() -> None:
    assert with_cards(0) == (7, [])
    assert with_cards(100 * MIB)[1] == [
        "rank 0: others used 100.00 MiB of its card before, which the device tier has, too"
    ]


def said_of(monkeypatch: pytest.MonkeyPatch, *free: tuple[int, int]) -> list[str]:
    monkeypatch.setattr(monitors, "_HOST_EVERY_SECONDS", 0.001)
    said: list[str] = []
    given = iter(free)
    done: list[bool] = []

    def look() -> tuple[int, int]:
        one = next(given, None)
        done.append(one is None or one[0] < GIB)
        return one or (24 * GIB, 24 * GIB)

    with monitors.warned_of_a_full_host(said.append, free=look):
        until = time.monotonic() + 10
        while not any(done) and time.monotonic() < until:
            time.sleep(0.002)
    return said


def test_it_is_said_once_with_how_much_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = said_of(monkeypatch, (9 * GIB, 24 * GIB), (GIB - 1, 24 * GIB), (GIB // 2, 24 * GIB))
    assert "1024.00 MiB of 24.00 GiB left" in said or "1.00 GiB of 24.00 GiB left" in said
    assert "--only-rank" in said


@pytest.mark.parametrize("free", [(5 * GIB, 24 * GIB), (5 * GIB, 512 * GIB), (GIB, 8 * GIB)])
def test_nothing_is_said_while_there_is_enough(monkeypatch: pytest.MonkeyPatch, free: tuple[int, int]) -> None:
    assert said_of(monkeypatch, free) == []


def test_a_control_group_that_has_less_than_the_machine_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "_GROUP", tmp_path)
    whole = environment.free_host_bytes()
    assert 0 < whole[0] <= whole[1]
    for name, text in (("max", "1000000"), ("current", "900000"), ("stat", "anon 1\ninactive_file 50000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert environment.free_host_bytes() == (150_000, 1_000_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert environment.free_host_bytes()[1] == whole[1]
