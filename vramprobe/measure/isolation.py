"""One process per cell: a spec goes in as JSON, a record comes out as JSON.

In: a spec, who starts its process (launcher.py), where the log goes. Out: a RunRecord, always: a worker that died, hung
or was killed gets the record that its exit status and the kernel's counters support. Imports no torch.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from vramprobe.choices import PhaseName
from vramprobe.errors import MissingDependency, SpecError, StoreError
from vramprobe.measure import environment, nvml
from vramprobe.measure.launcher import Launcher
from vramprobe.measure.ranks import cards_of_a_machine
from vramprobe.records.outcomes import Contaminated, Error, Interrupted, OomHost, Outcome, Timeout
from vramprobe.records.record import RunRecord, attempt_fields, new_attempt_id, record_from_json
from vramprobe.rules.sharding import rules_of
from vramprobe.spec import CellSpec
from vramprobe.workload.fused_loss import require_kernels

#: The kernel's counts of OOM kills: of this cgroup (version 2), else of the whole machine (Linux 4.13 and later).
_OOM_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))

#: The extra of pyproject.toml that brings a package.
_EXTRAS = {"liger_kernel": "liger", "trl": "trl"}
#: DeepSpeed with what it needs, as pip is told nothing of its other needs.
DEEPSPEED_SETUP = (
    "vramprobe emulate setup --package deepspeed==0.19.8 --package hjson==3.1.0 --package msgpack==1.2.4 "
    "--package ninja==1.13.2 --package einops==0.8.2 --package py-cpuinfo==9.0.0"
)


@dataclass(frozen=True)
class Ticket:
    """One attempt about to be made: its id, its beginning, and the folder where its worker leaves word.

    ``snapshot``: where the worker leaves the allocator's history of one step, ``recording``: the log of load and all
    steps, if anywhere.
    """

    folder: Path
    attempt_id: str
    started_at: datetime
    snapshot: Path | None = None
    recording: Path | None = None
    verify: bool = False  # run steps under other values, too (an emulated GPU alone)

    @property
    def record(self) -> Path:
        """Path of the record, which the worker writes whole or not at all."""
        return self.folder / f"{self.attempt_id}.json"

    @property
    def status(self) -> Path:
        """Path of the file in which the worker writes its current phase."""
        return self.folder / f"{self.attempt_id}.phase"

    def tear(self) -> None:
        """Clear what the worker left, once it is in the journal."""
        for path in (self.record, self.status):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder for tickets; gone at the end. Raises StoreError where the system has no room for one."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="vramprobe-", ignore_cleanup_errors=True)
    except OSError as error:
        raise StoreError(
            f"no temporary folder can be made ({error.strerror}); free some space, or set TMPDIR to a folder with room"
        ) from error
    with folder as name:
        yield Path(name)


def read_phase(status: Path) -> tuple[PhaseName, int | None] | None:
    """(phase, step) as a worker wrote them; None where it wrote nothing yet, or anything else."""
    try:
        words = status.read_text().split()
    except (OSError, UnicodeDecodeError):
        return None
    match words:
        case [name] if name in get_args(PhaseName):
            return name, None
        case [name, step] if name in get_args(PhaseName) and step.isdecimal():
            return name, int(step)
    return None


def new_ticket(
    folder: Path, snapshot: Path | None = None, *, recording: Path | None = None, verify: bool = False
) -> Ticket:
    """A ticket for an attempt that begins now."""
    return Ticket(folder, new_attempt_id(), datetime.now(UTC), snapshot, recording, verify)


def run_isolated(
    spec: CellSpec, launcher: Launcher, ticket: Ticket, log: Path, timeout_seconds: float | None
) -> RunRecord:
    """One attempt at a cell in its own process, which has what :func:`require_packages` asks for."""
    launcher.start()
    devices = nvml.open_visible(spec.num_gpus) if spec.device == "cuda" else []
    before = [(device, device.used_bytes()) for device in devices]
    kills_before = _oom_kills()
    request = {
        "spec": spec.model_dump_json(),
        "attempt_id": ticket.attempt_id,
        "isolation": launcher.isolation,
        "isolation_reason": launcher.isolation_reason,
        "record": str(ticket.record),
        "status": str(ticket.status),
        "log": str(log),
        "snapshot": str(ticket.snapshot or ""),
        "recording": str(ticket.recording or ""),
        "verify": "yes" if ticket.verify else "",
    }
    status = launcher.run(request, timeout_seconds)
    record = record_left(ticket, spec)
    if record is None:
        outcome = _death(status, timeout_seconds, kills_before, log, ticket)
        record = describe_death(spec, launcher, ticket, outcome)
    for device, before_bytes in before:
        after_bytes = device.use_that_stayed(before_bytes) if before_bytes is not None else None
        if after_bytes is not None:
            mark = Contaminated(baseline_before_bytes=before_bytes, baseline_after_bytes=after_bytes)
            return record.model_copy(update={"outcome": mark})
    return record


def record_left(ticket: Ticket, spec: CellSpec) -> RunRecord | None:
    """Read the worker's file if it is a record of this very attempt; a faulty worker may leave anything."""
    try:
        record = record_from_json(ticket.record.read_bytes())
    except (OSError, ValueError):
        return None
    return record if (record.attempt_id, record.fingerprint) == (ticket.attempt_id, spec.fingerprint) else None


