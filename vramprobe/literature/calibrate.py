"""Calibrate: every formula and ours on the same measured cells, side by side, and the formulas' constants as measured.

In: records of one way of measuring, and a fit if there is one. Out: a frozen Calibration. What is compared is the
allocated peak of a steady step; where NVML was there the device's peak, too, which some formulas mean with their
overhead; and for formulas of activations what is alive for backward when forward ends. Constants come by least squares
of a ledger's bytes on counts, in a group of records of one recipe. Counts what it leaves out. Imports no torch.
"""

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from vramprobe.catalog import gpu_seen
from vramprobe.choices import Method
from vramprobe.errors import FitError, VramprobeError
from vramprobe.literature.formulas import CONSTANTS, FORMULAS, Facts, FormulaEstimate, facts_of
from vramprobe.model.card_fit import CardFit
from vramprobe.predict.at_hand import replay_at_hand
from vramprobe.predict.recorded import predict_replay
from vramprobe.records import store
from vramprobe.records.frozen import FrozenModel
from vramprobe.records.record import RunRecord
from vramprobe.records.table import require_comparable
from vramprobe.spec import CellSpec

#: Our own predictions, among the formulas: without a fit, and with the one that was given.
OURS, OURS_FITTED, OURS_FITTED_UNSEEN = "vramprobe", "vramprobe, fitted", "vramprobe, fitted without this cell"

#: The allocated peak; the device's, where NVML saw it; what is alive for backward when forward ends.
Quantity = Literal["peak", "device", "saved"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)

#: Distinct rows that a group needs beyond its constants, for a standard error that means something.
SPARE_ROWS = 2
#: What autocast's 16-bit copy of an fp32 weight takes, where it lives until backward.
COPY_BYTES = 2
NOT_DETERMINED = "not determined: the standard error is larger than the constant"
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


class _Row(NamedTuple):
    """A measured cell; ``reasons``: formula → why it has no answer; ``errors``: quantity → who → (said − measured) /
    measured.
    """

    record: RunRecord
    facts: Facts
    answers: dict[str, FormulaEstimate]
    reasons: dict[str, str]
    errors: dict[Quantity, dict[str, float]]


