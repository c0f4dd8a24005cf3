"""Boundary: the largest batch or length of a cell that a GPU runs, found by running few cells near the predicted one.

In: a cell with one count left open, a card, a fit, and what ran before. Out: the count to run next, until one that ran
has one that ran out of memory right behind it. All that is known stands in the journal, so that a killed search goes on
where it was. Runs nothing.
"""

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from vramprobe.errors import VramprobeError
from vramprobe.model.card_fit import CardFit
from vramprobe.predict.at_hand import NoRecipe, card_of
from vramprobe.predict.bisection import bisected
from vramprobe.predict.expected import predict_at_hand
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.recorded import over_shapes
from vramprobe.predict.verdict import verdict
from vramprobe.records.record import RunRecord
from vramprobe.records.store import latest_by_fingerprint
from vramprobe.spec import CellSpec
from vramprobe.sweep.card import Card
from vramprobe.sweep.skip import lower_bound_bytes

Question = Literal["batch_size", "seq_len"]
#: Nobody's GPU has memory for so many steps of a count.
_MOST = 2**20


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Counts, in steps: the largest that fits at the interval's upper end, at its value, at its lower end (0: none)."""

    surely: int
    likely: int
    possibly: int


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Known bounds of one cell's largest count. ``runs``: the largest count that ran; ``fails``: the smallest that ran
    out of memory.

    ``next_count`` is null once the search has ended; ``why`` says why it ended without both.
    """

    question: Question
    step: int
    spec: CellSpec
    predicted: Predicted
    runs: int | None
    fails: int | None
    next_count: int | None
    why: str = ""

    @property
    def is_exact(self) -> bool:
        """Return True if both sides were run, one step apart."""
        return self.runs is not None and self.fails is not None and self.fails - self.runs == self.step


def with_count(spec: CellSpec, question: Question, count: int) -> CellSpec:
    """The cell with this count. Raises VramprobeError where it cannot be."""
    return CellSpec.model_validate(spec.model_dump() | {question: count})


def predicted_counts(
    spec: CellSpec, question: Question, step: int, card: Card, fit: CardFit | None, *, records: bool = False
) -> Predicted:
    """Predict the largest count that runs, by three bisections: memory grows with the count.

    By recipes at hand, near where they were not recorded around a count, else by one that is recorded now for all
    counts if ``records``. Without any, nothing is known: the search begins at one step.
    """
    most = _MOST
    if question == "seq_len" and spec.learned_positions is not None:
        most = spec.learned_positions // step
    limited = card.of(spec)
    limit_bytes = limited.total_bytes or card.total_bytes

    def predicted(predict: Callable[[CellSpec], Prediction]) -> Predicted:
        @functools.cache
        def at(steps: int) -> Prediction:
            return predict(spec.model_copy(update={question: step * steps}))

        def last(fits: Callable[[Prediction], bool]) -> int:
            return (most and bisected(lambda steps: fits(at(steps)), most, least=1)) or 0

        return Predicted(
            surely=last(lambda found: verdict(found, limited).verdict == "fits"),
            likely=last(lambda found: verdict(found, limited).verdict != "does not fit"),
            possibly=last(lambda found: lower_bound_bytes(found) <= limit_bytes),
        )

    with suppress(NoRecipe):
        return predicted(lambda one: predict_at_hand(one, card.gpu, fit, near=True))
    if records:
        with suppress(VramprobeError):  # the search itself shows what there is to know
            return predicted(over_shapes(spec, question, gpu=card_of(card.gpu), model=fit))
    return Predicted(surely=0, likely=1, possibly=most)


def next_steps(predicted: Predicted, runs: int | None, fails: int | None) -> int | None:
    """Return the count, in steps, to run next: the likely one, then away from it in doubling strides, then the middle.

    Where the prediction is right, two cells are enough. None where the boundary is known, or lies where the prediction
    does not allow it.
    """
    first = min(max(predicted.likely, 1), predicted.possibly)
    if runs is None and fails is None:
        return first or None
    if fails is None:
        onward = min(runs + max(1, runs - first), predicted.possibly)
        return onward if onward > runs else None
    if runs is None:
        back = fails - max(1, first - fails)
        back = max(back, predicted.surely if predicted.surely < fails else 1, 1)
        return back if back < fails else None
    return (runs + fails) // 2 if fails - runs > 1 else None


def boundary_of(
    spec: CellSpec,
    question: Question,
    step: int,
    predicted: Predicted,
    records: Iterable[RunRecord],
    asked: frozenset[str] = frozenset(),
) -> Boundary:
    """Derive the boundary of ``spec`` from ``records``; ``asked``: fingerprints that must not be run again."""
    ran, failed, others = [], [], {}
    for record in latest_by_fingerprint(records).values():
        count = getattr(record.spec, question)
        if with_count(spec, question, count).fingerprint != record.fingerprint:
            continue
        match record.outcome.kind:
            case "ok":
                ran.append(count)
            case "oom" | "skipped":
                failed.append(count)
            case kind:
                others[count] = kind
    runs, fails = max(ran, default=None), min(failed, default=None)
    words = {"question": question, "step": step, "spec": spec, "predicted": predicted, "runs": runs, "fails": fails}
    if runs is not None and fails is not None and fails <= runs:
        return Boundary(**words, next_count=None, why=f"{runs} ran and {fails} did not: memory does not only grow")
    steps = next_steps(predicted, runs and runs // step, fails and fails // step)
    if steps is None:
        return Boundary(**words, next_count=None, why=_why(predicted, step, runs, fails))
    if with_count(spec, question, step * steps).fingerprint in asked:
        how = f"ended as {others[step * steps]}" if step * steps in others else "was not run"
        return Boundary(**words, next_count=None, why=f"{question} {step * steps} {how}")
    return Boundary(**words, next_count=step * steps)


def _why(predicted: Predicted, step: int, runs: int | None, fails: int | None) -> str:
    if runs is None and fails is None:
        return f"not even {step} can fit, predicted"
    if runs is None:
        return f"not even {step} fits"
    return f"{runs + step} cannot fit, predicted" if fails is None else ""
