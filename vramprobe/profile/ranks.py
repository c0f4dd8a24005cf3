"""One process's raw files → its RankProfile: peaks by phase, what was alive at the peak, which lines asked for it.

In: a RawRank. Out: a RankProfile and what cannot be said, in words. The counters are the allocator's own; what is alive
comes from its history, where there is one, and is held against them.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vramprobe.profile import causes as causes_of
from vramprobe.profile.analyzed_rank import AnalyzedRank, MemoryPoint, moment_of_peak
from vramprobe.profile.monitors import CardSeen
from vramprobe.profile.places import Location, pattern
from vramprobe.profile.raw import RawPhase, RawRank
from vramprobe.records.profile import RankProfile
from vramprobe.records.profile_memory import BlocksAlike, Live, PhaseHighest, PlaceBytes, ProfilePeak
from vramprobe.records.traffic import CollectiveTraffic, added_up, moved_since
from vramprobe.units import MIB, format_bytes

_NUM_LARGEST = 10
_MANY = 4  # processes with the same remark
_OTHERS_BYTES = 64 * MIB  # an idle driver keeps less for itself


@dataclass
class Remarks:
    """Remarks on a rank, each once."""

    rank: str
    texts: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        """One remark, with the rank that it is about."""
        self.texts.append(f"{self.rank}: {text}")


def context_bytes(found: Sequence[RawRank]) -> int | None:
    """Device use less what torch reserved, the least of all phases' ends: others' memory only adds to it."""
    gaps = [
        phase.device_used_bytes - phase.reserved_end_bytes
        for raw in found
        for phase in raw.phases
        if phase.device_used_bytes is not None and phase.reserved_end_bytes is not None
    ]
    return min((gap for gap in gaps if gap >= 0), default=None)


def merged(remarks: Iterable[str]) -> list[str]:
    """Return ``remarks``, where many processes or ranks have the same one, once with their number."""
    found: dict[tuple[str, str], list[str]] = {}
    for remark in remarks:
        about = re.fullmatch(r"(process|rank) \d+: (.*)", remark, re.DOTALL)
        found.setdefault(("", remark) if about is None else (about[1], about[2]), []).append(remark)
    merged_ones = []
    for (kind, text), same in found.items():
        plural_kind = {"process": "processes", "rank": "ranks"}.get(kind, "")
        merged_ones += same if len(same) < _MANY or not kind else [f"{len(same)} {plural_kind}: {text}"]
    return merged_ones


def rank_profile(
    raw: RawRank, seen: AnalyzedRank | None, remarks: Remarks, cards: Sequence[CardSeen] = ()
) -> RankProfile:
    """Build the profile of one process, with its card seen from outside; analyse.py adds what other modules know."""
    peak = peak_of(raw.phases)
    card = next((one for one in cards if _is_called(raw.device_uuid, one.uuid)), None)
    if peak is not None and card is not None:
        peak = peak.model_copy(update={"device_bytes": _highest((peak.device_bytes, card.peak_bytes))})
        if (card.before_bytes or 0) > _OTHERS_BYTES:
            others = format_bytes(card.before_bytes or 0)
            remarks.add(f"others used {others} of its card before, which the device tier has, too")
    moment = moment_of_peak(seen) if seen is not None else None
    at_peak = alike = by_module = by_line = None
    if seen is not None and moment is not None and peak is not None:
        at_peak = causes_of.composition(seen.lives, moment.causes, moment.alive)
        alike, by_module, by_line = _by_place(seen, moment)
        _hold_against_counters(seen, moment, at_peak, peak, remarks)
    _tell_of_kept_batches(raw, remarks)
    end = raw.end
    return RankProfile(
        rank=raw.process.rank,
        pid=raw.process.pid,
        device=raw.process.device_index or 0,
        phases=highest_by_name(raw.phases),
        run_phases=run_phases(raw.phases),
        peak=peak,
        num_steps=raw.num_steps,
        at_peak=at_peak,
        at_peak_of=moment and moment.span.phase.said,
        largest=(alike or [])[:_NUM_LARGEST],
        by_module=by_module or [],
        by_line=by_line or [],
        fragmentation_bytes=fragmentation_bytes(raw.phases),
        num_alloc_retries=end.num_alloc_retries if end else None,
        num_ooms=end.num_ooms if end else None,
        traffic=traffic_of(raw) if raw.process.emulated else None,
    )


def _tell_of_kept_batches(raw: RawRank, remarks: Remarks) -> None:
    """Add a remark on an evaluation that keeps its logits and was shortened: its peak with all batches."""
    seen = raw.evaluation
    if seen is None:
        return
    num, of, grown = seen["num_batches"], seen["num_batches_of"], seen["grown_bytes"]
    remarks.add(
        f"evaluation adds {format_bytes(grown)} to its peak with each batch; all {of} of this length would take "
        f"{format_bytes(seen['peak_bytes'] + (of - num) * grown)} (predicted from {num}); eval_accumulation_steps or "
        "preprocess_logits_for_metrics lower it"
    )


def traffic_of(raw: RawRank) -> list[CollectiveTraffic]:
    """Return the traffic that the last whole step requested of its collectives; nothing where no step is whole."""
    own = [one for one in raw.moved if one.step is not None and one.step == raw.num_steps]
    counts = [(one.phase, {(kind, ranks): (calls, size) for kind, ranks, calls, size in one.counts}) for one in own]
    return added_up(part for phase, counted in counts for part in moved_since({}, counted, phase))


def _is_called(uuid: str | None, name: str) -> bool:
    """Return True if torch's UUID is NVML's, which begins with ``GPU-``."""
    return uuid is not None and uuid.removeprefix("GPU-") == name.removeprefix("GPU-")


def highest_by_name(phases: Sequence[RawPhase]) -> list[PhaseHighest]:
    """The highest of each tier by phase name, in the order in which the names first came."""
    return _highest_by([(phase.name, phase) for phase in phases])


def run_phases(phases: Sequence[RawPhase]) -> list[PhaseHighest]:
    """Return the highest bytes by phase of the run: all steps are ``training``; empty where there is nothing but
    loading and steps.
    """
    seen, names = {one.name for one in phases}, {"load": "load", "other": "after_training"}
    if rollout := seen & {"weight_sync", "sleep", "wake_up", "log_probs"}:
        names |= dict.fromkeys((*rollout, "generation"), "training")  # the first precedes the first step
    resumed = next((at for at, one in enumerate(phases) if one.name == "resume"), len(phases))
    named = [
        ("resume" if one.name == "load" and at > resumed else names.get(one.name, one.name), one)
        for at, one in enumerate(phases)  # what is still loaded then stands beside the optimizer's state
    ]
    found = _highest_by([(name if one.step is None else "training", one) for name, one in named])
    return found if {one.name for one in found} - {"load", "training", "after_training"} else []


def _highest_by(named: Sequence[tuple[str, RawPhase]]) -> list[PhaseHighest]:
    found = []
    for name in dict.fromkeys(name for name, _ in named):
        own = [phase for of, phase in named if of == name]
        found.append(
            PhaseHighest(
                name=name,
                num_phases=len(own),
                allocated_bytes=max(one.allocated_peak_bytes for one in own),
                reserved_bytes=_highest(one.reserved_peak_bytes for one in own),
                device_bytes=_highest(size for one in own for size in (one.device_used_bytes, one.device_peak_bytes)),
            )
        )
    return found


def peak_of(phases: Sequence[RawPhase]) -> ProfilePeak | None:
    """The highest allocated over all phases, the first of several; the other tiers' highest over the run."""
    if not phases:
        return None
    top = max(phases, key=lambda one: one.allocated_peak_bytes)
    return ProfilePeak(
        phase=top.name,
        step=top.step,
        allocated_bytes=top.allocated_peak_bytes,
        requested_bytes=top.requested_peak_bytes,
        reserved_bytes=_highest(one.reserved_peak_bytes for one in phases),
        device_bytes=_highest(size for one in phases for size in (one.device_used_bytes, one.device_peak_bytes)),
    )


