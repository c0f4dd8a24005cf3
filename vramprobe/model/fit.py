"""Fit: records, and what is predicted of their cells -> a CardFit.

In: RunRecords of one GPU, and a function that predicts a record's cell without a fit.
Out: a frozen CardFit that says what it was learnt from, and what was left out. Intervals are split conformal (Vovk et
al., Algorithmic Learning in a Random World, 2005), so they need no distribution. Never predicts; no torch, no numpy.
"""

import hashlib
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import vramprobe
from vramprobe.catalog import gpu_seen
from vramprobe.errors import FitError, VramprobeError
from vramprobe.model.card_fit import CHOICES, MOST_TIMES, CardFit, Gaps, Ratio, Span, Spread
from vramprobe.records.record import RunRecord
from vramprobe.records.table import require_comparable

#: Why a rank of several is left out.
RANKS = "of several GPUs, whose memory is no single GPU's"
#: Instrument -> why nothing is learnt from its records.
_NOT_OF_A_GPU = {
    "emulated": "emulated: vramprobe predict answers by such runs already, without a fit; measure on a GPU",
    "cpu": "of the CPU, which is measured and not predicted; measure on a GPU",
}
#: Why a peak of nothing is left out.
NO_BYTES = "a peak of 0 bytes, which nothing has"
MIN_RECORDS = 4
#: Share of further records that a spread is to hold.
COVERAGE = 0.9
#: A method has a spread of its own from so many records on: fewer do not show what nine in ten stay within.
ENOUGH_RECORDS = 9
#: Digits kept of a ratio: 1e-9 of 16 GiB is 17 bytes.
_NUM_DIGITS = 9


class Expected(NamedTuple):
    """Prediction of a record's cell without a fit."""

    allocated_bytes: int
    reserved_bytes: int | None


class _Pair(NamedTuple):
    record: RunRecord
    expected: Expected


def fit(records: Iterable[RunRecord], expect: Callable[[RunRecord], Expected]) -> CardFit:
    """Return what these records have over what ``expect`` says; a VramprobeError of it leaves its record out.

    Raises IncomparableRecords where device or torch differ, FitError with fewer than MIN_RECORDS usable.
    """
    records = list(records)
    pairs, left_out = _pairs(records, expect)
    if len(pairs) < MIN_RECORDS:
        reasons = "".join(f"; {count} left out: {reason}" for reason, count in left_out.items())
        raise FitError(
            f"a fit needs at least {MIN_RECORDS} usable records; of {len(records)} given, {len(pairs)} are{reasons}. "
            "Measure more cells on a GPU: vramprobe run SWEEP --out RESULTS"
        )
    require_comparable([one.record for one in pairs])
    first, specs = pairs[0].record, [one.record.spec for one in pairs]
    return CardFit(
        card=card_of(first),
        gaps=_gaps(pairs),
        models=sorted({spec.model for spec in specs}),
        num_params=_span(one.record.facts.num_params for one in pairs if one.record.facts),
        num_tokens=_span(spec.num_tokens for spec in specs),
        choices={name: sorted({str(getattr(spec, name)) for spec in specs}) for name in CHOICES},
        left_out=left_out,
        data_fingerprint=_data_fingerprint(pairs),
        fingerprints=sorted(one.record.fingerprint for one in pairs),
        versions=first.environment.versions,
        vramprobe_version=vramprobe.__version__,
        warnings=_mixed_versions([one.record for one in pairs]),
    )


def card_of(record: RunRecord) -> str:
    """Return the short name of the record's GPU, else what its machine calls the device."""
    name = record.environment.device_name
    gpu = gpu_seen(name)
    return gpu.short_name if gpu is not None else name


def conformal_quantile(values: Iterable[float]) -> float:
    """Return the bound that a further value of the same kind stays within with probability COVERAGE: the
    ceil((n + 1) · COVERAGE)-th smallest of n values.
    """
    ordered = sorted(map(float, values))
    return ordered[min(len(ordered), math.ceil((len(ordered) + 1) * COVERAGE)) - 1]


