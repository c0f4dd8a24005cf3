"""Fit: records -> a MemoryModel, one coefficient near 1 per term and a constant, over the arithmetic of terms.

In: RunRecords of one instrument and one kind of device. Out: a frozen MemoryModel that says what it was fitted on, how
well it explains that, and how well it predicts a model it has not seen. Physics is the prior: what the records do not
decide stays at 1. Never imports torch; numpy and scipy only when fitting.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import vramprobe
from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.errors import FitError
from vramprobe.memory_model import (
    CHOICES,
    ErrorSummary,
    LeaveOneModelOut,
    MemoryModel,
    Ranges,
    Spread,
)
from vramprobe.record import TRAINING_PHASES, RunRecord
from vramprobe.spec import CellSpec
from vramprobe.table import require_comparable
from vramprobe.terms import Moment, moments

if TYPE_CHECKING:
    import numpy as np

#: Why a simulated record is left out.
SIMULATED = "simulated: predicted, not measured"
MIN_RECORDS = 4
#: A coefficient outside these is no longer the physics it stands for.
COEFFICIENT_BOUNDS = (0.8, 1.25)
#: What a coefficient's distance from 1 costs, as relative error of one record: 10 % off costs like 0.1 % on one record.
PRIOR_WEIGHT = 0.01
#: Relative error from which the loss stops growing with the square.
ROBUST_SCALE = 0.02
#: Share of measured values that an interval is to hold.
COVERAGE = 0.9
#: Of the tiers beyond allocated, whose spread is over the fitted records.
INTERVAL_QUANTILES = (0.05, 0.95)
#: How an interval grows with each doubling where too few sizes were seen to learn it: by itself.
DEFAULT_GROWTH = 1.0
#: What a family never seen adds where only one was seen, as a share of the value.
DEFAULT_UNSEEN_FAMILY = 0.02
_MIN_DOUBLINGS, _MAX_SIZE_STEPS = 0.5, 8


class Observation(NamedTuple):
    """A record with its moments; ``bytes`` is its peak, or its lower bound where the device ran out of memory."""

    record: RunRecord
    moments: list[Moment]
    bytes: int
    censored: bool


class _Design(NamedTuple):
    """The records as arrays: ``terms`` is records × moments × causes in bytes, padded with zero rows.

    Moments that another one of the record covers in every term are left out: they are no peak, whatever is learnt.
    """

    terms: np.ndarray
    observed: np.ndarray
    censored: np.ndarray
    causes: list[str]


def fit(records: Iterable[RunRecord]) -> MemoryModel:
    """The memory model of these records.

    Raises IncomparableRecords where instrument, device or torch differ, FitError with fewer than MIN_RECORDS usable.
    """
    records = list(records)
    observations, left_out = _observations(records)
    exact = [one for one in observations if not one.censored]
    if len(exact) < MIN_RECORDS:
        reasons = "; ".join(f"{count} left out: {reason}" for reason, count in left_out.items())
        raise FitError(
            f"a fit needs at least {MIN_RECORDS} usable records; of {len(records)} given, {len(exact)} are. {reasons}"
        )
    require_comparable([one.record for one in observations])
    design = _design(observations)
    coefficients, constant = _solve(design)
    one_left_out = _leave_one_model_out(observations, design)
    first = exact[0].record
    return MemoryModel(
        instrument=first.instrument,
        device=first.spec.device,
        device_name=first.environment.device_name,
        data_fingerprint=_data_fingerprint(observations),
        fingerprints=sorted(one.record.fingerprint for one in observations),
        num_records=len(exact),
        num_lower_bounds=len(observations) - len(exact),
        left_out=left_out,
        models=sorted({one.record.spec.model for one in exact}),
        ranges=_ranges([one.record.spec for one in exact]),
        coefficients=coefficients,
        constant_bytes=constant,
        residuals=_residuals(observations, _errors(design, coefficients, constant)),
        leave_one_model_out=one_left_out,
        growth_per_doubling=_growth_per_doubling(observations, design, one_left_out),
        unseen_family=_unseen_family(observations, design, one_left_out),
        reserved_over_allocated=_reserved_gap([one.record for one in exact]),
        device_over_reserved_bytes=_device_gap([one.record for one in exact]),
        versions=first.environment.versions,
        vramprobe_version=vramprobe.__version__,
        warnings=_mixed_versions([one.record for one in observations]),
    )


# -- which records --------------------------------------------------------------------------------------------------


def _observations(records: Sequence[RunRecord]) -> tuple[list[Observation], dict[str, int]]:
    found, left_out = [], Counter()
    for record in records:
        size, censored, reason = _observed_bytes(record)
        if size is None:
            left_out[reason] += 1
            continue
        try:
            found.append(Observation(record, moments(record.spec), size, censored))
        except UnsupportedArchitecture as error:
            left_out[str(error)] += 1
    return found, dict(left_out)


def _observed_bytes(record: RunRecord) -> tuple[int | None, bool, str]:
    """(bytes, is a lower bound, why there is none)."""
    outcome = record.outcome
    if not record.is_measured:
        return None, False, SIMULATED
    if record.held_out:
        return None, False, "held out by its sweep"
    if outcome.kind == "ok" and record.peak is not None:
        return record.peak.allocated_bytes, False, ""
    if outcome.kind == "oom" and outcome.phase in TRAINING_PHASES and outcome.allocated_bytes is not None:
        return outcome.allocated_bytes + (outcome.requested_bytes or 0), True, ""
    return None, False, f"outcome {outcome.kind}"


def _mixed_versions(records: Sequence[RunRecord]) -> list[str]:
    """What differs harmlessly; what must not differ has raised by now (table.require_comparable)."""
    seen: dict[str, set[str]] = defaultdict(set)
    for record in records:
        for package, release in record.environment.versions.items():
            seen[package].add(str(release))
    return [f"records of several versions of {package}: {', '.join(sorted(found))}"
            for package, found in sorted(seen.items()) if len(found) > 1]  # fmt: skip


def _data_fingerprint(observations: Sequence[Observation]) -> str:
    lines = sorted(f"{one.record.fingerprint} {one.bytes} {one.censored}" for one in observations)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _ranges(specs: Sequence[CellSpec]) -> Ranges:
    def span(values: list[int]) -> tuple[int, int]:
        return min(values), max(values)

    return Ranges(
        num_params=span([architecture(spec.architecture).num_params for spec in specs]),
        num_tokens=span([spec.num_tokens for spec in specs]),
        seq_len=span([spec.seq_len for spec in specs]),
        batch_size=span([spec.batch_size for spec in specs]),
        choices={name: sorted({str(getattr(spec, name)) for spec in specs}) for name in CHOICES},
    )


# -- the least squares ----------------------------------------------------------------------------------------------


def _design(observations: Sequence[Observation]) -> _Design:
    import numpy as np

    causes = sorted({cause for one in observations for moment in one.moments for cause in moment.terms})
    num_moments = max(len(one.moments) for one in observations)
    empty = [0] * len(causes)
    terms = np.array([
        [[moment.terms.get(cause, 0) for cause in causes] for moment in one.moments]
        + [empty] * (num_moments - len(one.moments))
        for one in observations
    ], float)  # fmt: skip
    observed = np.array([float(one.bytes) for one in observations])
    return _Design(_without_covered(terms), observed, np.array([one.censored for one in observations]), causes)


def _without_covered(terms: np.ndarray) -> np.ndarray:
    """The same with fewer moments: without those that another one covers; of equal ones the first stays."""
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


def _rows(design: _Design, wanted: np.ndarray) -> _Design:
    """These records of a design, and the causes that they have."""
    terms = design.terms[wanted]
    present = terms.any(axis=(0, 1))
    causes = [cause for cause, has in zip(design.causes, present, strict=True) if has]
    return _Design(terms[..., present], design.observed[wanted], design.censored[wanted], causes)


def _solve(design: _Design) -> tuple[dict[str, float], int]:
    """(coefficient per cause, constant in bytes): robust relative least squares around 1, constant not negative."""
    import numpy as np
    from scipy.optimize import least_squares

    unit = 0.01 * float(np.median(design.observed))  # so that the constant is a number of the coefficients' size
    num_causes = len(design.causes)
    shares = np.ascontiguousarray(design.terms.transpose(1, 0, 2)) / design.observed[:, None]  # of the observed bytes
    unit_shares = unit / design.observed
    prior = PRIOR_WEIGHT * np.diag([1.0] * num_causes + [0.1])
    centre = np.array([1.0] * num_causes + [0.0])

    def relative_errors(unknowns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(predicted − observed) / observed of each record, and which moment is its peak."""
        by_moment = shares @ unknowns[:-1]
        peak = by_moment.argmax(axis=0)
        relative = np.take_along_axis(by_moment, peak[None], axis=0)[0] + unit_shares * unknowns[-1] - 1.0
        return relative, peak

    def residuals(unknowns: np.ndarray) -> np.ndarray:
        relative, _ = relative_errors(unknowns)
        relative[design.censored] = np.minimum(relative[design.censored], 0.0)  # above a lower bound is no error
        return np.concatenate([relative, prior @ (unknowns - centre)])

    def slopes(unknowns: np.ndarray) -> np.ndarray:
        relative, peak = relative_errors(unknowns)
        rows = np.column_stack([shares[peak, np.arange(peak.size)], unit_shares])
        rows[design.censored & (relative > 0.0)] = 0.0
        return np.concatenate([rows, prior])

    low, high = COEFFICIENT_BOUNDS
    solution = least_squares(
        residuals, x0=[1.0] * num_causes + [1e-3], jac=slopes, loss="soft_l1", f_scale=ROBUST_SCALE,
        bounds=([low] * num_causes + [0.0], [high] * num_causes + [np.inf]),
        xtol=1e-12, ftol=1e-12, gtol=1e-12,
    )  # fmt: skip
    coefficients = {cause: round(float(value), 6) for cause, value in zip(design.causes, solution.x, strict=False)}
    return coefficients, round(unit * float(solution.x[-1]))


