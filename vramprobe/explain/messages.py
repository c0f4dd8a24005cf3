"""The text of an out-of-memory error → an OutOfMemory with its figures in bytes.

Knows the messages of PyTorch 1.0 to 2.13 for CUDA and HIP, of its asynchronous allocator, and of XPU, NPU and MPS
(c10/cuda/CUDACachingAllocator.cpp, CUDAMallocAsyncAllocator.cpp, MPSAllocator.mm). A missing figure is None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vramprobe.units import GIB, KIB, MIB

_UNITS = {"bytes": 1, "B": 1, "KiB": KIB, "KB": KIB, "MiB": MIB, "MB": MIB, "GiB": GIB, "GB": GIB, "TiB": 1024 * GIB}
_AMOUNT = r"(\d+(?:\.\d+)?) ?(bytes|[KMGT]iB|[KMG]B|B)"  # torch writes 1024-based KB, MB and GB for MPS
#: Less than this is the rounding of three amounts that are printed to 0.01 GiB.
_ROUNDING_BYTES = 32 * MIB
#: More than any GPU has: WSL's driver reports a process of 2**64 bytes.
_ABSURD_BYTES = 2**50

_BEGIN = re.compile(
    r"(?P<backend>CUDA|HIP|XPU|NPU|MPS backend) out of memory\b|Allocation on device .{0,9}would exceed allowed memory"
)
_WITHOUT_FIGURES = re.compile(
    r"CUDA error: out of memory|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|"
    r"Cuda failure (?:2 )?'out of memory'|HIP error: out of memory"
)
_HOST = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)|Cannot allocate memory|\bMemoryError\b|"
    r"exit ?code\s*:? *\(?-9\b|Signal 9 \(SIGKILL\)|oom-kill|Out of memory: Killed process|^Killed$"
)
_FIELDS = {
    "total": (rf"total capac?i?ty of {_AMOUNT}", rf"{_AMOUNT} total capacity", rf"Device limit\s*: {_AMOUNT}"),
    "free": (rf"of which {_AMOUNT} is free", rf"{_AMOUNT} free[;)]", rf"Free \(according to CUDA\)\s*: {_AMOUNT}"),
    "process": (rf"this process has {_AMOUNT} memory in use",),
    "allowed": (rf"{_AMOUNT} allowed[;)]", rf"max allowed: {_AMOUNT}", rf"memory fraction\)\s*: {_AMOUNT}"),
    "allocated": (
        rf"{_AMOUNT} is allocated by PyTorch",
        rf"{_AMOUNT} already allocated",
        rf"Currently allocated\s*: {_AMOUNT}",
        rf"MPS allocated: {_AMOUNT}",
    ),
    "private_pools": (rf"with {_AMOUNT} allocated in private pools",),
    "unused": (rf"{_AMOUNT} is reserved by PyTorch but unallocated",),
    "reserved_total": (rf"{_AMOUNT} reserved in total by PyTorch",),
    "cached": (rf"{_AMOUNT} cached",),
}
_REQUESTED = (rf"Tried to allocate {_AMOUNT}", rf"Requested(?: size)?\s*: {_AMOUNT}")
_LAST = re.compile(r"but unallocated|reserved in total by PyTorch|\bcached[;)]|memory fraction\)|private pool|1EB")
_OTHER = re.compile(rf"Process \d+ has {_AMOUNT} memory in use")
_DEVICE = re.compile(r"\b(?:GPU|NPU|device) (\d+)")


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """One error. Bytes as printed, which is to 0.01 of the unit; None where the message does not say."""

    backend: str  # CUDA, HIP, XPU, NPU, MPS, or host
    device: int | None = None
    requested: int | None = None
    requested_half_unit: int = 0  # half of the printed amount's last digit, bytes
    total: int | None = None
    free: int | None = None
    allowed: int | None = None  # set_per_process_memory_fraction
    process: int | None = None  # this process by the driver: reserved, context and libraries
    allocated: int | None = None
    private_pools: int | None = None
    unused: int | None = None  # reserved and not allocated
    others: tuple[int, ...] = ()  # other processes on the GPU, as the driver names them
    has_figures: bool = True
    is_cut: bool = False  # the text ends before the message does

    @property
    def reserved(self) -> int | None:
        """Bytes of the allocator's segments."""
        return None if self.allocated is None or self.unused is None else self.allocated + self.unused

    @property
    def outside(self) -> int | None:
        """Bytes of this process outside PyTorch's allocator; with other processes where no figure separates them."""
        if self.reserved is None:
            return None
        if self.process is not None:
            return max(self.process - self.reserved, 0)
        if self.total is None or self.free is None:
            return None
        return max(self.total - self.free - sum(self.others) - self.reserved, 0)

    @property
    def neighbors(self) -> int | None:
        """Bytes of other processes, where the message tells them apart from this one."""
        if self.others:
            return sum(self.others)
        if self.process is None or self.total is None or self.free is None:
            return None
        size = self.total - self.free - self.process
        return size if size > _ROUNDING_BYTES else 0


