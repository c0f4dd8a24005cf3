"""The ranks of a cell: one process each, their records as one; a rank that fails or dies ends the others."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import make_record, make_spec

from vramprobe.errors import MissingDependency, SpecError
from vramprobe.measure import environment, isolation
from vramprobe.measure.observation import Observation
from vramprobe.measure.ranks import Seat, as_one, rank_of, run_all
from vramprobe.records.outcomes import Error, Invalid
from vramprobe.records.record import RunRecord, record_from_json
from vramprobe.spec import CellSpec

SPEC = make_spec(device="cuda", num_gpus=3, sharding="fsdp")


def seen(seat: Seat, more_bytes: int = 0, **overrides: Any) -> RunRecord:
    """A record as a rank leaves it, with a peak that is higher by so much."""
    record = make_record(SPEC, **overrides)
    if record.peak is not None:
        peak = record.peak.model_copy(update={"allocated_bytes": record.peak.allocated_bytes + more_bytes})
        record = record.model_copy(update={"peak": peak})
    return record.model_copy(update={"ranks": [rank_of(record, seat, Observation([], {}), {})]})


def failing(seat: Seat) -> RunRecord:
    return seen(seat, outcome=Error(error_type="Broken", message=f"rank {seat.index} broke"))


def led(folder: Path, run: Callable[[Seat], RunRecord], cell: CellSpec = SPEC) -> tuple[int, RunRecord | None, float]:
    """(exit status of the process that leads, what it made of the ranks, its seconds): it may die as they do."""

    def lead() -> None:
        (folder / "record.json").write_text(run_all(cell, folder / "ranks", run).to_json_line())

    began = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=lead)
    process.start()
    process.join(120)
    process.kill()
    path = folder / "record.json"
    return process.exitcode, record_from_json(path.read_bytes()) if path.exists() else None, time.monotonic() - began


def test_the_highest_rank_speaks_for_all_and_each_is_kept(tmp_path: Path) -> None:
    status, record, _ = led(tmp_path, lambda seat: seen(seat, more_bytes=[0, 512, 256][seat.index]))
    assert status == 0
    assert [rank.rank for rank in record.ranks] == [0, 1, 2]
    assert record.peak == record.ranks[1].peak
    assert record.peak.allocated_bytes == record.ranks[0].peak.allocated_bytes + 512
    assert all(rank.host_peak_bytes > 2**20 for rank in record.ranks)
    assert not (tmp_path / "ranks").exists()


def told_the_last(folder: Path, *names: str, cell: CellSpec = SPEC) -> list[str]:
    """Values of these variables in the last rank."""

    def run(seat: Seat) -> RunRecord:
        is_last = seat.index == cell.num_gpus - 1
        return seen(seat, warnings=[os.environ[name] for name in names] if is_last else [], more_bytes=seat.index)

    return led(folder, run, cell)[1].warnings


def test_each_rank_is_told_who_it_is(tmp_path: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert told_the_last(tmp_path, *names) == ["2", "3", "2", "3"]


def test_a_rank_of_fsdp1_s_hybrid_sees_its_machine_s_cards_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By which torch makes groups; two machines of two cards, of the four that are there."""
    monkeypatch.setattr("vramprobe.measure.nvml.visible_gpus", lambda: [(f"GPU-{card}", "card") for card in range(4)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,2,0")
    cell = make_spec(device="cuda", num_gpus=4, sharding="fsdp1-hybrid", shard_size=2)
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    assert told_the_last(tmp_path, *names, cell=cell) == ["1", "2", "GPU-2,GPU-0"]
    alike = cell.model_copy(update={"sharding": "fsdp-hybrid"})  # which its mesh divides
    assert told_the_last(tmp_path, *names, cell=alike) == ["3", "4", "3,1,2,0"]


def test_a_rank_that_fails_ends_those_that_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramprobe.measure.ranks._GRACE_SECONDS", 0.3)

    def run(seat: Seat) -> RunRecord:
        if seat.index == 1:
            return failing(seat)
        time.sleep(60)  # in a collective
        return seen(seat)

    status, record, seconds = led(tmp_path, run)
    assert (status, record.outcome.kind, record.outcome.message) == (0, "error", "rank 1 broke")
    assert seconds < 20


def test_the_first_to_fail_is_the_cause_and_what_follows_is_not(tmp_path: Path) -> None:
    """However late their ends are seen: each waits for the record of the next."""

    def run(seat: Seat) -> RunRecord:
        while seat.index < 2 and not (tmp_path / "ranks" / f"{seat.index + 1}.json").exists():
            time.sleep(0.01)
        return failing(seat)

    assert led(tmp_path, run)[1].outcome.message == "rank 2 broke"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_dies_takes_its_cell_with_it_in_the_same_way(tmp_path: Path, number: int) -> None:
    def run(seat: Seat) -> RunRecord:
        if seat.index == 2:
            os.kill(os.getpid(), number)
        time.sleep(60)
        return seen(seat)

    status, record, seconds = led(tmp_path, run)
    assert (status, record) == (-number, None)
    assert seconds < 20


def test_doubts_name_their_rank() -> None:
    seats = [Seat(index=index, num_ranks=2, num_cards=2, meeting_place="") for index in range(2)]
    records = [seen(seats[0]), seen(seats[1]).model_copy(update={"outcome": Invalid(reasons=["step 3 differs"])})]
    assert as_one(records).outcome == Invalid(reasons=["rank 1: step 3 differs"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({}, "num_gpus 3 needs as many GPUs, and 1 are visible here; emulate them: --emulate 'H100-SXM x3'"),
        ({"only_rank": 0}, "only_rank 0: one rank runs by itself on an emulated GPU alone"),
    ],
)
def test_cards_that_are_not_there(words: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "num_visible_gpus", lambda: 1)
    monkeypatch.delenv("VRAMPROBE_EMULATED_MACHINE", raising=False)
    with pytest.raises(SpecError, match=said):
        isolation.require_packages([make_spec(device="cuda", num_gpus=3, sharding="fsdp", **words)])


def test_one_rank_of_fsdp1_s_hybrid_needs_its_machine_s_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "num_visible_gpus", lambda: 1)
    monkeypatch.setattr(environment, "instrument_for", lambda spec: "emulated")
    alone = {"device": "cuda", "num_gpus": 64, "only_rank": 0}
    with pytest.raises(SpecError, match=r"shard_size 8 under fsdp1-hybrid needs as many GPUs .*'H100-SXM x8'"):
        isolation._require_cards(make_spec(sharding="fsdp1-hybrid", **alone))
    isolation._require_cards(make_spec(sharding="fsdp-hybrid", **alone))


def test_what_compiles_the_optimizer_of_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cell = make_spec(device="cuda", num_gpus=2, sharding="zero2", offload="optimizer")
    monkeypatch.setattr(environment, "num_visible_gpus", lambda: 2)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "g++-99")
    with pytest.raises(MissingDependency, match=r"CPUAdam on this machine, and there is no g\+\+-99, ninja"):
        isolation.require_packages([cell])
