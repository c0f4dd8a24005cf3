"""Calibrate: every formula and ours on the same measured cells, side by side, and the formulas' constants as measured.

In: records of one way of measuring, and a fit if there is one. Out: a frozen Calibration. What is compared is the
allocated peak of a steady step; where NVML was there the device's peak, too, which some formulas mean with their
overhead; and for formulas of activations what is alive for backward when forward ends. Counts what it leaves out.
Imports no torch.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from vramprobe.catalog import gpu_seen
from vramprobe.errors import FitError, VramprobeError
from vramprobe.kernels.chip import chip_like
from vramprobe.literature.formulas import FORMULAS, Facts, facts_of
from vramprobe.literature.recalibrate import Constant, constants_of
from vramprobe.model.card_fit import CardFit
from vramprobe.predict.predict import predict
from vramprobe.records import store
from vramprobe.records.frozen import FrozenModel
from vramprobe.records.record import RunRecord
from vramprobe.records.table import require_comparable
from vramprobe.spec import CellSpec, Method
from vramprobe.terms import ledger_terms

#: Our own engines, among the formulas: arithmetic alone, and with the fit that was given.
OURS, OURS_FITTED, OURS_FITTED_UNSEEN = "vramprobe", "vramprobe, fitted", "vramprobe, fitted without this cell"

#: The allocated peak; the device's, where NVML saw it; what is alive for backward when forward ends.
Quantity = Literal["peak", "device", "saved"]


class FormulaInfo(FrozenModel):
    """A formula's own words, and why it says nothing about so many rows."""

    name: str
    source: str
    says: str
    recipe: str
    missing: list[str]
    not_for: dict[str, int]


class FormulaScore(FrozenModel):
    """Errors of a formula on the measured cells of one group, as shares of the measured value: (said − measured).

    ``group`` is "all", "method full" and so on, or "recipe full bf16, adamw_torch_fused" and so on.
    ``ours_mean_absolute`` is our arithmetic's on the same rows; for the device, which only a fit knows, our fit's, and
    null without one.
    """

    formula: str
    quantity: Quantity
    group: str
    num_rows: int
    mean_signed: float
    mean_absolute: float
    worst_signed: float
    ours_mean_absolute: float | None


class Calibration(FrozenModel):
    """Scores in the order of the formulas, ours first; constants as measured."""

    instrument: str
    device_name: str
    num_rows: int
    left_out: dict[str, int]
    fit: str | None  # the fit's data fingerprint; null without one
    formulas: list[FormulaInfo]
    scores: list[FormulaScore]
    constants: list[Constant]


@dataclass(frozen=True)
class _Row:
    """A measured cell; ``said``: quantity → who → bytes; ``reasons``: formula → why it says nothing."""

    record: RunRecord
    facts: Facts
    measured: dict[Quantity, int]
    said: dict[Quantity, dict[str, int]]
    reasons: dict[str, str] = field(default_factory=dict)


def calibrate(records: Iterable[RunRecord], model: CardFit | None = None) -> Calibration:
    """Score all formulas and our engine on these records, and recalibrate the formulas' constants to them.

    Raises FitError where no record can be used, IncomparableRecords where those that can were measured differently.
    """
    records = list(store.latest_by_fingerprint(records).values())
    rows, left_out = _rows(records, model)
    if not rows:
        reasons = "; ".join(f"{count} left out: {reason}" for reason, count in left_out.items()) or "it holds none"
        raise FitError(f"nothing to calibrate on, of {len(records)} records: {reasons}; measure some cells first")
    require_comparable([row.record for row in rows])
    first = rows[0].record
    return Calibration(
        instrument=first.instrument,
        device_name=first.environment.device_name,
        num_rows=len(rows),
        left_out=dict(left_out),
        fit=model.data_fingerprint if model else None,
        formulas=[_info(formula.name, rows) for formula in FORMULAS],
        scores=_scores(rows),
        constants=constants_of((row.record, row.facts) for row in rows),
    )


def recipe_of(spec: CellSpec) -> str:
    """Describe the settings that decide bytes per parameter, in one line: ``full bf16, adamw_torch_fused``."""
    precision = spec.dtype if spec.autocast == "none" else f"{spec.dtype}+{spec.autocast}"
    quant = "" if spec.quant == "none" else f" {spec.quant} {spec.kbit_prep}"
    return f"{spec.method}{quant} {precision}, {spec.optim}{', checkpointing' if spec.gradient_checkpointing else ''}"


