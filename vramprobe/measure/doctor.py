"""Doctor: can this machine measure, how fast, and if not, what to do. Every check is made, whatever the others found.

In: the device to measure on. Out: a Diagnosis, a finding or more per check and one verdict. Imports no torch and asks
torch nothing in this process: what needs it is asked in a child with a time-out, or is a real cell.
"""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from vramprobe.errors import SpecError
from vramprobe.measure import environment, machine, nvml
from vramprobe.measure.isolation import new_ticket, require_packages, run_isolated
from vramprobe.measure.launcher import Server, worker_environment
from vramprobe.measure.machine import CheckResult, DoctorState
from vramprobe.measure.selftest import CPU_BLOCK_BYTES
from vramprobe.records.record import RunRecord
from vramprobe.records.table import describe_outcome
from vramprobe.resolve import resolve
from vramprobe.units import GIB, MIB, format_bytes, format_seconds, plural

_IMPORT_SECONDS, _SELF_TEST_SECONDS, _CELL_SECONDS = 180.0, 180.0, 300.0
#: The driver and NVML may round to their own pages, and load a kernel meanwhile.
_ROUNDING_BYTES = 4 * MIB


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings in the order of the checks, and in one line what follows from them."""

    device: Literal["cuda", "cpu"]
    ready: bool
    verdict: str
    findings: tuple[CheckResult, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)


def doctor(*, device: str = "auto", results: str | Path = "results") -> Diagnosis:
    """Check that this machine can measure on ``device``, and say what to do if it cannot; takes half a minute.

    Never raises for what it finds; SpecError for a device that is none.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise SpecError(f"device: {device!r} given; allowed: auto, cuda, cpu")
    began = time.monotonic()
    findings: list[CheckResult] = []
    with tempfile.TemporaryDirectory(prefix="vramprobe-") as scratch:
        case = DoctorState(environment.device_to_use(device), Path(results), Path(scratch))
        try:
            for check in CHECKS:
                findings += _survived(check, case)
        finally:
            if case.server is not None:
                case.server.close()
    return Diagnosis(
        device=case.device,
        ready=not any(finding.status == "failed" for finding in findings),
        verdict=_verdict(case, findings),
        findings=tuple(findings),
        seconds=time.monotonic() - began,
    )


def _survived(check: Callable[[DoctorState], Iterator[CheckResult]], case: DoctorState) -> list[CheckResult]:
    """Return the findings of a check, up to its own failure if it has one."""
    findings = []
    try:
        findings.extend(check(case))
    except Exception as error:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        detail = f"this check itself failed: {type(error).__name__}: {error}"
        findings.append(CheckResult(name, "failed", detail, "report it with this line: it is a fault of vramprobe's"))
    return findings


def _verdict(case: DoctorState, findings: list[CheckResult]) -> str:
    failed = [finding for finding in findings if finding.status == "failed"]
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return f"not ready to measure on {case.device}: {failed[0].name}: {failed[0].detail}{more}"
    where = case.gpu if case.device == "cuda" else f"this CPU ({environment.cpu_name()})"
    is_forked = case.server is not None and case.server.isolation == "forkserver"
    how = "cells are forked" if is_forked else "cells are spawned"
    overhead = "" if case.overhead_seconds is None else f", {format_seconds(case.overhead_seconds)} overhead per cell"
    warnings = sum(finding.status == "warning" for finding in findings)
    noted = f"; {plural(warnings, 'warning')} above" if warnings else ""
    return f"ready to measure on {where}: {how}{overhead}{noted}"


def check_torch_build(case: DoctorState) -> Iterator[CheckResult]:
    """Check that torch loads, which CUDA it was built for, and that its GPU is NVML's."""
    name = "torch build"
    if case.blocked:
        yield _not_tried(name, case)
        return
    began = time.monotonic()
    found = _ask("torch", _IMPORT_SECONDS)
    if "error" in found:
        case.blocked = "torch does not work"
        advice = "torch was built for another CUDA than this driver serves, or is broken: install it anew"
        yield CheckResult(name, "failed", found["error"], advice)
        return
    built = f"CUDA {found['cuda']}" if found["cuda"] else "the CPU only"
    detail = f"{found['version']} for {built}, imported in {format_seconds(time.monotonic() - began)}"
    if case.device == "cpu":
        yield CheckResult(name, "ok", detail)
        return
    served = nvml.cuda_driver_version()
    here = f"this driver serves CUDA up to {served}" if served else "no driver is to be seen here"
    seen = nvml.first_visible_gpu()
    if found["cuda"] is None:
        problem = "it cannot use the GPU"
        advice = f"install a CUDA build of torch (https://pytorch.org/get-started/locally/): {here}"
    elif not found["available"]:
        problem = "it sees no GPU"
        advice = f"{here}: install a newer driver, or a torch for an older CUDA"
    elif seen is None or found["uuid"] != seen[0]:
        problem = f"it calls {found['uuid']} GPU 0, NVML {seen and seen[0]}"
        advice = "set CUDA_VISIBLE_DEVICES to the GPU's UUID (nvidia-smi -L)"
    else:
        same = f"sees {found['name']} (compute capability {found['capability']}), the same UUID as NVML"
        yield CheckResult(name, "ok", f"{detail}; {same}")
        return
    case.blocked = "torch does not see the GPU"
    yield CheckResult(name, "failed", f"{detail}; {problem}", advice)


