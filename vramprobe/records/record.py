"""RunRecord: what one attempt at a cell produced; one JSON line, versioned and validated. Started: that one began.

In: what an instrument observed. Out: a frozen record, and JSON both ways. Bytes are ints and the unit is the last word
of the name; what is not known is null, never 0 or -1. Never measures and never judges comparability (table.py does).
"""

import statistics
import uuid
from datetime import datetime
from typing import Any, Literal

from vramprobe.records.frozen import FrozenModel
from vramprobe.records.outcomes import Outcome
from vramprobe.records.phase_memory import Amount, MemoryLedger, Peak, PhaseMemory
from vramprobe.records.traffic import CollectiveTraffic
from vramprobe.spec import CellSpec

#: Raise it when a field changes its meaning or goes; say what changed in FORMAT_HISTORY and keep reading the old one.
FORMAT = 1
FORMAT_HISTORY = {1: "first format"}
#: Fields of a cell under the names that older records have.
_OLDER_NAMES = {b'"emulate_vram":': b'"limit_vram":'}

#: cuda and cpu measure; emulated is the same software on an emulated driver.
Instrument = Literal["cuda", "emulated", "cpu"]
Isolation = Literal["spawn", "forkserver"]


class ModelFacts(FrozenModel):
    """Seen on the live model, not taken from its name."""

    num_params: Amount  # logical parameters of the base model (a 4-bit weight counts its elements), tied ones once
    num_trainable_params: Amount
    num_quantised_params: Amount
    quantised_weights_bytes: Amount  # packed weights and their quantisation state
    residual_dtype: str | None = None  # dtype of the hidden states between layers, e.g. "float32"
    attention_kernels: list[str] = []  # fused ones that ran, e.g. "ScaledDotProductFlashAttentionForCpu"


class Timing(FrozenModel):
    """Seconds. ``step_seconds`` comes from steps that were not traced; the rest is wall time of this cell."""

    step_seconds: list[float] = []
    load_seconds: float | None = None
    first_step_seconds: float | None = None  # of traced_seconds, the step that warms up: kernels, state, compiling
    traced_seconds: float | None = None
    history_seconds: float | None = None  # the step under the allocator's history, where one was taken
    total_seconds: float

    @property
    def median_step_seconds(self) -> float | None:
        """Median of the steps that were not traced; None without any."""
        return statistics.median(self.step_seconds) if self.step_seconds else None


class Environment(FrozenModel):
    """The context of a measurement, apart from the cell's identity."""

    device_name: str  # GPU marketing name, or the CPU's model
    device_uuid: str | None = None
    device_total_bytes: int | None = None  # as torch reports it (cuda), or the host's memory
    nvml_total_bytes: int | None = None
    nvml_memory_info: Literal["v2", "v1"] | None = None
    driver_version: str | None = None
    cuda_version: str | None = None
    emulator: str | None = None  # its version, where the CUDA driver is the emulated one; null for a real one
    alloc_conf: str | None = None
    isolation: Isolation
    isolation_reason: str | None = None  # why the cell was spawned where a fork server was to be had; else null
    num_threads: int | None = None
    platform: str
    python: str
    versions: dict[str, str | None]  # of vramprobe and of the libraries that the cell's kind runs
    commit: str | None = None
    dirty: bool | None = None

    @property
    def device_said(self) -> str:
        """The device's name, which says so where it is emulated."""
        return self.device_name if self.emulator is None else f"emulated {self.device_name}"


#: A record names so many lines that read values, those that could have steered the program first.
MAX_READS = 40


class ValueRead(FrozenModel):
    """Reads, by one line of Python, of values that the emulated GPU did not compute."""

    line: str | None  # file:line, innermost outside torch; null on a thread of autograd's
    function: str | None = None
    torch_line: str | None = None
    script_line: str | None = None  # innermost outside every installed package, where that is another one
    operator: str
    state: Literal["assumed", "uncomputed"]  # a likely value stood there, or nothing of the kind
    kind: Literal["control", "number", "bulk"]  # branched on, a whole number or a size; one float; many at once
    dtype: str | None = None
    num_reads: Amount
    max_elements: Amount
    could_have_steered: bool


class Verification(FrozenModel):
    """Further steps under other contents of what is not computed: whether they allocate as the first does."""

    contents: list[str]
    num_events: Amount  # allocations and frees of one step
    same: bool
    parted_at: str | None = None  # the first place where two sequences part: its number, both events, the line


