"""Largest: a GPU and a cell with one thing left open -> the largest batch, length or model of the catalog that fits.

In: a spec and a Judge, which predicts a cell and holds it against the GPU. Out: a frozen Largest, or an error where not
even the smallest fits. Allocated memory never falls with batch or length; reserved memory may, where blocks happen to
fill their segments. A bisection gives a count that fits and whose next does not; a smaller one may be tight.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple

from vramprobe.bounds.floor import least_weight_bytes
from vramprobe.catalog import Gpu, find_model
from vramprobe.errors import VramprobeError
from vramprobe.predict.at_hand import NoRecipe
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.verdict import TIGHT_SHARE, Verdict, usable_bytes
from vramprobe.records.frozen import FrozenModel
from vramprobe.spec import CellSpec

Question = Literal["batch_size", "seq_len", "model"]
#: Where families write how long a sequence they were trained for; nothing stops a longer one.
_TRAINED_LENGTH = "max_position_embeddings"


class Judged(NamedTuple):
    """A prediction, and what it means on the GPU."""

    prediction: Prediction
    verdict: Verdict


Judge = Callable[[CellSpec], Judged]


class LargestAnswer(FrozenModel):
    """A value and what is predicted of the cell with it."""

    value: int | str
    verdict: Verdict
    prediction: Prediction


class Largest(FrozenModel):
    """The largest value whose verdict is ``fits``, and beyond it the largest that is ``tight``; null where none is."""

    question: Question
    gpu: str
    fits: LargestAnswer | None
    tight: LargestAnswer | None
    notes: list[str] = []  # what else bounds the answer
    not_judged: dict[str, str] = {}  # model → why nothing can be said of it
    num_predictions: int


def largest_count(
    question: Literal["batch_size", "seq_len"],
    spec: CellSpec,
    judge: Judge,
    *,
    least: int = 1,
    rough: Judge | None = None,
) -> Largest:
    """The largest batch or length of ``spec``, whose own is not looked at, from ``least`` on.

    ``rough`` answers at once where ``judge`` replays the allocator: few counts are then judged, near what it says. What
    is kept in reserve may fall from one count to the next: the answer has the verdict, and the next larger not. Raises
    VramprobeError where not even ``least`` fits.
    """
    most, notes = _bounds(question, spec)
    seen: dict[int, Judged] = {}
    judged, last = _once(question, spec, judge, seen), _last
    if rough is not None:
        roughly = _once(question, spec, rough, {})
        last = partial(_near, rough=lambda count: _over_tight(roughly(count)))
    tight = last(lambda count: _over_tight(judged(count)), least, most)
    if tight is None:
        raise VramprobeError(_nothing_fits(question, spec, judged(least).verdict, least))
    fits = last(lambda count: _over_fits(judged(count)), least, tight)
    return Largest(
        question=question,
        gpu=judged(tight).verdict.gpu,
        fits=_answer(fits, judged(fits)) if fits else None,
        tight=_answer(tight, judged(tight)) if tight != fits else None,
        notes=[*(notes if tight == most else []), *_made_for(question, spec, tight)],
        num_predictions=len(seen),
    )


def largest_shipped(
    question: Literal["batch_size", "seq_len"], spec: CellSpec, judge: Judge, *, least: int = 1
) -> Largest | None:
    """As largest_count, where ``judge`` raises NoRecipe without a recipe that ships; some know several rows alone."""
    for first in dict.fromkeys((least, 2 if question == "batch_size" else least)):
        with suppress(NoRecipe):
            return largest_count(question, spec, judge, least=first)
    return None


def _once(
    question: Literal["batch_size", "seq_len"], spec: CellSpec, judge: Judge, seen: dict[int, Judged]
) -> Callable[[int], Judged]:
    """Return a function that judges a count only once; ``seen`` keeps the results."""

    def judged(count: int) -> Judged:
        if count not in seen:
            seen[count] = judge(spec.model_copy(update={question: count}))
        return seen[count]

    return judged


def _over_tight(found: Judged) -> int:
    return found.verdict.needed_bytes.value - found.verdict.usable_bytes


def _over_fits(found: Judged) -> float:
    """Bytes above what fits; of a cell that only runs by giving cached blocks back, by what it would keep."""
    judged = found.verdict
    high = judged.needed_bytes.high
    if judged.verdict != "fits" and (kept := found.prediction.reserved_bytes) is not None:
        high = max(high, kept.high)
    return high - TIGHT_SHARE * judged.usable_bytes


def largest_model(cells: Sequence[tuple[str, CellSpec | str]], judge: Judge, gpu: Gpu) -> Largest:
    """The largest of these models by its parameters; a text in place of a cell says why there is none.

    ``judge`` is asked of the largest first, of those whose weights the GPU holds, until one fits; a model of which it
    raises VramprobeError is not judged. Raises VramprobeError where none fits.
    """
    judged: dict[str, Judged] = {}
    not_judged: dict[str, str] = {}
    sizes = {name: find_model(name).n_params or 0 for name, _ in cells}
    tight: str | None = None
    for name, spec in sorted(cells, key=lambda pair: -sizes[pair[0]]):
        if isinstance(spec, str):
            not_judged[name] = spec
            continue
        if least_weight_bytes(spec, sizes[name]) > usable_bytes(gpu, device_is_known=False, num_gpus=spec.num_gpus):
            continue
        try:
            judged[name] = judge(spec)
        except VramprobeError as error:
            not_judged[name] = str(error)
            continue
        answer = judged[name].verdict.verdict
        if answer == "fits":
            return _largest_model(name, tight, judged, not_judged)
        tight = tight or (name if answer == "tight" else None)
    if tight is not None:
        return _largest_model(None, tight, judged, not_judged)
    if not judged and not_judged:
        name, reason = next(iter(not_judged.items()))
        raise VramprobeError(
            f"none of {len(not_judged)} models could be judged; --engine recipe records those that may be the answer; "
            f"{name}: {reason}"
        )
    raise VramprobeError(
        f"none of the models of the catalog that could be judged fits on {gpu.name} with these options; shorten the "
        "sequence, recompute layers (--gradient-checkpointing), or use method qlora"
    )


def _largest_model(
    fits: str | None, tight: str | None, judged: dict[str, Judged], not_judged: dict[str, str]
) -> Largest:
    """Return the answer: beyond what fits, the first that was tight."""
    shown = judged[fits or tight or ""].verdict
    return Largest(
        question="model",
        gpu=shown.gpu,
        fits=_answer(fits, judged[fits]) if fits else None,
        tight=_answer(tight, judged[tight]) if tight else None,
        not_judged=not_judged,
        num_predictions=len(judged),
    )


def _answer(value: int | str, found: Judged) -> LargestAnswer:
    return LargestAnswer(value=value, verdict=found.verdict, prediction=found.prediction)


def _last(over: Callable[[int], float], first: int, most: int | None) -> int | None:
    """The last count from ``first`` to ``most`` at which ``over``, which never falls, is not above 0; None without any.

    The next count to ask is where a straight line through the last two would cross 0, or the middle where that did not
    halve what is left: few questions where memory is linear, and never more than twice a plain bisection's.
    """
    low, at_low = first, over(first)
    if at_low > 0:
        return None
    high, at_high = None, 0.0
    count = first + 1
    while high is None:
        count = count if most is None else min(count, most)
        if count <= low:
            return low  # as far as it goes
        value = over(count)
        if value > 0:
            high, at_high = count, value
        else:
            slope = (value - at_low) / (count - low)
            low, at_low = count, value
            jump = math.floor(-at_low / slope) + 1 if slope > 0 else low
            count = low + max(1, min(jump, 1000 * low))
    return _between(over, low, at_low, high, at_high)


def _between(over: Callable[[int], float], low: int, at_low: float, high: int, at_high: float) -> int:
    """The last count from ``low`` on at which ``over`` is not above 0, as it is at ``high``."""
    halve = False
    while high - low > 1:
        before = high - low
        straight = low + math.floor(-at_low * (high - low) / (at_high - at_low))
        count = (low + high) // 2 if halve else min(max(straight, low + 1), high - 1)
        value = over(count)
        if value > 0:
            high, at_high = count, value
        else:
            low, at_low = count, value
            if not halve and high - low > 1:  # a straight line would end right here: look at the next
                value = over(low + 1)
                if value > 0:
                    return low
                low, at_low = low + 1, value
        halve = high - low > before // 2
    return low


def _near(over: Callable[[int], float], first: int, most: int | None, *, rough: Callable[[int], float]) -> int | None:
    """A count from ``first`` to ``most`` at which ``over`` is not above 0, and is so at the next; None where it is so
    at ``first``.

    ``rough`` costs nothing and is off by about as much at one count as at the next: each answer of ``over`` says by how
    much.
    """
    low: tuple[int, float] | None = None
    high: tuple[int, float] | None = None
    off = 0.0
    while low is None or high is None:
        count = _last(lambda count, off=off: rough(count) + off, first, most) or first
        if low is not None and count <= low[0]:
            count = low[0] + max(1, low[0] // 16)
        if high is not None and count >= high[0]:
            count = high[0] - max(1, high[0] // 16)
        count = max(first, count if most is None else min(count, most))
        above = over(count)
        if above > 0:
            high = count, above
            if count == first:
                return None
        else:
            low = count, above
            if count == most:
                return most
        off = above - rough(count)
    return _between(over, *low, *high)


def _bounds(question: Question, spec: CellSpec) -> tuple[int | None, list[str]]:
    """(largest count there may be, why) beside memory."""
    if question != "seq_len" or spec.learned_positions is None:
        return None, []
    return spec.learned_positions, [f"{spec.model} has {spec.learned_positions} learned positions"]


def _made_for(question: Question, spec: CellSpec, count: int) -> list[str]:
    """Return a note if the config.json names fewer positions than the sequence has."""
    longest = spec.architecture.get(_TRAINED_LENGTH)
    if question != "seq_len" or not isinstance(longest, int) or count <= longest:
        return []
    return [f"{spec.model} was made for {longest} positions; what is beyond would fit, whether or not it is of use"]


def _nothing_fits(question: Question, spec: CellSpec, at_least: Verdict, least: int) -> str:
    other = f"seq_len {spec.seq_len}" if question == "batch_size" else f"batch_size {spec.batch_size}"
    advice = [] if spec.gradient_checkpointing else ["recompute layers (--gradient-checkpointing)"]
    advice += [] if spec.method == "qlora" else ["use method qlora"]
    more = "" if spec.images else " or more GPUs (--min-gpus)"  # a vision tower has one GPU
    advice.append(f"take a smaller model{more}")
    return f"not even {question} {least} with {other} fits on {at_least.gpu}: {at_least.reason}; {', or '.join(advice)}"
