"""``vramprobe diff A B``: what has grown; and the limits that ``profile`` and ``diff`` end with exit status 1 for.

In: two journals of profiles, or a profile and a baseline. Out: text, JSON, Markdown in a file; a line on stderr for
each limit that is exceeded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vramprobe.cli.emulate import say
from vramprobe.cli.options import Json
from vramprobe.errors import SpecError, StoreError
from vramprobe.units import parse_bytes

if TYPE_CHECKING:
    from vramprobe.profile.diff import Difference
    from vramprobe.records.profile import ProfileRecord

MaxGrowth = Annotated[
    str | None,
    typer.Option(help="Exit with 1 if the allocated or the reserved peak grew by more than this: 2%, 200MiB, 0."),
]
Summary = Annotated[
    Path | None, typer.Option(help="Append a Markdown summary to this file, for instance $GITHUB_STEP_SUMMARY.")
]


def diff(
    before: Annotated[Path, typer.Argument(help="A .jsonl file of profiles (the last counts) or a run's folder.")],
    after: Annotated[Path, typer.Argument(help="The file or folder to compare with.")],
    max_growth: MaxGrowth = None,
    summary: Summary = None,
    json_output: Json = False,
) -> None:
    """Compare two profiles: which causes and which lines of the program grew."""
    from vramprobe.cli import display_difference
    from vramprobe.profile.diff import profile_at

    limits = ProfileLimits(None, max_growth, before)
    record = profile_at(after)
    difference = limits.compared(record)
    assert difference is not None
    if json_output:
        print(difference.model_dump_json())
    else:
        display_difference.print_difference(difference)
    raise typer.Exit(int(limits.exceeded_by(record, summary)))


class ProfileLimits:
    """Limits on what a profile may allocate, and on its growth since a baseline.

    Raises SpecError and StoreError at once for what cannot be read: before a command runs for minutes.
    """

    def __init__(
        self,
        max_allocated: str | None,
        max_growth: str | None,
        baseline: Path | None,
        max_slowdown: float | None = None,
    ) -> None:
        from vramprobe.profile.diff import parse_limit, profile_at

        if max_growth is not None and baseline is None:
            raise SpecError(f"--max-growth {max_growth}: since when? Give --baseline FILE, which --save made")
        self._allocated = max_allocated, None if max_allocated is None else parse_bytes(max_allocated)
        self._growth = max_growth, None if max_growth is None else parse_limit(max_growth)
        self._baseline = None if baseline is None else profile_at(baseline)
        self._slowdown = max_slowdown
        if max_slowdown is not None and (self._baseline is None or step_seconds(self._baseline) is None):
            raise SpecError(
                f"--max-slowdown {max_slowdown:g}: of which time? Give --baseline FILE with a step time, which "
                "`vramprobe profile --emulate GPU --save FILE` predicts"
            )
        if max_growth is not None and self._baseline is not None and self._baseline.outcome.kind != "ok":
            raise SpecError(
                f"{baseline} ended as {self._baseline.outcome.kind}, so that nothing can be said of growth since: make "
                "another baseline, or drop --max-growth"
            )

    def compared(self, record: ProfileRecord) -> Difference | None:
        """Return the growth since the baseline; None without one."""
        from vramprobe.profile.diff import compare

        return None if self._baseline is None else compare(self._baseline, record)

    def exceeded_by(self, record: ProfileRecord, summary: Path | None) -> bool:
        """Return True if any limit is exceeded; print each to stderr, and write it to the Markdown file ``summary``."""
        from vramprobe.profile.diff import too_much

        difference, exceeded = self.compared(record), []
        said, limit_bytes = self._allocated
        highest = max((rank.peak.allocated_bytes for rank in record.ranks if rank.peak), default=0)
        if limit_bytes is not None and record.lacks_a_step:
            exceeded.append(
                f"--max-allocated {said}: no training step was seen, so what training allocates is not known"
            )
        elif limit_bytes is not None and highest > limit_bytes:
            exceeded.append(
                f"--max-allocated {said}: {highest:,} bytes were allocated, {highest - limit_bytes:,} too many"
            )
        said, limit = self._growth
        if difference is not None and limit is not None and record.outcome.kind != "ok":
            exceeded.append(f"--max-growth {said}: the run ended as {record.outcome.kind}, so its growth is not known")
        elif difference is not None and limit is not None:
            exceeded += [f"--max-growth {said}: {one}" for one in too_much(difference, limit)]
        if self._slowdown is not None:
            exceeded += self._too_slow(record, self._slowdown)
        for one in exceeded:
            say(one)
        if summary is not None:
            _append(summary, record, difference, exceeded)
        return bool(exceeded)

    def _too_slow(self, record: ProfileRecord, most: float) -> list[str]:
        """A sentence where a step took longer than allowed, and where its time is not known."""
        assert self._baseline is not None
        before, now = step_seconds(self._baseline), step_seconds(record)
        assert before is not None
        if now is None:
            return [f"--max-slowdown {most:g}: no step time is known; at least four steps must end on a real GPU"]
        told = f"a step took {now:.3g} s, {now / before:.2f} × the baseline's {before:.3g} s"
        return [f"--max-slowdown {most:g}: {told}"] if now > most * before else []


def step_seconds(record: ProfileRecord) -> float | None:
    """Seconds of a step: measured where that is known, else predicted."""
    if record.measured_step_seconds is not None:
        return record.measured_step_seconds
    return None if record.step_time is None else record.step_time.seconds


def _append(path: Path, record: ProfileRecord, difference: Difference | None, exceeded: Sequence[str]) -> None:
    from vramprobe.profile.summary import markdown

    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(markdown(record, difference, exceeded))
    except OSError as error:
        raise StoreError(f"--summary {path} cannot be written: {error.strerror}") from None
