"""Fit: records -> a MemoryModel, one coefficient near 1 per term and a constant, over the arithmetic of terms.

In: RunRecords of one instrument and one kind of device. Out: a frozen MemoryModel that says what it was fitted on, how
well it explains that, and how well it predicts a model it has not seen. The least squares are regression.py's, what was
left out cross_validation.py's, the intervals interval.py's. Never imports torch; numpy and scipy only when fitting.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import vramprobe
from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.catalog import gpu_seen
from vramprobe.errors import FitError
from vramprobe.kernels.chip import chip_like
from vramprobe.model.cross_validation import leave_larger_out, leave_one_model_out, leave_out, summary
from vramprobe.model.interval import conformal_quantile, interval_width
from vramprobe.model.memory_model import CHOICES, ErrorSummary, MemoryModel, Ranges, Spread
from vramprobe.model.regression import NUM_DIGITS, PeakObservation, design_of, relative_errors, solution_of
from vramprobe.records.record import TRAINING_PHASES, RunRecord
from vramprobe.records.table import require_comparable
from vramprobe.terms import course_of, moments_of
from vramprobe.terms.replayed import replayed
from vramprobe.terms.step.workspaces import with_workspaces, workspaces_bytes

if TYPE_CHECKING:
    import numpy as np

#: Why a rank of several is.
RANKS = "of several GPUs, whose terms are no single GPU's"
MIN_RECORDS = 4
#: Of the tiers beyond allocated, whose spread is over the fitted records.
INTERVAL_QUANTILES = (0.05, 0.95)


def fit(records: Iterable[RunRecord]) -> MemoryModel:
    """The memory model of these records.

    Raises IncomparableRecords where instrument, device or torch differ, FitError with fewer than MIN_RECORDS usable.
    """
    records = list(records)
    observations, left_out = _observations(records)
    exact = [one for one in observations if not one.censored]
    if len(exact) < MIN_RECORDS:
        reasons = [f"{count} left out: {reason}" for reason, count in left_out.items()]
        if num_bounds := len(observations) - len(exact):
            reasons.insert(0, f"{num_bounds} ran out of memory, which only bounds a peak from below")
        raise FitError(
            f"a fit needs at least {MIN_RECORDS} usable records; of {len(records)} given, {len(exact)} are"
            f"{''.join(f'; {reason}' for reason in reasons)}. Measure more cells: vramprobe run SWEEP --out RESULTS"
        )
    require_comparable([one.record for one in observations], across_cards=True)
    design = design_of(observations)
    solution = solution_of(design)
    estimate = solution.estimate
    residuals = _residuals(observations, relative_errors(design, estimate))
    models = leave_out(observations, design, lambda spec: spec.model)
    first = exact[0].record
    over_replay = _replayed_gaps([one.record for one in exact])
    names = sorted({one.record.environment.device_name for one in exact})
    return MemoryModel(
        instrument=first.instrument,
        device=first.spec.device,
        device_name=names[0] if len(names) == 1 else f"{len(names)} cards",
        cards=_cards([one.record for one in exact]),
        data_fingerprint=_data_fingerprint(observations),
        fingerprints=sorted(one.record.fingerprint for one in observations),
        num_records=len(exact),
        num_lower_bounds=len(observations) - len(exact),
        left_out=left_out,
        models=sorted({one.record.spec.model for one in exact}),
        ranges=_ranges(exact),
        coefficients=estimate.coefficients,
        constant_bytes=estimate.constant_bytes,
        residuals=residuals,
        leave_one_model_out=leave_one_model_out(models) if models else None,
        interval=interval_width(
            solution,
            models,
            larger=leave_larger_out(observations, design),
            families=leave_out(observations, design, lambda spec: spec.model_type),
            worst_residual=residuals["overall"].worst_absolute,
        ),
        reserved_over_allocated=_reserved_gap([one.record for one in exact]),
        allocated_over_replayed=over_replay[0],
        reserved_over_replayed=over_replay[1],
        device_over_reserved_bytes=_device_gap([one.record for one in exact]),
        versions=first.environment.versions,
        vramprobe_version=vramprobe.__version__,
        warnings=_mixed_versions([one.record for one in observations]),
    )


# -- which records --------------------------------------------------------------------------------------------------


def _observations(records: Sequence[RunRecord]) -> tuple[list[PeakObservation], dict[str, int]]:
    found, left_out = [], Counter()
    for record in records:
        size, censored, reason = _observed_bytes(record)
        if not size:
            left_out[reason if size is None else "a peak of 0 bytes, which nothing has"] += 1
            continue
        try:
            gpu = gpu_seen(record.environment.device_name)
            course = course_of(record.spec, chip_like(gpu))
            moments = with_workspaces(moments_of(course, record.spec), workspaces_bytes(record.spec, gpu))
            found.append(PeakObservation(record, moments, size, censored, course.arch.num_params))
        except UnsupportedArchitecture as error:
            left_out[str(error)] += 1
    return found, dict(left_out)


def _observed_bytes(record: RunRecord) -> tuple[int | None, bool, str]:
    """(bytes, is a lower bound, why there is none)."""
    outcome = record.outcome
    if record.spec.num_gpus > 1:
        return None, False, RANKS
    if record.held_out:
        return None, False, "held out by its sweep"
    if outcome.kind == "ok" and record.peak is not None:
        return record.peak.allocated_bytes, False, ""
    if outcome.kind == "oom" and outcome.phase in TRAINING_PHASES and outcome.allocated_bytes is not None:
        return outcome.at_least_bytes, True, ""
    return None, False, f"outcome {outcome.kind}"


def _mixed_versions(records: Sequence[RunRecord]) -> list[str]:
    """Return the packages whose versions differ harmlessly; harmful differences have raised by now
    (table.require_comparable).
    """
    seen: dict[str, set[str]] = defaultdict(set)
    for record in records:
        for package, release in record.environment.versions.items():
            seen[package].add(str(release))
    return [
        f"records of several versions of {package}: {', '.join(sorted(found))}"
        for package, found in sorted(seen.items())
        if len(found) > 1
    ]


def _data_fingerprint(observations: Sequence[PeakObservation]) -> str:
    lines = sorted(f"{one.record.fingerprint} {one.bytes} {one.censored}" for one in observations)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _ranges(observations: Sequence[PeakObservation]) -> Ranges:
    specs = [one.record.spec for one in observations]

    def span(values: list[int]) -> tuple[int, int]:
        return min(values), max(values)

    return Ranges(
        num_params=span([one.num_params for one in observations]),
        num_tokens=span([spec.num_tokens for spec in specs]),
        seq_len=span([spec.seq_len for spec in specs]),
        batch_size=span([spec.batch_size for spec in specs]),
        choices={name: sorted({str(getattr(spec, name)) for spec in specs}) for name in CHOICES},
    )


def _residuals(observations: Sequence[PeakObservation], errors: np.ndarray) -> dict[str, ErrorSummary]:
    import numpy as np

    groups: dict[str, list[float]] = defaultdict(list)
    for one, error in zip(observations, errors.tolist(), strict=True):
        if one.censored:
            continue
        phase = one.record.peak.phase if one.record.peak else "unknown"
        for name in ("overall", f"method {one.record.spec.method}", f"phase {phase}"):
            groups[name].append(error)
    return {name: summary(np.array(errors)) for name, errors in groups.items()}


def _quantiles(values: Sequence[float]) -> tuple[float, float]:
    import numpy as np

    low, high = np.quantile(np.array(values), INTERVAL_QUANTILES)
    return float(low), float(high)


# -- the other tiers ------------------------------------------------------------------------------------------------


def _reserved_gap(records: Sequence[RunRecord]) -> Spread | None:
    """Reserved over allocated at the peak: what the caching allocator holds beyond the tensors.

    To the digits of a coefficient, as bytes are multiplied by it.
    """
    ratios = [
        record.peak.reserved_bytes / record.peak.allocated_bytes
        for record in records
        if record.peak and record.peak.reserved_bytes is not None
    ]
    return _spread(ratios, NUM_DIGITS)


def _replayed_gaps(records: Sequence[RunRecord]) -> tuple[Spread | None, Spread | None]:
    """Allocated and reserved memory over what the allocator's replay of the arithmetic has."""
    ratios: tuple[list[float], list[float]] = ([], [])
    for record in records:
        peak = record.peak
        if peak is not None and peak.reserved_bytes is not None:
            expected = replayed(record.spec, gpu_seen(record.environment.device_name))
            ratios[0].append(peak.allocated_bytes / expected.allocated_bytes)
            ratios[1].append(peak.reserved_bytes / expected.reserved_bytes)
    return _conformal(ratios[0]), _conformal(ratios[1])


