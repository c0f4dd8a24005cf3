"""What every kind of sharding asks of a rank: its tensors as they are stored and computed with, and its moments.

In: a spec, its tensors. Out: shares and Moments, for ranks.py, flat_ranks.py and zero_ranks.py. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vramprobe.architecture import architecture
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment, parameters
from vramprobe.terms.graph import CAUSES, ITEMSIZE_BYTES, Place
from vramprobe.terms.parameters import Tensor
from vramprobe.terms.rank_tape import RANK_CAUSES


def stored_tensors(spec: CellSpec) -> tuple[Tensor, ...]:
    return parameters.tensors(spec, architecture(spec.architecture))


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


def moments_at(places: dict[Place, dict[str, int]], idle: dict[str, int], at_step: dict[str, int]) -> list[Moment]:
    found = [*places.items(), (("optimizer_step", "optimizer"), at_step)]
    return [
        Moment(phase, label, {cause: size for cause in (*CAUSES, *RANK_CAUSES) if (size := (idle | terms).get(cause))})
        for (phase, label), terms in found
    ]
