"""Measured: records with step times of a card -> what its estimates are multiplied by, and how sure that is.

In: RunRecords. Out: by card, the factor between measured and estimated tokens per second, of the records whose launches
are at hand. Only what ran on a GPU itself counts: an emulated card has no times.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from vramprobe.catalog import Gpu, gpu_seen
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec
from vramprobe.speed.figure import Figure
from vramprobe.speed.rates import shipped_counted
from vramprobe.speed.scaled import Estimate

#: No interval is narrower, however alike the records are: other cells are not they.
_LEAST_HALF_WIDTH = 0.1


class Measured(NamedTuple):
    """``factor``: measured tokens per second over estimated, the median; ``half_width`` of its logarithm."""

    factor: float
    half_width: float
    num_records: int


def measured_speeds(
    records: Iterable[RunRecord], estimated: Callable[[CellSpec, Gpu], Estimate | None]
) -> Mapping[str, Measured]:
    """By short name of the card, what its records say of its speed; cards without step times, and cells without an
    estimate, are not there."""
    logs: dict[str, list[float]] = {}
    for record in records:
        gpu = gpu_seen(record.environment.device_name)
        timing = record.timing
        if record.instrument != "cuda" or gpu is None or record.outcome.kind != "ok":
            continue
        if timing is None or not timing.step_seconds or record.environment.emulator is not None:
            continue
        if (made := estimated(record.spec, gpu)) is not None:
            log = math.log(made.seconds / statistics.median(timing.step_seconds))
            logs.setdefault(gpu.short_name, []).append(log)
    return {name: _of(values) for name, values in logs.items()}


def _of(logs: list[float]) -> Measured:
    """Summarize the ratios to records: of one record the interval is the fit's own; of several, their distance."""
    middle = statistics.median(logs)
    apart = max(abs(value - middle) for value in logs) if len(logs) > 2 else shipped_counted().half_widths["usual"]
    return Measured(math.exp(middle), max(apart, _LEAST_HALF_WIDTH), len(logs))


def with_measured(made: Estimate, known: Measured) -> Estimate:
    """Return an estimate as fast as the card's records say, with their interval."""
    rate, factor = made.tokens_per_second.value * known.factor, math.exp(known.half_width)
    return made.model_copy(
        update={
            "seconds": made.seconds / known.factor,
            "tokens_per_second": Figure(value=rate, low=rate / factor, high=rate * factor),
            "mfu": made.mfu * known.factor,
            "condition": "measured",
        }
    )
