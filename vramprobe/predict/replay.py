"""Replay: a prediction by arithmetic -> the same with both tiers as the caching allocator's replay has them.

In: a prediction, its cell and the GPU. Out: a Prediction. What a fit knows of the replay is added afterwards
(uncertainty.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from vramprobe.predict.prediction import HasKernels, Prediction
from vramprobe.predict.uncertainty import ARITHMETIC_SPREAD, interval_around
from vramprobe.predict.verdict import within
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment
from vramprobe.terms.replayed import num_alloc_retries, replayed
from vramprobe.terms.step.workspaces import highest_moment, with_workspaces, workspaces_bytes


def with_replay(found: Prediction, spec: CellSpec, moments: Sequence[Moment], gpu: HasKernels | None) -> Prediction:
    """``found``, of a cell on CUDA, with allocated and reserved memory by replay; ``moments`` are those that it was
    made of. Bytes of the replay beside their terms are the blocks'.
    """
    played = replayed(spec, gpu)
    moment = highest_moment(with_workspaces(moments, workspaces_bytes(spec, gpu)))
    left = played.allocated_bytes - moment.total_bytes + moment.terms.get("block_remainders", 0)
    terms = {cause: size for cause, size in (moment.terms | {"block_remainders": max(left, 0)}).items() if size}
    spread = ARITHMETIC_SPREAD[spec.device]
    return found.model_copy(
        update={
            "peak_allocated_bytes": interval_around(played.allocated_bytes, spread),
            "terms": terms,
            "constant_bytes": min(left, 0),
            "reserved_bytes": interval_around(played.reserved_bytes, spread),
        }
    )


def with_retries(found: Prediction, spec: CellSpec, gpu: HasKernels | None) -> Prediction:
    """A replayed prediction with what becomes of it where ``gpu`` can hold its tensors, but not all that the allocator
    would keep: one more replay, on a card of that size.
    """
    if gpu is None or spec.device != "cuda":
        return found
    return within(found, gpu, lambda limit: num_alloc_retries(spec, gpu, limit))
