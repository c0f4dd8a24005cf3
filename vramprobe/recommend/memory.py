"""Memory: a cell on so many of a card -> what ``vramprobe predict`` says of it, or that the libraries do not run it so.

In: a CellSpec, a Gpu, their number and the sharding. Out: a Prediction by the fit that ships for the card, where one
reaches so far, else by arithmetic alone; or by the allocator's replay, which takes ten times as long.
"""

from __future__ import annotations

from vramprobe.catalog import Gpu
from vramprobe.errors import OutOfRange
from vramprobe.model.memory_model import shipped_fit
from vramprobe.model.replayed import load_bytes
from vramprobe.predict.cards import predict_several
from vramprobe.predict.prediction import Prediction, predict, simulated_interval, with_retries
from vramprobe.predict.rank_replay import ALLOCATED_RATIOS, load_note
from vramprobe.predict.sharding import predict_rank
from vramprobe.spec import DTENSOR_OPTIMIZERS, CellSpec, cannot_shard
from vramprobe.terms.ranks import FSDP, Sharding


def predict_on(spec: CellSpec, gpu: Gpu, num_gpus: int, sharding: Sharding | None) -> Prediction:
    """What one of ``num_gpus`` holds; ``sharding`` is null on one. Raises what predict raises."""
    if sharding is not None:
        return predict_rank(spec, num_gpus, sharding, gpu=gpu)
    fit = shipped_fit("cuda", gpu, of_one_card=True)
    try:
        return predict(spec, fit, gpu=gpu)
    except OutOfRange:
        return predict(spec, None, gpu=gpu)


def replayed_on(spec: CellSpec, gpu: Gpu, num_gpus: int, sharding: Sharding | None) -> Prediction:
    """The same with reserved memory and what the load needs, to the byte what ``vramprobe predict --gpu`` has."""
    if sharding is not None:
        return predict_several(spec, num_gpus, sharding, gpu=gpu, replays=True)
    try:
        return with_retries(predict(spec, shipped_fit("cuda", gpu), gpu=gpu, replays=True), spec, gpu)
    except OutOfRange:
        return predict(spec, None, gpu=gpu)


def load_on(spec: CellSpec, num_gpus: int, sharding: Sharding) -> int:
    """Bytes that a rank needs at most before its first step: most kinds have the model whole on each card first."""
    return load_bytes(spec.model_copy(update={"num_gpus": num_gpus, "sharding": sharding}))


def with_load(found: Prediction, needed_bytes: int) -> Prediction:
    """What arithmetic says of a rank's steps, or what its load needs where that is more, as predict has it."""
    if needed_bytes <= found.peak_allocated_bytes.value:
        return found
    return found.model_copy(update={
        "peak_allocated_bytes": simulated_interval(needed_bytes, ALLOCATED_RATIOS),
        "warnings": [load_note(needed_bytes), *found.warnings],
    })  # fmt: skip


def fit_name(gpu: Gpu, sharding: Sharding | None) -> str:
    """What tells cards apart that have a fit of their own; empty for all others."""
    return gpu.short_name if sharding is None and shipped_fit("cuda", gpu, of_one_card=True) else ""


def is_refused(spec: CellSpec, sharding: Sharding | None) -> bool:
    """Whether the libraries do not run the cell so."""
    if sharding is None:
        return False
    return cannot_shard(spec, sharding) is not None or (sharding in FSDP and spec.optim not in DTENSOR_OPTIMIZERS)