def check_self_test(case: DoctorState) -> Iterator[CheckResult]:
    """Check that the instrument sees a block of known size."""
    name = "self-test"
    if case.blocked:
        yield _not_tried(name, case)
        return
    found = _ask(case.device, _SELF_TEST_SECONDS)
    if "error" in found:
        yield CheckResult(name, "failed", found["error"], "free memory, then try again")
        return
    expected_bytes = GIB if case.device == "cuda" else CPU_BLOCK_BYTES
    exact = ("allocated", "reserved", "peak", "end")
    wrong = [
        f"{tier} moved by {moved}"
        for tier, moved in found.items()
        if moved is not None and abs(moved - expected_bytes) > (0 if tier in exact else _ROUNDING_BYTES)
    ]
    unknown = [tier for tier, moved in found.items() if moved is None]
    agreeing = ", ".join(tier for tier in found if tier not in unknown)
    if wrong:
        detail = f"of {expected_bytes} bytes allocated, {'; '.join(wrong)}"
        advice = "end what else uses the device, and try again; if it stays so, trust no number from this machine"
        yield CheckResult(name, "failed", detail, advice)
    elif unknown:
        detail = f"{format_bytes(expected_bytes)} allocated; {agreeing} agree, {', '.join(unknown)} does not tell"
        yield CheckResult(name, "warning", detail, "without NVML the device tier is null in every record")
    else:
        yield CheckResult(name, "ok", f"{format_bytes(expected_bytes)} allocated; {agreeing} agree")


def check_fork_server(case: DoctorState) -> Iterator[CheckResult]:
    """Check that cells can be forked from a process that has the libraries loaded, by the proof that a sweep runs."""
    name = "fork server"
    if case.blocked:
        yield _not_tried(name, case)
        return
    log = case.scratch / "forkserver.log"
    case.server = Server(case.device, None, worker_environment(), ["llama"], log)
    began = time.monotonic()
    case.server.start()
    seconds = format_seconds(time.monotonic() - began)
    if case.server.isolation == "forkserver":
        yield CheckResult(name, "ok", f"loaded and proven in {seconds}; cells are forked from it")
        return
    detail = f"{case.server.isolation_reason}, after {seconds}{_last_words(log)}"
    advice = "nothing needs to be done: cells are spawned instead and measure the same, some seconds slower each"
    yield CheckResult(name, "warning", detail, advice)


def check_cell(case: DoctorState) -> Iterator[CheckResult]:
    """One layer of a small model, from the worker's start to its record."""
    name = "a cell"
    if case.blocked or case.server is None:
        yield _not_tried(name, case)
        return
    spec = resolve(
        model="smollm2-135m",
        method="lora" if case.has_peft else "full",
        num_layers=1,
        batch_size=1,
        seq_len=16,
        device=case.device,
        timing_steps=1,
    )
    require_packages([spec])
    log = case.scratch / "cell.log"
    began = time.monotonic()
    record = run_isolated(spec, case.server, new_ticket(case.scratch), log, _CELL_SECONDS)
    seconds = time.monotonic() - began
    if record.outcome.kind != "ok":
        words = f"--model {spec.model} --method {spec.method} --num-layers 1 --batch-size 1 --seq-len 16"
        detail = f"{record.outcome.kind}: {describe_outcome(record.outcome)}{_last_words(log)}"
        yield CheckResult(name, "failed", detail, f"see it in full: vramprobe measure {words} --device {spec.device}")
        return
    case.overhead_seconds = max(seconds - _spent_training(record), 0.0)
    peak, overhead = format_bytes(record.peak.allocated_bytes), format_seconds(case.overhead_seconds)
    detail = f"{spec.cell_id}: {peak} at its peak, in {format_seconds(seconds)}, of which {overhead} are overhead"
    yield CheckResult(name, "ok", detail)


def _spent_training(record: RunRecord) -> float:
    """Loading, traced and timed steps: what the cell is about; the rest is how it came about."""
    timing = record.timing
    return (timing.load_seconds or 0.0) + (timing.traced_seconds or 0.0) + sum(timing.step_seconds)


def _not_tried(name: str, case: DoctorState) -> CheckResult:
    return CheckResult(name, "absent", f"not tried: {case.blocked or 'the fork server was not'}")


def _ask(test: str, timeout_seconds: float) -> dict[str, Any]:
    """Run a self-test in a process with a worker's environment; return its answer, or ``{"error": …}`` if it hangs or
    dies.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "vramprobe.measure.selftest", test],
        env=worker_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said, complaints = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"it did not end within {timeout_seconds:.0f} s"}
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver: nothing can be waited for
            process.wait(5)
        process.stdout.close()
        process.stderr.close()
    with contextlib.suppress(ValueError):
        return json.loads(said)
    status = process.returncode
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    last = (complaints.strip().splitlines() or ["it said nothing"])[-1]
    return {"error": f"it {how}: {last}"}


def _last_words(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f" (its log ends: {lines[-1][:300]})" if lines else ""


#: In the order in which they are made: what a later one needs, an earlier one has found.
CHECKS: tuple[Callable[[DoctorState], Iterator[CheckResult]], ...] = (
    *machine.CHECKS,
    check_torch_build,
    check_self_test,
    check_fork_server,
    check_cell,
)
