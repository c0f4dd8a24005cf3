"""A sweep on many nodes: the planned set of records whatever becomes of the nodes, and one series of like nodes.

The engine is played by a pool whose nodes answer at once, or are lost; a real station runs real cells.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from factories import TINY_LLAMA_PATH, make_environment, make_oom, make_record, make_spec
from processes import is_alive

from vramprobe.errors import MissingDependency, SpecError, VramprobeError
from vramprobe.measure.station import Station, StationLost
from vramprobe.records import store
from vramprobe.records.outcomes import Error, Interrupted, Ok, Timeout
from vramprobe.records.record import Environment, RunRecord, new_attempt_id, record_from_json
from vramprobe.spec import CellSpec
from vramprobe.sweep import dispatch, runner
from vramprobe.sweep.bookkeeping import Bookkeeping
from vramprobe.sweep.card import Card, Rate
from vramprobe.sweep.definition import Sweep
from vramprobe.sweep.fleet import Fleet, fleet_on
from vramprobe.sweep.limits import SweepLimits
from vramprobe.sweep.nodes import Lost, Needs, Node, difference, needs_of, series_of
from vramprobe.sweep.plan import SweepPolicy
from vramprobe.sweep.progress import Progress
from vramprobe.units import GIB

HERE = make_environment()
CELLS = tuple(make_spec(seq_len=16 * number, timing_steps=0) for number in range(1, 9))


def sweep_of(*cells: CellSpec) -> Sweep:
    return Sweep(name="fleet", description="", cells=cells, held_out=frozenset(), notes=())


def node(name: str, environment: Environment = HERE, **more: Any) -> Node:
    return Node(node_id=name, name=name, **{"num_cpus": 2.0, "num_gpus": 0.0, "environments": (environment,)} | more)


class PlayedPool:
    """Nodes that answer each cell as ``answer`` says: a record, a Lost, or nothing yet (None)."""

    def __init__(self, *nodes: Node, answer: Callable[[CellSpec, int], RunRecord | Lost | None] | None = None) -> None:
        self.there = list(nodes)
        self._answer = answer or (lambda spec, attempt: make_record(spec, environment=nodes[0].environments[0]))
        self.running: dict[str, CellSpec] = {}
        self.most_at_once = 0
        self.attempts: Counter[str] = Counter()
        self.cancelled: list[str] = []
        self.has_queue = False

    def nodes(self, specs: Sequence[str], *, wait: bool = False) -> list[Node]:
        return self.there

    def require(self, specs: Sequence[str], node: Node) -> None: ...

    def submit(self, request: dict[str, Any], needs: Needs, nodes: Sequence[Node], model_types: Sequence[str]) -> None:
        self.running[request["attempt_id"]] = CellSpec.model_validate_json(request["spec"])
        self.most_at_once = max(self.most_at_once, len(self.running))

    def ended(self, seconds: float) -> list[tuple[str, dict[str, Any] | Lost]]:
        found: list[tuple[str, dict[str, Any] | Lost]] = []
        for attempt_id, spec in list(self.running.items()):
            answer = self._answer(spec, self.attempts[spec.fingerprint])
            if answer is None:
                continue
            self.attempts[spec.fingerprint] += 1
            del self.running[attempt_id]
            if isinstance(answer, RunRecord):
                record = answer.model_copy(update={"attempt_id": attempt_id})
                late = record.outcome.kind == "timeout"
                answer = {
                    "record": record.to_json_line(),
                    "seconds": 0.1,
                    "limit_seconds": record.outcome.limit_seconds if late else 900.0,
                    "log": "" if record.outcome.kind == "ok" else "its last words",
                    "node": self.there[0].name,
                }
            found.append((attempt_id, answer))
        return found or (time.sleep(min(seconds, 0.01)) or [])

    def is_queued(self, attempt_id: str) -> bool:
        return self.has_queue

    def cancel(self, attempt_id: str) -> None:
        self.cancelled.append(attempt_id)
        self.running.pop(attempt_id, None)

    def close(self) -> None: ...


def swept(pool: PlayedPool, folder: Path, *cells: CellSpec, **options: Any) -> runner.RunSummary:
    many, sweep = Fleet(pool), sweep_of(*(cells or CELLS))
    card = many.card_of(sweep)
    return runner.run(sweep, folder, executor=many, **{"card": card} | options)


def test_every_cell_has_its_record_and_as_many_run_at_once_as_the_nodes_take(tmp_path: Path) -> None:
    pool, events = PlayedPool(node("a"), node("b", num_cpus=1.0)), []
    summary = swept(pool, tmp_path, on_event=events.append)
    assert Counter(record.fingerprint for record in store.read(tmp_path).records) == Counter(
        cell.fingerprint for cell in CELLS
    )
    assert (summary.counts(), summary.left, summary.plan.num_slots) == ({"ok": 8}, 0, 3)
    assert pool.most_at_once == 3
    assert {event.node for event in events if event.kind == "finished"} == {"a"}
    assert swept(pool, tmp_path).plan.actions() == {"kept": 8}


def test_a_lost_attempt_leaves_its_start_and_the_cell_is_tried_again(tmp_path: Path) -> None:
    def answer(spec: CellSpec, attempt: int) -> RunRecord | Lost:
        lost = {16: 1, 32: 2}.get(spec.seq_len, 0)
        return Lost("its node was lost") if attempt < lost else make_record(spec, environment=HERE)

    events: list[Progress] = []
    summary = swept(PlayedPool(node("a"), answer=answer), tmp_path, on_event=events.append)
    assert (summary.counts(), summary.left) == ({"ok": 8}, 0)
    contents = store.read(tmp_path)
    assert Counter(started.fingerprint for started in contents.unfinished) == {
        CELLS[0].fingerprint: 1,
        CELLS[1].fingerprint: 2,
    }
    assert "retry 2 of 2: its node was lost" in {event.reason for event in events}


def test_a_cell_that_is_lost_each_time_is_left_and_then_quarantined(tmp_path: Path) -> None:
    def answer(spec: CellSpec, attempt: int) -> RunRecord | Lost:
        return Lost("its worker crashed") if spec == CELLS[2] else make_record(spec, environment=HERE)

    summary = swept(PlayedPool(node("a"), answer=answer), tmp_path)
    assert (summary.counts(), summary.left) == ({"ok": 7}, 1)
    assert summary.notes == [f"{CELLS[2].cell_id}: 3 attempts were lost, the last one because its worker crashed"]
    assert swept(PlayedPool(node("a")), tmp_path).plan.actions() == {"kept": 7, "quarantined": 1}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"driver_version": "580.1"}, "driver 580.1 (the others None)"),
        ({"device_name": "Another CPU"}, "device Another CPU (the others Test CPU @ 2.00GHz)"),
        ({"versions": HERE.versions | {"torch": "2.12.0"}}, "torch 2.12.0 (the others 2.13.0+cpu)"),
        ({"commit": "f" * 40}, f"commit {'f' * 40} (the others {HERE.commit})"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_node_that_differs_is_left_out_and_named(other: dict[str, Any], said: str, tmp_path: Path) -> None:
    pool = PlayedPool(node("a"), node("b", make_environment(**other), num_cpus=1.0))
    summary = swept(pool, tmp_path)
    assert summary.notes == [f"node b is left out: {said}"]
    assert (summary.counts(), pool.most_at_once) == ({"ok": 8}, 2)


def test_a_record_of_another_environment_is_not_kept(tmp_path: Path) -> None:
    """A node that changed under the sweep: its records would be of another series."""

    def answer(spec: CellSpec, attempt: int) -> RunRecord:
        other = make_environment(versions=HERE.versions | {"torch": "2.12.0"})
        return make_record(spec, environment=other if attempt == 0 else HERE)

    summary = swept(PlayedPool(node("a"), answer=answer), tmp_path)
    assert summary.counts() == {"ok": 8}
    assert {record.environment.versions["torch"] for record in store.read(tmp_path).records} == {"2.13.0+cpu"}
    assert "node a measured with torch 2.12 (now 2.13); that is not kept" in summary.notes


def test_nodes_that_join_take_part_and_without_any_the_sweep_waits_a_while_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(dispatch, "_PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(dispatch, "_POLL_SECONDS", 0.01)
    pool = PlayedPool(node("a"))

    def on_event(event: Progress) -> None:
        if event.kind == "finished":
            pool.there = [node("a"), node("c")] if event.index < 6 else []

    summary = swept(pool, tmp_path, on_event=on_event)
    assert pool.most_at_once == 4
    assert summary.stopped_by == "no node left"
    assert summary.left == len(CELLS) - len(summary.records) > 0
    pool.there = [node("a")]
    assert swept(pool, tmp_path).left == 0
    assert len(store.read(tmp_path).records) == len(CELLS)


def test_a_signal_ends_the_running_cells_and_says_so(tmp_path: Path) -> None:
    pool = PlayedPool(node("a"), answer=lambda spec, attempt: make_record(spec) if spec == CELLS[0] else None)

    def on_event(event: Progress) -> None:
        if event.kind == "finished" and event.record.outcome.kind == "ok":
            os.kill(os.getpid(), signal.SIGTERM)

    summary = swept(pool, tmp_path, on_event=on_event)
    assert summary.stopped_by == "SIGTERM"
    assert summary.counts() == {"ok": 1, "interrupted": len(pool.cancelled)}
    assert {record.outcome.message for record in summary.records[1:]} == {"stopped by SIGTERM"}
    assert store.read(tmp_path).unfinished == ()


def test_limits_hold_as_on_one_machine(tmp_path: Path) -> None:
    pool = PlayedPool(node("a"), answer=lambda spec, attempt: make_record(spec, outcome=Timeout(limit_seconds=5)))
    assert swept(pool, tmp_path / "cells", limits=SweepLimits(max_cells=3)).counts() == {"interrupted": 3}
    summary = swept(pool, tmp_path / "timeout", CELLS[0], limits=SweepLimits(timeout_seconds=5))
    assert summary.counts() == {"timeout": 1}
    assert swept(pool, tmp_path / "time", limits=SweepLimits(max_seconds=1)).stopped_by == "max-time"


@pytest.mark.parametrize("has_queue", [False, True])
def test_an_attempt_that_says_nothing_is_given_up_but_not_one_that_waits_in_a_queue(
    has_queue: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(dispatch, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(dispatch, "_SILENCE_SECONDS", 0.0)
    pool, looks = PlayedPool(node("a"), answer=lambda spec, attempt: None), 0

    def is_queued(attempt_id: str) -> bool:
        nonlocal looks
        looks += 1
        if looks == 20 and has_queue:
            pool._answer = lambda spec, attempt: make_record(spec, environment=HERE)
        return has_queue

    pool.is_queued = is_queued
    summary = swept(pool, tmp_path, CELLS[0], limits=SweepLimits(timeout_seconds=0.02))
    assert (summary.counts(), len(pool.cancelled)) == (({"ok": 1}, 0) if has_queue else ({}, 3))


def test_what_waits_in_a_queue_when_the_time_is_over_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(dispatch, "_POLL_SECONDS", 0.01)
    pool = PlayedPool(node("a"), answer=lambda spec, attempt: None)
    pool.has_queue = True
    books: list[Bookkeeping] = []
    run = Fleet.run
    monkeypatch.setattr(Fleet, "run", lambda self, given: (books.append(given), run(self, given)))

    def on_event(event: Progress) -> None:
        if event.kind == "started":
            books[0].clock._deadline = time.monotonic()

    summary = swept(pool, tmp_path, CELLS[0], limits=SweepLimits(max_seconds=1000), on_event=on_event)
    assert (len(pool.cancelled), summary.counts()) == (1, {"interrupted": 1})
    assert summary.records[0].outcome == Interrupted(message="stopped by max-time", by_limit=True)


def test_an_oom_skips_the_larger_cells_and_a_replicate_waits_for_its_first_attempt(tmp_path: Path) -> None:
    cells = [make_spec(model="t5-large", method="lora", device="cuda", seq_len=size) for size in (512, 1024, 2048)]
    seen = make_environment(device_name="Test GPU", nvml_total_bytes=24 * 2**30)

    def answer(spec: CellSpec, attempt: int) -> RunRecord:
        outcome = make_oom(spec).outcome if spec.seq_len >= 1024 else Ok()
        return make_record(spec, environment=seen, outcome=outcome)

    pool = PlayedPool(node("a", seen, num_gpus=1.0), answer=answer)
    policy = SweepPolicy(audit_share=0.0, replicate_share=1.0)
    summary = swept(pool, tmp_path, *cells, policy=policy)
    assert Counter((record.spec.seq_len, record.outcome.kind) for record in summary.records) == {
        (512, "ok"): 2,
        (1024, "oom"): 1,
        (2048, "skipped"): 1,
    }
    assert pool.most_at_once == 1  # one GPU


@pytest.mark.parametrize("max_cells", [None, 5])
def test_what_is_left_is_the_sum_over_the_cells_that_are_left(max_cells: int | None, tmp_path: Path) -> None:
    """By prefix sums, because a sweep may have 10,000 cells; here counted one by one."""
    cells = [
        make_spec(model=model, seq_len=16 * number, timing_steps=0)
        for number in range(1, 5)
        for model in (str(TINY_LLAMA_PATH), "smollm2-135m")
    ]
    books: list[Bookkeeping] = []

    class Watched(Fleet):
        def run(self, given: Bookkeeping) -> None:
            books.append(given)
            super().run(given)

    seen = 0

    def on_event(event: Progress) -> None:
        nonlocal seen
        if event.kind == "finished":
            (one,) = books
            rest = [row for row in event.plan.rows[event.index :] if row.is_run]
            rest = rest if max_cells is None else rest[: max_cells - one.clock.num_cells]
            expected = sum(one.pace.correct(row.num_params, row.seconds) for row in rest)
            assert event.left_seconds == pytest.approx(expected / event.plan.num_slots)
            seen += 1

    many, sweep = Watched(PlayedPool(node("a"))), sweep_of(*cells)
    many.card_of(sweep)
    runner.run(sweep, tmp_path, executor=many, on_event=on_event, limits=SweepLimits(max_cells=max_cells))
    assert seen == (max_cells or len(cells))


def test_the_log_of_a_failed_cell_is_brought_here(tmp_path: Path) -> None:
    failed = Error(error_type="ValueError", message="boom")
    pool = PlayedPool(node("a"), answer=lambda spec, attempt: make_record(spec, outcome=failed))
    summary = swept(pool, tmp_path, CELLS[0])
    assert summary.log_of(summary.records[0]).read_text() == "its last words"


def test_the_card_and_the_price_are_those_of_the_nodes() -> None:
    seen = make_environment(device_name="NVIDIA H100 80GB HBM3", nvml_total_bytes=80 * GIB)
    many = Fleet(PlayedPool(node("a", seen, num_gpus=8.0), node("b", seen, num_gpus=4.0)))
    cells = sweep_of(make_spec(device="cuda"))
    assert many.device == "cuda"
    card = many.card_of(cells)
    assert isinstance(card, Card)
    assert (card.gpu.short_name, many.num_gpus) == ("H100-SXM", 12)
    assert many.of_all_gpus(Rate(2.0, "as given")) == Rate(24.0, "12 GPUs at $2.0/h, as given")
    with pytest.raises(SpecError, match="no node has A100 SXM4 80GB; the nodes have NVIDIA H100"):
        series_of(many.series, Needs(1, 1, GIB), "A100-80GB-SXM")
    with pytest.raises(SpecError, match="needs 16 cores, 16 GPUs"):
        series_of(many.series, needs_of(make_spec(device="cuda", num_gpus=16, sharding="ddp"), is_emulated=False), None)


def test_what_cannot_be_is_refused() -> None:
    nothing = node("a", environments=(), why="no vramprobe here")
    with pytest.raises(MissingDependency, match=r"no node can run a cell \(a: no vramprobe here\)"):
        series_of([nothing], Needs(1, 0, GIB), None)
    assert difference(nothing, node("b")) == "no vramprobe here"
    assert fleet_on("here") is None
    with pytest.raises(SpecError, match="gpu H200 is for the nodes of a fleet"):
        fleet_on("here", gpu="H200")
    with pytest.raises(SpecError, match="--on 'kubernetes' given; allowed: here, ray"):
        fleet_on("kubernetes")


def test_a_station_runs_cells_one_after_the_other_and_says_what_it_lacks() -> None:
    spec = make_spec(timing_steps=0)
    broken = make_spec(
        model=str(TINY_LLAMA_PATH), weights="pretrained", timing_steps=0
    )  # no weights beside that config

    def asked(one: CellSpec) -> dict[str, Any]:
        words = {"attempt_id": new_attempt_id(), "started_at": datetime.now(UTC).isoformat(), "verify": False}
        return words | {"spec": one.model_dump_json(), "timeout_seconds": 60, "left_seconds": 600, "log": "a.log"}

    with closing(Station(["llama"])) as station:
        (seen,) = station.ask(environments=[spec.model_dump_json()])["environments"]
        assert Environment.model_validate_json(seen).versions["torch"]
        with pytest.raises(VramprobeError, match="no NVIDIA GPU is visible here"):
            station.ask(requires=[make_spec(device="cuda").model_dump_json()])
        request = asked(spec)
        answer = station.ask(**request)
        record = record_from_json(answer["record"])
        assert (record.outcome.kind, record.attempt_id, answer["log"]) == ("ok", request["attempt_id"], "")
        assert record.environment.isolation == "forkserver"
        failed = station.ask(**asked(broken))
        assert record_from_json(failed["record"]).outcome.kind == "error"
        assert "safetensors" in failed["log"]
        process = psutil.Process(station.pid)
        servers = process.children()
        process.kill()
        with pytest.raises(StationLost, match="status -9"):
            station.ask(**asked(spec))
        deadline = time.monotonic() + 60
        while any(map(is_alive, servers)):  # its fork server goes with it
            assert time.monotonic() < deadline
            time.sleep(0.05)
