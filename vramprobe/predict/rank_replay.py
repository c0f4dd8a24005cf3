"""A rank of several through the allocator's replay: what it would hold in reserve, and whether its card is enough.

In: the prediction of a rank by arithmetic, and its cell with the ranks. Out: the same with both tiers as the replay has
them (model/replayed.py), which the kinds of sharding that terms/rank_requests.py knows have. No torch here.
"""

from __future__ import annotations

from vramprobe.choices import FSDP1
from vramprobe.model.replayed import num_alloc_retries, replayed
from vramprobe.predict.prediction import ALONE, HasKernels, Prediction, Within, simulated_interval, usable_bytes
from vramprobe.spec import CellSpec
from vramprobe.terms.rank_requests import is_logged

#: (low, high) of emulated / replayed, beyond the worst of the ranks in benchmarks/ranks.md.
ALLOCATED_RATIOS, RESERVED_RATIOS = (0.995, 1.005), (0.975, 1.025)


def with_rank_replay(found: Prediction, ranks: CellSpec, gpu: HasKernels | None) -> Prediction:
    """``found`` with allocated and reserved memory by replay, and with what becomes of the rank where ``gpu`` has room
    for its tensors, but not for all that the allocator would keep; unchanged where no order of requests is known.
    """
    if ranks.device != "cuda" or ranks.num_gpus == 1 or ranks.is_spread or not is_logged(ranks):
        return found
    played = replayed(ranks, gpu)
    allocated = simulated_interval(played.allocated_bytes, ALLOCATED_RATIOS)
    left = allocated.value - sum(found.terms.values())
    return found.model_copy(update={
        "peak_allocated_bytes": allocated, "terms": found.terms | ({"block_remainders": left} if left > 0 else {}),
        "constant_bytes": min(left, 0), "reserved_bytes": simulated_interval(played.reserved_bytes, RESERVED_RATIOS),
        "warnings": [*_notes(ranks), *(one for one in found.warnings if one != ALONE)],
        "within": _within(ranks, gpu, played.allocated_bytes, played.reserved_bytes),
    })  # fmt: skip


def _notes(ranks: CellSpec) -> list[str]:
    notes = ["by the allocator's replay, which emulated ranks bear out (benchmarks/ranks.md)"]
    if ranks.sharding in FSDP1:
        notes.append(
            "a block that FSDP1 frees waits until no stream uses it, which the replay leaves out: a real card may "
            "reserve more"
        )
    return notes


def _within(ranks: CellSpec, gpu: HasKernels | None, allocated_bytes: int, reserved_bytes: int) -> Within | None:
    if gpu is None or gpu.total_bytes is None:
        return None
    limit = usable_bytes(gpu, device_is_known=False, num_gpus=ranks.num_gpus)
    if not allocated_bytes <= limit < reserved_bytes:
        return None
    retries = num_alloc_retries(ranks, gpu, limit)
    return None if retries is None else Within(limit_bytes=limit, num_alloc_retries=retries)