def not_measured(record: RunRecord) -> str | None:
    """Return why a record says nothing of a GPU beside its recording; None for one that was measured on a GPU."""
    return _NOT_OF_A_GPU.get(record.instrument)


def _pairs(records: Sequence[RunRecord], expect: Callable[[RunRecord], Expected]) -> tuple[list[_Pair], dict[str, int]]:
    pairs, left_out = [], Counter()
    for record in records:
        reason = _unusable(record)
        try:
            if reason is None:
                pairs.append(_Pair(record, expect(record)))
        except VramprobeError as error:
            reason = str(error)
        if reason is not None:
            left_out[reason] += 1
    return pairs, dict(left_out)


def _unusable(record: RunRecord) -> str | None:
    """Return why nothing is learnt from a record; None where something is."""
    if reason := not_measured(record):
        return reason
    if record.spec.is_sharded:
        return RANKS
    if record.held_out:
        return "held out by its sweep"
    if record.outcome.kind == "oom":
        return "ran out of memory, which only bounds its peak from below"
    if record.outcome.kind != "ok" or record.peak is None or record.facts is None:
        return f"outcome {record.outcome.kind}"
    if not record.peak.allocated_bytes:
        return NO_BYTES
    return "its card was full: the allocator gave cached blocks back" if record.num_alloc_retries else None


def _gaps(pairs: Sequence[_Pair]) -> Gaps:
    peaks = [(one.record.peak, one.expected) for one in pairs if one.record.peak is not None]
    reserved = [(peak.reserved_bytes, peak, expected) for peak, expected in peaks if peak.reserved_bytes is not None]
    by_method: dict[str, list[_Pair]] = defaultdict(list)
    for one in sorted(pairs, key=lambda one: one.record.spec.method):
        by_method[one.record.spec.method].append(one)
    return Gaps(
        num_records=len(pairs),
        allocated=_ratio(_allocated(pairs)),
        by_method={name: _ratio(_allocated(own)) for name, own in by_method.items() if len(own) >= ENOUGH_RECORDS},
        reserved=_maybe_ratio([size / own.reserved_bytes for size, _, own in reserved if own.reserved_bytes]),
        device_over_reserved_bytes=_spread(
            [peak.device_bytes - size for size, peak, _ in reserved if peak.device_bytes is not None], 0
        ),
    )


def _allocated(pairs: Sequence[_Pair]) -> list[float]:
    """Measured over predicted allocated memory."""
    return [one.record.peak.allocated_bytes / one.expected.allocated_bytes for one in pairs if one.record.peak]


def _ratio(values: Sequence[float]) -> Ratio:
    found = _spread(values, _NUM_DIGITS)
    assert found is not None
    if not 0 < found.value <= MOST_TIMES:
        raise FitError(
            f"the records have {found.value:,.3g} times the memory that is predicted of their cells: they are of other "
            "cells than they say; vramprobe check RESULTS looks at each"
        )
    return Ratio(**found.model_dump())


def _maybe_ratio(values: Sequence[float]) -> Ratio | None:
    return _ratio(values) if values else None


def _spread(values: Sequence[float], num_decimals: int) -> Spread | None:
    """The median, and on both sides of it how far a further record stays; of fewer than ENOUGH_RECORDS twice as far as
    the furthest, as their quantile is not known.
    """
    if not values:
        return None
    middle = statistics.median(values)
    half = conformal_quantile(abs(value - middle) for value in values) * (1 if len(values) >= ENOUGH_RECORDS else 2)
    low, value, high = (round(float(end), num_decimals) for end in (middle - half, middle, middle + half))
    return Spread(low=low, value=value, high=high)


def _span(values: Iterable[int]) -> Span:
    ordered = sorted(values)
    return Span(low=ordered[0], high=ordered[-1])


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


def _data_fingerprint(pairs: Sequence[_Pair]) -> str:
    lines = sorted(f"{record.fingerprint} {record.peak and record.peak.allocated_bytes}" for record, _ in pairs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
