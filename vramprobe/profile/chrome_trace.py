"""A counted step → a trace in Chrome's event format, which ui.perfetto.dev and chrome://tracing open.

In: the run's folder and its record. Out: a JSON file: the host's launches, the phases, a track of kernels for each
stream, the collectives, and the bytes alive. Durations are predicted; the order is the run's own. Launches and kernels
are played call by call: the host issues one after the other and waits for nothing, a stream runs in order. Waits
between streams are not known, so the trace need not end where the step time says.

Format: "Trace Event Format", Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vramprobe.catalog import gpu_seen
from vramprobe.catalog.gpus import Gpu
from vramprobe.errors import StoreError, VramprobeError
from vramprobe.profile.history_log import read_history_log
from vramprobe.profile.raw import RawRank
from vramprobe.profile.run_files import read_run
from vramprobe.profile.step_time import counted_ranks
from vramprobe.records.profile import ProfileRecord
from vramprobe.speed.counted import Count, CountedTime, row_seconds, time_of
from vramprobe.speed.raw_count import count_of

_HOST, _GPU = 1, 2  # processes of the trace
_LAUNCHES, _PHASES = 1, 2  # threads of the host
_COLLECTIVES = 10_000  # a thread of the GPU, beyond all streams
Event = dict[str, Any]


def write(folder: Path, record: ProfileRecord, path: Path) -> None:
    """Write the trace of the slowest rank. Raises VramprobeError where no step was counted with its order, StoreError
    where the file cannot be written."""
    content = trace_of_profile(folder, record)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write the trace to {path}: {error.strerror}; name another file") from error


def trace_of_profile(folder: Path, record: ProfileRecord) -> dict[str, Any]:
    """The trace as a JSON object. Raises VramprobeError where no step was counted with its order."""
    counted = [raw for raw in counted_ranks(read_run(folder)) if (raw.count or {}).get("order")]
    gpu = gpu_seen(counted[0].process.device_name or "") if counted else None
    if gpu is None:
        raise VramprobeError(
            "there is no trace: no step was counted, which needs an emulated GPU, two steps and no --no-speed"
        )
    times = [(time_of(count_of(raw.count or {}), gpu), raw) for raw in counted]
    time, raw = max(times, key=lambda pair: pair[0].seconds)
    events = [*_names(gpu, raw), *_Played(count_of(raw.count or {}), raw, gpu, time).events()]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "command": record.name,
            "gpu": gpu.short_name,
            "durations": "predicted from a count of step " + str((raw.count or {})["step"]),
            "step_seconds_predicted": time.seconds,
            "vramprobe": record.environment.versions.get("vramprobe"),
        },
    }


class _Played:
    """Calls in their order on two clocks, µs: the host's, and each stream's."""

    def __init__(self, count: Count, raw: RawRank, gpu: Gpu, time: CountedTime) -> None:
        self._count, self._raw, self._time = count, raw, time
        self._order: Sequence[Sequence[int]] = (raw.count or {})["order"]
        self._seconds = row_seconds(count, gpu)
        self._launch_us = time.by_class.get("launches", 0.0) / max(time.num_kernels, 1) * 1e6
        self._shares = _collective_us(count, time.by_class.get("collectives", 0.0))

    def events(self) -> Iterator[Event]:
        """Host, phases, streams, collectives, memory."""
        streams = {stream: number for number, stream in enumerate(sorted({one[2] for one in self._order}))}
        free: dict[int, float] = {}  # by track: when it has done what it was given
        host, starts = 0.0, []
        phase_began: tuple[str, float] | None = None
        for at, _, stream in self._order:
            row = self._count.rows[at]
            starts.append(host)
            if phase_began is None or phase_began[0] != row.phase:
                if phase_began is not None:
                    yield _slice(_HOST, _PHASES, phase_began[0], "phase", phase_began[1], host, {})
                phase_began = (row.phase, host)
            kind, launched = row.kind, row.launches / row.calls
            issued = host + launched * self._launch_us
            if launched:
                yield _slice(_HOST, _LAUNCHES, row.name, kind, host, issued, {"launches": launched})
            host = issued
            track = _COLLECTIVES if kind == "collectives" else streams[stream]
            took = self._shares.get(at, self._seconds[at] * 1e6 / row.calls)
            start = max(free.get(track, 0.0), host)
            free[track] = start + took
            if took:
                yield _slice(_GPU, track, row.name, kind, start, start + took, _arguments(row))
        if phase_began is not None:
            yield _slice(_HOST, _PHASES, phase_began[0], "phase", phase_began[1], host, {})
        if rest := self._time.by_class.get("rest", 0.0) * 1e6:
            yield _slice(_HOST, _PHASES, "rest of the step", "rest", host, host + rest, {})
        yield from _memory(self._raw, [one[1] for one in self._order], starts)


def _collective_us(count: Count, seconds: float) -> dict[int, float]:
    """Each collective's call by its share of the bytes; the driver counts what all of them move."""
    rows = {at: row for at, row in enumerate(count.rows) if row.kind == "collectives"}
    total = sum(row.read + row.written for row in rows.values())
    if not total:
        return {}
    return {at: seconds * 1e6 * (row.read + row.written) / total / row.calls for at, row in rows.items()}


def _arguments(row: Any) -> dict[str, Any]:
    found = {
        "shapes": row.shapes,
        "phase": row.phase,
        "flops": row.flops // row.calls,
        "bytes": (row.read + row.written) // row.calls,
    }
    if row.line is not None:
        found["line"] = f"{row.line[0]}:{row.line[1]} {row.line[2]}"
    return found


def _slice(
    process: int, thread: int, name: str, category: str, start: float, end: float, arguments: Mapping[str, Any]
) -> Event:
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": name,
        "cat": category,
        "ts": round(start, 3),
        "dur": round(end - start, 3),
        "args": dict(arguments),
    }


def _memory(raw: RawRank, seen_us: Sequence[int], played_us: Sequence[float]) -> Iterator[Event]:
    """Requested bytes alive, emulated; each moment lies where the calls around it were played."""
    history_log = read_history_log(raw)
    if history_log is None:
        return
    first, last = np.searchsorted(history_log.times_us, (seen_us[0], seen_us[-1]))
    times = np.interp(history_log.times_us[first : last + 1], seen_us, played_us)
    for time, total in zip(times, np.cumsum(history_log.log.size_bytes)[first : last + 1], strict=True):
        yield {
            "ph": "C",
            "pid": _GPU,
            "tid": 0,
            "name": "live bytes, emulated",
            "ts": round(float(time), 3),
            "args": {"bytes": int(total)},
        }


def _names(gpu: Gpu, raw: RawRank) -> Iterator[Event]:
    """Yield the names of the trace's processes and threads."""

    def named(kind: str, process: int, thread: int, name: str) -> Event:
        return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}

    streams = sorted({one[2] for one in (raw.count or {})["order"]})
    rank = "" if raw.process.rank is None else f" of rank {raw.process.rank}"
    yield named("process_name", _HOST, 0, f"host{rank}, predicted")
    yield named("thread_name", _HOST, _LAUNCHES, "launches")
    yield named("thread_name", _HOST, _PHASES, "phases")
    yield named("process_name", _GPU, 0, f"{gpu.short_name}{rank}, predicted")
    for number, stream in enumerate(streams):
        yield named("thread_name", _GPU, number, f"stream {stream}")
    yield named("thread_name", _GPU, _COLLECTIVES, "collectives")
