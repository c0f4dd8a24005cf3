"""What every kind of sharding asks of a rank: its tensors as they are stored and computed with, and its course.

In: a spec, its tensors. Out: shares, a RankCourse and its Moments, for ranks.py, flat_ranks.py and zero_ranks.py. No
torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vramprobe.architecture import architecture
from vramprobe.spec import CellSpec
from vramprobe.terms import BATCH_BYTES_PER_TOKEN, Moment, parameters
from vramprobe.terms.graph import CAUSES, ITEMSIZE_BYTES
from vramprobe.terms.parameters import Tensor
from vramprobe.terms.rank_tape import RANK_CAUSES
from vramprobe.terms.walk import Walk


def stored_tensors(spec: CellSpec) -> tuple[Tensor, ...]:
    return parameters.tensors(spec, architecture(spec.architecture))


def prepared_tensors(spec: CellSpec, *, is_flat: bool = False) -> tuple[Tensor, ...]:
    """As accelerate has them shared by FSDP: mixed precision raises to fp32 what is trained, in whatever dtype it was
    loaded (utils/fsdp_utils.py, ``fsdp2_prepare_model``, but beside 4-bit weights; accelerator.py, ``prepare_model``).

    ``is_flat``: FSDP1's.
    """
    stored = stored_tensors(spec)
    if spec.autocast == "none" or (spec.quant not in ("none", "int8") and not is_flat):
        return stored
    return tuple([one._replace(dtype="fp32") if one.trained else one for one in stored])


def computed_tensors(spec: CellSpec, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """As the step computes with them: mixed precision casts what is gathered (FSDP) or the module (DeepSpeed)."""
    if spec.autocast == "none":
        return tuple(tensors)
    return tuple(tensor if tensor.quantised else tensor._replace(dtype=spec.autocast) for tensor in tensors)


def quantised_parts(spec: CellSpec, tensor: Tensor) -> tuple[int, int]:
    """(packed elements, their scales) in bytes; the scales are an attribute of the weight and never divided."""
    whole = parameters.quantised_bytes(tensor, spec.quant)
    packed = tensor.numel if spec.quant == "int8" else -(-tensor.numel // 2)
    return packed, whole - packed


class Share(NamedTuple):
    """One tensor of a rank: ``elements`` of it, padded, and the bytes of its quantisation state."""

    elements: int
    weights: int
    scales: int
    as_state: Tensor  # what the optimizer sees


def share_of(spec: CellSpec, tensor: Tensor, num_gpus: int, *, by_rows: bool) -> Share:
    """The largest share: FSDP cuts rows (of a packed weight: of its storage, one column of ``spec.dtype``)."""
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


def walked_micro_steps(spec: CellSpec) -> int:
    """How many differ of those that FSDP runs: the first, which finds no gradients, those between, and the last."""
    return min(spec.grad_accum, 3)


@dataclass(frozen=True)
class RankCourse:
    """A step of a rank whose batch size and length are left open, as ``terms.Course`` is one of a single GPU's."""

    walk: Walk
    idle: dict[str, int]  # alive between two steps, but for the batch
    at_step: dict[str, int]
    added: dict[str, int]  # all along, beside what the walk counts under the same name
    in_passes: dict[str, int]  # the same in forward and backward only
    undivided: int  # what packed weights take more where FSDP leaves them whole
    host: int = 0  # tensors in host memory between two steps, where something is offloaded


def moments_of(course: RankCourse, spec: CellSpec) -> list[Moment]:
    """Of the cell's batch size and length, in the order of the step."""
    idle = course.idle | {"batch": BATCH_BYTES_PER_TOKEN * spec.num_tokens}
    places = course.walk.highest(spec.batch_size, spec.seq_len)
    made = []
    for (phase, label), terms in [*places.items(), (("optimizer_step", "optimizer"), course.at_step)]:
        counted = idle | terms
        added = course.added if phase == "optimizer_step" else course.added | course.in_passes
        known = counted | {cause: counted.get(cause, 0) + size for cause, size in added.items()}
        made.append(
            Moment(phase, label, {cause: known[cause] for cause in (*CAUSES, *RANK_CAUSES) if known.get(cause)})
        )
    return made