def _errors(design: _Design, coefficients: dict[str, float], constant: int) -> np.ndarray:
    """(predicted − measured) / measured of each record, as memory_model.peak_moment predicts it."""
    import numpy as np

    scale = np.array([coefficients.get(cause, 1.0) for cause in design.causes])
    predicted = np.rint(design.terms * scale).sum(axis=2).max(axis=1) + constant
    return (predicted - design.observed) / design.observed


def _summary(errors: Sequence[float]) -> ErrorSummary:
    return ErrorSummary(
        num_records=len(errors),
        mean_absolute=sum(map(abs, errors)) / len(errors),
        worst_absolute=max(map(abs, errors)),
        mean_signed=sum(errors) / len(errors),
    )


def _residuals(observations: Sequence[Observation], errors: np.ndarray) -> dict[str, ErrorSummary]:
    groups: dict[str, list[float]] = defaultdict(list)
    for one, error in zip(observations, errors.tolist(), strict=True):
        if one.censored:
            continue
        phase = one.record.peak.phase if one.record.peak else "unknown"
        for name in ("overall", f"method {one.record.spec.method}", f"phase {phase}"):
            groups[name].append(error)
    return {name: _summary(errors) for name, errors in groups.items()}


def _errors_left_out(
    observations: Sequence[Observation], design: _Design, key: Callable[[CellSpec], str]
) -> dict[str, list[float]]:
    """Group → errors on its records by a fit without them; what cannot be left out is not in it."""
    import numpy as np

    groups = np.array([key(one.record.spec) for one in observations])
    errors: dict[str, list[float]] = {}
    for group in dict.fromkeys(groups.tolist()):
        held_out, rest = (groups == group) & ~design.censored, groups != group
        if held_out.any() and (rest & ~design.censored).any():
            errors[group] = _errors(_rows(design, held_out), *_solve(_rows(design, rest))).tolist()
    return errors


