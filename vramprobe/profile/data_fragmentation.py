"""The batches of a run's own data, step by step through the caching allocator: reserved memory over a long run.

In: a RawRank with its history, the steps on chosen batches, shapes in the run's order. Out: a DataFragmentation. The
requests before the first chosen batch are the run's own; those after are learnt (next_steps.py), the result
*predicted*.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import cycle, islice

from vramprobe.allocator.allocator import CachingAllocator
from vramprobe.allocator.compiled import counting_allocator
from vramprobe.allocator.config import parse_alloc_conf
from vramprobe.allocator.ledger import Device
from vramprobe.lengths.course import SETTINGS, Course, CourseUnderWay, play, settings_for
from vramprobe.log.shapes import Shape
from vramprobe.profile.analyzed_rank import AnalyzedRank
from vramprobe.profile.next_steps import ProfiledRun, recorded
from vramprobe.profile.ranks import line_said
from vramprobe.profile.raw import RawRank
from vramprobe.records.data_batches import DataFragmentation, ReservedCourse

_MOST_LINES = 3
_MOST_EVENTS = 10_000_000  # that are played where nobody asks for a number of steps: some seconds
_TIMES_SLOWER = 10  # without the allocator in C


def data_fragmentation(
    raw: RawRank, seen: AnalyzedRank | None, context_bytes: int | None, num_steps: int | None = None, num_ranks: int = 1
) -> DataFragmentation | None:
    """Reserved memory over ``num_steps`` steps of the run's batches, under several settings; null: as many as an epoch
    has, within what one of ``num_ranks`` may take, under the run's own. None where the batches were not asked for, or
    are all alike.
    """
    if len((raw.batches or {}).get("shapes") or ()) < 2 or not raw.plays:
        return None
    if seen is None:
        return DataFragmentation(why_not="no allocations were recorded (--trace all)")
    try:
        return _predicted(raw, seen, context_bytes, num_steps, num_ranks)
    except Exception as error:  # of a history that is made otherwise: it costs this answer, not the profile
        return DataFragmentation(why_not=str(error) or type(error).__name__)


def _predicted(
    raw: RawRank, seen: AnalyzedRank, context_bytes: int | None, num_steps: int | None, num_ranks: int
) -> DataFragmentation:
    run, batches = ProfiledRun(raw, seen), raw.batches or {}
    table = [(rows, width) for rows, width, *_ in batches["shapes"]]
    order = [table[at] for at in batches.get("order") or range(len(table))]
    own = (seen.history.allocator.get("alloc_conf") or "", 0)
    is_slow = isinstance(counting_allocator(parse_alloc_conf(own[0])), CachingAllocator)
    most = max(_MOST_EVENTS // (_TIMES_SLOWER if is_slow else 1) // num_ranks // max(run.num_events, 1), 1)
    settings = SETTINGS if num_steps else (own,)
    courses = courses_of(
        run,
        cycle(order),
        num_steps or min(-(-len(order) // run.num_micro_steps), most),
        device_of(raw, context_bytes),
        settings_for(own[0], settings, has_limit=raw.process.device_total_bytes is not None),
    )
    replayed = courses[0].reserved_bytes
    end = [one.reserved_end_bytes for one in raw.phases if one.step == run.first_step - 1][-1]
    return DataFragmentation(
        first_step=run.first_step,
        num_requests=run.num_names,
        num_inexact=len(run.inexact_tokens),
        inexact_at=_lines(run, seen),
        held_out=run.held_out,
        replay_error_bytes=replayed[0] - end if replayed and end is not None else None,
        courses=[_as_record(one, run.first_step) for one in courses],
    )


def _lines(run: ProfiledRun, seen: AnalyzedRank) -> list[str]:
    """Return the lines that make requests which no rule predicts, those of the most first."""
    places = Counter(seen.line_of(token) for token in run.inexact_tokens)
    found = dict.fromkeys(line_said(place) for place, _ in places.most_common())
    return list(found)[:_MOST_LINES]


def device_of(raw: RawRank, context_bytes: int | None) -> Device:
    """The card as the run had it."""
    total = raw.process.device_total_bytes
    return Device(total_bytes=total, segment_bytes=None if total is None else total - (context_bytes or 0))


def courses_of(
    run: ProfiledRun, shapes: Iterable[Shape], num_steps: int, device: Device, settings: Sequence[tuple[str, int]]
) -> list[Course]:
    """A Course for each setting, whose first step is all that the run did before ``first_step``."""
    own = recorded(run.seen, run.before[-1].stop)
    courses = [CourseUnderWay(one, device) for one in settings]
    for course in courses:
        course.step(partial(play, events=own, number=0))
    number = run.num_before
    for step in islice(run.steps(shapes), num_steps):
        for course in courses:
            course.step(partial(play, events=step, number=number))
        number += sum(event > 0 for event in step)
        if all(course.oom_step is not None for course in courses):
            break
    return [course.course() for course in courses]


def _as_record(course: Course, first_step: int) -> ReservedCourse:
    """Its steps counted as the run's."""
    before = first_step - 2
    oom_step = None if course.oom_step is None else before + course.oom_step
    counted = {"num_steps": before + course.num_steps, "oom_step": oom_step}
    return ReservedCourse(**{name: getattr(course, name) for name in ReservedCourse.model_fields} | counted)
