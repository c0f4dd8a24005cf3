"""Ballast: what a process holds of a large card so that it finds what it would find on a smaller, empty one.

In: the wanted size, and what the process itself takes already. Out: plain allocations of the CUDA driver, outside
torch's allocator, held until the process ends. Limits the size alone: see :meth:`Ballast.in_words`. No torch.
"""

import ctypes
from dataclasses import dataclass
from typing import Protocol

from vramprobe.errors import VramprobeError
from vramprobe.units import GIB, MIB, format_bytes

#: The driver hands out physical memory in pages of this size.
_PAGE_BYTES = 2 * MIB
#: Small enough that a driver which cannot give one piece whole may give two halves, large enough to be a few dozen.
_LARGEST_PIECE_BYTES = 4 * GIB
#: What may stay free beyond the wanted size; less than what NVML moves by when nobody allocates.
_TOLERANCE_BYTES = 16 * MIB


class BallastDriver(Protocol):
    """The two things that a ballast asks of a GPU."""

    def free_bytes(self) -> int:
        """Memory that an allocation by this process could still get, in bytes."""

    def allocate(self, num_bytes: int) -> bool:
        """Take so much until the process ends; False where it is not to be had in one piece."""


@dataclass(frozen=True, kw_only=True)
class Ballast:
    """Bytes and pieces held outside torch, and the bytes left free for the cell."""

    limit_bytes: int
    held_bytes: int
    num_pieces: int
    free_bytes: int

    def in_words(self) -> str:
        """One line for the record: what is limited, and what is not."""
        return (
            f"limited to {format_bytes(self.limit_bytes)}: {format_bytes(self.held_bytes)} of this one are "
            f"held in {self.num_pieces} plain allocations outside torch, {format_bytes(self.free_bytes)} are left; not "
            "limited: speed, the kernels chosen by architecture, what such a card's driver keeps for itself, what "
            "other processes use; torch's own messages still name the real card"
        )


def hold_the_rest(driver: BallastDriver, *, limit_bytes: int, own_bytes: int) -> Ballast:
    """Take what an empty card of ``limit_bytes`` would not have, this process's ``own_bytes`` being on it already.

    Raises VramprobeError where the size is too small for the process alone, or larger than what is free here.
    """
    wanted_bytes = limit_bytes - own_bytes
    if wanted_bytes <= 0:
        raise VramprobeError(
            f"cannot limit this GPU to {format_bytes(limit_bytes)}: the CUDA context of this process alone takes "
            f"{format_bytes(own_bytes)} here; allow more"
        )
    free_bytes = driver.free_bytes()
    if wanted_bytes > free_bytes:
        raise VramprobeError(
            f"cannot limit this GPU to {format_bytes(limit_bytes)}: this GPU has {format_bytes(free_bytes)} free, "
            f"and an empty card of that size would have {format_bytes(wanted_bytes)}; allow at most "
            f"{format_bytes(free_bytes + own_bytes)}, or end what else uses the GPU"
        )
    pieces: list[int] = []
    piece_bytes = _LARGEST_PIECE_BYTES
    while (surplus_bytes := driver.free_bytes() - wanted_bytes) >= _PAGE_BYTES:
        piece_bytes = min(piece_bytes, _whole_pages(surplus_bytes))
        if driver.allocate(piece_bytes):
            pieces.append(piece_bytes)
        elif piece_bytes > _PAGE_BYTES:
            piece_bytes = _whole_pages(piece_bytes // 2)
        else:
            break
    free_bytes = driver.free_bytes()
    if abs(free_bytes - wanted_bytes) > _TOLERANCE_BYTES:
        raise VramprobeError(
            f"cannot limit this GPU to {format_bytes(limit_bytes)}: {format_bytes(free_bytes)} stayed free where "
            f"{format_bytes(wanted_bytes)} should; the driver refuses to give it, or others use this GPU"
        )
    return Ballast(limit_bytes=limit_bytes, held_bytes=sum(pieces), num_pieces=len(pieces), free_bytes=free_bytes)


def _whole_pages(num_bytes: int) -> int:
    return max(num_bytes // _PAGE_BYTES, 1) * _PAGE_BYTES


class CudaDriver:
    """libcuda on the context that is current on this thread: torch's primary one, once torch has run a kernel here.

    The runtime that torch uses makes the device's primary context current on each thread that calls it.
    """

    _OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise VramprobeError(f"limiting a GPU's memory needs the CUDA driver's own library: {error}") from None
        self._library.cuMemAlloc_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]
        context = ctypes.c_void_p()
        self._check(self._library.cuCtxGetCurrent(ctypes.byref(context)))
        if not context:
            raise VramprobeError("no CUDA context is current on this thread, so its memory cannot be limited")

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._check(self._library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
        return free.value

    def allocate(self, num_bytes: int) -> bool:
        address = ctypes.c_uint64()  # forgotten at once: the memory goes with the process
        status = self._library.cuMemAlloc_v2(ctypes.byref(address), num_bytes)
        if status == self._OUT_OF_MEMORY:
            return False
        self._check(status)
        return True

    def _check(self, status: int) -> None:
        if status != 0:
            raise VramprobeError(f"the CUDA driver answered with error {status} while a smaller card was set up")
