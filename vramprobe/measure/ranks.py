"""A cell's ranks: one process each, forked from the cell's own before CUDA is there; their records as one.

In: a spec with several ranks, what runs one of them. Out: the record of the cell, whose peak, ledger and phases are
those of the rank that holds the most, with every rank beside it. A rank that fails ends the others. ``only_rank`` has
no other processes: the others' answers are made up (emulate/values/one_rank.py). Imports no torch until it runs a rank.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vramprobe.measure import environment, nvml
from vramprobe.measure.lifeline import die_with
from vramprobe.measure.observation import Observation
from vramprobe.records.outcomes import Invalid
from vramprobe.records.record import RankRecord, RunRecord, record_from_json
from vramprobe.rules.sharding import rules_of
from vramprobe.spec import CellSpec

if TYPE_CHECKING:
    from vramprobe.workload.sharding.rank import Rank

#: What the others may take to end by themselves once one has failed: a card's driver, a record on a slow disk.
_GRACE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank's place: its number of so many, its card, and the file where the ranks of this world meet."""

    index: int
    num_ranks: int
    num_cards: int  # of one machine
    meeting_place: str
    uuids: Sequence[str] = ()  # of its machine's cards, where this machine's are taken for those of several; else all

    @property
    def ordinal(self) -> int:
        """The card, as this machine's processes number them."""
        return self.index % self.num_cards

    def take(self) -> None:
        """Tell this process's libraries which rank they are, in a launcher's words."""
        os.environ.update(
            {
                "RANK": str(self.index),
                "WORLD_SIZE": str(self.num_ranks),
                "LOCAL_RANK": str(self.ordinal),
                "LOCAL_WORLD_SIZE": str(min(self.num_cards, self.num_ranks)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",  # nobody listens there: the ranks meet in a file
            }
        )
        self.show()

    def show(self) -> None:
        """Only its machine's cards to this process, before CUDA is there."""
        if self.uuids:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.uuids)

    def join(self, spec: CellSpec) -> Rank:
        """This process as a rank among the others, on its card."""
        from vramprobe.workload.sharding import rank_class

        is_emulated = environment.instrument_for(spec) == "emulated"
        return rank_class(spec)(spec, meeting_place=self.meeting_place, host_is_filled=not is_emulated)


def run_one_alone(spec: CellSpec, num_cards: int, run: Callable[[Seat], RunRecord]) -> RunRecord:
    """The record of ``only_rank``, in this process."""
    import torch

    from vramprobe.emulate.values import one_rank

    assert spec.only_rank is not None
    size = cards_of_a_machine(spec) or num_cards
    uuids = _uuids(0, size) if size < num_cards else ()
    seat = Seat(index=spec.only_rank, num_ranks=spec.num_gpus, num_cards=size, meeting_place="alone", uuids=uuids)
    os.environ.update(one_rank.environment(seat.index, seat.num_ranks, size))
    seat.show()
    one_rank.install(torch, seat.index, seat.num_ranks)
    record = run(seat)
    return record.model_copy(update={"warnings": [*record.warnings, *one_rank.remarks]})


def run_all(spec: CellSpec, folder: Path, run: Callable[[Seat], RunRecord]) -> RunRecord:
    """The record of a cell, each of whose ranks ``run`` runs in a child of its own; call it before CUDA is there.

    Where a rank dies without a record, so does this process, in the same way.
    """
    folder.mkdir()
    try:
        children = {}
        size = cards_of_a_machine(spec) or spec.num_gpus
        for index in range(spec.num_gpus):
            uuids = _uuids(index // size, size) if size < spec.num_gpus else ()
            seat = Seat(
                index=index,
                num_ranks=spec.num_gpus,
                num_cards=size,
                meeting_place=str(folder / "meeting-place"),
                uuids=uuids,
            )
            children[_fork(seat, run, folder)] = index
        return as_one([_record_of(folder, index) for index in _wait(children, folder)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def cards_of_a_machine(spec: CellSpec) -> int | None:
    """Number of cards that a rank must see for its library to make the cell's groups; None: all of them.

    FSDP1's hybrid has one group for each machine, and takes a machine to have the cards that its process sees.
    """
    return spec.shard_size if rules_of(spec.sharding).groups_are_machines else None


def _uuids(machine: int, size: int) -> list[str]:
    return [uuid for uuid, _ in nvml.gpus_in_torchs_order()][machine * size : (machine + 1) * size]


def as_one(records: Sequence[RunRecord]) -> RunRecord:
    """The records of all ranks in order as one; or, where some did not end well, the first of these to have ended."""
    failed = [record for record in records if record.outcome.kind not in ("ok", "invalid")]
    if failed:
        return failed[0]
    highest = max(records, key=lambda record: record.peak.allocated_bytes if record.peak else 0)
    doubts = [
        f"rank {record.ranks[0].rank}: {reason}"
        for record in records
        if isinstance(record.outcome, Invalid)
        for reason in record.outcome.reasons
    ]
    ranks = sorted((rank for record in records for rank in record.ranks), key=lambda rank: rank.rank)
    outcome = Invalid(reasons=doubts) if doubts else highest.outcome
    return highest.model_copy(update={"ranks": ranks, "outcome": outcome})


def rank_of(record: RunRecord, seat: Seat, observation: Observation, on_host: dict[str, int | None]) -> RankRecord:
    """Build a rank's record from its own run's record and observation; ``on_host`` by the RankRecord's names."""
    return RankRecord(
        rank=seat.index,
        peak=record.peak,
        ledger=record.ledger,
        phases=record.phases,
        context_bytes=record.context_bytes,
        num_alloc_retries=record.num_alloc_retries,
        host_peak_bytes=_resident_peak_bytes(),
        traffic=observation.traffic,
        **on_host,
    )


def _resident_peak_bytes() -> int | None:
    """The most host memory that this process had resident, what it shares with others counted whole."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    return None


def _fork(seat: Seat, run: Callable[[Seat], RunRecord], folder: Path) -> int:
    leader = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if sys.platform == "linux":
            die_with(leader)
        seat.take()
        partial = folder / f"{seat.index}.partial"
        partial.write_text(run(seat).to_json_line())
        partial.rename(folder / f"{seat.index}.json")
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(children: dict[int, int], folder: Path) -> list[int]:
    """The ranks that left a record, in the order in which they wrote it; one that failed ends the others."""
    left, ended, deadline = dict(children), [], None
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG if deadline else 0)
        if not pid:
            if time.monotonic() > deadline:
                for late in left:
                    os.kill(late, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.02)
            continue
        index = left.pop(pid, None)
        if index is None:
            continue
        if (folder / f"{index}.json").exists():
            ended.append(index)
            is_well = _record_of(folder, index).outcome.kind in ("ok", "invalid")
        elif not ended or all(_record_of(folder, one).outcome.kind in ("ok", "invalid") for one in ended):
            _die_like(os.waitstatus_to_exitcode(status), index, left)
        else:
            is_well = False
        if not is_well and deadline is None:
            deadline = time.monotonic() + _GRACE_SECONDS
    return sorted(ended, key=lambda one: (folder / f"{one}.json").stat().st_mtime_ns)  # waitpid may see several at once


def _record_of(folder: Path, index: int) -> RunRecord:
    return record_from_json((folder / f"{index}.json").read_bytes())


def _die_like(status: int, index: int, others: dict[int, int]) -> None:
    """End as a rank did that left no record, and its like with it: whoever waits for this process reads its status."""
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
    sys.stderr.write(f"rank {index} {how} without a record\n")
    sys.stderr.flush()
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status if status > 0 else 1)
