"""MemoryModel: what a fit is: coefficients near 1 over the terms, where they come from, and how far to trust them.

In: JSON or the fit. Out: a frozen, readable model. Never fits and never imports numpy, so that predicting starts fast.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from vramprobe import catalog
from vramprobe.catalog import Gpu
from vramprobe.catalog.shipped import data_file
from vramprobe.errors import FitError
from vramprobe.records.frozen import FiniteModel
from vramprobe.records.whole_file import replacing
from vramprobe.spec import Method
from vramprobe.terms import CAUSES, Moment

#: 2: ``interval``, from noise and from what the coefficients are unsure of, and a constant for each method; 1 had a
#: half-width that was a share of the peak, and one constant.
FORMAT = 2
#: An interval grows no further: it says nothing by then, and stays in the range of floats.
LARGEST_HALF_WIDTH = 1e6
#: The choices of a cell that a fit remembers having seen.
CHOICES = (
    "method",
    "quant",
    "kbit_prep",
    "dtype",
    "autocast",
    "optim",
    "attn",
    "model_type",
    "gradient_checkpointing",
    "fused_linear_cross_entropy",
    "loss",
    "trainer",
)
#: What a fit has seen of a choice that did not exist when it was made.
_SEEN_BEFORE = {"fused_linear_cross_entropy": ["False"], "loss": ["nll"], "trainer": ["sft"]}


# Wide enough for any real fit, and narrow enough that no prediction from a damaged one leaves the range of floats.
Size = Annotated[int, Field(ge=1, le=2**63)]
Count = Annotated[int, Field(ge=0, le=2**63)]
Coefficient = Annotated[float, Field(gt=0, le=10)]
RelativeError = Annotated[float, Field(ge=0, le=1e6)]
Learnt = Annotated[float, Field(ge=-(2**63), le=2**63)]


class Spread(FiniteModel):
    """A learnt number with its spread over the records."""

    value: Learnt
    low: Learnt
    high: Learnt

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"low {self.low}, value {self.value} and high {self.high} must be in this order")
        return self


class ErrorSummary(FiniteModel):
    """Relative errors, (predicted − measured) / measured."""

    num_records: Size
    mean_absolute: RelativeError
    worst_absolute: RelativeError
    mean_signed: float


class LeaveOneModelOut(FiniteModel):
    """Errors on each model by a fit that has not seen it."""

    overall: ErrorSummary
    by_model: dict[str, ErrorSummary]


def constant_name(method: str) -> str:
    """Return the name of a method's constant beside the causes."""
    return f"constant {method}"


class IntervalWidth(FiniteModel):
    """Distance of a measured peak from the predicted one, as a share of it; half_width() has the formula.

    ``half_width``, by method, is of the noise of a peak of ``from_bytes``; the noise goes with the peak's ``power``.
    ``covariance`` [row][column], a lower triangle, is how far the coefficients may be off together, relative to
    themselves and in squares of that noise: half_width · √(weights/weights) is a coefficient's half-width. Those of the
    constants (constant_name) are in ``from_bytes``.
    """

    half_width: dict[str, RelativeError]
    from_bytes: Size
    power: Annotated[float, Field(ge=-1, le=1)]
    covariance: dict[str, dict[str, Annotated[float, Field(ge=-1e12, le=1e12)]]]
    growth_per_doubling: Annotated[float, Field(ge=0, le=1e3)]
    unseen_family: RelativeError  # what a family never seen adds

    def half_width_of(self, method: str) -> float:
        """Return a method's half-width; for one that was never fitted, the widest of the others."""
        return self.half_width.get(method, max(self.half_width.values(), default=0.0))

    @model_validator(mode="after")
    def _of_known_causes(self) -> Self:
        names = {*self.covariance, *(name for row in self.covariance.values() for name in row)}
        if unknown := sorted(names - {*CAUSES, *map(constant_name, get_args(Method))}):
            raise ValueError(f"covariance of unknown causes: {', '.join(unknown)}")
        return self


def half_width(width: IntervalWidth, value: int, terms: dict[str, int], method: str, doublings: float) -> float:
    """Return how far the measured peak may be from ``value`` bytes so far outside the fitted range, as a share of it.

    half_width · sqrt(noise_share² + unsure_share) · (1 + growth_per_doubling · doublings); ``terms`` are the scaled
    ones at the peak. All of it is learnt from what was left out of the fit (interval.py).
    """
    shares = {cause: size / value for cause, size in terms.items()} | {constant_name(method): width.from_bytes / value}
    noise = noise_share(value / width.from_bytes, width.power)
    times = math.sqrt(noise * noise + max(unsure_share(width, shares), 0.0))
    grown = times * (1 + width.growth_per_doubling * doublings)
    return min(width.half_width_of(method) * grown, LARGEST_HALF_WIDTH)


def noise_share(relative_size: float, power: float) -> float:
    """Noise of a peak relative to that of the smallest fitted one, both as shares; below it no smaller."""
    return (max(relative_size, 1.0) if power > 0 else relative_size) ** power


def unsure_share(width: IntervalWidth, shares: dict[str, Any]) -> Any:
    """Square of what the coefficients' own uncertainty comes to: Σ covariance · share · share, of floats or arrays.

    ``shares`` are of the predicted bytes, by cause; what is not among them is 0.
    """
    total: Any = 0.0
    for row, columns in width.covariance.items():
        if row in shares:
            inner: Any = 0.0
            for column, value in columns.items():
                if column in shares:
                    inner = inner + (value if column == row else 2 * value) * shares[column]
            total = total + shares[row] * inner
    return total


