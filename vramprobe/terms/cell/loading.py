"""Loading: what is asked for before the first step, in its order: weights, preparation, adapters, batch.

In: a spec, its Architecture, the tensors of its prepared model in order, an allocator. Out: the allocator's own counts.
The order decides which blocks adapters and raised weights find free, and so what stays over of them. As the workload
makes a model of random weights: one after the other, filled from one tile. Never imports torch or the workload.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from vramprobe.architecture import Architecture
from vramprobe.bounds import tensors as parameters
from vramprobe.bounds.tensors import Tensor
from vramprobe.spec import CellSpec
from vramprobe.trainers import TRAINERS
from vramprobe.units import ITEMSIZE_BYTES

#: What weights are filled from: 2^20 numbers in fp32.
_TILE_BYTES = 4 * 2**20
_SHIFTED = 3  # of a doubly quantised weight's parts: the scales less their mean, which go


class Allocator(Protocol):
    """Whoever is asked."""

    def allocate(self, name: Hashable, size_bytes: int, stream: int = 0) -> object: ...

    def has(self, name: Hashable) -> bool: ...

    def free(self, name: Hashable) -> None: ...

    def empty_cache(self) -> None: ...

    def play(self, events: list[int], number: int, workspace_bytes: int) -> None: ...

    def state(self) -> object: ...


def load(
    spec: CellSpec,
    arch: Architecture,
    tensors: Sequence[tuple[str, Tensor]],
    allocator: Allocator,
) -> None:
    """All that stands as the first step begins; ``tensors``: each copy with a name of its own, adapters last."""
    base = [(name, tensor) for name, tensor in tensors if tensor.role != "adapter"]
    if spec.quant == "none":
        _load_whole(spec, arch, base, allocator)
    else:
        _load_quantised(spec, arch, base, allocator)
    if spec.kbit_prep == "peft":
        _cast(spec, [one for one in base if not one[1].quantised], allocator)
        allocator.empty_cache()  # peft's prepare_model_for_kbit_training does so
    _add_adapters(spec, [one for one in tensors if one[1].role == "adapter"], allocator)
    if spec.kbit_prep == "trl":
        _cast(spec, [one for one in base if not one[1].quantised], allocator)
    for name in batch_names(spec):
        allocator.allocate(name, ITEMSIZE_BYTES["int64"] * spec.num_tokens)


def batch_names(spec: CellSpec) -> tuple[str, ...]:
    """The inputs of a micro-batch."""
    return TRAINERS[spec.trainer].inputs


def _load_whole(
    spec: CellSpec,
    arch: Architecture,
    base: Sequence[tuple[str, Tensor]],
    allocator: Allocator,
    what: str = "weight",
) -> None:
    """A tied head stands until the weights are filled."""
    for name, tensor in base:
        allocator.allocate((what, name), _loaded_bytes(spec, tensor))
    _add_buffers(spec, arch, allocator, what)
    passing = ["tile"]
    if arch.tied:
        allocator.allocate("head", _loaded_bytes(spec, base[0][1]))
        passing.append("head")
    allocator.allocate("tile", _TILE_BYTES)
    for name in passing:
        allocator.free(name)


def _load_quantised(
    spec: CellSpec, arch: Architecture, base: Sequence[tuple[str, Tensor]], allocator: Allocator
) -> None:
    allocator.allocate("tile", _TILE_BYTES)
    if spec.quant in parameters.DOUBLE_QUANTISED:  # bitsandbytes keeps one of its own (functional.name2qmap)
        allocator.allocate("code", parameters.CODE_8BIT_BYTES)
    for name, tensor in base:
        if tensor.quantised:
            _quantise(spec, name, tensor, allocator)
        else:
            allocator.allocate(("weight", name), _loaded_bytes(spec, tensor))
    _add_buffers(spec, arch, allocator)
    allocator.free("tile")


def _quantise(spec: CellSpec, name: str, tensor: Tensor, allocator: Allocator) -> None:
    """bitsandbytes' functional.quantize_4bit and Int8Params: the whole weight stands until its parts do, and so do in 8
    bits its copy in fp16, under double quantisation the scales, and what these are less their mean.
    """
    parts = parameters.quantised_parts(tensor, spec.quant)
    before = [2 * tensor.numel] if spec.quant == "int8" else []  # in fp16
    if spec.quant in parameters.DOUBLE_QUANTISED:
        scales = ITEMSIZE_BYTES["fp32"] * -(-tensor.numel // parameters.NF4_BLOCK)
        packed, code, absmax, outer_absmax, outer_code, offset = parts
        parts, before = [packed, code, offset, scales, outer_absmax, absmax, outer_code], [scales]
    else:  # codes, scales; in 4 bits with their code book between
        parts = [parts[-1], *parts[:-1]]
    allocator.allocate("whole", tensor.num_bytes)
    for size_bytes in before:
        allocator.allocate("beside", size_bytes)
    for number, size_bytes in enumerate(parts):
        allocator.allocate(("weight", name, number), size_bytes)
    if spec.quant in parameters.DOUBLE_QUANTISED:
        allocator.free(("weight", name, _SHIFTED))
    if before:
        allocator.free("beside")
    allocator.free("whole")


def _add_buffers(spec: CellSpec, arch: Architecture, allocator: Allocator, what: str = "weight") -> None:
    for number, size_bytes in enumerate(parameters.buffer_parts(arch, spec.dtype)):
        allocator.allocate((what, "buffer", number), size_bytes)


def _add_adapters(spec: CellSpec, adapters: Sequence[tuple[str, Tensor]], allocator: Allocator) -> None:
    """peft makes them in the dtype of what they adapt, all of them, before it casts any."""
    for name, tensor in adapters:
        allocator.allocate(("weight", name), _loaded_bytes(spec, tensor))
    _cast(spec, adapters, allocator)


def _cast(spec: CellSpec, tensors: Sequence[tuple[str, Tensor]], allocator: Allocator) -> None:
    """One after the other, what is of another dtype in the end than as it was loaded."""
    for name, tensor in tensors:
        if _loaded_bytes(spec, tensor) != tensor.num_bytes:
            allocator.allocate(("cast", name), tensor.num_bytes)
            allocator.free(("weight", name))


def _loaded_bytes(spec: CellSpec, tensor: Tensor) -> int:
    """Before the preparation. int8 is no dtype for adapters, which are fp32 there from the start."""
    dtype = "fp32" if spec.quant == "int8" and tensor.role == "adapter" else spec.dtype
    return tensor.numel * ITEMSIZE_BYTES[dtype]