def begins(line: str) -> bool:
    """Whether a message with figures begins in this line."""
    return _BEGIN.search(line) is not None


def is_whole(text: str) -> bool:
    """Whether the last figure that its format has is there."""
    return _LAST.search(text) is not None


def without_figures(line: str) -> OutOfMemory | None:
    """An error of the GPU or of the host that names no amounts."""
    if _WITHOUT_FIGURES.search(line):
        return OutOfMemory(backend="CUDA", has_figures=False)
    if _HOST.search(line):
        requested = re.search(r"you tried to allocate (\d+) bytes", line)
        return OutOfMemory(backend="host", requested=int(requested[1]) if requested else None, has_figures=False)
    return None


def parse(text: str) -> OutOfMemory:
    """The figures of a message, of which ``text`` may be only the beginning."""
    begin = _BEGIN.search(text)
    text = text[begin.start() if begin else 0 :]
    found = {name: _first(patterns, text) for name, patterns in _FIELDS.items()}
    requested = next((match for one in _REQUESTED if (match := re.search(one, text))), None)
    reserved_total, cached = found.pop("reserved_total"), found.pop("cached")
    allocated = found["allocated"]
    if found["unused"] is None and allocated is not None:
        if reserved_total is not None:
            found["unused"] = max(reserved_total - allocated, 0)
        else:
            found["unused"] = cached  # PyTorch 1.0 to 1.3: cached beside the allocated
    device = _DEVICE.search(text)
    backend = ((begin and begin["backend"]) or "CUDA").removesuffix(" backend")
    others = tuple(size for match in _OTHER.finditer(text) if (size := _bytes(match)) is not None)
    if not found["process"]:  # 0 bytes in a container, where the driver does not find this process
        found["process"], others = _in_a_container(others, found)
    return OutOfMemory(
        backend=backend,
        device=int(device[1]) if device else None,
        requested=_bytes(requested) if requested else None,
        requested_half_unit=_UNITS[requested[2]] // 200 if requested else 0,
        others=others,
        has_figures=requested is not None or allocated is not None,
        is_cut=not is_whole(text),
        **found,
    )


def _in_a_container(others: tuple[int, ...], found: dict[str, int | None]) -> tuple[int | None, tuple[int, ...]]:
    """This process's bytes, and those of the others. In a container the driver knows this process by another number, so
    the message counts it among the others: together with the reserved bytes they are more than what is in use.
    """
    total, free, allocated, unused = (found[name] for name in ("total", "free", "allocated", "unused"))
    if total is None or free is None or allocated is None or unused is None:
        return None, others
    reserved = allocated + unused
    own = [size for size in others if size >= reserved - _ROUNDING_BYTES]
    if not own or sum(others) + reserved <= total - free + _ROUNDING_BYTES:
        return None, others
    left = list(others)
    left.remove(min(own))
    return min(own), tuple(left)


def _first(patterns: tuple[str, ...], text: str) -> int | None:
    return next((_bytes(match) for one in patterns if (match := re.search(one, text))), None)


def _bytes(match: re.Match[str]) -> int | None:
    size = round(float(match[1]) * _UNITS[match[2]])
    return size if size < _ABSURD_BYTES else None
