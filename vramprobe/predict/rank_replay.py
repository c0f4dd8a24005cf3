"""A rank of several through the allocator's replay: what it would hold in reserve.

In: the prediction of a rank by arithmetic, and its cell with the ranks. Out: the same with both tiers as the replay has
them (model/replayed.py), for the kinds of sharding whose requests are known in their order (terms/rank_requests.py). No
torch here.
"""

from __future__ import annotations

from vramprobe.choices import FSDP1
from vramprobe.model.replayed import replayed
from vramprobe.predict.prediction import ALONE, HasKernels, Prediction, simulated_interval
from vramprobe.spec import CellSpec
from vramprobe.terms.rank_requests import is_logged
from vramprobe.units import format_bytes

#: (low, high) of emulated / replayed, beyond the worst of the ranks in benchmarks/ranks_replayed.md.
ALLOCATED_RATIOS, RESERVED_RATIOS = (0.995, 1.005), (0.965, 1.035)
#: What ZeRO-3 gathers is replayed by itself, as it has a stream of its own: what stands at once is the arithmetic's.
ZERO3_ALLOCATED_RATIOS, ZERO3_RESERVED_RATIOS = (0.98, 1.035), (0.95, 1.045)


def with_rank_replay(found: Prediction, ranks: CellSpec, gpu: HasKernels | None) -> Prediction:
    """``found`` with allocated and reserved memory by replay; unchanged where no order of requests is known."""
    if ranks.device != "cuda" or ranks.num_gpus == 1 or not is_logged(ranks):
        return found
    played = replayed(ranks, gpu)
    if ranks.sharding == "zero3":
        allocated = simulated_interval(found.peak_allocated_bytes.value, ZERO3_ALLOCATED_RATIOS)
        reserved = simulated_interval(max(played.reserved_bytes, allocated.value), ZERO3_RESERVED_RATIOS)
    else:
        allocated = simulated_interval(played.allocated_bytes, ALLOCATED_RATIOS)
        reserved = simulated_interval(played.reserved_bytes, RESERVED_RATIOS)
    notes = _notes(ranks)
    if played.load_bytes > reserved.value:  # and the card has to hold it
        reserved = simulated_interval(played.load_bytes, RESERVED_RATIOS)
        notes.append(load_note(played.load_bytes))
    left = allocated.value - sum(found.terms.values())
    return found.model_copy(update={
        "peak_allocated_bytes": allocated, "terms": found.terms | ({"block_remainders": left} if left > 0 else {}),
        "constant_bytes": min(left, 0), "reserved_bytes": reserved,
        "warnings": [*notes, *(one for one in found.warnings if one != ALONE)],
    })  # fmt: skip


def load_note(load_bytes: int) -> str:
    """What is said where a rank's load needs more than its steps."""
    return f"its load needs the most, {format_bytes(load_bytes)} before anything is divided"


def _notes(ranks: CellSpec) -> list[str]:
    notes = ["reserved memory by the allocator's replay, held against emulated ranks (benchmarks/ranks_replayed.md)"]
    if ranks.sharding in FSDP1 or ranks.sharding == "zero3":
        notes.append(
            "what other streams use is free again as soon as they are done, which the replay takes to be at once: a "
            "real card may reserve more"
        )
    return notes