def calibrate(records: Iterable[RunRecord], model: CardFit | None = None) -> Calibration:
    """Score all formulas and our predictions on these records, and recalibrate the formulas' constants to them.

    Raises FitError where no record can be used, IncomparableRecords where those that can were measured differently.
    """
    records = list(store.latest_by_fingerprint(records).values())
    rows, left_out = [], Counter()
    for record in records:
        try:
            rows.append(_row(record, model))
        except VramprobeError as error:  # also a family whose parameters are not counted, a cell without a prediction
            left_out[str(error)] += 1
    if not rows:
        reasons = "; ".join(f"{count} left out: {reason}" for reason, count in left_out.items()) or "it holds none"
        raise FitError(f"nothing to calibrate on, of {len(records)} records: {reasons}; measure some cells first")
    require_comparable([row.record for row in rows])
    formulas = [
        FormulaInfo(
            **{name: getattr(formula, name) for name in ("name", "source", "says", "recipe", "missing")},
            not_for=Counter(row.reasons[formula.name] for row in rows if formula.name in row.reasons),
        )
        for formula in FORMULAS
    ]
    return Calibration(
        instrument=rows[0].record.instrument,
        device_name=rows[0].record.environment.device_name,
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


def _row(record: RunRecord, model: CardFit | None) -> _Row:
    """Every formula and ours of one record. Raises VramprobeError for one that is left out for all."""
    spec, gpu = record.spec, gpu_seen(record.environment.device_name)
    if record.outcome.kind != "ok":
        raise FitError(f"outcome {record.outcome.kind}")
    if spec.is_sharded:
        raise FitError(f"of a rank under {spec.sharding}, where the formulas are for a GPU by itself")
    if record.peak is None or record.peak.allocated_bytes <= 0 or record.ledger is None:
        raise FitError("no peak or no ledger")
    facts = facts_of(spec, record.facts)
    applied = {formula.name: formula.apply(facts) for formula in FORMULAS}
    answers = {name: answer for name, answer in applied.items() if isinstance(answer, FormulaEstimate)}
    reasons = {name: why for name, why in applied.items() if isinstance(why, str)}
    peaks = {one.name: answers[one.name] for one in FORMULAS if one.name in answers and one.predicts == "peak"}
    peak, device = {}, {}
    if (replay := replay_at_hand(spec, gpu=gpu, near=True)) is not None:
        peak[OURS] = replay.peak.allocated_bytes
    if replay is not None and model is not None:
        fitted = predict_replay(replay, spec, gpu=gpu, model=model)
        for who in [OURS_FITTED, *([OURS_FITTED_UNSEEN] if record.fingerprint not in model.fingerprints else [])]:
            peak[who] = fitted.peak_allocated_bytes.value
            device |= {who: fitted.device_bytes.value} if fitted.device_bytes is not None else {}
    peak |= {name: answer.allocated_bytes for name, answer in peaks.items()}
    device |= {name: answer.total_bytes for name, answer in peaks.items()}
    saved = {name: size for name, answer in answers.items() if (size := answer.saved_bytes) is not None}
    measured = (record.peak.allocated_bytes, record.peak.device_bytes, record.ledger.saved_activations_bytes)
    errors = {
        quantity: {who: size / of - 1 for who, size in said.items()}
        for quantity, said, of in zip(QUANTITIES, (peak, device, saved), measured, strict=True)
        if of is not None and of > 0
    }
    return _Row(record, facts, answers, reasons, errors)


def _scores(rows: Sequence[_Row]) -> list[FormulaScore]:
    names = (OURS, OURS_FITTED, OURS_FITTED_UNSEEN, *(formula.name for formula in FORMULAS))
    recipes = {number: recipe_of(row.record.spec) for number, row in enumerate(rows)}
    scores = []
    for quantity, name in itertools.product(QUANTITIES, names):
        of_name = {number: row for number, row in enumerate(rows) if name in row.errors.get(quantity, {})}
        groups = {"all": list(of_name.values())}
        for method in get_args(Method):
            groups[f"method {method}"] = [row for row in of_name.values() if row.record.spec.method == method]
        for recipe in sorted(set(recipes.values())):
            groups[f"recipe {recipe}"] = [row for number, row in of_name.items() if recipes[number] == recipe]
        scores += [_score(quantity, name, group, found) for group, found in groups.items() if found]
    return scores


def _score(quantity: Quantity, name: str, group: str, rows: Sequence[_Row]) -> FormulaScore:
    found, ours = [row.errors[quantity][name] for row in rows], OURS_FITTED if quantity == "device" else OURS
    of_ours = [abs(row.errors[quantity][ours]) for row in rows if ours in row.errors[quantity]]
    return FormulaScore(
        formula=name,
        quantity=quantity,
        group=group,
        num_rows=len(rows),
        mean_signed=statistics.fmean(found),
        mean_absolute=statistics.fmean(map(abs, found)),
        worst_signed=max(found, key=abs),
        ours_mean_absolute=statistics.fmean(of_ours) if len(of_ours) == len(rows) else None,
    )


# -- constants ---------------------------------------------------------------------------------------------------------


#: (what its terms count, by constant; bytes; the row) of one record: bytes = Σ constant × count.
_Equation = tuple[dict[str, int], int, _Row]


def _constants(rows: Iterable[_Row]) -> list[Constant]:
    """The constants of these rows, in the order of CONSTANTS."""
    groups: dict[tuple[str, ...], list[_Equation]] = defaultdict(list)
    for row in rows:
        for group, given, num_bytes in _equations(row):
            if (counts := {name: count for name, count in given.items() if count}) and num_bytes > 0:
                groups[group, *counts].append((counts, num_bytes, row))
    found = []
    for (group, *names), equations in groups.items():
        distinct = {(*counts.values(), num_bytes): (counts, num_bytes, row) for counts, num_bytes, row in equations}
        solved = _solve(names, list(distinct.values()))
        for name in names:
            words = {"name": name, "unit": CONSTANTS[name], "group": group, "num_rows": len(distinct)}
            words |= {"problem": solved} if isinstance(solved, str) else solved[name]
            says: dict[str, list[float]] = defaultdict(list)
            for formula, (_, _, row) in itertools.product(FORMULAS, equations):
                if formula.name in row.answers and name in row.answers[formula.name].constants:
                    says[formula.name].append(row.answers[formula.name].constants[name])
            found.append(Constant(**words, says={who: (min(said), max(said)) for who, said in says.items()}))
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


def _solve(names: Sequence[str], found: Sequence[_Equation]) -> dict[str, dict[str, Any]] | str:
    """Return by name what is measured and its standard error, every row with the same relative weight; or why there is
    none.
    """
    needed = len(names) + SPARE_ROWS
    if len(found) < needed:
        what = f"{len(names)} constants" if len(names) > 1 else "a constant"
        return f"too few rows: {len(found)} distinct, and {what} with a standard error needs {needed}"
    import numpy as np

    rows = np.array([[counts[name] / num_bytes for name in names] for counts, num_bytes, _ in found])
    scale = np.linalg.norm(rows, axis=0)
    sizes = np.linalg.svd(rows / scale, compute_uv=False)
    if sizes[-1] < SMALLEST_SINGULAR_SHARE * sizes[0]:
        return f"these rows cannot tell {', '.join(names)} apart: more models and lengths would"
    inverse = np.linalg.pinv(rows / scale)
    solution = inverse.sum(axis=1)
    residuals = 1 - rows / scale @ solution
    variance = float(residuals @ residuals) / (len(found) - len(names))
    errors = np.sqrt(variance * (inverse**2).sum(axis=1)) / scale
    return {
        name: {"measured": value, "standard_error": error, "problem": None if error <= abs(value) else NOT_DETERMINED}
        for name, value, error in zip(names, (solution / scale).tolist(), errors.tolist(), strict=True)
    }
