"""A GPU that is none: torch's and NVML's own Python code on a stand-in for what lies beneath it.

In: a card's size. Out: a context in which ``device="cuda"`` works on the CPU, torch.cuda's counters, history and OOM
observer are kept by the allocator's replay, and pynvml is answered by a made-up library. C functions alone are replaced
(``torch._C._cuda_*``, what is behind pynvml, libcuda), each with the signature that its callers there use, so that a
wrong name or argument above them fails here as on a GPU. It stands for bytes, not for kernels: what an operator takes
while it runs is not seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vramprobe.allocator.allocator import CachingAllocator
from vramprobe.allocator.ledger import Device, OutOfMemory, SegmentEvent
from vramprobe.units import GIB, MIB

UUID = "8f2a6a0e-1b1c-4f6d-9f4e-0123456789ab"
CONTEXT_BYTES = 500 * MIB
_REMEMBERING = ("torch.cuda", "transformers.utils.import_utils", "accelerate.utils.imports", "peft.import_utils")
_POOLS = ("all", "large_pool", "small_pool")


class FakeCard:
    """One H200 and the process on it. ``others_bytes``: what other processes hold of it."""

    def __init__(self, total_bytes: int = 143_771 * MIB, others_bytes: int = 0) -> None:
        self.total_bytes, self.others_bytes, self.held_bytes = total_bytes, others_bytes, 0
        self.has_context, self.num_ooms = False, 0
        self.allocator = CachingAllocator(device=Device(total_bytes=total_bytes))
        self.allocator.ledger.on_segment = self._segment
        self.history: list[dict[str, Any]] | None = None
        self.observers: list[Any] = []
        self.recorded: list[tuple[Any, ...]] = []  # arguments of _cuda_record_memory_history
        self._resize()

    @property
    def used_bytes(self) -> int:
        own = CONTEXT_BYTES + self.allocator.ledger.reserved if self.has_context else 0
        return self.others_bytes + self.held_bytes + own

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes

    def hold(self, num_bytes: int) -> bool:
        """A plain allocation of the driver's."""
        if num_bytes > self.free_bytes:
            return False
        self.held_bytes += num_bytes
        self._resize()
        return True

    def allocate(self, name: int, size_bytes: int) -> None:
        """torch's malloc. Raises torch.OutOfMemoryError as it does: the observers first."""
        self.has_context = True
        try:
            block = self.allocator.allocate(name, size_bytes)
        except OutOfMemory as error:
            self.num_ooms += 1
            for observer in self.observers:
                observer(0, error.segment_bytes, self.total_bytes, self.free_bytes)
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size_bytes} bytes.") from None
        self._note("alloc", block.address, size_bytes)

    def free(self, name: int) -> None:
        """torch's free, with no other stream in the way."""
        block = self.allocator._live[name]
        for action in ("free_requested", "free_completed"):
            self._note(action, block.address, block.requested)
        self.allocator.free(name)

    def stats(self, device: int) -> dict[str, Any]:
        """``_cuda_memoryStats``: nested, as torch/csrc/cuda/Module.cpp builds it."""
        assert device == 0
        ledger, found = self.allocator.ledger, {}
        for key in ("requested", "allocated", "active", "reserved"):
            moments = {"current": getattr(ledger, key), "peak": getattr(ledger, f"{key}_peak")}
            found[f"{key}_bytes"] = {pool: dict(moments, allocated=0, freed=0) for pool in _POOLS}
        return {**found, "num_alloc_retries": ledger.num_alloc_retries, "num_ooms": self.num_ooms}

    def snapshot(self, mempool_id: Any) -> dict[str, Any]:
        """``_cuda_memorySnapshot``, its trace alone."""
        assert mempool_id is None
        return {
            "segments": [],
            "device_traces": [list(self.history or ())],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""},
        }

    def record(
        self,
        enabled: str | None,
        context: str | None,
        stacks: str,
        max_entries: int,
        clear_history: bool,
        compile_context: bool,
        global_record_annotations: bool,
        skip_actions: list[str] | None = None,
    ) -> None:
        """``_cuda_record_memory_history``, with its own checks; torch 2.11 gives no ``skip_actions``."""
        assert enabled in (None, "state", "all")
        assert context in (None, "state", "alloc", "all")
        assert stacks in ("python", "all")
        assert isinstance(max_entries, int)
        self.recorded.append((enabled, context, stacks, max_entries, clear_history))
        self.history = None if enabled is None else [] if clear_history else self.history or []

    def _resize(self) -> None:
        left = self.total_bytes - self.others_bytes - self.held_bytes - CONTEXT_BYTES
        self.allocator.ledger.limit_bytes = left

    def _segment(self, event: SegmentEvent) -> None:
        self._note(event.action, event.address, event.size_bytes)

    def _note(self, action: str, address: int, size_bytes: int) -> None:
        if self.history is not None:
            self.history.append(
                {
                    "action": action,
                    "addr": address,
                    "size": size_bytes,
                    "stream": 0,
                    "frames": [],
                    "time_us": time.time_ns() // 1000,
                    "pool_id": (0, 0),
                }
            )


