"""Evaluate: records → how far predictions are from what was measured, on records that the fit has not seen.

In: records and what to hold out. Out: an Evaluation: a Score for each held-out record and tier, and their Summaries.
Each fold is fitted again without its records. Never leaves a record out silently. No torch.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from vramprobe import catalog
from vramprobe.choices import Method, PhaseName
from vramprobe.errors import FitError, SpecError, VramprobeError
from vramprobe.model.card_fit import CardFit
from vramprobe.model.fit import NO_BYTES, RANKS, card_of, not_measured
from vramprobe.predict.expected import Expect, expected, fit_records, once
from vramprobe.predict.prediction import Interval, Prediction
from vramprobe.predict.uncertainty import with_fit
from vramprobe.predict.verdict import usable_bytes, verdict
from vramprobe.records.condition import parse_condition
from vramprobe.records.phase_memory import Peak
from vramprobe.records.record import RunRecord
from vramprobe.records.store import latest_by_fingerprint
from vramprobe.records.table import require_comparable
from vramprobe.spec import CellSpec

LeaveOut = Literal["model", "family", "length"]
Tier = Literal["allocated", "reserved", "device"]

_KEYS: dict[LeaveOut, Callable[[CellSpec], str]] = {
    "model": lambda spec: spec.model_label,
    "family": lambda spec: spec.model_type,
    "length": lambda spec: str(spec.seq_len),
}
#: Upper ends of the classes of size, in parameters.
_SIZES = {
    "up to 200M": 2e8, "200M to 1B": 1e9, "1B to 3B": 3e9, "3B to 10B": 1e10, "10B to 40B": 4e10, "over 40B": 1e18,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Score:
    """One held-out record in one tier: what was measured, and what a fit without it predicted."""

    record: RunRecord
    fold: str
    tier: Tier
    num_params: int
    measured_bytes: int
    predicted: Interval
    predicted_phase: PhaseName
    is_outside: bool  # no record of the fit is like it

    @property
    def error(self) -> float:
        """(predicted − measured) / measured; negative is an under-prediction."""
        return self.predicted.value / self.measured_bytes - 1

    @property
    def is_inside(self) -> bool:
        """Return True if the interval holds the measured value."""
        return self.predicted.low <= self.measured_bytes <= self.predicted.high

    @property
    def measured_phase(self) -> PhaseName:
        """Phase of the measured peak."""
        assert self.record.peak is not None
        return self.record.peak.phase


@dataclass(frozen=True, kw_only=True)
class ScoreSummary:
    """The scores of one group; errors are relative."""

    group: str
    tier: Tier
    num_records: int
    mean_absolute: float
    worst_absolute: float
    mean_signed: float
    worst_under_prediction: float | None  # null where nothing was under-predicted
    coverage: float  # share of measured values inside their interval


@dataclass(frozen=True, kw_only=True)
class CardScore:
    """Verdicts on one size of GPU against what was measured, beside the card's context where nobody measured it."""

    gpu: str
    num_right: int
    num_tight: int  # neither promised nor refused
    num_false_fits: int
    num_false_refusals: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All that was found; ``left_out``: reason → records that say nothing here."""

    folds: tuple[str, ...]
    scores: tuple[Score, ...]
    summaries: tuple[ScoreSummary, ...]
    cards: tuple[CardScore, ...]
    num_lower_bounds: int  # held-out out-of-memory records
    num_below_bound: int  # of these, predicted wholly below what was needed
    left_out: dict[str, int]


class _Fold(NamedTuple):
    name: str
    model: CardFit
    records: list[RunRecord]


def evaluate(
    records: Iterable[RunRecord],
    *,
    hold_out: str | None = None,
    leave_out: LeaveOut | None = None,
    model: CardFit | None = None,
    expect: Expect = expected,
) -> Evaluation:
    """Fit without the held-out records and predict them; ``expect`` predicts a record's cell without a fit.

    ``hold_out`` is a condition (records/condition.py); ``leave_out`` takes each model, family or length out in turn;
    ``model`` is a fit to judge by what it has not seen. With none of them, what the sweep held out is held out. Raises
    FitError where nothing is held out or too little is left to fit, IncomparableRecords for records that must not be
    mixed.
    """
    if sum(choice is not None for choice in (hold_out, leave_out, model)) > 1:
        raise FitError("give one of hold_out, leave_out and a fit, not several: each says on its own what is held out")
    if leave_out is not None and leave_out not in _KEYS:
        raise SpecError(f"leave_out: {leave_out!r} given; allowed: {', '.join(_KEYS)}")
    records = list(latest_by_fingerprint(records).values())
    reasons = [_says_nothing(record) for record in records]
    measured = [record for record, reason in zip(records, reasons, strict=True) if reason is None]
    left_out = Counter(filter(None, reasons))
    if not measured:
        reasons = "; ".join(f"{count} left out: {reason}" for reason, count in left_out.items()) or "it holds none"
        raise FitError(f"nothing to evaluate, of {len(records)} records: {reasons}")
    require_comparable(measured)
    expect = once(expect)
    folds = _folds(measured, hold_out, leave_out, model, expect)
    scores: list[Score] = []
    predictions: list[tuple[RunRecord, Prediction]] = []
    for fold in folds:
        for record in fold.records:
            try:
                prediction = _predicted(record, fold.model, expect)
            except VramprobeError as error:
                left_out[str(error)] += 1
                continue
            predictions.append((record, prediction))
            scores += _scores(record, prediction, fold)
    bounds = [
        (found.peak_allocated_bytes.high, record.outcome.at_least_bytes or 0)
        for record, found in predictions
        if record.outcome.kind == "oom"
    ]
    return Evaluation(
        folds=tuple(fold.name for fold in folds),
        scores=tuple(scores),
        summaries=tuple(_summaries(scores)),
        cards=tuple(
            _card_scores([(one.peak, found) for one, found in predictions if one.peak and one.outcome.kind == "ok"])
        ),
        num_lower_bounds=len(bounds),
        num_below_bound=sum(high < least for high, least in bounds),
        left_out=dict(left_out),
    )


def _says_nothing(record: RunRecord) -> str | None:
    """Return why no prediction can be judged by this record; None where one can."""
    if record.spec.is_sharded:
        return RANKS
    if reason := not_measured(record):
        return reason
    if record.outcome.kind not in ("ok", "oom"):
        return f"outcome {record.outcome.kind}"
    return NO_BYTES if record.peak and not record.peak.allocated_bytes else None


# -- what is held out --------------------------------------------------------------------------------------------------


def _folds(
    records: Sequence[RunRecord],
    hold_out: str | None,
    leave_out: LeaveOut | None,
    model: CardFit | None,
    expect: Expect,
) -> list[_Fold]:
    if model is not None:
        unseen = [record for record in records if record.fingerprint not in model.fingerprints]
        return [_Fold("what the fit has not seen", model, _some(unseen, "the fit has seen every record"))]
    if leave_out is not None:
        key = _KEYS[leave_out]
        groups = sorted({key(record.spec) for record in records}, key=lambda name: (len(name), name))
        if len(groups) < 2:
            raise FitError(f"every record is of one {leave_out} ({', '.join(groups)}); nothing is left to fit")
        return [
            _fold(f"{leave_out} {group}", records, lambda spec, group=group: key(spec) == group, expect)
            for group in groups
        ]
    if hold_out is not None:
        return [_fold(hold_out, records, parse_condition(hold_out), expect)]
    marked = {record.fingerprint for record in records if record.held_out}
    return [_fold("held out by the sweep", records, lambda spec: spec.fingerprint in marked, expect)]


def _fold(name: str, records: Sequence[RunRecord], is_held_out: Callable[[CellSpec], bool], expect: Expect) -> _Fold:
    """A fit of the rest. A sweep's own mark counts only through ``is_held_out``."""
    held_out = _some([record for record in records if is_held_out(record.spec)], f"{name}: nothing is held out")
    rest = [record.model_copy(update={"held_out": False}) for record in records if not is_held_out(record.spec)]
    return _Fold(name, fit_records(rest, expect), held_out)


