"""Outcomes of a measured cell: how an attempt ended.

In: what the worker saw, or the sweep did with the cell. Out: one frozen class for each kind, which a record holds
(record.py).
"""

from typing import Annotated, Literal

from pydantic import Field

from vramprobe.choices import PhaseName
from vramprobe.records.frozen import FrozenModel
from vramprobe.units import MIB


class Ok(FrozenModel):
    kind: Literal["ok"] = "ok"


class Oom(FrozenModel):
    """The device ran out; a lower bound for the fit."""

    kind: Literal["oom"] = "oom"
    phase: PhaseName
    step: int | None = None
    requested_bytes: int | None = None  # the segment that the allocator asked the device for
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    free_bytes: int | None = None
    message: str

    @property
    def at_least_bytes(self) -> int | None:
        """Bytes that the cell needs at least: allocated at the failure, and the least request that asks for such a
        segment.

        A request up to 1 MiB asks for 2 MiB, one below 10 MiB for 20 MiB, a larger one is rounded up to 2 MiB
        (c10/cuda/CUDACachingAllocator.cpp, ``get_allocation_size``, which its observers are told).
        """
        if self.allocated_bytes is None:
            return None
        segment = self.requested_bytes or 0
        if segment % (2 * MIB):  # no segment of this allocator's
            return self.allocated_bytes + segment
        least = {0: 0, 2 * MIB: 1, 20 * MIB: MIB + 1}.get(segment, max(segment - 2 * MIB + 1, 10 * MIB))
        return self.allocated_bytes + least


class OomHost(FrozenModel):
    """The host ran out: a failed host allocation, or the kernel's or the container's killer."""

    kind: Literal["oom_host"] = "oom_host"
    phase: PhaseName | None = None
    message: str


class Timeout(FrozenModel):
    kind: Literal["timeout"] = "timeout"
    limit_seconds: float
    phase: PhaseName | None = None  # that it hung in


class Error(FrozenModel):
    kind: Literal["error"] = "error"
    phase: PhaseName | None = None
    error_type: str
    message: str
    traceback: str | None = None


class Interrupted(FrozenModel):
    """Stopped by a signal or, ``by_limit``, by the sweep's own time or money."""

    kind: Literal["interrupted"] = "interrupted"
    message: str
    by_limit: bool = False


class Skipped(FrozenModel):
    """Not run, because it would certainly have run out of memory; ``evidence`` names what says so."""

    kind: Literal["skipped"] = "skipped"
    why: Literal["dominated", "predicted"]  # by an observed OOM of no larger a cell; by a lower bound above the card
    evidence: str
    evidence_attempt_id: str | None = None  # the attempt that ran out of memory, where one did


class Invalid(FrozenModel):
    """Measured, but it must not be believed: the ledger did not close or steady steps did not repeat."""

    kind: Literal["invalid"] = "invalid"
    reasons: list[str]


class Contaminated(FrozenModel):
    """Someone else's memory on the device moved while the cell ran."""

    kind: Literal["contaminated"] = "contaminated"
    baseline_before_bytes: int
    baseline_after_bytes: int


Outcome = Annotated[
    Ok | Oom | OomHost | Timeout | Error | Interrupted | Skipped | Invalid | Contaminated, Field(discriminator="kind")
]