def _leave_one_model_out(observations: Sequence[Observation], design: _Design) -> LeaveOneModelOut | None:
    errors = _errors_left_out(observations, design, lambda spec: spec.model)
    if not errors:
        return None
    every = [error for found in errors.values() for error in found]
    half_width = conformal_quantile([abs(1 / (1 + error) - 1) for error in every])
    return LeaveOneModelOut(
        overall=_summary(every), by_model={model: _summary(found) for model, found in sorted(errors.items())},
        low=max(1 - half_width, 1e-3), high=1 + half_width,
    )  # fmt: skip


def _unseen_family(observations: Sequence[Observation], design: _Design, left_out: LeaveOneModelOut | None) -> float:
    """What a family never seen adds to the half-width, as a share of the value."""
    errors = _errors_left_out(observations, design, lambda spec: spec.model_type)
    every = [abs(error) for found in errors.values() for error in found]
    if not every or left_out is None:
        return DEFAULT_UNSEEN_FAMILY
    return max(conformal_quantile(every) - (left_out.high - 1), 0.0)


def conformal_quantile(values: Sequence[float]) -> float:
    """What a further value of the same kind stays within with probability COVERAGE (split conformal prediction).

    Vovk et al., Algorithmic Learning in a Random World (2005): the ceil((n + 1) · coverage)-th smallest of n values.
    """
    ordered = sorted(values)
    return ordered[min(len(ordered), math.ceil((len(ordered) + 1) * COVERAGE)) - 1]


