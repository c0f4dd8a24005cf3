"""Interval: errors on what was left out -> how wide 90 % intervals must be, and how they grow beyond what was fitted.

In: Folds of cross_validation.py. Out: an IntervalWidth; memory_model.half_width has its formula. Split conformal
prediction (Lei et al., JASA 113, 2018) with residuals relative to their standard error: a record's own noise, as a
power of its peak, and what the coefficients are unsure of. No torch; numpy and scipy only inside functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vramprobe.model.cross_validation import Fold
from vramprobe.model.memory_model import IntervalWidth, constant_name
from vramprobe.model.regression import Solution
from vramprobe.units import NUM_PUBLISHED_DIGITS, published

if TYPE_CHECKING:
    import numpy as np

#: Share of measured values that an interval is to hold.
COVERAGE = 0.9
#: By how much of itself an interval grows with each doubling, where larger models left out do not show more: an
#: allowance, as nothing measured there can speak against it.
LEAST_GROWTH = 0.05
#: The same where no model could be left out: by itself.
DEFAULT_GROWTH = 1.0
#: What a family never seen adds where only one was seen, as a share of the value.
DEFAULT_UNSEEN_FAMILY = 0.02
#: The powers of the peak that are tried for the noise, as a share: from constant bytes to a share that grows as the
#: peak itself.
POWERS = tuple(number / 10 for number in range(-10, 11))
#: Records of a method from which its own quantile is taken: from here on nine in ten of them are not all of them.
LEAST_RECORDS = 9


def interval_width(
    solution: Solution,
    models: Sequence[Fold],
    larger: Sequence[Fold],
    families: Sequence[Fold],
    worst_residual: float,
) -> IntervalWidth:
    """From models, all larger models and families left out; with one model only, from ``worst_residual`` in the fit.

    Residuals in the fit say little of another model, so they count twice.
    """
    import numpy as np

    least_bytes = int(solution.fitted_bytes.min())
    if not models:
        return IntervalWidth(
            half_width=dict.fromkeys(solution.estimate.constant_bytes, published(2 * worst_residual)),
            from_bytes=least_bytes,
            power=0.0,
            covariance={},
            growth_per_doubling=DEFAULT_GROWTH,
            unseen_family=DEFAULT_UNSEEN_FAMILY,
        )
    power = likeliest_power(models, least_bytes)
    by_model = [fold.residuals / standard_errors(fold, power, least_bytes) for fold in models]
    scores, methods = abs(np.concatenate(by_model)), np.concatenate([fold.methods for fold in models])
    factor = few_models_factor(by_model)
    half_width = {
        method: published(
            factor * conformal_quantile(own if len(own := scores[methods == method]) >= LEAST_RECORDS else scores)
        )
        for method in solution.estimate.constant_bytes
    }

    def inside(fold: Fold) -> np.ndarray:
        """The half-widths of what the fold left out."""
        return standard_errors(fold, power, least_bytes) * [half_width[method] for method in fold.methods.tolist()]

    growth, unseen = LEAST_GROWTH, DEFAULT_UNSEEN_FAMILY
    if larger and all(half_width.values()):
        excess = [(abs(fold.residuals) / inside(fold) - 1) / fold.doublings for fold in larger]
        growth = max(conformal_quantile(np.concatenate(excess)), LEAST_GROWTH)
    if families:
        unseen = max(conformal_quantile(np.concatenate([abs(fold.residuals) - inside(fold) for fold in families])), 0.0)
    return IntervalWidth(
        half_width=half_width,
        from_bytes=least_bytes,
        power=power,
        covariance=_by_name(solution, power, least_bytes),
        growth_per_doubling=round(growth, 4),
        unseen_family=published(unseen),
    )


def standard_errors(fold: Fold, power: float, least_bytes: int) -> np.ndarray:
    """Standard error of each left-out record as a share, up to a factor: its own noise, and the fold's uncertain
    unknowns.
    """
    import numpy as np

    unsure = fold.rest.covariance(lambda size: noise_share(size / least_bytes, power))
    variance = noise_share(fold.predicted_bytes / least_bytes, power) ** 2
    return np.sqrt(variance + np.maximum(((fold.shares @ unsure) * fold.shares).sum(axis=1), 0.0))


def noise_share(relative_size: np.ndarray, power: float) -> np.ndarray:
    """As memory_model.noise_share, of many."""
    import numpy as np

    return (np.maximum(relative_size, 1.0) if power > 0 else relative_size) ** power


def likeliest_power(folds: Sequence[Fold], least_bytes: int) -> float:
    """The power of the peak with which noise grows, one of POWERS, by maximum likelihood of the left-out residuals.

    Laplace's distribution, whose likelihood one wild record does not rule; 0 where nothing was off.
    """
    import numpy as np

    sizes = abs(np.concatenate([fold.residuals for fold in folds]))
    if not sizes.any():
        return 0.0
    costs = []
    for power in POWERS:
        scale = np.concatenate([standard_errors(fold, power, least_bytes) for fold in folds])
        costs.append(math.log((sizes / scale).mean()) + np.log(scale).mean())
    return POWERS[int(np.argmin(costs))]


def _by_name(solution: Solution, power: float, least_bytes: int) -> dict[str, dict[str, float]]:
    """The unknowns' covariance as half_width() takes it: of scaled terms, in squares of the smallest's noise."""
    import numpy as np

    unsure = solution.covariance(lambda size: noise_share(size / least_bytes, power))
    coefficients, constants = solution.estimate
    units = [*coefficients.values(), *[least_bytes / solution.unit_bytes] * len(constants)]
    unsure = unsure / np.outer(units, units)
    names = [*coefficients, *map(constant_name, constants)]
    kept = [index for index in range(len(names)) if unsure[index, index] > 0]
    return {
        names[row]: {
            names[column]: float(f"{unsure[row, column]:.{NUM_PUBLISHED_DIGITS}g}") for column in kept if column <= row
        }
        for row in kept
    }


def few_models_factor(by_model: Sequence[np.ndarray]) -> float:
    """By how much a quantile must grow as its records are few: Student's t over the normal's, 1 for many.

    Records of one model share what is wrong with it, so they count as fewer: by Kish's design effect, from the
    correlation within models (one-way analysis of variance).
    """
    import numpy as np
    from scipy.special import ndtri, stdtrit

    scores, counts = np.concatenate(by_model), np.array([len(one) for one in by_model])
    num_records, num_models = scores.size, counts.size
    means = np.array([one.mean() for one in by_model])
    between = float((counts * (means - scores.mean()) ** 2).sum()) / max(num_models - 1, 1)
    within = float(sum(((one - mean) ** 2).sum() for one, mean in zip(by_model, means, strict=True)))
    within /= max(num_records - num_models, 1)
    typical = (num_records - (counts**2).sum() / num_records) / max(num_models - 1, 1)
    spread = between + (typical - 1) * within
    correlation = max((between - within) / spread, 0.0) if spread > 0 else 0.0
    effective = num_records / (1 + (typical - 1) * correlation)
    tail = (1 + COVERAGE) / 2
    return float(stdtrit(max(effective - 1, 1.0), tail) / ndtri(tail))


def conformal_quantile(values: Iterable[float]) -> float:
    """Return the bound that a further value of the same kind stays within with probability COVERAGE (split conformal
    prediction).

    Vovk et al., Algorithmic Learning in a Random World (2005): the ceil((n + 1) · coverage)-th smallest of n values.
    """
    ordered = sorted(map(float, values))
    return ordered[min(len(ordered), math.ceil((len(ordered) + 1) * COVERAGE)) - 1]
