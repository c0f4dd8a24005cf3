"""One process per cell: started by the fork server or spawned; a spec goes in as JSON, a record comes out as JSON.

In: a spec and where the log goes. Out: a RunRecord, always: a worker that died, hung or was killed gets the record that
its exit status and the kernel's counters support. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from vramprobe.errors import MissingDependency
from vramprobe.measure import environment, nvml
from vramprobe.measure.forkserver import ForkServer, ServerEnded
from vramprobe.record import (
    Contaminated,
    Error,
    Interrupted,
    Isolation,
    OomHost,
    Outcome,
    RunRecord,
    Timeout,
    new_attempt,
    record_from_json,
)
from vramprobe.spec import CellSpec
from vramprobe.units import MIB

#: NVML moves by this much without anybody allocating; more means that someone else was on the card.
CONTAMINATION_BYTES = 16 * MIB
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # newer torch reads the first, older the second
#: Not inherited: a record says what its spec says, and an allocator set from outside would not be in it.
_SAID_BY_THE_SPEC = (*_ALLOCATOR_SETTINGS, "PYTORCH_NO_CUDA_MEMORY_CACHING")
_TEARDOWN_SECONDS = 3.0  # the driver frees a dead process's memory a moment after it is gone


class Launcher(Protocol):
    """Runs one request to its end: exit status (negative: signal), or None on time-out, the worker being gone then."""

    isolation: Isolation

    def run(self, request: dict[str, str], timeout_seconds: float | None) -> int | None: ...

    def close(self) -> None: ...


class Spawner:
    """A new interpreter for each cell."""

    isolation: Isolation = "spawn"

    def __init__(self, env: dict[str, str]) -> None:
        self._env = env
        self._process: subprocess.Popen | None = None

    def run(self, request: dict[str, str], timeout_seconds: float | None) -> int | None:
        """Start, wait, and kill when the time is up."""
        spec_path = Path(request["record"]).with_suffix(".spec.json")
        spec_path.write_text(request["spec"])
        spec = CellSpec.model_validate_json(request["spec"])
        with open(request["log"], "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vramprobe.measure.worker", str(spec_path), request["record"]],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
                env=self._env | _allocator_settings(spec),
            )  # fmt: skip
        try:
            return self._process.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.close()

    def close(self) -> None:
        """Kill the worker if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.stdin.close()
            self._process.wait()
            self._process = None


class Server:
    """Children of a fork server; started with the first cell."""

    isolation: Isolation = "forkserver"

    def __init__(self, env: dict[str, str], model_types: list[str], log: Path) -> None:
        self._settings = (model_types, env, log)
        self._server: ForkServer | None = None

    def run(self, request: dict[str, str], timeout_seconds: float | None) -> int | None:
        """One child. If the server dies, its cell died with it, in the same way; the next cell gets a new server."""
        self._server = self._server or ForkServer(*self._settings)
        try:
            return self._server.run(request, timeout_seconds)
        except ServerEnded as ended:
            with open(request["log"], "a") as log:
                log.write(f"the fork server ended; its last words are in {self._settings[-1]}\n")
            self.close()
            return ended.status

    def close(self) -> None:
        """End the server and any child."""
        if self._server is not None:
            self._server.close()
            self._server = None


def run_isolated(spec: CellSpec, launcher: Launcher, log: Path, timeout_seconds: float | None) -> RunRecord:
    """One attempt at a cell in its own process. Raises MissingDependency before starting what cannot work here."""
    require_packages(spec)
    started_at = datetime.now(UTC)
    device = _watched_device(spec)
    before_bytes = device.used_bytes() if device else None
    kills_before = _kernel_oom_kills()
    with tempfile.TemporaryDirectory(prefix="vramprobe-") as folder:
        path = Path(folder) / "record.json"
        request = {"spec": spec.model_dump_json(), "record": str(path), "log": str(log)}
        status = launcher.run(request, timeout_seconds)
        record = record_from_json(path.read_bytes()) if path.exists() else None
    if record is None:
        outcome = _death(status, timeout_seconds, kills_before, log)
        record = describe_death(spec, launcher.isolation, outcome, started_at)
    if device is not None and before_bytes is not None:
        record = _contamination(record, before_bytes, device)
    assert record.fingerprint == spec.fingerprint, "the worker described another cell"
    return record


