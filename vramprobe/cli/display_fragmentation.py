"""Print reserved memory over many steps: a line for each allocator setting, and the one that helps.

In: courses, of a cell's batches (lengths/course.py) or of a profiled run's (records/data_batches.py). Out: lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vramprobe.units import format_bytes

if TYPE_CHECKING:
    from vramprobe.lengths.course import Course
    from vramprobe.records.data_batches import DataFragmentation, ReservedCourse


def course_lines(courses: Sequence[Course] | Sequence[ReservedCourse], first: str) -> list[str]:
    """A table under its head, and which setting reserves least; ``first``: what the first column of bytes is after."""
    found = [f"{'setting':<52}{first:>11}{'last step':>11}{'peak':>11}{'retries':>9}"]
    for one in courses:
        name = one.alloc_conf.replace(",per_process_memory_fraction:", ", memory fraction ")
        name = name or "default"
        name += f", empty_cache each {one.empty_cache_steps} steps" if one.empty_cache_steps else ""
        sizes = (one.first_reserved_bytes, one.last_reserved_bytes, one.peak_reserved_bytes)
        oom = f"  out of memory at step {one.oom_step:,}" if one.oom_step is not None else ""
        cells = "".join(f"{format_bytes(size) if size else '-':>11}" for size in sizes)
        found.append(f"{name:<52}{cells}{one.num_alloc_retries:>9,}{oom}")
    return found + ([_advice(courses)] if len(courses) > 1 else [])


def _advice(courses: Sequence[Course] | Sequence[ReservedCourse]) -> str:
    """Return the setting that reserves least, of those that ran the longest; none can go below the allocated peak."""
    default, longest = courses[0], max(one.num_steps for one in courses)
    least = min((one for one in courses if one.num_steps == longest), key=lambda one: one.peak_reserved_bytes)
    name = least.alloc_conf or "the default"
    name += f" with empty_cache each {least.empty_cache_steps} steps" if least.empty_cache_steps else ""
    if longest == 0:
        return "no setting completes the first step"
    if default.oom_step is not None and least.oom_step is None:
        return (
            f"{courses[0].alloc_conf or 'the default'} runs out of memory at step {default.oom_step:,}; {name} does not"
        )
    saved = default.peak_reserved_bytes - least.peak_reserved_bytes
    if saved <= 0:
        return "no setting reserves less than the first"
    return f"{name} reserves {format_bytes(saved)} less than {default.alloc_conf or 'the default'} at the peak"


def fragmentation_lines(found: DataFragmentation) -> list[str]:
    """Return lines on the reserved memory over a profiled run's batches, and on how far they can be trusted."""
    if found.why_not is not None:
        return [f"reserved memory over the run is not predicted: {found.why_not}"]
    longest = max(one.num_steps for one in found.courses)
    before = (found.first_step or 1) - 1
    lines = [f"reserved memory by the allocator's replay, predicted for steps {before + 1:,} to {longest:,}:"]
    lines += [f"  {line}" for line in course_lines(found.courses, f"step {before}")]
    if found.held_out:
        off = max(one.error for one in found.held_out)
        different = max(one.num_different for one in found.held_out)
        lines.append(
            f"  {len(found.held_out)} held-out steps make the predicted requests but for {different:,} of "
            f"{found.num_requests:,}; {100 * off:.2f} % of their bytes differ at most"
        )
    if found.num_inexact:
        places = "; ".join(found.inexact_at)
        lines.append(
            f"  {found.num_inexact:,} of {found.num_requests:,} sizes do not follow from the batch's shape: {places}"
        )
    if found.replay_error_bytes:
        gap = format_bytes(abs(found.replay_error_bytes))
        lines.append(f"  the replay of the run's own {before} steps is {gap} off: the figures are as far off, or more")
    if len(found.courses) == 1:
        lines.append("  --replay-steps compares other allocator settings (with --folder, then --from it)")
    return lines
