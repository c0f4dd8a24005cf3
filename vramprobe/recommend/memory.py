"""Memory: a cell on so many of a card -> what ``vramprobe predict`` says of it, or that the libraries do not run it so.

In: a CellSpec with its ranks, a Gpu. Out: a Prediction by the fit that ships for the card, where one reaches so far,
else by arithmetic alone; or by the allocator's replay, which takes ten times as long.
"""

from __future__ import annotations

from vramprobe.catalog import Gpu
from vramprobe.errors import OutOfRange
from vramprobe.model.memory_model import MemoryModel, shipped_fit
from vramprobe.predict.predict import predict
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.replay import ALLOCATED_RATIOS, load_note
from vramprobe.predict.uncertainty import interval_around
from vramprobe.spec import CellSpec


def predict_on(spec: CellSpec, gpu: Gpu) -> Prediction:
    """Predict one of the cell's GPUs. Raises what predict raises."""
    return _with(_fit_of(spec, gpu, of_one_card=True), spec, gpu, replays=False)


def replayed_on(spec: CellSpec, gpu: Gpu) -> Prediction:
    """Predict it with reserved memory and the load, to the byte as ``vramprobe predict --gpu`` does."""
    return _with(_fit_of(spec, gpu), spec, gpu, replays=True)


def _with(fit: MemoryModel | None, spec: CellSpec, gpu: Gpu, *, replays: bool) -> Prediction:
    try:
        return predict(spec, fit, gpu=gpu, replays=replays, retries=replays)
    except OutOfRange:
        return predict(spec, None, gpu=gpu)


def _fit_of(spec: CellSpec, gpu: Gpu, *, of_one_card: bool = False) -> MemoryModel | None:
    return None if spec.num_gpus > 1 else shipped_fit("cuda", gpu, of_one_card=of_one_card)


def with_load(found: Prediction, needed_bytes: int) -> Prediction:
    """Raise a rank's prediction to its load's bytes, where they are more than those of its steps, as predict does."""
    if needed_bytes <= found.peak_allocated_bytes.value:
        return found
    return found.model_copy(
        update={
            "peak_allocated_bytes": interval_around(needed_bytes, ALLOCATED_RATIOS),
            "warnings": [load_note(needed_bytes), *found.warnings],
        }
    )


def fit_name(spec: CellSpec, gpu: Gpu) -> str:
    """Return the name that tells cards with a fit of their own apart; empty for all others."""
    return gpu.short_name if _fit_of(spec, gpu, of_one_card=True) else ""