def describe_death(spec: CellSpec, isolation: Isolation, outcome: Outcome, started_at: datetime) -> RunRecord:
    """The record of a cell whose worker could not write one."""
    return RunRecord(
        **new_attempt(spec, started_at),
        environment=environment.capture(spec, isolation, with_torch=False),
        outcome=outcome,
    )


def require_packages(spec: CellSpec) -> None:
    """Raise MissingDependency for a package or a device that this cell cannot do without."""
    needed = ["torch", "transformers", "accelerate"]
    needed += ["peft"] if spec.method != "full" else []
    needed += ["bitsandbytes"] if spec.quant != "none" or spec.optim.endswith(("_8bit", "_32bit")) else []
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependency(
            f"measuring {spec.cell_id} needs {', '.join(missing)}, not installed here; "
            "install what measuring needs: pip install 'vramprobe[measure]'"
        )
    if spec.device == "cuda" and nvml.first_visible_gpu() is None:
        raise MissingDependency(
            "device cuda was asked for, but no NVIDIA GPU is visible here (NVML lists none, or CUDA_VISIBLE_DEVICES "
            "hides it); use --device cpu for the cpu instrument, or run where nvidia-smi shows a GPU"
        )


def worker_environment() -> dict[str, str]:
    """The variables a worker starts with; set before any library is imported."""
    quiet = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "PYTHONUNBUFFERED": "1"}
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    inherited = {name: value for name, value in os.environ.items() if name not in _SAID_BY_THE_SPEC}
    return quiet | inherited | order


def _allocator_settings(spec: CellSpec) -> dict[str, str]:
    return dict.fromkeys(_ALLOCATOR_SETTINGS, spec.alloc_conf) if spec.alloc_conf else {}


def _watched_device(spec: CellSpec) -> nvml.NvmlDevice | None:
    gpu = nvml.first_visible_gpu() if spec.device == "cuda" else None
    return nvml.open_device(gpu[0]) if gpu else None


def _death(status: int | None, timeout_seconds: float | None, kills_before: int | None, log: Path) -> Outcome:
    """What the exit of a worker that left no record means."""
    if status is None:
        return Timeout(limit_seconds=timeout_seconds)
    kills = _kernel_oom_kills()
    if status == -signal.SIGKILL and None not in (kills, kills_before) and kills > kills_before:
        return OomHost(message=f"killed by the kernel's OOM killer (oom_kill went from {kills_before} to {kills})")
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
    return Error(error_type="WorkerDied", message=f"the worker {how} without a record; its log: {log}")


def _kernel_oom_kills() -> int | None:
    """The kernel's count of OOM kills (Linux 4.13 and later); None elsewhere."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return None


def _contamination(record: RunRecord, before_bytes: int, device: nvml.NvmlDevice) -> RunRecord:
    """The record, marked if the device did not go back to where it was."""
    deadline = time.monotonic() + _TEARDOWN_SECONDS
    while True:
        after_bytes = device.used_bytes()
        if after_bytes is None or abs(after_bytes - before_bytes) <= CONTAMINATION_BYTES:
            return record
        if time.monotonic() > deadline:
            mark = Contaminated(baseline_before_bytes=before_bytes, baseline_after_bytes=after_bytes)
            return record.model_copy(update={"outcome": mark})
        time.sleep(0.05)


def interrupted(spec: CellSpec, isolation: Isolation, signal_name: str) -> RunRecord:
    """The record of a cell that the user or the machine stopped."""
    return describe_death(spec, isolation, Interrupted(message=f"stopped by {signal_name}"), datetime.now(UTC))
