"""One rank of several: what every kind of sharding needs of it.

In: a spec, its tensors, an allocator after the load. Out: shares of tensors, a RankCourse and its Moments, the last
requests of a load. Knows no kind of sharding. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vramprobe.architecture import Architecture, architecture
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment, batch_bytes
from vramprobe.terms.cell import parameters
from vramprobe.terms.cell.loading import Allocator, batch_names, packed_number
from vramprobe.terms.cell.parameters import Tensor
from vramprobe.terms.step.walk import Walk
from vramprobe.terms.tape.graph import CAUSES, ITEMSIZE_BYTES

#: Causes that only a rank of several has.
RANK_CAUSES = ("gathered_weights", "gradient_buckets")
#: CUDA streams, each with its own blocks in the caching allocator: the step's stream, and those of the collectives.
COMPUTING, SENDING, GATHERING, REDUCING = 0, 1, 2, 3


class Division(NamedTuple):
    """How several ranks divide one model."""

    sharding: str  # of choices.Sharding, within one group
    num_gpus: int  # ranks that share one copy of the model
    all_buffers: bool = False  # see ranks.rank_moments
    is_replicated: bool = False  # whether there are several such groups, which all-reduce their gradients
    offload: str = "none"  # choices.Offload


# -- tensors ------------------------------------------------------------------------------------------------------


def stored_tensors(spec: CellSpec) -> tuple[Tensor, ...]:
    """The tensors of the prepared model, whole."""
    return parameters.tensors(spec, architecture(spec.architecture))


def computed_tensors(spec: CellSpec, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same in the dtype of the step: mixed precision casts gathered weights (FSDP) or the module (DeepSpeed)."""
    if spec.autocast == "none":
        return tuple(tensors)
    return tuple(tensor if tensor.quantised else tensor._replace(dtype=spec.autocast) for tensor in tensors)


def quantised_parts(spec: CellSpec, tensor: Tensor) -> tuple[int, int]:
    """(packed elements, scales) in bytes; scales are an attribute of the weight and never sharded."""
    whole = parameters.quantised_bytes(tensor, spec.quant)
    packed = tensor.numel if spec.quant == "int8" else -(-tensor.numel // 2)
    return packed, whole - packed


class Share(NamedTuple):
    """One rank's shard of a tensor: ``elements``, padding included, and the bytes of its quantization state."""

    elements: int
    weights: int
    scales: int
    as_state: Tensor  # what the optimizer sees


def share_of(spec: CellSpec, tensor: Tensor, num_gpus: int, *, by_rows: bool) -> Share:
    """The largest shard. FSDP2 shards by rows; of a packed weight, the rows of its storage, one ``spec.dtype`` wide."""
    if tensor.quantised:
        packed, scales = quantised_parts(spec, tensor)
        width = ITEMSIZE_BYTES[spec.dtype] if by_rows else 1
        share = -(-packed // (width * num_gpus)) * width
        return Share(share, share, scales, tensor)
    if by_rows:
        cut = tensor._replace(shape=(-(-tensor.shape[0] // num_gpus), *tensor.shape[1:]))
    else:
        cut = tensor._replace(shape=(-(-tensor.numel // num_gpus),))
    return Share(cut.numel, cut.num_bytes, 0, cut)


# -- moments ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankCourse:
    """One rank's step for any batch size and length, as ``terms.Course`` is a single GPU's; bytes by cause."""

    walk: Walk
    idle: dict[str, int]  # alive between two steps, without the batch
    at_step: dict[str, int]
    added: dict[str, int]  # throughout the step, added to what the walk counts under the same cause
    undivided: int  # additional bytes of packed weights where FSDP does not shard them
    host: int = 0  # tensors in host memory between two steps, with offload


def moments_of(course: RankCourse, spec: CellSpec) -> list[Moment]:
    """The moments of a step at the cell's batch size and length, in the order of the step."""
    idle = course.idle | {"batch": batch_bytes(spec)}
    places = course.walk.highest(spec.batch_size, spec.seq_len)
    made = []
    for (phase, label), terms in [*places.items(), (("optimizer_step", "optimizer"), course.at_step)]:
        counted = idle | terms
        known = counted | {cause: counted.get(cause, 0) + size for cause, size in course.added.items()}
        made.append(
            Moment(phase, label, {cause: known[cause] for cause in (*CAUSES, *RANK_CAUSES) if known.get(cause)})
        )
    return made


# -- requests -----------------------------------------------------------------------------------------------------


def loaded_key(spec: CellSpec, allocator: Allocator, name: str) -> Hashable:
    """The allocator's key of a weight that loading.py has loaded: cast, as stored, or packed."""
    numbered = ("weight", name, packed_number(spec.quant))
    return next(key for key in (("cast", name), ("weight", name), numbered) if allocator.has(key))


def add_buffers(spec: CellSpec, arch: Architecture, allocator: Allocator) -> None:
    """Request the buffers of a model that no GPU has loaded whole."""
    for number, size_bytes in enumerate(parameters.buffer_parts(arch, spec.dtype)):
        allocator.allocate(("buffer", number), size_bytes)


def add_batch(spec: CellSpec, allocator: Allocator) -> None:
    """Request one rank's ids and labels."""
    for name in batch_names(spec):
        allocator.allocate(name, ITEMSIZE_BYTES["int64"] * spec.num_tokens)