def _growth_per_doubling(
    observations: Sequence[Observation], design: _Design, left_out: LeaveOneModelOut | None
) -> float:
    """By how much of itself the half-width must grow with each doubling of parameters beyond those fitted.

    Learnt as it is used: fits of the smaller models predict the larger ones, at least half a doubling above.
    """
    import numpy as np

    half_width = left_out.high - 1 if left_out else 0.0
    if half_width == 0:
        return DEFAULT_GROWTH
    sizes = np.array([architecture(one.record.spec.architecture).num_params for one in observations])
    exact = ~design.censored
    excesses: list[float] = []
    steps = sorted(set(sizes[exact].tolist()))[:-1]
    for largest in steps[:: -(-len(steps) // _MAX_SIZE_STEPS) or 1]:
        smaller, larger = sizes <= largest, exact & (sizes >= largest * 2**_MIN_DOUBLINGS)
        if (smaller & exact).sum() < MIN_RECORDS or not larger.any():
            continue
        errors = np.abs(_errors(_rows(design, larger), *_solve(_rows(design, smaller))))
        doublings = np.log2(sizes[larger] / largest)
        excesses += ((errors / half_width - 1) / doublings).tolist()
    return round(max(conformal_quantile(excesses), 0.0), 4) if excesses else DEFAULT_GROWTH


def _quantiles(values: Sequence[float]) -> tuple[float, float]:
    import numpy as np

    low, high = np.quantile(np.array(values), INTERVAL_QUANTILES)
    return float(low), float(high)


# -- the other tiers ------------------------------------------------------------------------------------------------


def _reserved_gap(records: Sequence[RunRecord]) -> Spread | None:
    """Reserved over allocated at the peak: what the caching allocator holds beyond the tensors."""
    ratios = [record.peak.reserved_bytes / record.peak.allocated_bytes
              for record in records if record.peak and record.peak.reserved_bytes is not None]  # fmt: skip
    return _spread(ratios)


def _device_gap(records: Sequence[RunRecord]) -> Spread | None:
    """Device less reserved in bytes: the CUDA context and what libraries take behind torch."""
    peaks = [record.peak for record in records if record.peak and record.peak.reserved_bytes is not None]
    return _spread([peak.device_bytes - peak.reserved_bytes for peak in peaks if peak.device_bytes is not None])


def _spread(values: Sequence[Any]) -> Spread | None:
    if not values:
        return None
    import numpy as np

    low, high = _quantiles(values)
    return Spread(value=float(np.median(np.array(values))), low=low, high=high)