class _Storages(TorchDispatchMode):
    """Every storage that an operator makes is a block of the card's until it goes."""

    def __init__(self, card: FakeCard) -> None:
        super().__init__()
        self._card, self._refs = card, {}
        self._numbers = iter(range(2**62))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor) and item.device.type == "cpu":
                self._see(item.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, number = storage._cdata, next(self._numbers)
        if key in self._refs or not storage.nbytes():
            return
        self._card.allocate(number, storage.nbytes())

        def gone(ref: Any) -> None:
            self._refs.pop(key)
            self._card.free(number)

        self._refs[key] = weakref.ref(storage, gone)


class _OnHost(TorchFunctionMode):
    """``cuda`` in any argument becomes ``cpu``; where a tensor is asked for its device it says so, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tuple(map(_moved, args)), {key: _moved(value) for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _moved(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


class _Autocast(torch.autocast):
    """Autocast for the GPU, where its tensors are."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def _plug_torch(patch: pytest.MonkeyPatch, card: FakeCard) -> None:
    properties = SimpleNamespace(
        name="NVIDIA H200", uuid=UUID, major=9, minor=0, total_memory=card.total_bytes, multi_processor_count=132
    )
    beneath = {
        "_cuda_init": lambda: None,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getDevice": lambda: 0,
        "_cuda_synchronize": lambda: None,
        "_cuda_memoryStats": card.stats,
        "_cuda_resetPeakMemoryStats": lambda device: card.allocator.ledger.reset_peaks(),
        "_cuda_emptyCache": card.allocator.empty_cache,
        "_cuda_memorySnapshot": card.snapshot,
        "_cuda_record_memory_history": card.record,
        "_cuda_attach_out_of_memory_observer": card.observers.append,
        "_cuda_exchangeDevice": lambda device: 0,
        "_cuda_maybeExchangeDevice": lambda device: 0,
    }
    for name, function in beneath.items():
        patch.setattr(torch._C, name, function, raising=False)
    for name, value in {
        "_is_compiled": lambda: True,
        "_cached_device_count": None,
        "_device_count_nvml": lambda: 1,
        "_initialized": False,
        "_queued_calls": [],
        "_get_device_properties": lambda device: properties,
        "default_generators": (torch.Generator(),),
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "_cudart": SimpleNamespace(cudaMemGetInfo=lambda device: (card.free_bytes, card.total_bytes)),
    }.items():
        patch.setattr(torch.cuda, name, value, raising=False)
    patch.setattr(torch.version, "cuda", "13.0")
    patch.setattr(torch, "autocast", _Autocast)


def _plug_nvml(patch: pytest.MonkeyPatch, card: FakeCard, *, has_v2: bool) -> None:
    """Behind pynvml's own functions: what they hand over by reference is filled in."""

    def memory(handle: Any, pointer: Any) -> int:
        pointer._obj.total, pointer._obj.used, pointer._obj.free = card.total_bytes, card.used_bytes, card.free_bytes
        return 0

    def number(*values: int) -> Any:
        def answer(*arguments: Any) -> int:
            pointers = [argument for argument in arguments if hasattr(argument, "_obj")]
            for pointer, value in zip(pointers, values, strict=True):
                pointer._obj.value = value
            return 0

        return answer

    def text(value: str) -> Any:
        def answer(*arguments: Any) -> int:
            buffer = next(argument for argument in arguments if isinstance(argument, ctypes.Array))
            buffer.value = value.encode()
            return 0

        return answer

    def by_uuid(uuid: ctypes.c_char_p, pointer: Any) -> int:
        return 0 if uuid.value == f"GPU-{UUID}".encode() else pynvml.NVML_ERROR_NOT_FOUND

    functions = {
        "nvmlInitWithFlags": lambda flags: 0,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetHandleByIndex_v2": lambda index, pointer: 0,
        "nvmlDeviceGetCount_v2": number(1),
        "nvmlDeviceGetUUID": text(f"GPU-{UUID}"),
        "nvmlDeviceGetName": text("NVIDIA H200"),
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetMigMode": number(0, 0),
        "nvmlDeviceGetPersistenceMode": lambda handle, pointer: pynvml.NVML_ERROR_NO_PERMISSION,
        "nvmlDeviceGetCudaComputeCapability": number(9, 0),
        "nvmlSystemGetDriverVersion": text("580.159.04"),
        "nvmlSystemGetCudaDriverVersion_v2": number(13000),
    }
    if has_v2:
        functions["nvmlDeviceGetMemoryInfo_v2"] = memory

    def find(name: str) -> Any:
        if name not in functions:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return functions[name]

    patch.setattr(pynvml, "_LoadNvmlLibrary", lambda: None)
    patch.setattr(pynvml, "_nvmlGetFunctionPointer", find)


def _libcuda(card: FakeCard) -> SimpleNamespace:
    def current(pointer: Any) -> int:
        pointer._obj.value = 1 if card.has_context else None
        return 0

    def memory(free: Any, total: Any) -> int:
        free._obj.value, total._obj.value = card.free_bytes, card.total_bytes
        return 0

    def allocate(pointer: Any, num_bytes: int) -> int:
        return 0 if card.hold(num_bytes) else 2

    return SimpleNamespace(cuCtxGetCurrent=current, cuMemGetInfo_v2=memory, cuMemAlloc_v2=_with_argtypes(allocate))


def _with_argtypes(function: Any) -> Any:
    function.argtypes = None  # as ctypes' functions have
    return function


@contextlib.contextmanager
def _forgetful() -> Iterator[None]:
    """What libraries remember of the GPU that there is, or is not, is asked anew."""

    def forget() -> None:
        for name in _REMEMBERING:
            for thing in vars(importlib.import_module(name)).values():
                if hasattr(thing, "cache_clear"):
                    thing.cache_clear()

    forget()
    yield
    forget()


@contextlib.contextmanager
def fake_cuda(
    total_bytes: int = 143_771 * MIB, *, others_bytes: int = 1 * GIB, has_v2: bool = True
) -> Iterator[FakeCard]:
    """Inside, this process has a GPU. Libraries that look for one as they load must be loaded already."""
    card = FakeCard(total_bytes, others_bytes)
    with pytest.MonkeyPatch.context() as patch, _forgetful():
        _plug_torch(patch, card)
        _plug_nvml(patch, card, has_v2=has_v2)
        load = ctypes.CDLL
        patch.setattr(
            ctypes,
            "CDLL",
            lambda name, *args, **options: _libcuda(card) if name == "libcuda.so.1" else load(name, *args, **options),
        )
        with _OnHost(), _Storages(card):
            yield card
