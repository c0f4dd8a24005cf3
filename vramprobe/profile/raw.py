"""The raw files of a profiled run as frozen data: each process's lines, its history, and what the launcher knew.

Each class has the fields of one kind of line as the hook (hook/) writes it; run_files.py reads them. Judges nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vramprobe.profile.doing import Doing


@dataclass(frozen=True, kw_only=True)
class RawProcess:
    """Process that wrote a file of lines."""

    pid: int
    argv: tuple[str, ...] = ()
    python: str | None = None
    torch: str | None = None
    cuda: str | None = None
    rank: int | None = None
    world_size: int | None = None
    device_index: int | None = None
    device_name: str | None = None
    device_total_bytes: int | None = None
    device_uuid: str | None = None  # torch below 2.4 does not tell
    device_uuids: tuple[str | None, ...] = ()  # of all that it sees
    capability: tuple[int, int] | None = None
    emulated: bool = False
    versions: Mapping[str, str | None] = field(default_factory=dict)
    started_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class RawPhase:
    """One phase on one card: its ends and peaks as the allocator counted them, bytes; times of time.time_ns()."""

    name: str
    device: int | None = None
    step: int | None = None
    micro_step: int | None = None
    start_ns: int
    end_ns: int
    allocated_end_bytes: int
    allocated_peak_bytes: int
    reserved_end_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    requested_end_bytes: int | None = None
    requested_peak_bytes: int | None = None
    device_used_bytes: int | None = None  # at its end, by all processes, as the driver says
    device_peak_bytes: int | None = None  # within it; an emulated driver counts this, a real one does not

    @property
    def said(self) -> str:
        """``backward of step 2``, ``load``."""
        return self.name if self.step is None else f"{self.name} of step {self.step}"


@dataclass(frozen=True, kw_only=True)
class RawHost:
    """The most host memory that a process held in one phase: CPU tensors, what it pinned, and both at one time."""

    phase: str
    step: int | None = None
    both_bytes: int
    pinned_bytes: int


@dataclass(frozen=True, kw_only=True)
class RawMapped:
    """A checkpoint's file that a process mapped into its memory."""

    path: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class RawMoved:
    """Traffic that one phase requested of NCCL: (kind by the driver's number, ranks, calls, bytes) each."""

    phase: str
    step: int | None = None
    counts: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class RawAsleep:
    """Memory that is unmapped from ``time_ns`` on, although torch counts it as allocated: (address, bytes) each."""

    time_ns: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class RawOom:
    """An OutOfMemoryError as it was raised, caught by the program or not; ``stack`` innermost first."""

    time_ns: int | None = None
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    phase: str | None = None
    step: int | None = None
    stack: tuple[tuple[str, int, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class RawEnd:
    """End of a process: ``stopped`` by its hook, by an ``error`` that nobody caught, else ``exit``."""

    why: str
    num_alloc_retries: int | None = None
    num_ooms: int | None = None


@dataclass(frozen=True, kw_only=True)
class RawHeld:
    """Storages of one cause, alive at ``time_ns``."""

    cause: str
    time_ns: int
    storages: Mapping[int, int]  # address → bytes
    names: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RawHistory:
    """History of the allocator, one value per event (profile/hook/history.py says which)."""

    device: int
    traced: str = "all"
    first_ns: int | None = None
    last_ns: int | None = None
    actions: array[int]
    addresses: array[int]
    sizes: array[int]
    times_us: array[int]
    streams: array[int]
    stacks_of: array[int]
    stacks: tuple[tuple[tuple[str, int, str], ...], ...]
    alive_before: tuple[tuple[int, int, int, int], ...] = ()
    held: tuple[RawHeld, ...] = ()
    allocator: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RawTrainer:
    """Length of a training as transformers' Trainer reports it; ``are_given``: by max_steps, not by epochs."""

    num_steps: int
    are_given: bool
    num_epochs: float
    num_batches: int | None = None  # of an epoch, on one rank
    grad_accum: int = 1
    world_size: int = 1


@dataclass(frozen=True, kw_only=True)
class RawRank:
    """One process; ``end`` is None where it was killed, ``history`` where it left none."""

    process: RawProcess
    phases: tuple[RawPhase, ...] = ()
    moved: tuple[RawMoved, ...] = ()
    host: tuple[RawHost, ...] = ()
    mapped: tuple[RawMapped, ...] = ()
    asleep: tuple[RawAsleep, ...] = ()
    num_steps: int = 0
    ooms: tuple[RawOom, ...] = ()
    warnings: tuple[str, ...] = ()
    values: Mapping[str, Any] | None = None
    verification: Mapping[str, Any] | None = None
    evaluation: Mapping[str, Any] | None = None  # of how many batches, and what the last of them added to the peak
    count: Mapping[str, Any] | None = None  # of one step (emulate/values/count)
    batches: Mapping[str, Any] | None = None  # the shapes of all (hook/own_batches.py)
    probe: Mapping[str, Any] | None = None  # the own batch's shape, where others follow (hook/probe_batches.py)
    plays: tuple[Mapping[str, Any], ...] = ()  # which batch was trained on in which step after those of num_steps
    kept: tuple[Mapping[str, Any], ...] = ()  # collections with tensors of many steps (hook/kept_lists.py)
    trainer: RawTrainer | None = None
    settings: Mapping[str, str] = field(default_factory=dict)  # hook/settings.py
    parallel: Mapping[str, int] = field(default_factory=dict)  # how ranks share the model (hook/parallel.py)
    end: RawEnd | None = None
    doing: Doing | None = None  # when it was last heard of
    history: RawHistory | None = None

    @property
    def name(self) -> str:
        """``rank 3``, or the process where it has none."""
        return f"process {self.process.pid}" if self.process.rank is None else f"rank {self.process.rank}"

    @property
    def device_uuid(self) -> str | None:
        """UUID of the card that it works on: an engine's worker may choose it after its first use of CUDA."""
        devices = [one.device for one in self.phases if one.device is not None]
        uuids = self.process.device_uuids
        return uuids[devices[-1]] if devices and devices[-1] < len(uuids) else self.process.device_uuid


@dataclass(frozen=True, kw_only=True)
class RawUncaught:
    """An exception that ended a process; ``stack`` innermost first."""

    pid: int
    rank: int | None = None
    time_ns: int
    error: str  # its class and message
    stack: tuple[tuple[str, int, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class EngineLog:
    """Log lines of one process of an inference engine about its memory."""

    process: str  # its name, as Python's multiprocessing has it
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RawRun:
    """One command; ``launcher`` is run.json, None where that is missing or torn."""

    launcher: Mapping[str, Any] | None
    ranks: tuple[RawRank, ...]
    warnings: tuple[str, ...] = ()
    replaced: tuple[Mapping[str, Any], ...] = ()  # by which kind (weights …) and what, of all processes
    engine_logs: Mapping[int, EngineLog] = field(default_factory=dict)  # by process
    doing: tuple[Doing, ...] = ()  # of processes that had not used a GPU when they were last heard of
    uncaught: tuple[RawUncaught, ...] = ()  # of all processes, torch or not, the first to fail first
