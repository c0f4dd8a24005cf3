"""MemoryModel: what a fit is: coefficients near 1 over the terms, where they come from, and how far to trust them.

In: JSON or the fit. Out: a frozen, readable model. Never fits and never imports numpy, so that predicting starts fast.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from vramprobe.errors import FitError
from vramprobe.terms import Moment

FORMAT = 1
#: The choices of a cell that a fit remembers having seen.
CHOICES = ("method", "quant", "kbit_prep", "dtype", "autocast", "optim", "attn", "model_type", "gradient_checkpointing")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Spread(_Frozen):
    """A learnt number with its spread over the records."""

    value: float
    low: float
    high: float


class ErrorSummary(_Frozen):
    """Relative errors, (predicted − measured) / measured."""

    num_records: int
    mean_absolute: float
    worst_absolute: float
    mean_signed: float


class LeaveOneModelOut(_Frozen):
    """Errors on each model by a fit that has not seen it; ``low`` and ``high`` bound measured / predicted."""

    overall: ErrorSummary
    by_model: dict[str, ErrorSummary]
    low: float
    high: float


class Ranges(_Frozen):
    """What the fit has seen: (smallest, largest) of each number, and every value of each choice."""

    num_params: tuple[int, int]
    num_tokens: tuple[int, int]
    seq_len: tuple[int, int]
    batch_size: tuple[int, int]
    choices: dict[str, list[str]]


class MemoryModel(_Frozen):
    """peak allocated = max over moments of Σ coefficient × term, + a constant; sizes in bytes."""

    format: Literal[1] = FORMAT
    instrument: str
    device: str
    device_name: str
    data_fingerprint: str  # over the records' fingerprints and peaks
    fingerprints: list[str] = []  # of the cells it was fitted on; the report shows these apart from the others
    num_records: int
    num_lower_bounds: int  # out-of-memory records, which only bound from below
    left_out: dict[str, int]  # reason → number of records
    models: list[str]
    ranges: Ranges
    coefficients: dict[str, float]
    constant_bytes: int
    residuals: dict[str, ErrorSummary]  # "overall", "method full", "phase backward", …
    leave_one_model_out: LeaveOneModelOut | None  # null with records of one model only
    reserved_over_allocated: Spread | None = None
    device_over_reserved_bytes: Spread | None = None
    versions: dict[str, str | None]
    vramprobe_version: str
    warnings: list[str] = []


def save_fit(model: MemoryModel, path: str | Path) -> None:
    """Write the model as readable JSON. Raises FitError where the path cannot be written."""
    try:
        Path(path).write_text(model.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise FitError(f"cannot write the fit to {path}: {error.strerror}") from error


def load_fit(path: str | Path) -> MemoryModel:
    """Read a saved model. Raises FitError for a missing file, for what is no fit, and for another format."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise FitError(
            f"cannot read the fit {path}: {error.strerror}; vramprobe fit RESULTS -o {path} makes one"
        ) from error
    except ValueError as error:
        raise FitError(f"{path} is not JSON ({error}); vramprobe fit RESULTS -o FILE makes a fit") from error
    if not isinstance(data, dict) or "coefficients" not in data:
        raise FitError(f"{path} is JSON but no fit; vramprobe fit RESULTS -o FILE makes one")
    if data.get("format") != FORMAT:
        raise FitError(
            f"{path} has format {data.get('format')!r}, this vramprobe reads {FORMAT}; fit the records again"
        )
    try:
        return MemoryModel.model_validate(data)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise FitError(f"{path} is damaged at {where}: {problem['msg']}; fit the records again") from None


def peak_moment(found: Sequence[Moment], coefficients: dict[str, float]) -> Moment:
    """The highest moment once each term has its coefficient, with the scaled terms in whole bytes."""
    scaled = [
        Moment(one.phase, one.label, {cause: round(coefficients.get(cause, 1.0) * n) for cause, n in one.terms.items()})
        for one in found
    ]
    return max(scaled, key=lambda moment: moment.total_bytes)
