"""Measured: records with step times of a card -> what its estimates are multiplied by, and how sure that is.

In: RunRecords. Out: by card, the factor between measured and estimated tokens per second. Only what ran on a GPU itself
counts: an emulated card has no times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.catalog import gpu_seen
from vramprobe.records.record import RunRecord
from vramprobe.speed.rates import SpeedFit, shipped_speed
from vramprobe.speed.step import estimate

#: No interval is narrower, however alike the records are: other cells are not they.
_LEAST_HALF_WIDTH = 0.1


class Measured(NamedTuple):
    """``factor``: measured tokens per second over estimated, the median; ``half_width`` of its logarithm."""

    factor: float
    half_width: float
    num_records: int


def measured_speeds(records: Iterable[RunRecord], fit: SpeedFit | None = None) -> Mapping[str, Measured]:
    """By short name of the card, what its records say of its speed; cards without step times are not there."""
    fit = fit or shipped_speed()
    logs: dict[str, list[float]] = {}
    for record in records:
        gpu = gpu_seen(record.environment.device_name)
        timing = record.timing
        if record.instrument != "cuda" or gpu is None or record.outcome.kind != "ok":
            continue
        if timing is None or not timing.step_seconds or record.environment.emulator is not None:
            continue
        with suppress(UnsupportedArchitecture):  # measured, but there is nothing to compare it with
            seconds = estimate(record.spec, gpu, fit=fit).seconds
            logs.setdefault(gpu.short_name, []).append(math.log(seconds / statistics.median(timing.step_seconds)))
    return {name: _of(values, fit) for name, values in logs.items()}


def _of(logs: list[float], fit: SpeedFit) -> Measured:
    """Summarize the ratios to records: of one record the interval is the fit's own; of several, their distance."""
    middle = statistics.median(logs)
    apart = max(abs(value - middle) for value in logs) if len(logs) > 2 else fit.half_widths["usual"]
    return Measured(math.exp(middle), max(apart, _LEAST_HALF_WIDTH), len(logs))
