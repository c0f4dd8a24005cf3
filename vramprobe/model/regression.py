"""Regression: the arithmetic of records as arrays -> coefficients near 1 and constants, by robust least squares.

In: Observations. Out: Estimates, and their errors on any records. What the records do not decide is exactly the
physics: its coefficient is 1. Out-of-memory records only raise. No torch; numpy and scipy only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vramprobe.records.record import RunRecord
from vramprobe.terms import Moment

if TYPE_CHECKING:
    import numpy as np

#: A coefficient outside these is no longer the physics it stands for.
COEFFICIENT_BOUNDS = (0.8, 1.25)
#: What a coefficient's distance from 1 costs, as relative error of one record: 10 % off costs like 0.1 % on one record.
PRIOR_WEIGHT = 0.01
#: The same for the constant, per hundredth of the median peak.
CONSTANT_PRIOR_WEIGHT = 0.001
#: Relative error from which the loss stops growing with the square.
ROBUST_SCALE = 0.02
#: Digits kept of a coefficient: 1e-9 of 16 GiB is 17 bytes.
NUM_DIGITS = 9
_MAX_STEPS, _SMALLEST_STEP, _STEP_SHARES = 100, 1e-13, (1.0, 0.5, 0.25, 0.1, 0.03, 0.01)


class PeakObservation(NamedTuple):
    """A record with its moments; ``bytes`` is its peak, or its lower bound where the device ran out of memory."""

    record: RunRecord
    moments: list[Moment]
    bytes: int
    censored: bool
    num_params: int


class Design(NamedTuple):
    """The records as arrays: ``terms`` is records × moments × causes in bytes, padded with zero rows; ``is_method`` is
    records × methods, 1.0 for a record's own.

    Moments that another one of the record covers in every term are left out: they are no peak, whatever is learnt.
    """

    terms: np.ndarray
    observed: np.ndarray
    censored: np.ndarray
    causes: list[str]
    is_method: np.ndarray
    methods: Sequence[str]


class FittedValues(NamedTuple):
    """Fitted values: a coefficient by cause, and a constant in bytes by method."""

    coefficients: dict[str, float]
    constant_bytes: dict[str, int]


class Solution(NamedTuple):
    """An estimate, and what is needed to say how sure it is.

    The unknowns are the coefficients in the order of the design's causes, then the methods' constants in
    ``unit_bytes``. ``fitted_shares`` and ``fitted_bytes`` are of the records that finished.
    """

    estimate: FittedValues
    unit_bytes: float
    fitted_shares: np.ndarray
    fitted_bytes: np.ndarray
    prior: np.ndarray

    def shares(self, design: Design, of_bytes: np.ndarray) -> np.ndarray:
        """Share of each unknown's term in ``of_bytes``, at the predicted peak: records × unknowns."""
        return _shares(design, self.estimate, self.unit_bytes, of_bytes)

    def covariance(self, noise: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Covariance of the unknowns; ``noise`` gives the error of a peak of so many bytes, as a share.

        The sandwich: White, Econometrica 48 (1980), for ridge regression. Unknowns that no record decides have none.
        """
        import numpy as np

        rows, scale = self.fitted_shares, noise(self.fitted_bytes)
        inverse = np.linalg.inv(rows.T @ rows + np.diag(self.prior**2))
        return inverse @ ((rows * scale[:, None] ** 2).T @ rows) @ inverse


def design_of(observations: Sequence[PeakObservation]) -> Design:
    """The observations as arrays, in their order."""
    import numpy as np

    causes = sorted({cause for one in observations for moment in one.moments for cause in moment.terms})
    num_moments = max(len(one.moments) for one in observations)
    nothing = [0] * len(causes)
    flat: list[int] = []  # NumPy takes a list of numbers many times faster than lists in lists
    for one in observations:
        for moment in one.moments:
            flat.extend(map(moment.terms.get, causes, nothing))
        flat.extend(nothing * (num_moments - len(one.moments)))
    terms = np.array(flat, float).reshape(len(observations), num_moments, len(causes))
    observed = np.array([float(one.bytes) for one in observations])
    censored = np.array([one.censored for one in observations])
    methods = sorted({one.record.spec.method for one in observations})
    is_method = np.array([[float(one.record.spec.method == method) for method in methods] for one in observations])
    return Design(_without_covered(terms), observed, censored, causes, is_method, methods)


def _without_covered(terms: np.ndarray) -> np.ndarray:
    """Drop the moments of each record that another moment covers; of equal ones the first stays."""
    import numpy as np

    num_moments = terms.shape[1]
    covered = np.zeros(terms.shape[:2], bool)
    for one in range(num_moments):
        for other in range(num_moments):
            at_least = (terms[:, other] >= terms[:, one]).all(axis=1)
            if other < one:
                covered[:, one] |= at_least
            elif other > one:
                covered[:, one] |= at_least & (terms[:, other] > terms[:, one]).any(axis=1)
    first = np.argsort(covered, axis=1, kind="stable")[:, : int((~covered).sum(axis=1).max())]
    return np.take_along_axis(np.where(covered[..., None], 0.0, terms), first[..., None], axis=1)


def rows_of(design: Design, wanted: np.ndarray) -> Design:
    """These records of a design. A cause that none of them has decides nothing, and stays at the physics."""
    terms, observed, censored, causes, is_method, methods = design
    return Design(terms[wanted], observed[wanted], censored[wanted], causes, is_method[wanted], methods)


def relative_errors(design: Design, estimate: FittedValues) -> np.ndarray:
    """(predicted − measured) / measured of each record, as memory_model.peak_moment predicts it."""
    import numpy as np

    scale = np.array([estimate.coefficients.get(cause, 1.0) for cause in design.causes])
    constants = np.array([estimate.constant_bytes.get(method, 0) for method in design.methods])
    predicted = np.rint(design.terms * scale).sum(axis=2).max(axis=1) + design.is_method @ constants
    return (predicted - design.observed) / design.observed


def solution_of(design: Design) -> Solution:
    """:func:`solve`, with what is needed to say how sure it is."""
    estimate, unit, fitted = solve(design), _unit_bytes(design), rows_of(design, ~design.censored)
    return Solution(estimate, unit, _shares(fitted, estimate, unit, fitted.observed), fitted.observed, _prior(design))


def solve(design: Design) -> FittedValues:
    """Robust relative least squares around the physics, constants not negative.

    Unknowns are the coefficients' distances from 1, and the methods' constants in hundredths of the median peak: what a
    library holds beside the terms comes with the method (every QLoRA cell on the CPU held 1,280 bytes more).

    First those of the records that finished; then each out-of-memory record alone may raise them, never lower one, and
    the largest of each counts. So no out-of-memory record ever lowers a prediction, whatever came before it.
    """
    import numpy as np

    exact = ~design.censored
    unit = _unit_bytes(design)
    low, high = COEFFICIENT_BOUNDS
    num_causes, num_methods = len(design.causes), len(design.methods)
    least = np.array([low - 1] * num_causes + [0.0] * num_methods)
    most = np.array([high - 1] * num_causes + [np.inf] * num_methods)
    unknowns = _Problem(rows_of(design, exact), unit).minimised(0.0 * least, least, most)
    raised, most = [unknowns], np.maximum(most, unknowns + _SMALLEST_STEP)
    bounds = np.flatnonzero(design.censored)
    is_violated = _Problem(rows_of(design, bounds), unit).errors(unknowns)[0] < 0 if bounds.size else []
    for number in bounds[is_violated]:
        with_one = _Problem(rows_of(design, np.append(np.flatnonzero(exact), number)), unit)
        raised.append(with_one.minimised(unknowns, unknowns, most))
    unknowns = np.max(raised, axis=0)
    coefficients = [round(1 + one, NUM_DIGITS) for one in unknowns[:num_causes].tolist()]
    constants = [round(unit * one) for one in unknowns[num_causes:].tolist()]
    return FittedValues(
        dict(zip(design.causes, coefficients, strict=True)), dict(zip(design.methods, constants, strict=True))
    )


def _unit_bytes(design: Design) -> float:
    """A hundredth of the median peak: in it the constant is a number of the coefficients' size."""
    import numpy as np

    return 0.01 * float(np.median(design.observed[~design.censored]))


def _prior(design: Design) -> np.ndarray:
    import numpy as np

    return np.array([PRIOR_WEIGHT] * len(design.causes) + [CONSTANT_PRIOR_WEIGHT] * len(design.methods))


def _shares(design: Design, estimate: FittedValues, unit_bytes: float, of_bytes: np.ndarray) -> np.ndarray:
    import numpy as np

    scale = np.array([estimate.coefficients[cause] for cause in design.causes])
    peak = (design.terms @ scale).argmax(axis=1)
    at_peak = design.terms[np.arange(peak.size), peak]
    return np.column_stack([at_peak, unit_bytes * design.is_method]) / of_bytes[:, None]


class _Problem:
    """Sum of robust squares of relative errors, and of distances from the physics."""

    def __init__(self, design: Design, unit: float) -> None:
        import numpy as np

        self.shares = np.ascontiguousarray(design.terms.transpose(1, 0, 2)) / design.observed[:, None]
        self.at_one = self.shares.sum(axis=2) - 1.0
        self.unit_shares = unit * design.is_method / design.observed[:, None]
        self.censored = design.censored
        self.prior = _prior(design)
        self.num_causes = len(design.causes)

    def errors(self, unknowns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(predicted − observed) / observed of each record, and which moment is its peak."""
        import numpy as np

        by_moment = self.at_one + self.shares @ unknowns[: self.num_causes]
        peak = by_moment.argmax(axis=0)
        relative = np.take_along_axis(by_moment, peak[None], axis=0)[0]
        return relative + self.unit_shares @ unknowns[self.num_causes :], peak

    def cost(self, unknowns: np.ndarray) -> float:
        """Return the cost that is minimized: soft L1 of the errors (SciPy's ``soft_l1``), squares of the unknowns."""
        import numpy as np

        relative, _ = self.errors(unknowns)
        relative[self.censored] = np.minimum(relative[self.censored], 0.0)
        robust = 2 * ROBUST_SCALE**2 * (np.sqrt(1 + (relative / ROBUST_SCALE) ** 2) - 1)
        return float(robust.sum() + ((self.prior * unknowns) ** 2).sum())

    def minimised(self, start: np.ndarray, least: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Gauss-Newton with reweighting, each step solved exactly within the bounds (BVLS), halved until it helps.

        Exactly solved, a direction that no record decides stays where the prior has it: at the physics.
        """
        import numpy as np
        from scipy.optimize import lsq_linear

        unknowns, cost = start, self.cost(start)
        for _ in range(_MAX_STEPS):
            relative, peak = self.errors(unknowns)
            rows = np.column_stack([self.shares[peak, np.arange(peak.size)], self.unit_shares])
            weight = (1 + (relative / ROBUST_SCALE) ** 2) ** -0.5
            weight[self.censored & (relative > 0)] = 0.0  # above a lower bound is no error
            normal = (rows * weight[:, None]).T @ rows + np.diag(self.prior**2)
            pull = rows.T @ (weight * (rows @ unknowns - relative))
            root = np.linalg.cholesky(normal)
            best = lsq_linear(root.T, np.linalg.solve(root, pull), bounds=(least, most), method="bvls").x
            for share in _STEP_SHARES:
                tried = unknowns + share * (best - unknowns)
                if (found := self.cost(tried)) < cost:
                    break
            else:
                break
            step = float(np.abs(tried - unknowns).max())
            unknowns, cost = tried, found
            if step < _SMALLEST_STEP:
                break
        return unknowns
