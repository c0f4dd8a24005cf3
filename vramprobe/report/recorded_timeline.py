"""A cell's recipe → a page or a picture of its live memory by cause, over the step with the peak.

In: a cell's words, a GPU, a path. Out: the file. The recording is the recipe engine's (predict/recorded.py), extended
to the cell's own depth. Needs no torch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vramprobe.catalog import gpu_or_size
from vramprobe.predict import recorded
from vramprobe.predict.questions import cell_on_ranks
from vramprobe.report import timeline_file
from vramprobe.report.timeline import Subject, Timeline, timeline_over
from vramprobe.spec import CellSpec


def timeline(
    path: str | Path,
    *,
    device: str | None = None,
    gpu: str | None = None,
    say: Callable[[str], None] = lambda words: None,
    **options: Any,
) -> None:
    """Draw a cell's live memory over one step by cause, to .html, .png or .svg, from its recording on an emulated GPU.

    ``options`` are the cell's words, ``gpu`` the GPU that is emulated; ``say`` hears what a recording does. Raises as
    recorded.predict, StoreError for the path.
    """
    spec, card = cell_on_ranks(device=device or "cuda", **options), None if gpu is None else gpu_or_size(gpu)
    timeline_file.require_writable(path)
    timeline_file.write(timeline_of(recorded.replay_of(spec, gpu=card, say=say), spec), path)


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
