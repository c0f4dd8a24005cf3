"""Memory of a cell's phases and of its steady step, by tier and by cause: parts of a record (record.py).

In: what an instrument observed, or a replay. Out: frozen models. Bytes are ints; what is not known is null, never 0.
"""

from typing import Annotated

from pydantic import Field

from vramprobe.choices import PhaseName
from vramprobe.records.frozen import FrozenModel

TRAINING_PHASES = ("forward", "backward", "optimizer_step", "zero_grad")


#: Bytes or a count: never negative, and of 64 bits. A difference of two readings may be (device use, unaccounted).
Amount = Annotated[int, Field(ge=0, lt=2**63)]


class PhaseMemory(FrozenModel):
    """Memory over one phase of one step: at its end (``end``) and the highest within it (``peak``)."""

    name: PhaseName
    step: int | None = None  # 1-based; None for load, prepare and batch
    micro_step: int | None = None  # 1-based, for forward and backward under gradient accumulation
    allocated_end_bytes: Amount
    allocated_peak_bytes: Amount
    reserved_end_bytes: Amount | None = None
    reserved_peak_bytes: Amount | None = None
    requested_end_bytes: Amount | None = None
    requested_peak_bytes: Amount | None = None
    active_end_bytes: Amount | None = None
    active_peak_bytes: Amount | None = None
    device_used_bytes: int | None = None  # NVML at the phase's end, less the baseline before the context
    rss_end_bytes: Amount | None = None  # the process's resident set


class Composition(FrozenModel):
    """Bytes of live tensors at one point in time by cause; the parts add up to ``total_bytes`` exactly.

    On cuda in requested bytes: what the caching allocator rounds up or does not split off has no cause.
    """

    total_bytes: Amount
    weights_bytes: Amount
    gradients_bytes: Amount
    optimizer_state_bytes: Amount
    batch_bytes: Amount
    saved_activations_bytes: Amount  # made in forward, alive when forward ended
    temporaries_bytes: Amount  # the rest: live only within the phase
    other_bytes: Amount = (
        0  # there before the step and no tensor of the workload's: cuBLAS workspaces, libraries' tables
    )

    def parts(self) -> dict[str, int]:
        """The parts by name, without the total."""
        return {name: value for name, value in self.model_dump().items() if name != "total_bytes"}


class MemoryLedger(FrozenModel):
    """The steady step by cause. Sizes are the tensors' own (numel × itemsize, each storage once).

    What is read off the allocator is in requested bytes on cuda, for the same reason as in Composition.
    """

    weights_bytes: Amount  # parameters, buffers and quantisation state
    gradients_bytes: Amount  # at the end of backward
    optimizer_state_bytes: Amount  # after the first step
    batch_bytes: Amount
    saved_activations_bytes: int  # allocated at the end of forward less at its start
    unaccounted_bytes: int  # idle allocated memory less all of the above that is alive then
    at_peak: Composition | None = None  # null where no allocation trace was taken


class Peak(FrozenModel):
    """The highest memory of the training phases, by tier (load is apart: see ``load_allocated_bytes``)."""

    phase: PhaseName
    step: int
    allocated_bytes: Amount
    reserved_bytes: Amount | None = None
    device_bytes: int | None = None  # reserved + context + rest, as NVML saw it; null where NVML is not there
    load_allocated_bytes: Amount  # peak while loading and preparing
