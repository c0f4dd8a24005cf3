"""Calibrate: every formula and ours on the same measured cells, side by side, and the formulas' constants as measured.

In: records of one way of measuring, and a fit if there is one. Out: a frozen Calibration. What is compared is the
allocated peak of a steady step; where NVML was there the device's peak, too, which some formulas mean with their
overhead; and for formulas of activations what is alive for backward when forward ends. Constants come by least squares
of a ledger's bytes on counts, in a group of records of one recipe. Counts what it leaves out. Imports no torch.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from vramprobe.catalog import gpu_seen
from vramprobe.errors import FitError, VramprobeError
from vramprobe.literature.formulas import CONSTANTS, FORMULAS, Facts, FormulaEstimate, facts_of
from vramprobe.model.card_fit import CardFit
from vramprobe.predict.questions import predicted
from vramprobe.records import store
from vramprobe.records.frozen import FrozenModel
from vramprobe.records.record import RunRecord
from vramprobe.records.table import require_comparable
from vramprobe.spec import CellSpec, Method

#: Our own predictions, among the formulas: without a fit, and with the one that was given.
OURS, OURS_FITTED, OURS_FITTED_UNSEEN = "vramprobe", "vramprobe, fitted", "vramprobe, fitted without this cell"

#: The allocated peak; the device's, where NVML saw it; what is alive for backward when forward ends.
Quantity = Literal["peak", "device", "saved"]

#: Distinct rows that a group needs beyond its constants, for a standard error that means something.
SPARE_ROWS = 2
#: What autocast's 16-bit copy of an fp32 weight takes, where it lives until backward.
COPY_BYTES = 2
#: Singular values below this share of the largest: the rows cannot tell the constants apart.
SMALLEST_SINGULAR_SHARE = 1e-4


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
    ``ours_mean_absolute`` is our prediction's on the same rows, for the device, which only a fit knows, with the fit;
    null where not every row has one, as of what is saved.
    """

    formula: str
    quantity: Quantity
    group: str
    num_rows: int
    mean_signed: float
    mean_absolute: float
    worst_signed: float
    ours_mean_absolute: float | None


class Constant(FrozenModel):
    """One number of the formulas, as measured in one group of records, or the ``problem`` with that.

    ``measured`` is null where the rows are too few or too alike. ``says``: formula → the lowest and the highest that it
    takes for this group's cells.
    """

    name: str
    unit: str
    group: str
    num_rows: int  # distinct ones: a second length of one model measures its weights no second time
    measured: float | None = None
    standard_error: float | None = None
    problem: str | None = None
    says: dict[str, tuple[float, float]]


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
    """A measured cell; ``said``: quantity → who → bytes; ``answers``: formula → its estimate, or why there is none."""

    record: RunRecord
    facts: Facts
    answers: dict[str, FormulaEstimate | str]
    measured: dict[Quantity, int] = field(default_factory=dict)
    said: dict[Quantity, dict[str, int]] = field(default_factory=lambda: {kind: {} for kind in get_args(Quantity)})


