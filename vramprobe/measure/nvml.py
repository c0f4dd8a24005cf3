"""Device memory of one GPU as NVML reports it, from outside torch.

Opened by UUID, because torch's order is not NVML's. Version 2 of the memory query separates what the driver keeps for
itself; where it is missing, version 1 answers and the record says so. Everything unavailable is None, never 0.
"""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pynvml

from vramprobe.units import MIB

#: NVML moves by this much without anybody allocating; more means that someone else was on the card.
CONTAMINATION_BYTES = 16 * MIB
_TEARDOWN_SECONDS = 10.0  # the driver frees a dead process's memory, up to 140 GB, a moment after it is gone


@dataclass(frozen=True)
class NvmlDevice:
    """An open handle; the library stays initialised as long as the process lives."""

    handle: object
    memory_info: Literal["v2", "v1"]

    def used_bytes(self) -> int | None:
        """Device memory in use by everybody, in bytes, without what the driver reserves (v2); None if NVML fails."""
        try:
            return int(_memory_info(self.handle, self.memory_info).used)
        except pynvml.NVMLError:
            return None

    def use_that_stayed(self, before_bytes: int) -> int | None:
        """The use that does not go back to ``before_bytes``; None where it does, or NVML does not tell."""
        deadline = time.monotonic() + _TEARDOWN_SECONDS
        while True:
            after_bytes = self.used_bytes()
            if after_bytes is None or abs(after_bytes - before_bytes) <= CONTAMINATION_BYTES:
                return None
            if time.monotonic() > deadline:
                return after_bytes
            time.sleep(0.05)

    def total_bytes(self) -> int | None:
        """The card's memory as the driver reports it; torch reports less, the box says more."""
        try:
            return int(_memory_info(self.handle, self.memory_info).total)
        except pynvml.NVMLError:
            return None


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """One GPU as NVML describes it now; what it does not tell is None."""

    uuid: str
    name: str
    total_bytes: int | None
    used_bytes: int | None
    memory_info: Literal["v2", "v1"] | None
    mig: bool | None
    persistence: bool | None


def gpu_states() -> list[GpuState]:
    """Every GPU that NVML lists, in its order."""
    return [_state(uuid, name) for uuid, name in visible_gpus()]


def _state(uuid: str, name: str) -> GpuState:
    device = open_device(uuid)

    def is_on(ask: Callable[[object], int]) -> bool | None:
        try:
            return ask(device.handle) == pynvml.NVML_FEATURE_ENABLED if device else None
        except pynvml.NVMLError:  # a GPU without MIG, a container without the right to ask
            return None

    return GpuState(
        uuid=uuid,
        name=name,
        total_bytes=device.total_bytes() if device else None,
        used_bytes=device.used_bytes() if device else None,
        memory_info=device.memory_info if device else None,
        mig=is_on(lambda handle: pynvml.nvmlDeviceGetMigMode(handle)[0]),
        persistence=is_on(pynvml.nvmlDeviceGetPersistenceMode),
    )


def why_unavailable() -> str | None:
    """NVML's own words for why it does not answer; None where it does."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return str(error)
    return None


def open_device(uuid: str) -> NvmlDevice | None:
    """The GPU with this UUID (with or without ``GPU-``); None where NVML or the device is not to be had."""
    try:
        pynvml.nvmlInit()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(name)
    except pynvml.NVMLError:
        return None
    for version in ("v2", "v1"):
        with contextlib.suppress(pynvml.NVMLError):
            _memory_info(handle, version)
            return NvmlDevice(handle, version)
    return None


def open_first_visible() -> NvmlDevice | None:
    """The GPU that torch will call 0; None where there is none."""
    return next(iter(open_visible(1)), None)


def open_visible(count: int) -> list[NvmlDevice]:
    """The first so many GPUs in torch's order, as far as they are to be had."""
    opened = [open_device(uuid) for uuid, _ in gpus_in_torchs_order()[:count]]
    return [device for device in opened if device is not None]


def compute_capability() -> tuple[int, int] | None:
    """(major, minor) of the GPU that torch will call 0, asked without a CUDA context; None where NVML does not tell."""
    device = open_first_visible()
    try:
        return device and tuple(pynvml.nvmlDeviceGetCudaComputeCapability(device.handle))
    except pynvml.NVMLError:
        return None


def driver_version() -> str | None:
    """The NVIDIA driver's version, None without one."""
    try:
        pynvml.nvmlInit()
        return _text(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def cuda_driver_version() -> str | None:
    """The newest CUDA that the driver serves, such as ``13.0``; None without one."""
    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    except pynvml.NVMLError:
        return None
    return f"{version // 1000}.{version % 1000 // 10}"


def visible_gpus() -> list[tuple[str, str]]:
    """(uuid, name) of every GPU that NVML lists, without touching CUDA; empty on a machine without a driver."""
    try:
        pynvml.nvmlInit()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [(_text(pynvml.nvmlDeviceGetUUID(gpu)), _text(pynvml.nvmlDeviceGetName(gpu))) for gpu in gpus]
    except pynvml.NVMLError:
        return []


def first_visible_gpu() -> tuple[str, str] | None:
    """(uuid, name) of the GPU that torch will call 0; None where there is none."""
    return next(iter(gpus_in_torchs_order()), None)


def gpus_in_torchs_order() -> list[tuple[str, str]]:
    """(uuid, name) of each GPU as torch will number them, given CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER=PCI_BUS_ID.

    An entry that is neither an index nor the beginning of a UUID hides itself and everything after it, as in CUDA.
    """
    gpus = visible_gpus()
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return gpus
    found = []
    for entry in map(str.strip, wanted.split(",")):
        if entry.isdigit():
            named = gpus[int(entry)] if int(entry) < len(gpus) else None
        else:
            named = next((gpu for gpu in gpus if entry and gpu[0].startswith(entry)), None)
        if named is None:
            break
        found.append(named)
    return found


def uuid_of(properties: Any, ordinal: int) -> str:
    """The UUID of torch's device as NVML spells it: torch leaves GPU- out, and before 2.4 does not tell."""
    told = getattr(properties, "uuid", None)
    return gpus_in_torchs_order()[ordinal][0] if told is None else f"GPU-{str(told).removeprefix('GPU-')}"


def _memory_info(handle: object, version: str) -> object:
    if version == "v2":
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return pynvml.nvmlDeviceGetMemoryInfo(handle)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