def fragmentation_bytes(phases: Sequence[RawPhase]) -> int | None:
    """Reserved less allocated, both highest, in the phase that reserved the most; of several the fullest one.

    Segments stay once they are taken, so that later phases of little memory say nothing.
    """
    known = [
        (one.reserved_peak_bytes, one.allocated_peak_bytes) for one in phases if one.reserved_peak_bytes is not None
    ]
    return None if not known else max(known)[0] - max(known)[1]


def _hold_against_counters(
    seen: AnalyzedRank, moment: MemoryPoint, at_peak: Live, peak: ProfilePeak, remarks: Remarks
) -> None:
    phase = moment.span.phase
    if phase.allocated_peak_bytes != peak.allocated_bytes:
        remarks.add(
            f"the peak was in {peak.said}, which was not traced; what is alive is of the traced peak, "
            f"{format_bytes(phase.allocated_peak_bytes)} in {phase.said}"
        )
    counted = phase.requested_peak_bytes
    if counted is not None and counted != at_peak.total_bytes:
        remarks.add(
            f"the allocator counted {counted:,} B requested at the peak of {phase.said} and its history comes to "
            f"{at_peak.total_bytes:,} B; the difference is unexplained"
        )
    if moment.span.phase.step is not None and phase.step not in seen.owners.gradients_in and phase.name == "backward":
        remarks.add(f"no gradients were looked up in {phase.said}: they count as temporaries there")


