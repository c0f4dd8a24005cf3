"""Recalibrate: measured ledgers → the constants that formulas are made of, each with its standard error.

In: records with what they count (Facts). Out: Constants per group of one recipe, by least squares of measured bytes on
counts: bytes = Σ constant × count. A group whose rows cannot say it has a reason instead of a number. Loads numpy only
when asked for numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from vramprobe.literature.formulas import CONSTANTS, FORMULAS, Facts
from vramprobe.records.record import RunRecord

#: Distinct rows that a group needs beyond its constants, for a standard error that means something.
SPARE_ROWS = 2
#: What autocast's 16-bit copy of an fp32 weight takes, where it lives until backward.
COPY_BYTES = 2
#: Singular values below this share of the largest: the rows cannot tell the constants apart.
SMALLEST_SINGULAR_SHARE = 1e-4


class Constant(BaseModel):
    """One number of the formulas, as measured in one group of records, or the ``problem`` with that.

    ``measured`` is null where the rows are too few or too alike. ``says``: formula → the lowest and the highest that it
    takes for this group's cells.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    unit: str
    group: str
    num_rows: int  # distinct ones: a second length of one model measures its weights no second time
    measured: float | None = None
    standard_error: float | None = None
    problem: str | None = None
    says: dict[str, tuple[float, float]]


class Equation(NamedTuple):
    """Equation of one record: ``num_bytes`` = Σ constant × count, within a group of records of one recipe."""

    group: str
    counts: dict[str, int]
    num_bytes: int
    facts: Facts


def constants_of(rows: Iterable[tuple[RunRecord, Facts]]) -> list[Constant]:
    """The constants of these records, in the order of CONSTANTS; ``rows`` are measured records with their facts."""
    groups: dict[tuple[str, tuple[str, ...]], list[Equation]] = defaultdict(list)
    for record, facts in rows:
        for equation in equations(record, facts):
            groups[equation.group, tuple(equation.counts)].append(equation)
    found = [constant for found in groups.values() for constant in _constants_of_group(found)]
    order = list(CONSTANTS)
    return sorted(found, key=lambda constant: (order.index(constant.name), constant.group))


def equations(record: RunRecord, facts: Facts) -> list[Equation]:
    """Return a measured record's equations of the constants: one per part of its ledger that is not empty."""
    ledger, seen, spec = record.ledger, record.facts, record.spec
    if ledger is None or seen is None:
        return []
    trained, trained_dtype = seen.num_trainable_params, spec.dtype if spec.method == "full" else spec.lora_dtype
    adapters = 0 if spec.method == "full" else trained
    method = spec.method if spec.quant == "none" else f"{spec.method} {spec.quant}"
    prepared = ", ".join(
        [
            method,
            spec.dtype,
            *([f"{spec.lora_dtype} adapters"] if adapters else []),
            *([f"{spec.kbit_prep} preparation"] if spec.kbit_prep != "none" else []),
        ]
    )
    parts = [
        (
            prepared,
            {"weights": seen.num_params - seen.num_quantised_params, "adapter_weights": adapters},
            ledger.weights_bytes - seen.quantised_weights_bytes,
        ),
        (method, {"quantised_weights": seen.num_quantised_params}, seen.quantised_weights_bytes),
        (f"{method}, trained in {trained_dtype}", {"gradients": trained}, ledger.gradients_bytes),
        (f"{spec.optim}, trained in {trained_dtype}", {"optimizer_state": trained}, ledger.optimizer_state_bytes),
        _kept_for_backward(record, facts, prepared),
    ]
    found = [(group, {name: count for name, count in counts.items() if count}, size) for group, counts, size in parts]
    return [Equation(group, counts, size, facts) for group, counts, size in found if counts and size > 0]


def _kept_for_backward(record: RunRecord, facts: Facts, prepared: str) -> tuple[str, dict[str, int], int]:
    """(group, counts, bytes) of saved activations.

    Cast copies of adapters and of the head are taken off first: their size is no question, and few rows could tell
    them from the rest. Those of a whole model are a constant.
    """
    spec, size = record.spec, record.ledger.saved_activations_bytes
    group = f"{prepared}, autocast {spec.autocast}" if spec.autocast != "none" else prepared
    group += f", LoRA dropout {spec.lora_dropout:g}" if spec.lora_dropout else ""
    logits = {"logits": facts.num_tokens * facts.vocab}
    if spec.gradient_checkpointing:
        size -= COPY_BYTES * facts.num_cast_head_params
        return f"{group}, checkpointing", {"checkpoint_store": facts.token_layer_widths} | logits, size
    is_fused = bool(record.facts.attention_kernels)
    counts = {"layer_activations": facts.token_layer_widths, "attention_scores": 0 if is_fused else facts.num_scores}
    if spec.method == "full":
        counts["cast_copies"] = facts.num_cast_params
    else:
        size -= COPY_BYTES * facts.num_cast_params
    return f"{group}, {'fused' if is_fused else 'unfused'} attention", counts | logits, size


def _constants_of_group(found: Sequence[Equation]) -> list[Constant]:
    names = list(found[0].counts)
    distinct = {(*one.counts.values(), one.num_bytes): one for one in found}
    solved = _solve(names, list(distinct.values()))
    values, problem = ({}, solved) if isinstance(solved, str) else (solved, None)
    return [_constant(name, found, len(distinct), values.get(name), problem) for name in names]


def _constant(
    name: str, found: Sequence[Equation], num_rows: int, value: tuple[float, float] | None, problem: str | None
) -> Constant:
    measured, standard_error = value or (None, None)
    if value and standard_error > abs(measured):
        problem = "not determined: the standard error is larger than the constant"
    return Constant(
        name=name,
        unit=CONSTANTS[name],
        group=found[0].group,
        num_rows=num_rows,
        measured=measured,
        standard_error=standard_error,
        problem=problem,
        says=_what_formulas_say(name, [one.facts for one in found]),
    )


def _solve(names: Sequence[str], found: Sequence[Equation]) -> dict[str, tuple[float, float]] | str:
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


def _what_formulas_say(name: str, cells: Sequence[Facts]) -> dict[str, tuple[float, float]]:
    said: dict[str, list[float]] = defaultdict(list)
    for formula in FORMULAS:
        for facts in cells:
            answer = formula.apply(facts)
            if not isinstance(answer, str) and name in answer.constants:
                said[formula.name].append(answer.constants[name])
    return {formula: (min(values), max(values)) for formula, values in said.items()}
