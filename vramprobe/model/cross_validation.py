"""Cross-validation: the errors of fits on records that they have not seen: a model, a family, all larger models.

In: observations and their design. Out: Folds, each with an error per record left out, and summaries. What an interval
makes of them is interval.py's. No torch; numpy only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vramprobe.model.memory_model import ErrorSummary, LeaveOneModelOut
from vramprobe.model.regression import Design, PeakObservation, Solution, relative_errors, rows_of, solution_of
from vramprobe.spec import CellSpec
from vramprobe.units import published

if TYPE_CHECKING:
    import numpy as np

#: A fit of fewer models says too little about larger ones: its errors are those of having seen few.
MIN_SMALLER_MODELS = 3
#: Nearer models would make a growth of every small difference.
MIN_DOUBLINGS = 0.5
_MAX_SIZE_STEPS = 8


class Fold(NamedTuple):
    """Prediction errors on records that a fit without them makes, one value of each field per record.

    ``errors``: (predicted − measured) / measured; ``shares``: of the predicted bytes, by unknown, as regression.shares
    has them; ``doublings``: of parameters, above the largest model that the fit has seen.
    """

    name: str
    rest: Solution
    errors: np.ndarray
    predicted_bytes: np.ndarray
    shares: np.ndarray
    methods: np.ndarray
    doublings: np.ndarray

    @property
    def residuals(self) -> np.ndarray:
        """measured / predicted − 1: what an interval around the prediction has to hold."""
        return 1 / (1 + self.errors) - 1


def leave_out(observations: Sequence[PeakObservation], design: Design, key: Callable[[CellSpec], str]) -> list[Fold]:
    """Each group in turn predicted by a fit of the others; empty where there are no others."""
    import numpy as np

    groups = np.array([key(one.record.spec) for one in observations])
    folds = []
    for group in dict.fromkeys(groups.tolist()):
        held_out, rest = (groups == group) & ~design.censored, groups != group
        if held_out.any() and (rest & ~design.censored).any():
            folds.append(_fold(design, rest, held_out, group, np.zeros(held_out.sum())))
    return folds


def leave_larger_out(observations: Sequence[PeakObservation], design: Design) -> list[Fold]:
    """The larger models predicted by fits of the smaller ones, as they are used: MIN_DOUBLINGS above or more.

    Empty where no size has MIN_SMALLER_MODELS at or below it and a model so far above.
    """
    import numpy as np

    sizes = np.array([one.num_params for one in observations])
    models = np.array([one.record.spec.model for one in observations])
    exact = ~design.censored
    steps = [
        largest
        for largest in sorted(set(sizes[exact].tolist()))
        if len(set(models[exact & (sizes <= largest)].tolist())) >= MIN_SMALLER_MODELS
        and (sizes[exact] >= largest * 2**MIN_DOUBLINGS).any()
    ]
    folds = []
    for largest in steps[:: -(-len(steps) // _MAX_SIZE_STEPS) or 1]:
        larger = exact & (sizes >= largest * 2**MIN_DOUBLINGS)
        folds.append(_fold(design, sizes <= largest, larger, f"above {largest}", np.log2(sizes[larger] / largest)))
    return folds


def leave_one_model_out(folds: Sequence[Fold]) -> LeaveOneModelOut:
    """The summaries of models left out in turn."""
    import numpy as np

    return LeaveOneModelOut(
        overall=summary(np.concatenate([fold.errors for fold in folds])),
        by_model={fold.name: summary(fold.errors) for fold in sorted(folds, key=lambda fold: fold.name)},
    )


def summary(errors: np.ndarray) -> ErrorSummary:
    """Summarize one group's relative errors."""
    sizes = abs(errors)
    return ErrorSummary(
        num_records=len(errors),
        mean_absolute=published(float(sizes.mean())),
        worst_absolute=published(float(sizes.max())),
        mean_signed=published(float(errors.mean())),
    )


def _fold(design: Design, rest: np.ndarray, held_out: np.ndarray, name: str, doublings: np.ndarray) -> Fold:
    import numpy as np

    fitted, unseen = rows_of(design, rest), rows_of(design, held_out)
    solution = solution_of(fitted)
    errors = relative_errors(unseen, solution.estimate)
    predicted = (1 + errors) * unseen.observed
    methods = np.array(unseen.methods)[unseen.is_method.argmax(axis=1)]
    return Fold(name, solution, errors, predicted, solution.shares(unseen, predicted), methods, doublings)
