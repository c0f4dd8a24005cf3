"""Two profiles → what changed in a step's predicted time, by class, and whether the change pays.

In: two ProfileRecords. Out: a TimeDifference; None where a side has no counted step. Of one GPU the errors of the two
times are mostly common, so that their ratio is nearer to the truth than either: :data:`LEAST_SHARE`. Of two GPUs they
are not, and the intervals have to lie apart.
"""

from vramprobe.records.frozen import FrozenModel
from vramprobe.records.profile import ProfileRecord
from vramprobe.records.step_time import StepTime
from vramprobe.units import format_bytes

#: A change below this share is not told from none. A prototype of the count had the sign of 13 of 14 published pairs of
#: one A100 and one source (fused kernels on and off) right, the wrong one -1.2 %, and was off by at most 3 points on
#: the 9 pairs above 5 %.
LEAST_SHARE = 0.03
#: Memory that is not worth a word.
_LEAST_MEMORY_SHARE = 0.01


class ClassSeconds(FrozenModel):
    """One class's seconds before and after; classes overlap."""

    what: str
    before_seconds: float
    after_seconds: float


class TimeDifference(FrozenModel):
    """``ratio``: after over before, of the step, or of a token where the two steps have different numbers of them.
    ``is_told``: whether it is beyond what such a comparison can be off by.
    """

    before_seconds: float
    after_seconds: float
    by_class: tuple[ClassSeconds, ...]  # the largest change first
    per: str  # "step" or "token"
    ratio: float
    is_told: bool
    compared: str  # what the judgement rests on
    verdict: str


def time_difference(before: ProfileRecord, after: ProfileRecord) -> TimeDifference | None:
    """The step's time after the change over that before."""
    one, other = before.step_time, after.step_time
    if one is None or other is None:
        return None
    tokens = (one.tokens or 0, other.tokens or 0)
    per_token = all(tokens) and tokens[0] != tokens[1]
    ratio = other.seconds / one.seconds * (tokens[0] / tokens[1] if per_token else 1.0)
    same = one.gpu == other.gpu
    is_told = abs(ratio - 1) >= LEAST_SHARE if same else _apart(one, other, ratio)
    return TimeDifference(
        before_seconds=one.seconds,
        after_seconds=other.seconds,
        by_class=tuple(_by_class(one, other)),
        per="token" if per_token else "step",
        ratio=ratio,
        is_told=is_told,
        compared=_compared(same, one, other),
        verdict=_verdict(ratio, is_told, _reserved_growth(before, after)),
    )


def _apart(one: StepTime, other: StepTime, ratio: float) -> bool:
    """Return True if the 80 % intervals of two GPUs do not meet, scaled as the ratio is."""
    scale = ratio * one.seconds / other.seconds
    return scale * other.low_seconds > one.high_seconds or scale * other.high_seconds < one.low_seconds


def _by_class(one: StepTime, other: StepTime) -> list[ClassSeconds]:
    names = dict.fromkeys([*one.by_class, *other.by_class])
    found = [
        ClassSeconds(what=name, before_seconds=one.by_class.get(name, 0.0), after_seconds=other.by_class.get(name, 0.0))
        for name in names
    ]
    changed = [each for each in found if each.before_seconds != each.after_seconds]
    return sorted(changed, key=lambda each: -abs(each.after_seconds - each.before_seconds))


def _compared(same: bool, one: StepTime, other: StepTime) -> str:
    if same:
        return (
            f"two counts for {one.gpu}, whose errors are mostly common: changes below {LEAST_SHARE:.0%} cannot be told "
            "from none, larger ones may be off by a few points"
        )
    return f"counts for {one.gpu} and {other.gpu}, whose errors differ: told apart where the 80 % intervals do not meet"


def _reserved_growth(before: ProfileRecord, after: ProfileRecord) -> int | None:
    """Bytes of the reserved peak, 0 where they change by less than a word is worth; None where a side has none."""
    peaks = [one.highest_rank.peak if one.highest_rank else None for one in (before, after)]
    sizes = [None if peak is None else peak.reserved_bytes for peak in peaks]
    if sizes[0] is None or sizes[1] is None:
        return None
    grown = sizes[1] - sizes[0]
    return grown if abs(grown) > _LEAST_MEMORY_SHARE * sizes[0] else 0


def _verdict(ratio: float, is_told: bool, grown: int | None) -> str:
    share = f"{abs(ratio - 1):.1%}"
    memory = "" if grown is None else f"{format_bytes(abs(grown))} {'more' if grown > 0 else 'less'} reserved memory"
    if not is_told:
        if grown is None or grown == 0:
            return "no difference in time that can be told"
        return f"no difference in time that can be told, {memory}"
    if ratio < 1:
        return f"worth it: {share} faster" + (f", for {memory}" if grown else "")
    if grown is not None and grown < 0:
        return f"worth it only for the memory: {share} slower, {memory}"
    return f"not worth it: {share} slower" + (f", and {memory}" if grown else "")