def _some(records: list[RunRecord], complaint: str) -> list[RunRecord]:
    if not records:
        raise FitError(
            f"{complaint}; hold something out with a condition such as params>3e9, or leave each model, family or "
            "length out in turn"
        )
    return records


# -- scores ------------------------------------------------------------------------------------------------------------


def _predicted(record: RunRecord, model: CardFit, expect: Expect) -> Prediction:
    """Predict a record's cell by the fit."""
    facts, gpu = record.facts, catalog.gpu_seen(record.environment.device_name)
    return with_fit(expect(record), record.spec, model, gpu, num_params=facts.num_params if facts else None)


def _scores(record: RunRecord, prediction: Prediction, fold: _Fold) -> list[Score]:
    if record.outcome.kind != "ok" or record.peak is None:
        return []
    num_params = record.facts.num_params if record.facts else None
    is_outside = bool(fold.model.outside(record.spec, num_params, card_of(record)))
    tiers: dict[Tier, tuple[int | None, Interval | None]] = {
        "allocated": (record.peak.allocated_bytes, prediction.peak_allocated_bytes),
        "reserved": (record.peak.reserved_bytes, prediction.reserved_bytes),
        "device": (record.peak.device_bytes, prediction.device_bytes),
    }
    return [
        Score(
            record=record,
            fold=fold.name,
            tier=tier,
            num_params=num_params or 0,
            measured_bytes=measured,
            predicted=predicted,
            predicted_phase=prediction.peak_phase,
            is_outside=is_outside,
        )
        for tier, (measured, predicted) in tiers.items()
        if measured is not None and predicted is not None
    ]


