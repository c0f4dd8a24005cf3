"""Interval: errors on what was left out -> how wide 90 % intervals must be, and how they grow beyond what was fitted.

In: LeftOut errors of cross_validation.py. Out: an IntervalWidth, whose formula is predict.half_width. Split conformal
prediction with scores relative to a scale that is itself learnt. No torch; numpy and scipy only inside functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vramprobe.cross_validation import LeftOut
from vramprobe.memory_model import IntervalWidth

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
#: The powers of the peak that are tried: from a constant relative error to one that grows as the peak itself. Not
#: below: what a wrong coefficient costs is a constant share, and errors in range do not show how little of them it is.
POWERS = tuple(number / 20 for number in range(21))


def interval_width(
    models: LeftOut | None, larger: LeftOut | None, families: LeftOut | None, worst_residual: float, least_bytes: int
) -> IntervalWidth:
    """From models, all larger models and families left out; with one model only, from ``worst_residual`` in the fit.

    ``least_bytes`` is the smallest measured peak, below which the half-width stays. Residuals in the fit say little of
    another model, so they count twice.
    """
    if models is None:
        return IntervalWidth(
            half_width=2 * worst_residual, from_bytes=least_bytes, power=0.0, growth_per_doubling=DEFAULT_GROWTH,
            unseen_family=DEFAULT_UNSEEN_FAMILY,
        )  # fmt: skip
    power = likeliest_power(abs(models.residuals), _relative_size(models, least_bytes))
    scores = models.residuals / _relative_size(models, least_bytes) ** power
    half_width = conformal_quantile(abs(scores)) * few_models_factor(scores, models.folds)
    growth, unseen = LEAST_GROWTH, DEFAULT_UNSEEN_FAMILY
    if larger is not None and half_width > 0:
        inside = half_width * _relative_size(larger, least_bytes) ** power
        growth = max(conformal_quantile((abs(larger.residuals) / inside - 1) / larger.doublings), LEAST_GROWTH)
    if families is not None:
        inside = half_width * _relative_size(families, least_bytes) ** power
        unseen = max(conformal_quantile(abs(families.residuals) - inside), 0.0)
    return IntervalWidth(
        half_width=half_width, from_bytes=least_bytes, power=power, growth_per_doubling=round(growth, 4),
        unseen_family=unseen,
    )  # fmt: skip


def likeliest_power(sizes: np.ndarray, relative_size: np.ndarray) -> float:
    """The power of the peak with which errors of these sizes grow, one of POWERS, by maximum likelihood.

    Laplace's distribution, whose likelihood one wild record does not rule; the smallest power of equals, and 0 where
    nothing was off.
    """
    import numpy as np

    if not sizes.any():
        return 0.0
    log_size = np.log(relative_size)
    costs = [math.log((sizes / relative_size**power).mean()) + power * log_size.mean() for power in POWERS]
    return POWERS[int(np.argmin(costs))]


def few_models_factor(scores: np.ndarray, folds: np.ndarray) -> float:
    """By how much a quantile must grow as its records are few: Student's t over the normal's, 1 for many.

    Records of one model share what is wrong with it, so they count as fewer: by Kish's design effect, from the
    correlation within models (one-way analysis of variance).
    """
    import numpy as np
    from scipy.special import ndtri, stdtrit

    names, counts = np.unique(folds, return_counts=True)
    means = np.array([scores[folds == name].mean() for name in names])
    num_records, num_models = scores.size, names.size
    between = float((counts * (means - scores.mean()) ** 2).sum()) / max(num_models - 1, 1)
    within = float(sum(((scores[folds == name] - mean) ** 2).sum() for name, mean in zip(names, means, strict=True)))
    within /= max(num_records - num_models, 1)
    typical = (num_records - (counts**2).sum() / num_records) / max(num_models - 1, 1)
    spread = between + (typical - 1) * within
    correlation = max((between - within) / spread, 0.0) if spread > 0 else 0.0
    effective = num_records / (1 + (typical - 1) * correlation)
    tail = (1 + COVERAGE) / 2
    return float(stdtrit(max(effective - 1, 1.0), tail) / ndtri(tail))


def conformal_quantile(values: Iterable[float]) -> float:
    """What a further value of the same kind stays within with probability COVERAGE (split conformal prediction).

    Vovk et al., Algorithmic Learning in a Random World (2005): the ceil((n + 1) · coverage)-th smallest of n values.
    """
    ordered = sorted(map(float, values))
    return ordered[min(len(ordered), math.ceil((len(ordered) + 1) * COVERAGE)) - 1]


def _relative_size(found: LeftOut, least_bytes: int) -> np.ndarray:
    import numpy as np

    return np.maximum(found.predicted_bytes / least_bytes, 1.0)
