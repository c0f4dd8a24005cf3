"""CardFit: what memory measured on one card has over predicted memory, by method, and what that was learnt from.

In: JSON or the fit. Out: a frozen, readable fit, and what of a cell lies outside of it. Never fits.
"""

import json
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from vramprobe.errors import FitError
from vramprobe.records.frozen import FiniteModel
from vramprobe.records.whole_file import replacing
from vramprobe.spec import CellSpec
from vramprobe.units import short_count

#: 4: of one measured card, beside recordings; 3 had ratios to arithmetic, also of the CPU and of emulated runs.
FORMAT = 4
#: Measured memory is no more times that of a prediction of the same cell.
MOST_TIMES = 100
#: The choices of a cell that are outside of a fit whose records all have others.
CHOICES = ("method", "quant", "optim", "attn", "model_type", "loss", "trainer")

# Wide enough for any real fit, and narrow enough that no prediction from a damaged one leaves the range of floats.
Size = Annotated[int, Field(ge=1, le=2**63)]
Learnt = Annotated[float, Field(ge=-(2**63), le=2**63)]


class Spread(FiniteModel):
    """The median over records, and the ends between which 90 % of further records should lie."""

    value: Learnt
    low: Learnt
    high: Learnt

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"low {self.low}, value {self.value} and high {self.high} must be in this order")
        return self


class Ratio(Spread):
    """A Spread of a ratio."""

    @model_validator(mode="after")
    def _positive(self) -> Self:
        if not 0 < self.value <= MOST_TIMES:
            raise ValueError(f"a ratio of {self.value} is none of measured to predicted memory")
        return self


class Gaps(FiniteModel):
    """Measured memory beside predicted memory: ratios, and bytes of the device beyond the allocator.

    ``by_method``: allocated memory alone, of methods with enough records. Null where no record has that tier.
    """

    num_records: Size
    allocated: Ratio
    by_method: dict[str, Ratio] = {}
    reserved: Ratio | None = None
    device_over_reserved_bytes: Spread | None = None  # both measured: context, and what libraries take behind torch

    def allocated_of(self, method: str) -> Ratio:
        """Return the method's own ratio, else that of all."""
        return self.by_method.get(method, self.allocated)


class Span(FiniteModel):
    """The smallest and the largest of a number."""

    low: Size
    high: Size


class CardFit(FiniteModel):
    """Gaps between records of one GPU and what is predicted of their cells; sizes in bytes."""

    format: Literal[4] = FORMAT
    card: str
    gaps: Gaps
    models: list[str]
    num_params: Span
    num_tokens: Span
    choices: dict[str, list[str]]  # every value of each of CHOICES
    left_out: dict[str, int]  # reason → number of records
    data_fingerprint: str  # over the records' fingerprints and peaks
    fingerprints: list[str] = []  # of the cells it was fitted on; the report shows these apart from the others
    versions: dict[str, str | None]
    vramprobe_version: str
    warnings: list[str] = []

    @property
    def num_records(self) -> int:
        """Number of records that it was fitted on."""
        return self.gaps.num_records

    def outside(self, spec: CellSpec, num_params: int | None, card: str | None) -> list[str]:
        """Return what of a cell no record has: another value of a choice, a model of another size, more tokens, a card.

        Fewer tokens are inside, so that an interval's end never falls as a cell grows.
        """
        found = [
            f"{name} {value}"
            for name in CHOICES
            if (value := str(getattr(spec, name))) not in self.choices.get(name, [value])
        ]
        if num_params is not None and not self.num_params.low <= num_params <= self.num_params.high:
            low, high = short_count(self.num_params.low), short_count(self.num_params.high)
            found.append(f"{short_count(num_params)} parameters (fitted: {low} to {high})")
        if spec.num_tokens > self.num_tokens.high:
            found.append(f"{spec.num_tokens:,} tokens (fitted: up to {self.num_tokens.high:,})")
        if card is not None and card != self.card:
            found.append(f"card {card}")
        return found


def save_fit(model: CardFit, path: str | Path) -> None:
    """Write the fit as readable JSON. Raises FitError where that cannot be; a fit that was there stays then."""
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


def load_fit(path: str | Path) -> CardFit:
    """Read a saved fit. Raises FitError for a missing file, for what is no fit, and for another format."""
    again = f"vramprobe fit RESULTS -o {path}"
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise FitError(f"cannot read the fit {path}: {error.strerror}; {again} makes one") from error
    except ValueError as error:
        raise FitError(f"{path} is not JSON ({error}); vramprobe fit RESULTS -o FILE makes a fit") from error
    if not isinstance(data, dict) or "format" not in data or not {"gaps", "overall", "coefficients"} & data.keys():
        raise FitError(f"{path} is JSON but no fit; vramprobe fit RESULTS -o FILE makes one")
    if data["format"] != FORMAT:
        raise FitError(f"{path} has format {data['format']!r}, this vramprobe reads {FORMAT}; fit again: {again}")
    try:
        return CardFit.model_validate(data)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        at = f" at {where}" if where else ""
        what = problem["msg"].removeprefix("Value error, ")
        raise FitError(f"{path} is damaged{at}: {what}; fit again: {again}") from None
