"""``with vramprobe.watch() as run:``: the memory of a training loop in this very process, on a GPU or an emulated one.

In: the block. Out: WatchedRun with its profile. The hook is that of ``vramprobe profile`` (profile/hook), from the
first block on until the process ends; a process that is profiled already keeps its hook.
"""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramprobe.errors import SpecError, VramprobeError
from vramprobe.records.shown import Shown

if TYPE_CHECKING:
    from vramprobe.explain.failure import Report
    from vramprobe.records.profile import ProfileRecord


@dataclass
class WatchedRun(Shown):
    """``profile``: the process until the block's end; None before, and where it could not be made (``why_none``).
    ``failure``: what explains an out-of-memory error that ended the block."""

    profile: ProfileRecord | None = None
    failure: Report | None = None
    why_none: str = "the block has not ended"

    def headline(self) -> str:
        """Return the profile's headline."""
        return self.why_none if self.profile is None else self.profile.headline()

    def rows(self) -> list[dict[str, Any]]:
        """Return the profile's rows: the peaks of each phase, in bytes by tier."""
        return [] if self.profile is None else self.profile.rows()

    def remarks(self) -> list[str]:
        """Return the causes at the peak, the warnings, and what explains an out-of-memory error."""
        said = [] if self.profile is None else self.profile.remarks()
        return said + (str(self.failure).splitlines() if self.failure else [])


@contextmanager
def watch(*, gpus: str | None = None, trace: str = "step", save: str | Path | None = None) -> Iterator[WatchedRun]:
    """Watch the process from here on, and analyse it as the block ends; the block's exceptions are raised again.

    ``gpus``: a verdict for each of these, separated by commas, or all; of other GPUs than the one in use it is unknown
    without ``trace="all"``. ``trace``: step (the causes of the third step's peak), all, or none. ``save``: append the
    profile to this .jsonl file. An out-of-memory error has its explanation as a note, which its traceback shows.

    Raises SpecError for a trace that is not known, UnknownName for such a GPU, StoreError where nothing can be kept.
    """
    from vramprobe.profile.command import named_gpus

    names = named_gpus(gpus)
    begin(trace)
    run = WatchedRun()
    try:
        yield run
    except BaseException as error:
        _finish(run, names, save, error)
        raise
    _finish(run, names, save, None)


def begin(trace: str = "step") -> None:
    """Put the hook into this process, unless it has one. Raises SpecError for another trace than all, step and none."""
    from vramprobe.profile import this_process

    if trace not in ("all", "step", "none"):
        raise SpecError(f"trace: {trace!r} given; allowed: all, step, none")
    if this_process.folder_here() is None:
        this_process.watch([Path(sys.argv[0]).name or "python"], trace)


def profile_so_far(gpus: list[str] | str | None = None, error: BaseException | None = None) -> ProfileRecord:
    """Return the profile of this process as if it ended here, by ``error`` where that is given.

    Raises StoreError where it cannot be made.
    """
    from vramprobe.profile import this_process
    from vramprobe.profile.analyse import analyse
    from vramprobe.records.profile_outcomes import ProfileOk

    folder = this_process.folder_here()
    assert folder is not None
    this_process.write_so_far(folder, [] if error is None else traceback.format_exception(error))
    record = analyse(folder, gpus=gpus)
    if record.outcome.kind == "lost" and error is None:  # the command that started this process has not ended
        record = record.model_copy(update={"outcome": ProfileOk()})
    return record


def _finish(
    run: WatchedRun, gpus: list[str] | str | None, save: str | Path | None, error: BaseException | None
) -> None:
    """Fill ``run``; where the block ended by an error, nothing of ours takes its place."""
    try:
        run.profile, run.why_none = profile_so_far(gpus, error), ""
        if save is not None:
            from vramprobe.records import writing

            writing.append(save, run.profile)
    except VramprobeError as failed:
        run.why_none = str(failed)
        if error is None:
            raise
    if error is not None and "OutOfMemory" in type(error).__name__:
        from vramprobe.explain.report import report_of

        text = "".join(traceback.format_exception(error))
        with suppress(VramprobeError):
            run.failure = report_of(io.BytesIO(text.encode()))
            error.add_note(f"vramprobe: {run.failure}")
