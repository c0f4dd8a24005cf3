"""Records and a fit → what the tables and the plot show: one cell per configuration, with its prediction.

In: comparable records. Out: frozen cells, in the order a reader looks for them. Predicts by recipes at hand, and
records none. Never formats anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vramprobe.catalog import gpu_seen
from vramprobe.errors import VramprobeError
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.units import word_for

if TYPE_CHECKING:
    import pandas as pd

    from vramprobe.model.card_fit import CardFit


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One configuration: the attempt that counts, and its prediction; null on the CPU, or without a recipe at hand."""

    record: RunRecord
    held_out: bool | None  # whether the fit has not seen it; null without a fit
    predicted_bytes: int | None = None
    low_bytes: int | None = None
    high_bytes: int | None = None
    remark: str = ""  # why there is no prediction, where a recipe is at hand

    @property
    def measured_bytes(self) -> int | None:
        """The allocated peak of the training steps; null unless the run is to be believed."""
        return self.record.peak.allocated_bytes if self.record.outcome.kind == "ok" and self.record.peak else None

    @property
    def num_params(self) -> int:
        """Parameters of the model; 0 where the run failed before they were known."""
        return self.record.facts.num_params if self.record.facts else 0

    @property
    def error_percent(self) -> float | None:
        """Predicted less measured, in percent of measured: negative is an under-prediction."""
        if self.measured_bytes is None or self.predicted_bytes is None:
            return None
        return 100 * (self.predicted_bytes - self.measured_bytes) / self.measured_bytes

    @property
    def is_inside(self) -> bool:
        """Return True if the measured peak lies in the predicted interval."""
        if self.low_bytes is None or self.measured_bytes is None or self.high_bytes is None:
            return False
        return self.low_bytes <= self.measured_bytes <= self.high_bytes


def word_of(cells: Sequence[Cell]) -> str:
    """Return the word for these cells' numbers, measured or emulated: comparable cells are of one instrument."""
    return word_for(cells[0].record.instrument)


def cells_of(records: Iterable[RunRecord], model: CardFit | None) -> list[Cell]:
    """The attempt that counts for each cell that was measured, small models first; ``model`` corrects predictions."""
    latest = store.latest_by_fingerprint(records).values()
    return [_cell(record, model) for record in sorted(latest, key=_reading_order)]


def summaries(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the accuracy of the predictions, in percent of the measured peak: a row per group that is not empty.

    Held-out cells first, then those of the fit, each over all and by method; without a fit all together.
    """
    import pandas as pd

    names = {True: "held out", False: "in the fit", None: "predicted"}

    frame = pd.DataFrame(
        [
            {
                "name": names[cell.held_out],
                "method": cell.record.spec.method,
                "error": cell.error_percent,
                "inside": cell.is_inside,
            }
            for cell in cells
            if cell.error_percent is not None
        ]
    )
    rows = []
    for name, group in frame.groupby("name", sort=False) if len(frame) else ():
        methods = dict(list(group.groupby("method")))
        parts = {"all": group} | (methods if len(methods) > 1 else {})
        rows += [{"group": f"{name}, {part}", **_summary(found)} for part, found in parts.items()]
    return sorted(rows, key=lambda row: not row["group"].startswith("held out"))


def _cell(record: RunRecord, model: CardFit | None) -> Cell:
    from vramprobe.predict.at_hand import NoRecipe
    from vramprobe.predict.expected import predict_at_hand

    held_out = None if model is None else record.fingerprint not in model.fingerprints
    try:
        prediction = predict_at_hand(record.spec, gpu_seen(record.environment.device_name), model)
    except NoRecipe:
        return Cell(record=record, held_out=held_out)
    except VramprobeError as error:
        return Cell(record=record, held_out=held_out, remark=str(error))
    peak = prediction.peak_allocated_bytes
    return Cell(record=record, held_out=held_out, predicted_bytes=peak.value, low_bytes=peak.low, high_bytes=peak.high)


def _summary(found: pd.DataFrame) -> dict[str, Any]:
    errors = found.error
    return {
        "num_cells": len(found),
        "mean_abs_error_percent": errors.abs().mean(),
        "worst_abs_error_percent": errors.abs().max(),
        "worst_under_prediction_percent": errors.min() if errors.min() < 0 else None,
        "inside_interval_percent": 100 * found.inside.mean(),
    }


def _reading_order(record: RunRecord) -> tuple:
    spec = record.spec
    num_params = record.facts.num_params if record.facts else float("inf")  # failed before it was known: last
    return (
        num_params,
        spec.model_label,
        spec.method,
        spec.quant,
        spec.num_tokens,
        spec.seq_len,
        spec.cell_id,
        record.fingerprint,
    )
