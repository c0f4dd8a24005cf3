"""The driver's functions by ctypes, for its tests: plain numbers in, plain numbers out."""

import ctypes
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_int64, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
READ_CALLBACK = ctypes.CFUNCTYPE(None, c_void_p, c_size_t)
OUT_OF_MEMORY = 2


class CudaError(Exception):
    def __init__(self, code: int, name: str) -> None:
        super().__init__(f"{name}: {code}")
        self.code = code


class AllocationProperties(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location_type", c_int),
        ("location_id", c_int),
        ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class IpcHandle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]


class Dim3(ctypes.Structure):
    _fields_ = [("x", c_uint), ("y", c_uint), ("z", c_uint)]


class Driver:
    """One loaded copy of the driver; raises CudaError where a call does not give 0."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        for name in (
            "device_used_bytes",
            "device_peak_bytes",
            "process_used_bytes",
            "uncomputed_reads",
            "launches",
            "graph_bytes",
            "take_device_peak_bytes",
        ):
            getattr(self.library, f"emu_control_{name}").restype = c_uint64
        for name in ("cudaGetErrorName", "cudaGetErrorString", "nvmlErrorString"):
            getattr(self.library, f"emu_{name}").restype = c_char_p

    def call(self, name: str, *arguments: object) -> int:
        return getattr(self.library, f"emu_{name}")(*arguments)

    def check(self, name: str, *arguments: object) -> None:
        code = self.call(name, *arguments)
        if code:
            raise CudaError(code, name)

    def pointer(self, name: str, *arguments: object) -> int:
        """Return the pointer that a call writes through its first argument."""
        out = c_void_p()
        self.check(name, byref(out), *arguments)
        return out.value or 0

    def number(self, name: str, *arguments: object, kind: type = c_int) -> int:
        out = kind()
        self.check(name, byref(out), *arguments)
        return out.value

    def malloc(self, num_bytes: int) -> int:
        return self.pointer("cudaMalloc", c_size_t(num_bytes))

    def free(self, pointer: int) -> None:
        self.check("cudaFree", c_void_p(pointer))

    def malloc_async(self, num_bytes: int, stream: int = 0) -> int:
        return self.pointer("cudaMallocAsync", c_size_t(num_bytes), c_void_p(stream))

    def free_async(self, pointer: int, stream: int = 0) -> None:
        self.check("cudaFreeAsync", c_void_p(pointer), c_void_p(stream))

    def info(self) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        self.check("cudaMemGetInfo", byref(free), byref(total))
        return free.value, total.value

    def used(self) -> int:
        free, total = self.info()
        return total - free

    def pool(self, device: int = 0) -> int:
        return self.pointer("cudaDeviceGetDefaultMemPool", device)

    def pool_attribute(self, pool: int, which: int) -> int:
        value = c_uint64()
        self.check("cudaMemPoolGetAttribute", c_void_p(pool), which, byref(value))
        return value.value

    def set_pool_attribute(self, pool: int, which: int, value: int) -> None:
        self.check("cudaMemPoolSetAttribute", c_void_p(pool), which, byref(c_uint64(value)))

    # virtual memory
    def reserve(self, num_bytes: int) -> int:
        return self.pointer("cuMemAddressReserve", c_size_t(num_bytes), c_size_t(0), c_void_p(0), c_uint64(0))

    def make_memory(self, num_bytes: int, device: int = 0) -> int:
        wanted = AllocationProperties(type=1, handle_types=1, location_type=1, location_id=device)
        return self.pointer("cuMemCreate", c_size_t(num_bytes), byref(wanted), c_uint64(0))

    def map(self, pointer: int, num_bytes: int, handle: int) -> None:
        self.check("cuMemMap", c_void_p(pointer), c_size_t(num_bytes), c_size_t(0), c_void_p(handle), c_uint64(0))

    def unmap(self, pointer: int, num_bytes: int) -> None:
        self.check("cuMemUnmap", c_void_p(pointer), c_size_t(num_bytes))

    def release_memory(self, handle: int) -> None:
        self.check("cuMemRelease", c_void_p(handle))

    # copies
    def write(self, pointer: int, data: bytes) -> None:
        self.check("cudaMemcpy", c_void_p(pointer), data, c_size_t(len(data)), HOST_TO_DEVICE)

    def read(self, pointer: int, num_bytes: int, before: bytes = b"") -> bytes:
        out = ctypes.create_string_buffer(before, num_bytes)
        self.check("cudaMemcpy", out, c_void_p(pointer), c_size_t(num_bytes), DEVICE_TO_HOST)
        return out.raw

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        self.check("cudaMemcpy", c_void_p(to), c_void_p(source), c_size_t(num_bytes), DEVICE_TO_DEVICE)

    def memset(self, pointer: int, value: int, num_bytes: int) -> None:
        self.check("cudaMemset", c_void_p(pointer), value, c_size_t(num_bytes))

    # what is computed
    def mark(self, pointer: int, num_bytes: int, computed: bool = True) -> None:
        self.call(f"control_mark_{'computed' if computed else 'uncomputed'}", c_void_p(pointer), c_size_t(num_bytes))

    def is_computed(self, pointer: int, num_bytes: int) -> bool:
        return bool(self.call("control_is_computed", c_void_p(pointer), c_size_t(num_bytes)))

    def any_computed(self, pointer: int, num_bytes: int) -> bool:
        return bool(self.call("control_any_computed", c_void_p(pointer), c_size_t(num_bytes)))

    def uncomputed_reads(self) -> int:
        return self.call("control_uncomputed_reads")

    def on_uncomputed_read(self, function: Callable[[int, int], None]) -> None:
        self._callback = READ_CALLBACK(function)  # kept alive
        self.call("control_on_uncomputed_read", self._callback)

    def inject(self, value: int) -> None:
        self.call("control_inject_count", c_int64(value))

    def launch(self, stream: int = 0, threads: int = 32) -> int:
        one, block = Dim3(1, 1, 1), Dim3(threads, 1, 1)
        return self.call("cudaLaunchKernel", c_void_p(1), one, block, c_void_p(0), c_size_t(0), c_void_p(stream))

    # NVML
    def nvml_device(self, index: int = 0) -> int:
        self.check("nvmlInit_v2")
        out = c_void_p()
        self.check("nvmlDeviceGetHandleByIndex_v2", index, byref(out))
        return out.value or 0

    def nvml_used(self, index: int = 0) -> int:
        memory = (c_uint64 * 3)()
        self.check("nvmlDeviceGetMemoryInfo", c_void_p(self.nvml_device(index)), memory)
        return memory[2]

    def nvml_processes(self, index: int = 0) -> dict[int, int]:
        count, room = c_uint(64), (ctypes.c_char * (16 * 64))()
        self.check("nvmlDeviceGetComputeRunningProcesses", c_void_p(self.nvml_device(index)), byref(count), room)
        words = (c_uint64 * 128).from_buffer_copy(room)
        return {words[2 * k] & 0xFFFFFFFF: words[2 * k + 1] for k in range(count.value)}