def _summaries(scores: Sequence[Score]) -> list[ScoreSummary]:
    """Each tier over all, then the allocated tier by method, size and phase; no row for an empty group."""
    groups = [("all", tier, [score for score in scores if score.tier == tier]) for tier in get_args(Tier)]
    allocated = [score for score in scores if score.tier == "allocated"]
    groupings: list[tuple[Iterable[str], Callable[[Score], str]]] = [
        (get_args(Method), lambda score: score.record.spec.method),
        (_SIZES, lambda score: next(name for name, end in _SIZES.items() if score.num_params <= end)),
        (get_args(PhaseName), lambda score: score.measured_phase),
    ]
    for names, key in groupings:
        groups += [(name, "allocated", [score for score in allocated if key(score) == name]) for name in names]
    return [_summary(group, tier, found) for group, tier, found in groups if found]


def _summary(group: str, tier: Tier, scores: Sequence[Score]) -> ScoreSummary:
    errors = [score.error for score in scores]
    return ScoreSummary(
        group=group,
        tier=tier,
        num_records=len(scores),
        mean_absolute=statistics.fmean(map(abs, errors)),
        worst_absolute=max(map(abs, errors)),
        mean_signed=statistics.fmean(errors),
        worst_under_prediction=min(errors) if min(errors) < 0 else None,
        coverage=statistics.fmean(score.is_inside for score in scores),
    )


def _card_scores(predictions: Sequence[tuple[Peak, Prediction]]) -> list[CardScore]:
    """For each size of GPU in the catalog that some record needs more than a quarter of."""
    by_size = {gpu.total_bytes: gpu for gpu in reversed(catalog.list_gpus()) if gpu.total_bytes is not None}
    largest = max((_known_bytes(peak) for peak, _ in predictions), default=0)
    return [_card_score(by_size[size], predictions) for size in sorted(by_size) if size < 4 * largest]


def _card_score(gpu: catalog.Gpu, predictions: Sequence[tuple[Peak, Prediction]]) -> CardScore:
    counts: Counter[str] = Counter()
    for peak, prediction in predictions:
        fits = _known_bytes(peak) <= usable_bytes(gpu, device_is_known=peak.device_bytes is not None)
        match verdict(prediction, gpu).verdict:
            case "tight":
                counts["tight"] += 1
            case "fits":
                counts["right" if fits else "false fit"] += 1
            case _:
                counts["false refusal" if fits else "right"] += 1
    return CardScore(
        gpu=gpu.name,
        num_right=counts["right"],
        num_tight=counts["tight"],
        num_false_fits=counts["false fit"],
        num_false_refusals=counts["false refusal"],
    )


def _known_bytes(peak: Peak) -> int:
    """Bytes of a card that the cell took: as NVML saw it, else without the context."""
    return peak.device_bytes or peak.reserved_bytes or peak.allocated_bytes
