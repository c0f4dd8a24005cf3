"""Checks of a machine that need no torch: host, results folder, GPUs by NVML, variables, installed libraries.

In: the case so far. Out: findings, and in the case what later checks need to know. The other checks and the verdict are
doctor.py's.
"""

import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import vramprobe
from vramprobe.measure import environment, nvml
from vramprobe.measure.launcher import SAID_BY_THE_SPEC, Server
from vramprobe.units import GIB, format_bytes

#: ``absent``: not here, and only what needs it cannot be measured. ``failed`` stops everything on this device.
Status = Literal["ok", "warning", "failed", "absent"]

#: Without these nothing is measured; without the others, what they are for.
_NEEDED_BY_ALL = ("torch", "transformers", "accelerate")
_NEEDED_BY = {
    "peft": "method lora and qlora",
    "bitsandbytes": "quantised models and the 8-bit and 32-bit optimizers of bitsandbytes",
}
#: Passed on to the cells, and they change what a cell needs.
_CHANGES_MEMORY = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "CUDA_MODULE_LOADING", "CUDA_LAUNCH_BLOCKING")
_FREE_DISK_BYTES = 1 * GIB  # a sweep's records and logs take some MiB; a full disk stops it
_FREE_MEMORY_BYTES = 4 * GIB  # the libraries take about 1 GiB in each process


@dataclass(frozen=True)
class CheckResult:
    """Result of one check; ``advice`` says what to do where something is to be done."""

    name: str
    status: Status
    detail: str
    advice: str | None = None


@dataclass
class DoctorState:
    """Facts that the checks have learned so far. ``blocked``: the reason why torch cannot be asked at all."""

    device: Literal["cuda", "cpu"]
    results: Path
    scratch: Path
    blocked: str | None = None
    gpu: str | None = None  # name and size of the one that is used
    has_peft: bool = True
    server: Server | None = None
    overhead_seconds: float | None = None


def check_python(case: DoctorState) -> Iterator[CheckResult]:
    """Report the Python version and the platform."""
    del case
    yield CheckResult("python", "ok", f"{platform.python_version()} on {platform.platform()}")


def check_host_memory(case: DoctorState) -> Iterator[CheckResult]:
    """Check the free bytes of the host's memory, or of the container's share."""
    del case
    free_bytes, _ = environment.free_host_bytes()
    if free_bytes >= _FREE_MEMORY_BYTES:
        yield CheckResult("host memory", "ok", f"{format_bytes(free_bytes)} free")
    else:
        advice = "free some: the libraries alone take about 1 GiB in each process"
        yield CheckResult("host memory", "warning", f"only {format_bytes(free_bytes)} free", advice)


def check_results_folder(case: DoctorState) -> Iterator[CheckResult]:
    """Check that records can be written to the results folder."""
    name = "results folder"
    folder = case.results.absolute()
    while not folder.exists():  # `run` makes it; what is there already decides whether it can
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"a record\n")
            os.fsync(file.fileno())
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        detail = f"{folder} cannot be written to: {error.strerror}"
        yield CheckResult(name, "failed", detail, "run where it can, or give a sweep another folder with --out")
        return
    detail = f"{case.results} can be written to; {format_bytes(free_bytes)} free on its disk"
    if free_bytes >= _FREE_DISK_BYTES:
        yield CheckResult(name, "ok", detail)
    else:
        yield CheckResult(name, "warning", detail, "make room: a sweep that meets a full disk stops")


def check_gpus(case: DoctorState) -> Iterator[CheckResult]:
    """Every GPU as NVML describes it, and the driver; whether there is one to use."""
    states = nvml.gpu_states()
    chosen = nvml.first_visible_gpu()
    if not states or (case.device == "cuda" and chosen is None):
        why = nvml.why_unavailable() or ("NVML lists none" if not states else "CUDA_VISIBLE_DEVICES hides them all")
        yield CheckResult(
            "GPU",
            "failed" if case.device == "cuda" else "absent",
            f"no NVIDIA GPU is to be seen: {why}",
            "run where nvidia-smi shows a GPU (a container needs --gpus all), or measure with --device cpu",
        )
    for index, state in enumerate(states):
        is_used = case.device == "cuda" and chosen is not None and state.uuid == chosen[0]
        case.gpu = f"{state.name} ({format_bytes(state.total_bytes)})" if is_used else case.gpu
        yield _gpu(index, state, is_used=is_used)
    if states:
        driver, cuda = nvml.driver_version(), nvml.cuda_driver_version()
        yield CheckResult("driver", "ok", f"{driver or 'unknown'}, serves CUDA up to {cuda or 'unknown'}")


