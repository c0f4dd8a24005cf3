"""A profile's step with the peak → a page or a picture of its live memory by cause.

In: the run's folder, its record, a path. Out: the file. Of the rank with the highest peak; where the peak lies outside
the steps, as in loading, of that phase.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from vramprobe.errors import VramprobeError
from vramprobe.log.log import PhaseMark
from vramprobe.profile import chrome_trace
from vramprobe.profile.analyzed_rank import AnalyzedRank, MemoryPoint, moment_of_peak, see
from vramprobe.profile.causes import as_cell
from vramprobe.profile.raw import RawRank
from vramprobe.profile.run_files import read_run
from vramprobe.records.profile import ProfileRecord
from vramprobe.report import timeline_file
from vramprobe.report.timeline import Subject, Timeline, timeline_over
from vramprobe.units import word_for


def write(folder: Path, record: ProfileRecord, path: str | Path) -> None:
    """Write the timeline to ``path``: memory (.html, .png, .svg), or the counted step as a trace (.json).

    Raises VramprobeError where no history was taken, or no step was counted.
    """
    if Path(path).suffix.lower() == ".json":
        chrome_trace.write(folder, record, Path(path))
        return
    timeline_file.write(timeline_of_profile(folder, record), path)


def timeline_of_profile(folder: Path, record: ProfileRecord) -> Timeline:
    """The step with the peak of the highest rank. Raises VramprobeError where its process left no history."""
    top = record.highest_rank
    raw = next((one for one in read_run(folder).ranks if top is not None and one.process.pid == top.pid), None)
    seen = see(raw) if raw is not None else None
    moment = moment_of_peak(seen) if seen is not None else None
    if raw is None or seen is None or moment is None or top is None or top.peak is None:
        raise VramprobeError("there is no timeline: no process left a history of its allocations")
    return _timeline(record, raw, seen, moment)


def _timeline(record: ProfileRecord, raw: RawRank, seen: AnalyzedRank, moment: MemoryPoint) -> Timeline:
    step, environment = moment.span.phase.step, record.environment
    spans = [one for one in seen.spans if one.phase.step == step] if step is not None else [moment.span]
    marks = [
        # A moment before the first event of all is none: the events begin with the second one at the earliest.
        PhaseMark(one.phase.name, step, one.phase.micro_step, range(max(one.start, 1), max(one.stop, 1)))  # type: ignore[arg-type]
        for one in spans
    ]
    causes = np.append(as_cell(moment.causes), np.int8(0))[seen.log.blocks - 1]
    versions = {"vramprobe": environment.versions.get("vramprobe"), "torch": environment.torch}
    made_by = [f"{name} {version}" for name, version in versions.items() if version]
    subject = Subject(
        name=record.name,
        word=word_for(record.instrument),
        step=step,
        tier="requested",
        footer=f"{', '.join(made_by)}; {environment.device_said}, process {raw.process.pid}",
        allocated_bytes=moment.span.phase.allocated_peak_bytes,
        reserved_bytes=max((one.reserved_peak_bytes for one in raw.phases if one.reserved_peak_bytes), default=None),
    )
    micro_steps = {one.phase.micro_step for one in spans} - {None}
    log = replace(seen.log, marks=tuple(marks), causes=causes)
    reserved = [one.phase.reserved_peak_bytes for one in spans]
    return timeline_over(subject, log, marks, reserved, has_micro_steps=len(micro_steps) > 1)