def calibrate(records: Iterable[RunRecord], model: CardFit | None = None) -> Calibration:
    """Score all formulas and our predictions on these records, and recalibrate the formulas' constants to them.

    Raises FitError where no record can be used, IncomparableRecords where those that can were measured differently.
    """
    records = list(store.latest_by_fingerprint(records).values())
    rows, left_out = _rows(records, model)
    if not rows:
        reasons = "; ".join(f"{count} left out: {reason}" for reason, count in left_out.items()) or "it holds none"
        raise FitError(f"nothing to calibrate on, of {len(records)} records: {reasons}; measure some cells first")
    require_comparable([row.record for row in rows])
    first = rows[0].record
    formulas = [
        FormulaInfo(
            **{name: getattr(formula, name) for name in ("name", "source", "says", "recipe")},
            missing=list(formula.missing),
            not_for=Counter(reason for row in rows if isinstance(reason := row.answers[formula.name], str)),
        )
        for formula in FORMULAS
    ]
    return Calibration(
        instrument=first.instrument,
        device_name=first.environment.device_name,
        num_rows=len(rows),
        left_out=dict(left_out),
        fit=model.data_fingerprint if model else None,
        formulas=formulas,
        scores=_scores(rows),
        constants=_constants(rows),
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
                rows.append(_row(record, model))
            except VramprobeError as error:  # a family whose parameters are not counted, a cell without a prediction
                left_out[str(error)] += 1
    return rows, left_out


def _row(record: RunRecord, model: CardFit | None) -> _Row:
    facts = facts_of(record.spec, record.facts)
    row = _Row(record, facts, {formula.name: formula.apply(facts) for formula in FORMULAS})
    seen: dict[Quantity, int | None] = {
        "peak": record.peak.allocated_bytes,
        "saved": record.ledger.saved_activations_bytes,
        "device": record.peak.device_bytes,
    }
    row.measured.update({quantity: size for quantity, size in seen.items() if size is not None and size > 0})
    gpu = gpu_seen(record.environment.device_name)
    row.said["peak"][OURS] = predicted(record.spec, None, engine="auto", gpu=gpu).peak_allocated_bytes.value
    if model is not None:
        fitted = predicted(record.spec, model, engine="auto", gpu=gpu, replays=True)
        for who in [OURS_FITTED, *([OURS_FITTED_UNSEEN] if record.fingerprint not in model.fingerprints else [])]:
            row.said["peak"][who] = fitted.peak_allocated_bytes.value
            if fitted.device_bytes is not None:
                row.said["device"][who] = fitted.device_bytes.value
    for formula in FORMULAS:
        if isinstance(answer := row.answers[formula.name], str):
            continue
        if formula.predicts == "peak":
            row.said["peak"][formula.name] = answer.allocated_bytes
            row.said["device"][formula.name] = answer.total_bytes
        if answer.saved_bytes is not None:
            row.said["saved"][formula.name] = answer.saved_bytes
    return row


# -- scores ------------------------------------------------------------------------------------------------------------


def _scores(rows: Sequence[_Row]) -> list[FormulaScore]:
    names = (OURS, OURS_FITTED, OURS_FITTED_UNSEEN, *(formula.name for formula in FORMULAS))
    scores = []
    for quantity in get_args(Quantity):
        for name in names:
            groups: dict[str, list[_Row]] = defaultdict(list)
            for row in rows:
                if name in row.said[quantity] and quantity in row.measured:
                    spec = row.record.spec
                    for group in ("all", f"method {spec.method}", f"recipe {recipe_of(spec)}"):
                        groups[group].append(row)
            scores += [_score(name, quantity, group, groups[group]) for group in sorted(groups, key=_group_order)]
    return scores


def _score(name: str, quantity: Quantity, group: str, rows: Sequence[_Row]) -> FormulaScore:
    def errors(who: str) -> list[float]:
        return [row.said[quantity][who] / row.measured[quantity] - 1 for row in rows]

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


# -- constants ---------------------------------------------------------------------------------------------------------


class _Equation(NamedTuple):
    """Equation of one record: ``num_bytes`` = Σ constant × count."""

    counts: dict[str, int]
    num_bytes: int
    row: _Row


def _constants(rows: Iterable[_Row]) -> list[Constant]:
    """The constants of these rows, in the order of CONSTANTS."""
    groups: dict[tuple[str, ...], list[_Equation]] = defaultdict(list)
    for row in rows:
        for group, given, num_bytes in _equations(row):
            if (counts := {name: count for name, count in given.items() if count}) and num_bytes > 0:
                groups[group, *counts].append(_Equation(counts, num_bytes, row))
    found = []
    for (group, *names), equations in groups.items():
        distinct = list({(*one.counts.values(), one.num_bytes): one for one in equations}.values())
        solved = _solve(names, distinct)
        for name in names:
            value, error = (None, None) if isinstance(solved, str) else solved[name]
            problem = solved if isinstance(solved, str) else None
            if value is not None and error is not None and error > abs(value):
                problem = "not determined: the standard error is larger than the constant"
            says: dict[str, list[float]] = defaultdict(list)
            for formula, answer in (item for one in equations for item in one.row.answers.items()):
                if isinstance(answer, FormulaEstimate) and name in answer.constants:
                    says[formula].append(answer.constants[name])
            constant = Constant(
                name=name,
                unit=CONSTANTS[name],
                group=group,
                num_rows=len(distinct),
                measured=value,
                standard_error=error,
                problem=problem,
                says={formula.name: (min(said), max(said)) for formula in FORMULAS if (said := says.get(formula.name))},
            )
            found.append(constant)
    return sorted(found, key=lambda constant: (list(CONSTANTS).index(constant.name), constant.group))


def _equations(row: _Row) -> list[tuple[str, Mapping[str, int], int]]:
    """(group, counts by constant, bytes) of each part of a measured record's ledger."""
    record, facts = row.record, row.facts
    ledger, seen, spec = record.ledger, record.facts, record.spec
    if ledger is None or seen is None:
        return []
    trained, trained_dtype = seen.num_trainable_params, spec.dtype if spec.method == "full" else spec.lora_dtype
    adapters = 0 if spec.method == "full" else trained
    method = spec.method if spec.quant == "none" else f"{spec.method} {spec.quant}"
    prepared = f"{method}, {spec.dtype}" + (f", {spec.lora_dtype} adapters" if adapters else "")
    prepared += f", {spec.kbit_prep} preparation" if spec.kbit_prep != "none" else ""
    weights = {"weights": seen.num_params - seen.num_quantised_params, "adapter_weights": adapters}
    # Cast copies of adapters and of the head are taken off: their size is no question, and few rows could tell them
    # from the rest. Those of a whole model are a constant.
    kept, size = {"logits": facts["num_tokens"] * facts["vocab"]}, ledger.saved_activations_bytes
    group = f"{prepared}, autocast {spec.autocast}" if spec.autocast != "none" else prepared
    group += f", LoRA dropout {spec.lora_dropout:g}" if spec.lora_dropout else ""
    if spec.gradient_checkpointing:
        kept = {"checkpoint_store": facts["token_layer_widths"]} | kept
        group, size = f"{group}, checkpointing", size - COPY_BYTES * facts["num_cast_head_params"]
    else:
        is_fused, is_full = bool(seen.attention_kernels), spec.method == "full"
        counts = {"layer_activations": facts["token_layer_widths"]}
        counts |= {"attention_scores": 0 if is_fused else facts["num_scores"]}
        kept = counts | ({"cast_copies": facts["num_cast_params"]} if is_full else {}) | kept
        group += f", {'fused' if is_fused else 'unfused'} attention"
        size -= 0 if is_full else COPY_BYTES * facts["num_cast_params"]
    return [
        (prepared, weights, ledger.weights_bytes - seen.quantised_weights_bytes),
        (method, {"quantised_weights": seen.num_quantised_params}, seen.quantised_weights_bytes),
        (f"{method}, trained in {trained_dtype}", {"gradients": trained}, ledger.gradients_bytes),
        (f"{spec.optim}, trained in {trained_dtype}", {"optimizer_state": trained}, ledger.optimizer_state_bytes),
        (group, kept, size),
    ]


def _solve(names: Sequence[str], found: Sequence[_Equation]) -> dict[str, tuple[float, float]] | str:
    """(constant, standard error) by name, every row with the same relative weight; or why there is none."""
    needed = len(names) + SPARE_ROWS
    if len(found) < needed:
        what = f"{len(names)} constants" if len(names) > 1 else "a constant"
        return f"too few rows: {len(found)} distinct, and {what} with a standard error needs {needed}"
    import numpy as np

    rows = np.array([[one.counts[name] / one.num_bytes for name in names] for one in found])
    scale = np.linalg.norm(rows, axis=0)
    sizes = np.linalg.svd(rows / scale, compute_uv=False)
    if sizes[-1] < SMALLEST_SINGULAR_SHARE * sizes[0]:
        return f"these rows cannot tell {', '.join(names)} apart: more models and lengths would"
    solution, *_ = np.linalg.lstsq(rows / scale, np.ones(len(found)), rcond=None)
    residuals = 1 - rows / scale @ solution
    variance = float(residuals @ residuals) / (len(found) - len(names))
    errors = np.sqrt(variance * np.diag(np.linalg.inv((rows / scale).T @ (rows / scale))))
    return {
        name: (float(value), float(error))
        for name, value, error in zip(names, solution / scale, errors / scale, strict=True)
    }
