"""Where a sweep's time went, from its records."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

from factories import make_record

from vramprobe.records.record import Oom, RunRecord, Timing


def test_the_time_of_a_sweep_adds_up(script: Callable[[str], ModuleType]) -> None:
    sweep_time = script("speed.sweep_time")
    began = datetime(2026, 3, 1, tzinfo=UTC)

    def attempt(seconds: float, **timing: Any) -> RunRecord:
        outcome = {} if timing else {"outcome": Oom(phase="load", message="out")}
        moment = (began + timedelta(seconds=seconds)).isoformat()
        return make_record(started_at=moment, timing=Timing(total_seconds=10.0, **timing), **outcome)

    whole = {
        "load_seconds": 2.0,
        "first_step_seconds": 1.0,
        "traced_seconds": 3.0,
        "history_seconds": 0.5,
        "step_seconds": [0.25, 0.25],
    }
    time = sweep_time.sweep_time([attempt(0, **whole), attempt(12), attempt(1000, **whole)])  # and a pause
    assert (time.num_attempts, time.wall_seconds) == (3, 32.0)
    assert (time.load_seconds, time.warm_up_seconds, time.step_seconds) == (4.0, 2.0, 6.0)
    assert (time.failed_seconds, time.overhead_seconds) == (10.0, 10.0)
    older = {key: value for key, value in whole.items() if key != "first_step_seconds"}
    assert sweep_time.sweep_time([attempt(0, **older)]).row()[4] == "–"
    assert sweep_time.sweep_time([]) is None