class Emulation(FrozenModel):
    """Basis of an emulated record: the card, the emulator, and the uncomputed values.

    ``context_bytes`` is assumed, and so is what it adds to the device tier; ``graph_bytes`` too: the most
    that the instances of CUDA graphs of a process held.
    """

    card: str  # as the catalog calls it
    num_cards: Amount
    emulator_version: str
    torch_build: str  # as torch names itself, e.g. 2.13.0+cu130
    contents: str  # what bytes that nobody computed are taken for
    routing: str  # where tokens go whose scores nobody computed
    context_bytes: Amount
    graph_bytes: Amount | None = None  # None: of an emulator that charged nothing for them
    is_busy: bool = False  # the host runs ahead of a card that trains (emulate/driver/completion.c); else done at once
    num_launches: Amount | None = None
    num_reads: Amount | None = None  # by the host, of values that nobody computed
    num_steering_reads: Amount | None = None  # of those, the ones that could have steered the program
    reads: list[ValueRead] = []
    verification: Verification | None = None


class RankRecord(FrozenModel):
    """Observations of one of several ranks on its card and in its process; null where that is not known.

    Under device-map, ``rank`` is a card's number: one process has them all, and what is a process's own is null.
    """

    rank: Amount
    modules: list[str] | None = None  # under device-map, the parts of the model on this card, as the map names them
    peak: Peak | None = None
    ledger: MemoryLedger | None = None
    phases: list[PhaseMemory] = []
    context_bytes: int | None = None
    num_alloc_retries: int | None = None
    host_peak_bytes: Amount | None = None  # resident at most, what processes share counted in each
    host_tensors_bytes: Amount | None = None  # of the model, its gradients and the optimizer's state there, at most
    host_pinned_bytes: Amount | None = None  # what torch's allocator of pinned memory took of it, in powers of two
    traffic: list[CollectiveTraffic] | None = None  # of the steady step; null where nobody counts, as on real GPUs


class RunRecord(FrozenModel):
    """One attempt at one cell. ``peak``, ``ledger`` and ``facts`` are null where the run did not get that far.

    Of several ranks, or cards of one process, ``peak``, ``ledger``, ``phases`` and what else is one card's are those
    of the highest.
    """

    format: Literal[1] = FORMAT
    attempt_id: str  # unique per attempt
    cell_id: str
    fingerprint: str
    instrument: Instrument
    started_at: str  # ISO 8601, UTC
    sweep: str | None = None  # the sweep's name; null for a single measurement
    held_out: bool = False  # the sweep keeps this cell out of the fit, to test predictions on it
    outcome: Outcome  # up to here a journal is indexed without reading the rest of its lines (store.py)
    spec: CellSpec
    environment: Environment
    emulation: Emulation | None = None  # what an emulated record rests on; null for every other instrument
    peak: Peak | None = None
    ledger: MemoryLedger | None = None
    phases: list[PhaseMemory] = []
    facts: ModelFacts | None = None
    timing: Timing | None = None
    context_bytes: int | None = None  # device − reserved after a full step: CUDA context and what sits behind torch
    num_alloc_retries: int | None = None
    ranks: list[RankRecord] = []  # of a cell with several, those that were run; under device-map, the cards
    warnings: list[str] = []


class Started(FrozenModel):
    """An attempt has begun; its record, with the same ``attempt_id``, is still to come. One without is interrupted."""

    format: Literal[1] = FORMAT
    line: Literal["started"] = "started"
    attempt_id: str
    cell_id: str
    fingerprint: str
    instrument: Instrument
    started_at: str  # ISO 8601, UTC
    sweep: str | None = None


def new_attempt_id() -> str:
    """A name that no other attempt has."""
    return uuid.uuid4().hex


def attempt_fields(spec: CellSpec, attempt_id: str, started_at: datetime, instrument: Instrument) -> dict[str, Any]:
    """The fields that name one attempt at a cell, whoever writes its record: the worker, or the runner for it."""
    return {
        "attempt_id": attempt_id,
        "cell_id": spec.cell_id,
        "fingerprint": spec.fingerprint,
        "instrument": instrument,
        "started_at": started_at.isoformat(timespec="milliseconds"),
    }


def record_from_json(line: str | bytes) -> RunRecord:
    """Read one record of any format this version knows. Raises ValueError (pydantic's) on anything else."""
    line = line.encode() if isinstance(line, str) else line
    for older, name in _OLDER_NAMES.items():
        line = line.replace(older, name)
    return RunRecord.model_validate_json(line)