def _gpu(index: int, state: nvml.GpuState, *, is_used: bool) -> CheckResult:
    parts = [
        state.name,
        state.uuid,
        format_bytes(state.total_bytes),
        f"{format_bytes(state.used_bytes)} in use now",
        f"memory info {state.memory_info or 'unknown'}",
        f"persistence mode {_on_off(state.persistence)}",
        f"MIG {_on_off(state.mig)}",
    ]
    advice = []
    if state.used_bytes is None:
        advice.append("NVML does not tell its memory, so the device tier will be null")
    # Version 1 counts what the driver keeps for itself as used.
    elif state.memory_info == "v2" and state.used_bytes > nvml.CONTAMINATION_BYTES:
        advice.append("end what else uses it: a cell during which that use moves by 16 MiB is marked contaminated")
    if state.mig:
        advice.append("MIG is on: an instance is a device of its own, which vramprobe has not been tried on")
    return CheckResult(
        f"GPU {index}" + ("" if is_used else ", not used"),
        "warning" if advice and is_used else "ok",
        ", ".join(parts),
        "; ".join(advice) if advice and is_used else None,
    )


def _on_off(value: bool | None) -> str:
    return {True: "on", False: "off", None: "unknown"}[value]


def check_variables(case: DoctorState) -> Iterator[CheckResult]:
    """Environment variables that decide which GPU is used, that are ignored, or that move the numbers."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None or case.device == "cuda":
        shown = "not set: GPU 0 in the order of PCI is used" if wanted is None else f"{wanted!r}"
        yield CheckResult("CUDA_VISIBLE_DEVICES", "ok", shown)
    for name in (*SAID_BY_THE_SPEC, "CUDA_DEVICE_ORDER"):
        value = os.environ.get(name)
        if value is not None and (name, value) != ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"):
            instead = "PCI_BUS_ID is used" if name == "CUDA_DEVICE_ORDER" else "say it in the cell: --alloc-conf"
            yield CheckResult(name, "warning", f"{value!r} is ignored", instead)
    for name in _CHANGES_MEMORY:
        if name in os.environ and case.device == "cuda":
            detail = f"{os.environ[name]!r} is passed on to the cells, changes their memory, and is in no record"
            yield CheckResult(name, "warning", detail, f"unset {name} unless that is what you measure")


def check_packages(case: DoctorState) -> Iterator[CheckResult]:
    """The libraries that measuring needs, against the versions it was tested with."""
    ranges = _ranges()
    if ranges is not None:
        yield CheckResult("vramprobe", "ok", vramprobe.__version__)
    else:
        detail = f"{vramprobe.__version__}, not installed: the versions it was tested with are not known here"
        yield CheckResult("vramprobe", "warning", detail, "pip install -e '.[measure]' in the checkout")
    for name in (*_NEEDED_BY_ALL, *_NEEDED_BY):
        yield _package(name, (ranges or {}).get(name), case)


def _ranges() -> dict[str, SpecifierSet] | None:
    """Package → the versions that measuring was tested with; None where this package is not installed."""
    try:
        required = importlib.metadata.requires("vramprobe") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return {requirement.name: requirement.specifier for requirement in map(Requirement, required)}


def _package(name: str, wanted: SpecifierSet | None, case: DoctorState) -> CheckResult:
    install = f"pip install '{name}{wanted}'" if wanted else f"pip install {name}"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if name in _NEEDED_BY_ALL:
            case.blocked = case.blocked or f"{name} is not installed"
            return CheckResult(name, "failed", "not installed; nothing is measured without", install)
        case.has_peft = case.has_peft and name != "peft"
        return CheckResult(name, "absent", f"not installed; without it, no {_NEEDED_BY[name]}", install)
    if wanted is None:
        return CheckResult(name, "ok", version)
    if wanted.contains(version, prereleases=True):
        return CheckResult(name, "ok", f"{version} (tested: {wanted})")
    return CheckResult(name, "warning", f"{version}, not among the tested {wanted}", install)


#: In the order in which they are made.
CHECKS = (check_python, check_host_memory, check_results_folder, check_gpus, check_variables, check_packages)