def _rows(records: Sequence[RunRecord], model: CardFit | None) -> tuple[list[_Row], Counter[str]]:
    """(rows, reason → number of records left out): every formula and ours stand before the same rows."""
    rows, left_out = [], Counter()
    for record in records:
        if record.outcome.kind != "ok":
            left_out[f"outcome {record.outcome.kind}"] += 1
        elif record.spec.num_gpus > 1:
            left_out["of several GPUs, where the formulas are for one"] += 1
        elif record.peak is None or record.peak.allocated_bytes <= 0 or record.ledger is None:
            left_out["no peak or no ledger"] += 1
        else:
            try:
                rows.append(_row(record, facts_of(record.spec), model))
            except VramprobeError as error:  # no arithmetic for the family, or for an option of it
                left_out[str(error)] += 1
    return rows, left_out


def _row(record: RunRecord, facts: Facts, model: CardFit | None) -> _Row:
    measured: dict[Quantity, int] = {"peak": record.peak.allocated_bytes}
    if record.ledger.saved_activations_bytes > 0:
        measured["saved"] = record.ledger.saved_activations_bytes
    if record.peak.device_bytes is not None and record.peak.device_bytes > 0:
        measured["device"] = record.peak.device_bytes
    gpu = gpu_seen(record.environment.device_name)
    terms = ledger_terms(record.spec, chip_like(gpu))
    said: dict[Quantity, dict[str, int]] = {
        "peak": {OURS: predict(record.spec, gpu=gpu).peak_allocated_bytes.value},
        "saved": {OURS: terms["saved_activations"]},
        "device": {},
    }
    if model is not None:
        fitted = predict(record.spec, model, gpu=gpu, replays=True)
        for who in [OURS_FITTED, *([OURS_FITTED_UNSEEN] if record.fingerprint not in model.fingerprints else [])]:
            said["peak"][who] = fitted.peak_allocated_bytes.value
            if fitted.device_bytes is not None:
                said["device"][who] = fitted.device_bytes.value
    reasons = {}
    for formula in FORMULAS:
        answer = formula.apply(facts)
        if isinstance(answer, str):
            reasons[formula.name] = answer
            continue
        if formula.predicts == "peak":
            said["peak"][formula.name], said["device"][formula.name] = answer.allocated_bytes, answer.total_bytes
        if answer.saved_bytes is not None:
            said["saved"][formula.name] = answer.saved_bytes
    return _Row(record, facts, measured, said, reasons)


def _info(name: str, rows: Sequence[_Row]) -> FormulaInfo:
    formula = next(formula for formula in FORMULAS if formula.name == name)
    not_for = Counter(row.reasons[name] for row in rows if name in row.reasons)
    return FormulaInfo(
        name=name,
        source=formula.source,
        says=formula.says,
        recipe=formula.recipe,
        missing=list(formula.missing),
        not_for=dict(not_for),
    )


def _scores(rows: Sequence[_Row]) -> list[FormulaScore]:
    names = (OURS, OURS_FITTED, OURS_FITTED_UNSEEN, *(formula.name for formula in FORMULAS))
    scores = []
    for quantity in get_args(Quantity):
        for name in names:
            groups: dict[str, list[_Row]] = defaultdict(list)
            for row in rows:
                if name in row.said[quantity] and quantity in row.measured:
                    groups["all"].append(row)
                    groups[f"method {row.record.spec.method}"].append(row)
                    groups[f"recipe {recipe_of(row.record.spec)}"].append(row)
            scores += [_score(name, quantity, group, groups[group]) for group in sorted(groups, key=_group_order)]
    return scores


def _score(name: str, quantity: Quantity, group: str, rows: Sequence[_Row]) -> FormulaScore:
    def errors(who: str) -> list[float]:
        return [(row.said[quantity][who] - row.measured[quantity]) / row.measured[quantity] for row in rows]

    found, ours = errors(name), OURS_FITTED if quantity == "device" else OURS
    has_ours = all(ours in row.said[quantity] for row in rows)
    return FormulaScore(
        formula=name,
        quantity=quantity,
        group=group,
        num_rows=len(rows),
        mean_signed=statistics.fmean(found),
        mean_absolute=statistics.fmean(map(abs, found)),
        worst_signed=max(found, key=abs),
        ours_mean_absolute=statistics.fmean(map(abs, errors(ours))) if has_ours else None,
    )


def _group_order(group: str) -> tuple[int, int, str]:
    kind, _, name = group.partition(" ")
    methods = get_args(Method)
    return ("all", "method", "recipe").index(kind), methods.index(name) if name in methods else 0, name