def describe_death(spec: CellSpec, launcher: Launcher, ticket: Ticket, outcome: Outcome) -> RunRecord:
    """The record of a cell whose worker could not write one."""
    return RunRecord(
        **attempt_fields(spec, ticket.attempt_id, ticket.started_at, environment.instrument_for(spec)),
        spec=spec,
        environment=environment.capture(spec, launcher.isolation, launcher.isolation_reason, with_torch=False),
        outcome=outcome,
    )


def require_packages(specs: Iterable[CellSpec]) -> None:
    """Raise MissingDependency for a package or a device that one of these cells needs."""
    first_with: dict[str, CellSpec] = {}
    interprets = False
    for spec in specs:
        if spec.is_sharded:
            _require_cards(spec)
        if rules_of(spec.sharding).uses_deepspeed and spec.offload != "none":
            _require_compiler(spec)
        interprets = interprets or (spec.fused_linear_cross_entropy and spec.device == "cpu")
        for name in (*_needed_packages(spec), spec.device):
            first_with.setdefault(name, spec)
    devices = {name for name in ("cpu", "cuda") if first_with.pop(name, None)}
    missing = {name: spec for name, spec in first_with.items() if importlib.util.find_spec(name) is None}
    if "deepspeed" in missing:
        raise MissingDependency(
            f"running {missing['deepspeed'].cell_id} needs deepspeed, not installed here: pip install deepspeed, or "
            f"for an emulated GPU: {DEEPSPEED_SETUP}"
        )
    if missing:
        extras = ",".join(["measure", *(extra for name, extra in _EXTRAS.items() if name in missing)])
        raise MissingDependency(
            f"running {next(iter(missing.values())).cell_id} needs {', '.join(missing)}, not installed here; "
            f"install what measuring needs: pip install 'vramprobe[{extras}]'"
        )
    if interprets:
        require_kernels("cpu")
    if "cuda" in devices and nvml.first_visible_gpu() is None:
        raise MissingDependency(
            "device cuda was asked for, but no NVIDIA GPU is visible here (NVML lists none, or CUDA_VISIBLE_DEVICES "
            "hides it); use --device cpu for the cpu instrument, or run where nvidia-smi shows a GPU"
        )


