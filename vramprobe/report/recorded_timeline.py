"""A cell's recipe → a page or a picture of its live memory by cause, over the step with the peak.

In: a CellSpec, a GPU, a path. Out: the file. The recording is the recipe engine's (predict/recorded.py), extended to
the cell's own depth. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vramprobe.catalog import Gpu
from vramprobe.predict import recorded
from vramprobe.report import timeline_file
from vramprobe.report.timeline import Subject, Timeline, timeline_over
from vramprobe.spec import CellSpec


def write(spec: CellSpec, gpu: Gpu | None, path: str | Path, say: Callable[[str], None]) -> None:
    """Write the timeline to ``path`` (.html, .png, .svg). Raises as recorded.predict, StoreError for the path."""
    timeline_file.require_writable(path)
    timeline_file.write(timeline_of(recorded.replay_of(spec, gpu=gpu, say=say), spec), path)


def timeline_of(replay: recorded.Replay, spec: CellSpec) -> Timeline:
    """The step with the peak, the steady second one as a rule."""
    peak, log = replay.peak, replay.log
    subject = Subject(
        name=spec.cell_id,
        word="emulated",
        footer=replay.provenance,
        step=peak.step,
        tier="requested",
        allocated_bytes=peak.allocated_bytes,
        reserved_bytes=peak.reserved_bytes,
    )
    reserved = {(one.name, one.step, one.micro_step): one.reserved_peak_bytes for one in replay.phases}
    marks = [mark for mark in log.marks if mark.step == peak.step]
    return timeline_over(
        subject,
        log,
        marks,
        [reserved.get((mark.name, mark.step, mark.micro_step)) for mark in marks],
        has_micro_steps=(spec.grad_accum or 1) > 1,
    )
