"""Fake tensors' storages → allocations and frees, in order, as a real allocator would have seen them.

In: a program that runs under the mode. Out: Events. Follows storages, not tensors, so views and in-place operations
count once. What real execution does otherwise than fake is mended here (gradients that meet) or asked of ``kernels``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vramprobe.log.trace import Event
from vramprobe.simulate.fake import values
from vramprobe.simulate.fake.shapes import ShapeCache
from vramprobe.simulate.kernels import cuda

#: What an operator's own kernel takes while it runs and gives back: (operator, arguments, result) → sizes in bytes, one
#: that goes before the next is taken once more, negative.
Scratch = Callable[[Any, tuple[Any, ...], Any], list[int]]
#: Of an operator's results those that are made in the device's memory, in that order.
Made = Callable[[Any], Any]
#: Operators that are run as Python, for what it allocates: name, with the overload's if it has one → implementation.
Kernels = dict[str, Callable[..., Any]]

_ADD = torch.ops.aten.add.Tensor
#: What backward does in place, but never under a dispatch mode: adding gradients that meet, and writing into zeros that
#: it has just made (FunctionsManual.cpp, ``index_backward`` and ``value_selecting_reduction_backward``).
_INDEX_PUT = torch.ops.aten.index_put.default
_MENDED = frozenset({_ADD, _INDEX_PUT, torch.ops.aten.scatter.src})
_DEVICE = torch.ops.prim.device.default
#: Copies indices to the device of what they point into; a list of numbers was made in the host's memory.
_INDEX = torch.ops.aten.index.Tensor
#: Products that go through cuBLAS, which keeps a workspace for each thread that calls it, made once the result is.
#: ``linear`` and ``matmul``: as a library's own operator calls them, beneath autograd.
_BLAS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul")
)
_VALUE = torch.ops.aten._local_scalar_dense.default
#: What a program is told that asks for a fake tensor's value. Yes: transformers asks whether nothing is padded and no
#: sequences are packed (masking_utils.py), and so it is in every cell. Optimizers ask for their step: 1.
_ANSWERS = {torch.bool: True, torch.float32: 1.0, torch.float64: 1.0, torch.bfloat16: 1.0, torch.float16: 1.0}
#: The Python frame right under the autograd engine (torch/autograd/graph.py): no formula in Python is running.
_ENGINE_FRAME = "_engine_run_backward"
#: References to a tensor, and to its storage, that only the engine's buffer holds, as seen from __torch_dispatch__.
_SOLE_USES, _SOLE_STORAGE_USES = 4, 2

_SHAPES = ShapeCache()  # of this process: layers, steps and runs repeat the same shapes


class _StorageRef(weakref.ref):
    """A weak reference that knows which storage it was."""

    __slots__ = ("key",)


class Recorder(TorchDispatchMode):
    """Over a FakeTensorMode: notes each new storage as it appears and as it goes.

    Every block has an address of its own, never used twice; the time of an event is its number.
    """

    def __init__(
        self,
        scratch: Scratch,
        kernels: Kernels,
        blas_workspace_bytes: int = 0,
        on_host: frozenset[Any] = frozenset(),
        made: Mapping[Any, Made] = MappingProxyType({}),
        *,
        knows_values: bool = False,
    ) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.blas_workspace_bytes = blas_workspace_bytes
        self._scratch = scratch
        self._kernels = kernels
        self._made = made
        self._knows_values = knows_values
        self._call = partial(values.call, _SHAPES.call) if knows_values else _SHAPES.call
        self._on_host = on_host  # operators whose results are not in the device's memory
        self.workspaces: dict[str, int] = {}  # thread → the address of its BLAS workspace, which stays
        self.thread = "main"  # a device's backward runs on a thread of its own: whoever starts one says so here
        self.to_host = False  # new tensors are in the host's memory: whoever makes them there says so here
        self.autocast = False  # beneath a mode torch cannot tell: whoever turns it on or off says so here
        self._blocks: dict[int, tuple[int, int]] = {}  # storage → (address, bytes)
        self._refs: dict[int, _StorageRef] = {}
        self._num_blocks = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps __torch_dispatch__, a frame between us and the engine's

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # most calls by number; the mode below would take its long way
            return args[0].fake_device
        if func is _VALUE:
            known = values.number_of(args[0])
            return _ANSWERS.get(args[0].dtype, 1) if known is None else known
        kernel = self._kernels.get(func._name)
        if kernel is not None:
            with self, _autocast_again() if self.autocast else nullcontext():
                return kernel(*args, **(kwargs or {}))
        copied = self._indices_on_device(args[1]) if func is _INDEX else []
        in_place = func in _MENDED and _is_in_place(func, args, sys._getframe(1))
        result = self._call(func, args, kwargs or {})
        if func in self._on_host or (self._knows_values and self._is_of_host(args)):
            for made in tree_leaves(result):
                self.hide(made)
        elif in_place:
            self._hand_over(args[0].untyped_storage(), result.untyped_storage())
        elif isinstance(result, torch.Tensor):
            self._see(result)
        elif isinstance(result, (tuple, list)):
            made = self._made.get(func)
            for item in result if made is None else made(result):
                if isinstance(item, torch.Tensor):
                    self._see(item)
        if func in _BLAS and self.blas_workspace_bytes and self.thread not in self.workspaces:
            self.workspaces[self.thread] = self._allocate(self.blas_workspace_bytes)
        self._take(self._scratch(func, args, result))
        for ptr, size_bytes in copied:
            self._note(ptr, -size_bytes)
        return result

    def _indices_on_device(self, indices: list[torch.Tensor | None]) -> list[tuple[int, int]]:
        """Copy indices that are in the host's memory to the device; -> those that go with the call: (address, bytes).

        Autograd keeps a copy for backward. Where values are known the host's own tensor is used again, and the copy is
        taken to go.
        """
        hidden = [index for index in indices if index is not None and self._is_hidden(index)]
        if not self._knows_values:
            for index in hidden:
                self.move_to_device(index)
            return []
        sizes = [index.numel() * index.dtype.itemsize for index in hidden]
        return [(self._allocate(size_bytes), size_bytes) for size_bytes in sizes]

    def _is_of_host(self, args: tuple[Any, ...]) -> bool:
        """Whether all tensors among the arguments, of which there are some, are in the host's memory."""
        tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
        return bool(tensors) and all(map(self._is_hidden, tensors))

    def _is_hidden(self, tensor: torch.Tensor) -> bool:
        return self._blocks.get(tensor.untyped_storage()._cdata) == (0, 0)

    def _take(self, scratch: list[int]) -> None:
        """Allocate these sizes, give back the newest of a size that comes with a minus, and in the end the rest."""
        taken: list[tuple[int, int]] = []
        for size_bytes in scratch:
            if size_bytes > 0:
                taken.append((self._allocate(size_bytes), size_bytes))
                continue
            at = max(at for at, (_, size) in enumerate(taken) if size == -size_bytes)
            self._note(taken.pop(at)[0], size_bytes)
        for ptr, size_bytes in taken:
            self._note(ptr, -size_bytes)

    def ptr_of(self, storage_key: int) -> int | None:
        """The address of the block behind a storage (its ``_cdata``); None for one that was never seen or is hidden."""
        block = self._blocks.get(storage_key)
        return block[0] if block is not None and block[1] else None

    def empty_cache(self) -> None:
        """The program has the allocator give back what is cached: an event of no bytes, of no block."""
        self._note(0, 0)

    def hide(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new tensor that is not in the device's memory, but in the host's or managed; returned as it is.

        Where nothing has happened since it was made, the device has never held it.
        """
        storage = tensor.untyped_storage()
        ptr, size_bytes = self._blocks.pop(storage._cdata, (0, 0))
        if size_bytes and self.events[-1].ptr == ptr:
            self.events.pop()
        elif size_bytes:
            self._note(ptr, -size_bytes)
        self._watch(storage, 0, 0)
        return tensor

    def move_to_device(self, tensor: torch.Tensor) -> None:
        """Copy a tensor that was made in the host's memory, where an operator has not done so by now."""
        storage = tensor.untyped_storage()
        if self._is_hidden(tensor):
            del self._blocks[storage._cdata]
            self._see(tensor)

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._blocks:
            return
        size_bytes = storage.nbytes()
        if self.to_host:
            self._watch(storage, 0, 0)
        elif size_bytes:
            self._watch(storage, self._allocate(size_bytes), size_bytes)

    def _watch(self, storage: torch.UntypedStorage, ptr: int, size_bytes: int) -> None:
        key = storage._cdata
        self._blocks[key] = (ptr, size_bytes)
        self._refs[key] = ref = _StorageRef(storage, self._gone)
        ref.key = key

    def _hand_over(self, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
        """``new`` is what is computed in ``old``'s memory by a real run."""
        ptr, size_bytes = self._blocks.pop(old._cdata)
        del self._refs[old._cdata]
        self._watch(new, ptr, size_bytes)

    def _gone(self, ref: weakref.ref[Any]) -> None:
        self._refs.pop(ref.key, None)
        ptr, size_bytes = self._blocks.pop(ref.key)
        if size_bytes:
            self._note(ptr, -size_bytes)

    def _allocate(self, size_bytes: int) -> int:
        self._num_blocks += 1
        self._note(self._num_blocks, size_bytes)
        return self._num_blocks

    def _note(self, ptr: int, size_bytes: int) -> None:
        self.events.append(Event(ptr, size_bytes, len(self.events)))


def _autocast_again() -> Any:
    """What a real kernel calls meets autocast as anywhere else; beneath a mode it would not."""
    exclude = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude)


def _adds_in_place(args: tuple[Any, ...]) -> bool:
    """Of two gradients that meet: whether a real run would write the sum into the first.

    torch/csrc/autograd/input_buffer.cpp, ``accumulate``: in place if the buffer holds the last reference to a dense
    tensor and its storage; but never under a dispatch mode, and so never here.
    """
    old = args[0]
    if not isinstance(old, torch.Tensor) or old._is_view():
        return False
    uses = torch._C._storage_Use_Count(old.untyped_storage()._cdata)
    return uses == _SOLE_STORAGE_USES and old._use_count() == _SOLE_USES


def _is_in_place(func: Any, args: tuple[Any, ...], caller: FrameType) -> bool:
    """Whether a real run would write the result into the first argument; ``caller`` is the operator's, in Python."""
    if caller.f_code is cuda.math_attention.__code__:
        return func is _ADD  # the mask, to the scores
    by_engine = caller.f_code.co_name == _ENGINE_FRAME and not torch.is_grad_enabled()  # its own C++ code
    if func is _INDEX_PUT and args[3:] != (True,):  # the gradient of what was written over, less what was written
        return False
    return by_engine and (func is not _ADD or _adds_in_place(args))
