"""The context of a measurement: machine, driver, library versions, commit. Read in the worker, apart from the cell."""

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import psutil

from vramprobe.emulate import machine_folder
from vramprobe.measure import nvml
from vramprobe.records.record import Environment, Instrument, Isolation
from vramprobe.spec import CellSpec

_COMMIT = re.compile(r"[0-9a-f]{40}")
PACKAGES = ("vramprobe", "torch", "transformers", "peft", "bitsandbytes", "accelerate")
#: Those that only a cell with a fused loss runs.
_OF_A_FUSED_LOSS = ("liger-kernel", "triton")
_OF_TRL = ("trl", "triton")
_OF_CUT = ("cut-cross-entropy", "triton")
_GROUP = Path("/sys/fs/cgroup")


def capture(
    spec: CellSpec, isolation: Isolation, isolation_reason: str | None = None, *, with_torch: bool
) -> Environment:
    """Everything a reader needs to run this again, or to refuse to compare it.

    Without torch (the runner, planning or describing a worker that died) what only torch knows is left null.
    """
    commit, dirty = _commit()
    common = {
        "isolation": isolation,
        "isolation_reason": isolation_reason,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": _versions(PACKAGES + more_packages(spec)),
        "commit": commit,
        "dirty": dirty,
    }
    if with_torch:
        import torch

        common["num_threads"] = torch.get_num_threads()
    if spec.device == "cpu":
        return Environment(device_name=cpu_name(), device_total_bytes=psutil.virtual_memory().total, **common)
    common |= {"driver_version": nvml.driver_version(), "alloc_conf": spec.alloc_conf}
    if machine_folder() is not None:
        common["emulator"] = emulator_here()
    gpu = nvml.first_visible_gpu()
    if with_torch and (seen := _cuda_properties()):
        common |= seen
    elif gpu:
        common |= {"device_uuid": gpu[0], "device_name": gpu[1]}
    device = nvml.open_device(common["device_uuid"]) if "device_uuid" in common else None
    return Environment(
        **({"device_name": "no CUDA device"} | common),
        nvml_total_bytes=device.total_bytes() if device else None,
        nvml_memory_info=device.memory_info if device else None,
    )


def more_packages(spec: CellSpec) -> tuple[str, ...]:
    """Those that this cell runs and most others do not: cells that have the same are measured in one environment."""
    more = _OF_A_FUSED_LOSS if spec.fused_linear_cross_entropy else ()
    if spec.other_head:
        more += _OF_TRL if spec.uses_trl else _OF_CUT
    return more


def instrument_for(spec: CellSpec) -> Instrument:
    """Return the instrument by which this process observes ``spec``: the CUDA that it sees is a real GPU's, or an
    emulated one's.
    """
    return "emulated" if spec.device == "cuda" and machine_folder() is not None else spec.device


@functools.cache
def emulator_here() -> str:
    """The emulator's version; its sources do not change while a process lives."""
    from vramprobe.emulate.version import emulator_version

    return emulator_version()


def here() -> Callable[[CellSpec], Environment]:
    """The environment that this machine would measure a cell in, as far as is known without torch; asked once each."""
    known: dict[tuple[str, tuple[str, ...]], Environment] = {}

    def context_of(spec: CellSpec) -> Environment:
        key = spec.device, more_packages(spec)
        if key not in known:
            known[key] = capture(spec, "spawn", with_torch=False)
        return known[key]

    return context_of


def device_to_use(wanted: str) -> Literal["cuda", "cpu"]:
    """``auto`` → cuda where NVML lists a GPU that CUDA_VISIBLE_DEVICES shows, else cpu; without importing torch."""
    if wanted != "auto":
        return wanted
    return "cuda" if nvml.first_visible_gpu() else "cpu"


def num_visible_gpus() -> int:
    """GPUs that torch will see, by NVML; emulated ones where it is emulated."""
    return len(nvml.gpus_in_torchs_order())


def _cuda_properties() -> dict[str, object]:
    import torch

    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device_name": properties.name,
        "device_uuid": nvml.uuid_of(properties, 0),
        "device_total_bytes": properties.total_memory,
        "cuda_version": torch.version.cuda,
    }


@functools.cache
def cpu_name() -> str:
    """The processor's marketing name, or its architecture where the system does not tell."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def free_host_bytes() -> tuple[int, int]:
    """(free, whole) of this machine's memory, or of that of the control group that limits it (version 2)."""
    machine = psutil.virtual_memory()
    found = [(machine.available, machine.total)]
    with contextlib.suppress(OSError, ValueError):  # no limit reads "max"
        limit, used = (int((_GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        files = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        found.append((limit - used + int(files.get("inactive_file", 0)), limit))  # as the kernel frees it first
    return min(found)


def is_slow_for(spec: CellSpec) -> bool:
    """Tell a cell in bf16 on a CPU without vectors for its products: torch has them on x86 with AVX-512 alone."""
    has_vectors = "avx512bw" in _cpuinfo("flags", "avx512bw").split()
    return spec.device == "cpu" and "bf16" in (spec.dtype, spec.autocast) and not has_vectors


def _cpuinfo(key: str, default: str = "") -> str:
    """The first value of ``key`` in /proc/cpuinfo, ``default`` where there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(key):
                return line.split(":", 1)[1].strip()
    return default


def remember() -> None:
    """Ask what does not change while a process lives, so that the children it forks need not ask again."""
    if machine_folder() is not None:
        emulator_here()
    _commit(), _versions(PACKAGES), cpu_name(), platform.platform()  # platform keeps its answer itself


@functools.cache
def _versions(packages: tuple[str, ...]) -> dict[str, str | None]:
    found: dict[str, str | None] = dict.fromkeys(packages)
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


@functools.cache
def _commit() -> tuple[str | None, bool | None]:
    """(commit, dirty) of the checkout this package runs from; for a copy without one, the commit that
    $VRAMPROBE_COMMIT says it was taken from, if any. (None, None) for an installed package.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        said = os.environ.get("VRAMPROBE_COMMIT", "")
        return (said if _COMMIT.fullmatch(said) else None), None

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        # Results and generated tables are written while a sweep runs; they do not make the code dirty.
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--", "vramprobe"))
    except (OSError, subprocess.CalledProcessError):
        return None, None
