"""Largest: a GPU and a cell with one thing left open -> the largest batch, length or model of the catalog that fits.

In: a spec and a Judge, which predicts a cell and holds it against the GPU. Out: a frozen Largest, or an error where not
even the smallest fits. Memory never falls with batch or length, so a bisection over whole numbers is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.bounds.floor import least_weight_bytes
from vramprobe.catalog import find_model
from vramprobe.errors import VramprobeError
from vramprobe.predict.prediction import Frozen, Prediction
from vramprobe.predict.verdict import TIGHT_SHARE, Verdict
from vramprobe.spec import CellSpec
from vramprobe.units import format_bytes

Question = Literal["batch_size", "seq_len", "model"]
#: Where families write how long a sequence they were trained for; nothing stops a longer one.
_TRAINED_LENGTH = "max_position_embeddings"


class Judged(NamedTuple):
    """A prediction, and what it means on the GPU."""

    prediction: Prediction
    verdict: Verdict


Judge = Callable[[CellSpec], Judged]


class LargestAnswer(Frozen):
    """A value and what is predicted of the cell with it."""

    value: int | str
    verdict: Verdict
    prediction: Prediction


class Largest(Frozen):
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
) -> Largest:
    """The largest batch or length of ``spec``, whose own is not looked at, from ``least`` on.

    Raises VramprobeError where not even ``least`` fits.
    """
    most, notes = _bounds(question, spec)
    seen: dict[int, Judged] = {}
    judged = _once(question, spec, judge, seen)
    tight = _last(lambda count: _over_tight(judged(count)), least, most)
    if tight is None:
        raise VramprobeError(_nothing_fits(question, spec, judged(least).verdict, least))
    fits = _last(lambda count: _over_fits(judged(count)), least, tight)
    return _found(question, spec, judged, fits, tight, notes if tight == most else [], len(seen))


def largest_replayed(
    question: Literal["batch_size", "seq_len"],
    spec: CellSpec,
    judge: Judge,
    rough: Judge,
    *,
    least: int = 1,
) -> Largest:
    """As largest_count, where ``judge`` replays the allocator: few of its answers, near what ``rough`` says at once.

    What is kept in reserve may fall from one count to the next: the answer has the verdict, and the next larger not.
    """
    most, notes = _bounds(question, spec)
    seen: dict[int, Judged] = {}
    judged, roughly = _once(question, spec, judge, seen), _once(question, spec, rough, {})

    def guess(count: int) -> float:
        return _over_tight(roughly(count))

    tight = _near(lambda count: _over_tight(judged(count)), guess, least, most)
    if tight is None:
        raise VramprobeError(_nothing_fits(question, spec, judged(least).verdict, least))
    fits = _near(lambda count: _over_fits(judged(count)), guess, least, tight)
    return _found(question, spec, judged, fits, tight, notes if tight == most else [], len(seen))


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


def _found(
    question: Literal["batch_size", "seq_len"],
    spec: CellSpec,
    judged: Callable[[int], Judged],
    fits: int | None,
    tight: int,
    notes: list[str],
    num_predictions: int,
) -> Largest:
    return Largest(
        question=question,
        gpu=judged(tight).verdict.gpu,
        fits=_answer(fits, judged) if fits else None,
        tight=_answer(tight, judged) if tight != fits else None,
        notes=notes + _made_for(question, spec, tight),
        num_predictions=num_predictions,
    )


def largest_model(
    cells: Sequence[tuple[str, CellSpec | str]], judge: Judge, gpu: str, record: Judge | None = None
) -> Largest:
    """The largest of these models by its parameters; a text in place of a cell says why there is none.

    ``record`` judges a model that ``judge`` knows no arithmetic of, in seconds to a minute: asked only of those that
    are larger than the answer so far and whose weights the GPU holds. Raises VramprobeError where none fits.
    """
    judged: dict[str, tuple[int, Judged]] = {}
    not_judged: dict[str, str] = {}
    unknown: list[tuple[str, CellSpec]] = []
    for name, spec in cells:
        if isinstance(spec, str):
            not_judged[name] = spec
            continue
        try:
            found = judge(spec)
        except UnsupportedArchitecture as error:
            not_judged[name] = str(error)
            unknown.append((name, spec))
            continue
        judged[name] = architecture(spec.architecture).num_params, found
    if record is not None:
        _record_larger(unknown, record, judged, not_judged)

    def top(verdicts: tuple[str, ...]) -> str | None:
        fitting = [name for name, (_, one) in judged.items() if one.verdict.verdict in verdicts]
        return max(fitting, key=lambda name: judged[name][0], default=None)

    fits, tight = top(("fits",)), top(("fits", "tight"))
    if not judged:
        name, reason = next(iter(not_judged.items()))
        more = "" if record else "--engine recipe records those that may be the answer; "
        raise VramprobeError(f"none of {len(not_judged)} models could be judged; {more}{name}: {reason}")
    if tight is None:
        raise VramprobeError(
            f"none of the {len(judged)} models of the catalog that could be judged fits on {gpu} with these options; "
            "shorten the sequence, recompute layers (--gradient-checkpointing), or use method qlora"
        )
    return Largest(
        question="model",
        gpu=gpu,
        fits=_answer(fits, lambda name: judged[name][1]) if fits else None,
        tight=_answer(tight, lambda name: judged[name][1]) if tight != fits else None,
        not_judged=not_judged,
        num_predictions=len(judged),
    )


def _record_larger(
    unknown: Sequence[tuple[str, CellSpec]],
    record: Judge,
    judged: dict[str, tuple[int, Judged]],
    not_judged: dict[str, str],
) -> None:
    """Judge models by recordings, the largest first, until one fits; those that may change the answer alone."""
    sizes = {name: find_model(name).n_params or 0 for name, _ in unknown}
    usable = max((one.verdict.usable_bytes for _, one in judged.values()), default=None)
    for name, spec in sorted(unknown, key=lambda pair: -sizes[pair[0]]):
        fitting = [size for size, one in judged.values() if one.verdict.verdict == "fits"]
        if fitting and sizes[name] <= max(fitting):
            break
        least = least_weight_bytes(spec, sizes[name])
        if usable is not None and least > usable:
            not_judged[name] = f"not recorded: its weights alone take {format_bytes(least)}"
            continue
        try:
            judged[name] = sizes[name], record(spec)
        except VramprobeError as error:
            not_judged[name] = str(error)
        else:
            del not_judged[name]


def _answer(value: int | str, judged: Callable[[int | str], Judged]) -> LargestAnswer:
    found = judged(value)
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


def _near(over: Callable[[int], float], rough: Callable[[int], float], first: int, most: int | None) -> int | None:
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
