"""The trace of a counted step: valid by Chrome's event format, played on two clocks with known answers."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from profile_factory import FIRST_NS, training, write_launcher

from vramprobe.catalog import find_gpu
from vramprobe.errors import StoreError, VramprobeError
from vramprobe.profile import timeline
from vramprobe.profile.analyse import analyse
from vramprobe.records.traffic import KINDS
from vramprobe.speed.counted import row_seconds, time_of
from vramprobe.speed.raw_count import count_of

GPU = find_gpu("RTX-4090")
LINE = ["/srv/train.py", 3, "step"]


def row(name: str, phase: str, what: str = "other", **more: Any) -> dict[str, Any]:
    known = {"shapes": "bfloat16[8, 8] -> x", "dtype": "bfloat16", "calls": 1, "flops": 0, "read": 0, "written": 0}
    return {"phase": phase, "what": what, "name": name, "launches": 1, "width": 8, "line": LINE} | known | more


ROWS = [
    row("aten::mm", "forward", "product", flops=10**12, calls=2, launches=2),
    row("c10d::allreduce_", "backward", read=10**9, written=10**9),
    row("aten::add_", "optimizer", read=10**9, written=10**9),
    row("aten::view", "optimizer", launches=0),
]
MS = 1000  # µs of the run's own clock between two calls
ORDER = [(0, 0), (0, 0), (1, 7), (2, 0), (3, 0)]


def content(folder: Path, *, order: list[tuple[int, int]] | None = ORDER, **process: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    script = training(**process)
    first_us = FIRST_NS // 1000 + 10 * MS
    count = {
        "step": 2, "num_launches": 4, "num_claimed": 4, "unclaimed": {}, "rows": ROWS,
        "moved": [[KINDS.index("all_reduce"), 2, 1, 10**9]],
    }  # fmt: skip
    if order is not None:
        count["order"] = [[at, first_us + number * MS, stream] for number, (at, stream) in enumerate(order)]
    script.say("count", **count)
    script.write(folder)
    write_launcher(folder)
    path = folder / "out" / "step.json"
    timeline.write(folder, analyse(folder), path)
    return json.loads(path.read_text())


def slices(found: dict[str, Any], process: int, category: str) -> list[dict[str, Any]]:
    return [
        one for one in found["traceEvents"] if one["ph"] == "X" and one["pid"] == process and one["cat"] == category
    ]


def test_it_is_valid_by_the_event_format(tmp_path: Path) -> None:
    """Events keep the format's rules for each kind, and Perfetto's importer's: numbers in µs, none negative; the
    slices of a track lie beside or within each other."""
    found = content(tmp_path)
    assert found["displayTimeUnit"] in ("ms", "ns")
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for one in found["traceEvents"]:
        assert one["ph"] in ("X", "C", "M")
        assert isinstance(one["pid"], int)
        assert isinstance(one["tid"], int)
        assert isinstance(one["name"], str)
        if one["ph"] == "M":
            assert one["name"] in ("process_name", "thread_name")
            assert isinstance(one["args"]["name"], str)
            continue
        assert one["ts"] >= 0
        if one["ph"] == "C":
            assert all(isinstance(value, int) for value in one["args"].values())
        else:
            assert one["dur"] >= 0
            tracks.setdefault((one["pid"], one["tid"]), []).append((one["ts"], one["ts"] + one["dur"]))
    for spans in tracks.values():
        for before, after in pairwise(spans):
            assert after[0] >= before[1] - 0.002
    named = {(one["pid"], one["tid"]) for one in found["traceEvents"] if one["name"] == "thread_name"}
    assert set(tracks) <= named


def test_kernels_run_in_order_and_none_before_it_was_launched(tmp_path: Path) -> None:
    found = content(tmp_path)
    count = count_of({"moved": [[KINDS.index("all_reduce"), 2, 1, 10**9]]} | {
        "step": 2, "num_launches": 4, "num_claimed": 4, "unclaimed": {}, "rows": ROWS,
    })  # fmt: skip
    time, each = time_of(count, GPU), row_seconds(count, GPU)
    launch_us = time.by_class["launches"] / time.num_kernels * 1e6
    first, second = slices(found, 2, "products")
    assert first["ts"] == pytest.approx(launch_us, abs=0.01)
    assert first["dur"] == pytest.approx(each[0] * 1e6 / 2, abs=0.01)
    assert second["ts"] == pytest.approx(first["ts"] + first["dur"], abs=0.01)
    assert first["args"]["flops"] == 5 * 10**11
    assert first["args"]["line"] == "/srv/train.py:3 step"
    (reduced,) = slices(found, 2, "collectives")
    assert reduced["ts"] == pytest.approx(3 * launch_us, abs=0.01)  # beside the products
    assert reduced["dur"] == pytest.approx(time.by_class["collectives"] * 1e6, abs=0.01)
    assert [one["name"] for one in slices(found, 1, "phase")] == ["forward", "backward", "optimizer"]
    assert "aten::view" not in {one["name"] for one in found["traceEvents"]}
    assert found["otherData"]["step_seconds_predicted"] == pytest.approx(time.seconds)
    assert "predicted" in found["otherData"]["durations"]


def test_live_bytes_are_the_historys(tmp_path: Path) -> None:
    counters = [one for one in content(tmp_path)["traceEvents"] if one["ph"] == "C"]
    assert counters
    assert all("emulated" in one["name"] for one in counters)
    times = [one["ts"] for one in counters]
    assert times == sorted(times)
    launches = [one for one in content(tmp_path)["traceEvents"] if one["ph"] == "X" and one["pid"] == 1]
    assert times[-1] <= max(one["ts"] + one["dur"] for one in launches)


def test_each_stream_has_its_track(tmp_path: Path) -> None:
    found = content(tmp_path, order=[(0, 0), (0, 9), (2, 9)])
    first, second = slices(found, 2, "products")
    assert first["tid"] != second["tid"]
    assert second["ts"] < first["ts"] + first["dur"]
    names = [one["args"]["name"] for one in found["traceEvents"] if one["name"] == "thread_name"]
    assert {"stream 0", "stream 9", "collectives"} <= set(names)


def test_without_a_counted_step_there_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(VramprobeError, match="no step was counted"):
        content(tmp_path, order=None)
    (tmp_path / "file").write_text("")
    content(tmp_path / "whole")
    with pytest.raises(StoreError, match="name another file"):
        timeline.write(tmp_path / "whole", analyse(tmp_path / "whole"), tmp_path / "file" / "step.json")