def _conformal(ratios: Sequence[float]) -> Spread | None:
    """The median, and on both sides of it what a further record stays within (interval.conformal_quantile)."""
    if not ratios:
        return None
    import numpy as np

    value = float(np.median(np.array(ratios)))
    half = conformal_quantile(abs(ratio / value - 1) for ratio in ratios)
    low, middle, high = (round(value * factor, NUM_DIGITS) for factor in (1 - half, 1, 1 + half))
    return Spread(low=low, value=middle, high=high)


def _cards(records: Sequence[RunRecord]) -> list[str]:
    """The GPUs by their short names, as far as the catalog knows them."""
    found = {gpu_seen(record.environment.device_name) for record in records}
    return sorted(gpu.short_name for gpu in found if gpu is not None)


def _device_gap(records: Sequence[RunRecord]) -> Spread | None:
    """Device less reserved in whole bytes: the CUDA context and what libraries take behind torch.

    None of emulated records, whose context is assumed.
    """
    records = [record for record in records if record.instrument != "emulated"]
    peaks = [(record.peak.device_bytes, record.peak.reserved_bytes) for record in records if record.peak]
    return _spread([device - own for device, own in peaks if device is not None and own is not None], 0)


def _spread(values: Sequence[Any], num_decimals: int) -> Spread | None:
    if not values:
        return None
    import numpy as np

    numbers = (float(np.median(np.array(values))), *_quantiles(values))
    value, low, high = (round(number, num_decimals) for number in numbers)
    return Spread(value=value, low=low, high=high)