class Ranges(FiniteModel):
    """Ranges that the fit has seen: (smallest, largest) of each number, and every value of each choice."""

    num_params: tuple[Size, Size]
    num_tokens: tuple[Size, Size]
    seq_len: tuple[Size, Size]
    batch_size: tuple[Size, Size]
    choices: dict[str, list[str]]

    @field_validator("choices")
    @classmethod
    def _of_today(cls, choices: dict[str, list[str]]) -> dict[str, list[str]]:
        return _SEEN_BEFORE | choices

    @field_validator("num_params", "num_tokens", "seq_len", "batch_size")
    @classmethod
    def _in_order(cls, span: tuple[int, int]) -> tuple[int, int]:
        if span[0] > span[1]:
            raise ValueError(f"the smallest, {span[0]}, is above the largest, {span[1]}")
        return span


class MemoryModel(FiniteModel):
    """peak allocated = max over moments of Σ coefficient × term, + the method's constant; sizes in bytes."""

    format: Literal[2] = FORMAT
    instrument: str
    device: str
    device_name: str  # of several cards, how many
    cards: list[str] = []  # the GPUs' short names
    basis: str | None = None  # of emulated records: what says that such runs are as those on a card
    data_fingerprint: str  # over the records' fingerprints and peaks
    fingerprints: list[str] = []  # of the cells it was fitted on; the report shows these apart from the others
    num_records: Size
    num_lower_bounds: Count  # out-of-memory records, which only bound from below
    left_out: dict[str, int]  # reason → number of records
    models: list[str]
    ranges: Ranges
    coefficients: dict[str, Coefficient]
    constant_bytes: dict[str, Count]  # by method
    residuals: dict[str, ErrorSummary]  # "overall", "method full", "phase backward", …
    leave_one_model_out: LeaveOneModelOut | None  # null with records of one model only
    interval: IntervalWidth  # learnt from what was left out
    reserved_over_allocated: Spread | None = None  # a ratio, so positive
    allocated_over_replayed: Spread | None = None  # to what the allocator's replay of the arithmetic has (replayed.py)
    reserved_over_replayed: Spread | None = None
    device_over_reserved_bytes: Spread | None = None
    versions: dict[str, str | None]
    vramprobe_version: str
    warnings: list[str] = []

    @property
    def is_emulated(self) -> bool:
        """Return True if the records are of an emulated GPU, which is not the card."""
        return self.instrument == "emulated"

    def constant_of(self, method: str) -> int:
        """Bytes beside the terms; of a method that was never fitted the most that another has."""
        return self.constant_bytes.get(method, max(self.constant_bytes.values(), default=0))

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if unknown := sorted(self.coefficients.keys() - set(CAUSES)):
            raise ValueError(f"coefficients of unknown causes: {', '.join(unknown)}; known: {', '.join(CAUSES)}")
        if "overall" not in self.residuals:
            raise ValueError("residuals have no 'overall'")
        for name in ("reserved_over_allocated", "allocated_over_replayed", "reserved_over_replayed"):
            ratio = getattr(self, name)
            if ratio is not None and ratio.low <= 0:
                raise ValueError(f"{name} must be above 0")
        return self


def save_fit(model: MemoryModel, path: str | Path) -> None:
    """Write the model as readable JSON. Raises FitError where that cannot be; a fit that was there stays then."""
    text = model.model_dump_json(indent=2) + "\n"
    whole = Path(path).resolve()
    try:
        if whole.exists() and not whole.is_file():
            whole.write_text(text)  # a device or a pipe
        else:
            with replacing(whole) as part:
                part.write_text(text)
    except OSError as error:
        raise FitError(f"cannot write the fit to {path}: {error.strerror}; name another file with --out") from error


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
        at = f" at {where}" if where else ""
        what = problem["msg"].removeprefix("Value error, ")
        raise FitError(f"{path} is damaged{at}: {what}; fit the records again") from None


def shipped_fit(device: str, gpu: Gpu | None = None, *, of_one_card: bool = False) -> MemoryModel | None:
    """The fit that ships for this device: of the CPU any will do, of GPUs one of ``gpu`` itself, else one of several
    emulated cards, which counts what tells NVIDIA's cards apart by arithmetic; None without.

    One of runs on an emulated GPU comes after those of a real one, and predictions by it say so. ``of_one_card``: for
    dozens of answers at once, where reserved memory cannot be replayed; arithmetic's own margin serves these better
    than the spread of that tier over all cells.
    """
    found = [model for model in shipped_fits() if model.device == device]
    if device == "cpu":
        return next(iter(found), None)
    own = (model for model in found if gpu is not None and is_same_gpu(model, gpu))
    several = (model for model in found if len(model.cards) > 1 and (gpu is None or gpu.is_nvidia))
    return next(own, None) or (None if of_one_card else next(several, None))


@cache
def shipped_fits() -> tuple[MemoryModel, ...]:
    """The fits that ship with the package, in the order of their files' names, emulated ones last."""
    fits = [load_fit(path) for path in sorted(data_file("fits").glob("*.json"), key=lambda path: path.name)]
    return tuple(sorted(fits, key=lambda model: model.is_emulated))


def is_same_gpu(model: MemoryModel, gpu: Gpu) -> bool:
    """Return True if the fit was measured on this model of GPU."""
    return catalog.gpu_seen(model.device_name) == gpu


def peak_moment(found: Sequence[Moment], coefficients: dict[str, float]) -> Moment:
    """The highest moment once each term has its coefficient, with the scaled terms in whole bytes."""
    if not coefficients:
        return max(found, key=lambda moment: moment.total_bytes)
    scaled = [
        Moment(one.phase, one.label, {cause: round(coefficients.get(cause, 1.0) * n) for cause, n in one.terms.items()})
        for one in found
    ]
    return max(scaled, key=lambda moment: moment.total_bytes)
