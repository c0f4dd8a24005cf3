"""Cross-validation: the errors of fits on records that they have not seen: a model, a family, all larger models.

In: observations and their design. Out: LeftOut, an error per record and fold, and summaries. What an interval makes of
them is interval.py's. No torch; numpy only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vramprobe.architecture import architecture
from vramprobe.memory_model import ErrorSummary, LeaveOneModelOut
from vramprobe.regression import Design, Observation, relative_errors, rows_of, solve
from vramprobe.spec import CellSpec

if TYPE_CHECKING:
    import numpy as np

#: A fit of fewer models says too little about larger ones: its errors are those of having seen few.
MIN_SMALLER_MODELS = 3
#: Nearer models would make a growth of every small difference.
MIN_DOUBLINGS = 0.5
_MAX_SIZE_STEPS = 8


class LeftOut(NamedTuple):
    """One of each per left-out record: (predicted − measured) / measured by a fit without its fold, the predicted
    bytes, the name of the fold, and how many doublings of parameters it is above that fit.
    """

    errors: np.ndarray
    predicted_bytes: np.ndarray
    folds: np.ndarray
    doublings: np.ndarray

    @property
    def residuals(self) -> np.ndarray:
        """measured / predicted − 1: what an interval around the prediction has to hold."""
        return 1 / (1 + self.errors) - 1


def leave_out(observations: Sequence[Observation], design: Design, key: Callable[[CellSpec], str]) -> LeftOut | None:
    """Each group in turn predicted by a fit of the others; None where there are no others."""
    import numpy as np

    groups = np.array([key(one.record.spec) for one in observations])
    parts = []
    for group in dict.fromkeys(groups.tolist()):
        held_out, rest = (groups == group) & ~design.censored, groups != group
        if held_out.any() and (rest & ~design.censored).any():
            parts.append(_fold(design, rest, held_out, group, np.zeros(held_out.sum())))
    return _joined(parts)


def leave_larger_out(observations: Sequence[Observation], design: Design) -> LeftOut | None:
    """The larger models predicted by fits of the smaller ones, as they are used: MIN_DOUBLINGS above or more.

    None where no size has MIN_SMALLER_MODELS at or below it and a model so far above.
    """
    import numpy as np

    sizes = np.array([architecture(one.record.spec.architecture).num_params for one in observations])
    models = np.array([one.record.spec.model for one in observations])
    exact = ~design.censored
    steps = [
        largest for largest in sorted(set(sizes[exact].tolist()))
        if len(set(models[exact & (sizes <= largest)].tolist())) >= MIN_SMALLER_MODELS
        and (sizes[exact] >= largest * 2**MIN_DOUBLINGS).any()
    ]  # fmt: skip
    parts = []
    for largest in steps[:: -(-len(steps) // _MAX_SIZE_STEPS) or 1]:
        larger = exact & (sizes >= largest * 2**MIN_DOUBLINGS)
        parts.append(_fold(design, sizes <= largest, larger, f"above {largest}", np.log2(sizes[larger] / largest)))
    return _joined(parts)


def leave_one_model_out(found: LeftOut) -> LeaveOneModelOut:
    """The summaries of models left out in turn."""
    by_model = {str(name): summary(found.errors[found.folds == name]) for name in sorted(set(found.folds.tolist()))}
    return LeaveOneModelOut(overall=summary(found.errors), by_model=by_model)


def summary(errors: np.ndarray) -> ErrorSummary:
    """Of one group's relative errors."""
    sizes = abs(errors)
    return ErrorSummary(
        num_records=len(errors), mean_absolute=float(sizes.mean()), worst_absolute=float(sizes.max()),
        mean_signed=float(errors.mean()),
    )  # fmt: skip


def _fold(design: Design, rest: np.ndarray, held_out: np.ndarray, name: str, doublings: np.ndarray) -> LeftOut:
    import numpy as np

    unseen = rows_of(design, held_out)
    errors = relative_errors(unseen, solve(rows_of(design, rest)))
    return LeftOut(errors, (1 + errors) * unseen.observed, np.full(errors.size, name), doublings)


def _joined(parts: Sequence[LeftOut]) -> LeftOut | None:
    import numpy as np

    return LeftOut(*map(np.concatenate, zip(*parts, strict=True))) if parts else None