def _by_place(seen: AnalyzedRank, moment: MemoryPoint) -> tuple[list[BlocksAlike], list[PlaceBytes], list[PlaceBytes]]:
    """(blocks alike, bytes by Class.method, bytes by line and cause), each the largest first."""
    sizes, lines, names, alike = seen.lives.sizes, seen.lines, seen.owners.names, Counter()
    for block in np.flatnonzero(moment.alive).tolist():
        name = names.get(block)
        kind = (
            int(sizes[block]),
            causes_of.CAUSES[moment.causes[block]],
            seen.places.of(int(lines[block])),
            pattern(name) if name else None,
        )
        alike[kind] += 1
    blocks = [
        BlocksAlike(
            size_bytes=size,
            num_blocks=count,
            cause=cause,
            line=place.line,
            function=place.function,
            module=place.module,
            parameter=parameter,
        )
        for (size, cause, place, parameter), count in alike.items()
    ]
    blocks.sort(key=lambda one: (-one.total_bytes, one.cause, one.line or "", one.parameter or ""))
    modules = _by((module_said(place), None, size, count) for (size, _, place, _), count in alike.items())
    by_line = _by((line_said(place), cause, size, count) for (size, cause, place, _), count in alike.items())
    return blocks, modules, by_line


def _by(alike: Iterable[tuple[str, str | None, int, int]]) -> list[PlaceBytes]:
    """Bytes by place and cause, from the size and the number of blocks alike."""
    sizes, counts = Counter(), Counter()
    for place, cause, size, count in alike:
        sizes[place, cause] += size * count
        counts[place, cause] += count
    found = [
        PlaceBytes(place=place, cause=cause, num_bytes=size, num_blocks=counts[place, cause])
        for (place, cause), size in sizes.items()
    ]
    return sorted(found, key=lambda one: (-one.num_bytes, one.place, one.cause or ""))


def module_said(place: Location) -> str:
    """``LlamaMLP.forward``, function or file where there is no class, or that there is no Python line."""
    if place.line is None or place.module is not None:
        return place.module or "no Python line"
    file = place.line.rpartition(":")[0]
    return file if place.function == "<module>" else f"{place.function} in {file.rpartition('/')[2]}"


def line_said(place: Location) -> str:
    """``file.py:12 forward``, or that there is none."""
    return "no Python line" if place.line is None else f"{place.line} {place.function}"


def _highest(values) -> int | None:
    return max((value for value in values if value is not None), default=None)