def _require_cards(spec: CellSpec) -> None:
    """Raise SpecError where there is no card for each rank, or none to run one rank on by itself."""
    there, is_emulated = environment.num_visible_gpus(), environment.instrument_for(spec) == "emulated"
    if spec.only_rank is None and there < spec.num_gpus:
        way = f"--emulate 'H100-SXM x{spec.num_gpus}', up to 16"
        way += "" if spec.is_spread else ", or one rank by itself with --only-rank 0"
        raise SpecError(
            f"num_gpus {spec.num_gpus} needs as many GPUs, and {there} are visible here; emulate them: {way}"
        )
    of_a_machine = cards_of_a_machine(spec)
    if of_a_machine is not None and there < of_a_machine:
        raise SpecError(
            f"shard_size {of_a_machine} under {spec.sharding} needs as many GPUs also of a rank that runs by itself, "
            f"as FSDP1 counts a machine's, and {there} are visible here; emulate them: --emulate 'H100-SXM "
            f"x{of_a_machine}', up to 16, or use fsdp-hybrid"
        )
    if spec.only_rank is not None and not is_emulated:
        raise SpecError(
            f"only_rank {spec.only_rank}: one rank runs by itself on an emulated GPU alone, whose collectives wait for "
            "nobody; add --emulate H100-SXM, or drop it to run all ranks"
        )


def _require_compiler(spec: CellSpec) -> None:
    """Raise MissingDependency for what torch asks for to compile DeepSpeed's CPUAdam, or to find it compiled."""
    compiler, headers = os.environ.get("CXX", "c++"), Path(sysconfig.get_path("include")) / "Python.h"
    missing = [name for name in (compiler, "ninja") if shutil.which(name) is None]
    missing += [] if headers.exists() else [str(headers)]
    if missing:
        raise MissingDependency(
            f"running {spec.cell_id} compiles DeepSpeed's CPUAdam on this machine, and there is no "
            f"{', '.join(missing)}; install a C++20 compiler, ninja and Python's headers: "
            "apt-get install g++ ninja-build python3-dev"
        )


def _needed_packages(spec: CellSpec) -> list[str]:
    needed = ["torch", "transformers", "accelerate"]
    needed += ["peft"] if spec.method != "full" else []
    needed += ["bitsandbytes"] if spec.needs_bitsandbytes else []
    needed += ["deepspeed"] if rules_of(spec.sharding).uses_deepspeed else []
    needed += ["liger_kernel"] if spec.fused_linear_cross_entropy else []
    needed += ["trl"] if spec.uses_trl else []
    needed += ["cut_cross_entropy"] if spec.loss == "cut_cross_entropy" else []
    return needed


def _death(
    status: int | None, timeout_seconds: float | None, kills_before: int | None, log: Path, ticket: Ticket
) -> Outcome:
    """Derive the outcome of a worker that left no record from its exit status."""
    phase, step = read_phase(ticket.status) or (None, None)
    if status is None:
        return Timeout(limit_seconds=timeout_seconds, phase=phase)
    kills = _oom_kills()
    if status == -signal.SIGKILL and None not in (kills, kills_before) and kills > kills_before:
        message = f"killed by the kernel's OOM killer (oom_kill went from {kills_before} to {kills})"
        return OomHost(message=message, phase=phase)
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
    when = "" if phase is None else f" in {phase}" if step is None else f" in {phase} of step {step}"
    message = f"the worker {how}{when} without a record; its log: {log}"
    return Error(error_type="WorkerDied", message=message, phase=phase)


def _oom_kills() -> int | None:
    """Number of processes that the kernel's OOM killer ended: in this container if it counts its own, else overall."""
    for path in _OOM_COUNTERS:
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None


def interrupted(spec: CellSpec, launcher: Launcher, ticket: Ticket, by: str, *, by_limit: bool) -> RunRecord:
    """The record of a cell that the user, the machine or the sweep's own limit stopped."""
    return describe_death(spec, launcher, ticket, Interrupted(message=f"stopped by {by}", by_limit=by_limit))
