"""Records and a fit → what the tables and the plot show: one cell per configuration, with its prediction.

In: comparable records. Out: frozen cells, in the order a reader looks for them. Never formats anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from vramprobe.errors import OutOfRange, VramprobeError
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.spec import Method
from vramprobe.units import word_for

if TYPE_CHECKING:
    from vramprobe.model.memory_model import MemoryModel


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One configuration: the attempt that counts, and its prediction; null without a fit, or where it has none."""

    record: RunRecord
    held_out: bool | None  # whether the fit has not seen it; null without a fit
    predicted_bytes: int | None = None
    low_bytes: int | None = None
    high_bytes: int | None = None
    remark: str = ""  # what to know about the prediction, e.g. why there is none

    @property
    def measured_bytes(self) -> int | None:
        """The allocated peak of the training steps; null unless the run is to be believed."""
        return self.record.peak.allocated_bytes if self.record.outcome.kind == "ok" and self.record.peak else None

    @property
    def error_percent(self) -> float | None:
        """Predicted less measured, in percent of measured: negative is an under-prediction."""
        if self.measured_bytes is None or self.predicted_bytes is None:
            return None
        return 100 * (self.predicted_bytes - self.measured_bytes) / self.measured_bytes

    @property
    def is_inside(self) -> bool:
        """Whether the measured peak lies in the predicted interval."""
        return self.low_bytes <= self.measured_bytes <= self.high_bytes


def word_of(cells: Sequence[Cell]) -> str:
    """What these cells' own numbers are called, measured or emulated: comparable cells are of one instrument."""
    return word_for(cells[0].record.instrument)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How good the predictions are for one group of cells, in percent of the measured peak."""

    group: str
    num_cells: int
    mean_abs_error_percent: float
    worst_abs_error_percent: float
    worst_under_prediction_percent: float | None  # the lowest error; null when nothing was under-predicted
    inside_interval_percent: float


def cells_of(records: Iterable[RunRecord], model: MemoryModel | None) -> list[Cell]:
    """The attempt that counts for each cell that was measured, small models first; with a ``model``, predicted."""
    latest = store.latest_by_fingerprint(record for record in records if record.was_run).values()
    return [_cell(record, model) for record in sorted(latest, key=_reading_order)]


def summaries(cells: Sequence[Cell]) -> list[Summary]:
    """Held-out cells first, then those of the fit, each over all and by method; no row for an empty group."""
    result = []
    for name, held_out in (("held out", True), ("in the fit", False)):
        group = [cell for cell in cells if cell.held_out is held_out and cell.error_percent is not None]
        methods = [method for method in get_args(Method) if any(cell.record.spec.method == method for cell in group)]
        result += [_summary(f"{name}, all", group)] if group else []
        for method in methods if len(methods) > 1 else []:
            result.append(_summary(f"{name}, {method}", [cell for cell in group if cell.record.spec.method == method]))
    return result


def _cell(record: RunRecord, model: MemoryModel | None) -> Cell:
    if model is None:
        return Cell(record=record, held_out=None)
    from vramprobe.catalog import gpu_seen
    from vramprobe.predict.prediction import predict

    held_out = record.fingerprint not in model.fingerprints
    remark = ""
    try:
        prediction = predict(record.spec, model, gpu=gpu_seen(record.environment.device_name), replays=True)
    except OutOfRange as error:
        prediction, remark = error.prediction, str(error)
    except VramprobeError as error:
        return Cell(record=record, held_out=held_out, remark=str(error))
    peak = prediction.peak_allocated_bytes
    return Cell(
        record=record,
        held_out=held_out,
        predicted_bytes=peak.value,
        low_bytes=peak.low,
        high_bytes=peak.high,
        remark=remark,
    )


def _summary(group: str, cells: Sequence[Cell]) -> Summary:
    errors = [cell.error_percent for cell in cells]
    return Summary(
        group=group,
        num_cells=len(cells),
        mean_abs_error_percent=statistics.fmean(map(abs, errors)),
        worst_abs_error_percent=max(map(abs, errors)),
        worst_under_prediction_percent=min(errors) if min(errors) < 0 else None,
        inside_interval_percent=100 * statistics.fmean(cell.is_inside for cell in cells),
    )


def _reading_order(record: RunRecord) -> tuple:
    spec = record.spec
    num_params = record.facts.num_params if record.facts else float("inf")  # failed before it was known: last
    return (num_params, spec.model_label, spec.method, spec.quant, spec.num_tokens, spec.seq_len, spec.cell_id,
            record.fingerprint)  # fmt: skip
