"""One rank under DeepSpeed's ZeRO -> the moments of the rank that holds the most, by arithmetic.

In: a spec, the stage and N. Out: Moments, as ranks.py hands them on; what is counted is said there. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vramprobe.architecture import architecture
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment, optimizer, parameters
from vramprobe.terms.graph import ITEMSIZE_BYTES
from vramprobe.terms.parameters import Tensor
from vramprobe.terms.rank_parts import computed_tensors, moments_at, share_of, stored_tensors
from vramprobe.terms.setup import setup_of
from vramprobe.terms.walk import walk_of
from vramprobe.terms.zero_tape import Bucket, zero_walk

#: DeepSpeed's defaults in elements: reduce_bucket_size and allgather_bucket_size (two are alive with overlap_comm), and
#: stage3_max_live_parameters (deepspeed/runtime/zero/config.py).
BUCKET_ELEMENTS = 500_000_000
MAX_LIVE_ELEMENTS = 1_000_000_000
#: Of an element, while its gradient's norm is taken (stage_1_and_2.py, ``get_norm_dtype``: double).
_NORM_BYTES = 8


def bucket_moments(spec: CellSpec, num_gpus: int, *, is_first_stage: bool, has_flash: bool) -> list[Moment]:
    """Weights whole, an fp32 copy of the trained ones and its state divided; gradients in a bucket, then divided.

    Of the rank with the first part of the flat parameters, which has the largest pieces where an embedding comes first.
    """
    arch, stored = architecture(spec.architecture), stored_tensors(spec)
    computed = computed_tensors(spec, stored)
    trained = [tensor for tensor in computed if tensor.trained]
    elements = sum(tensor.numel * tensor.num_copies for tensor in trained)
    width = ITEMSIZE_BYTES[trained[0].dtype]
    part = -(-elements // num_gpus)
    master = trained[0]._replace(dtype="fp32", role="linear", shape=(part,), num_copies=1)
    pieces = _first_pieces(trained, part)
    is_filled, sent = elements > BUCKET_ELEMENTS, min(elements, BUCKET_ELEMENTS)
    if spec.autocast == "none" and width == 2:  # a 16-bit model that DeepSpeed is not told of: averaged in fp32
        kept, raised = 4 * part, 0
        buffered = 4 if is_first_stage else width
        bucket = Bucket(BUCKET_ELEMENTS * buffered, sent * (buffered + (4 if buffered == 2 else 0)) + kept, kept,
                        is_filled=is_filled, stays=is_first_stage)  # fmt: skip
    else:  # kept are whole tensors of which this rank has any part, joined and raised to fp32 for the step
        kept, raised = width * sum(size for size, _ in pieces), part * (width + (4 if width == 2 else 0))
        bucket = Bucket(BUCKET_ELEMENTS * width, sent * width, kept, is_filled=is_filled, stays=False)
    walk = zero_walk(setup_of(spec, arch, computed, has_flash), bucket)
    idle = {
        "weights": _bytes(spec, computed).weights + master.num_bytes + parameters.buffers_bytes(arch, spec.dtype),
        "optimizer_state": optimizer.allocated_state_bytes(spec, [master]),
        "batch": 2 * 8 * spec.num_tokens,
    }
    norm = _NORM_BYTES * max(piece for _, piece in pieces)
    at_step = {"gradients": kept,
               "gradient_buckets": bucket.whole if bucket.stays else 0,
               "optimizer_temporaries": max(norm, raised, optimizer.temporaries_bytes(spec, [master]))}  # fmt: skip
    return moments_at(walk.highest(spec.batch_size, spec.seq_len), idle, at_step)


def _first_pieces(trained: Sequence[Tensor], part: int) -> list[tuple[int, int]]:
    """(elements, of them on the rank) of each tensor in the first part; what stands in front of the layers first."""
    outside = [tensor for tensor in trained if not tensor.per_layer]
    front = [tensor for tensor in outside if tensor.role == "embedding"]
    behind = [tensor for tensor in outside if tensor.role != "embedding"]
    layers = [tensor for tensor in trained if tensor.per_layer]
    found, left = [], part
    depth = max((tensor.num_copies for tensor in layers), default=0)
    for tensor in [*front, *[tensor for _ in range(depth) for tensor in layers], *behind]:
        if left <= 0:
            break
        found.append((tensor.numel, min(tensor.numel, left)))
        left -= tensor.numel
    return found


class _Bytes(NamedTuple):
    """Bytes of a stretch of the model that is gathered at once: its weights, and its gradients."""

    weights: int
    gradients: int


def stage3_moments(spec: CellSpec, num_gpus: int, *, all_buffers: bool, has_flash: bool) -> list[Moment]:
    arch, stored = architecture(spec.architecture), stored_tensors(spec)
    computed = computed_tensors(spec, stored)
    total, largest = _bytes(spec, computed), _largest(spec, computed)
    shares = [share_of(spec, tensor, num_gpus, by_rows=False) for tensor in stored]
    trained = [share.as_state for tensor, share in zip(stored, shares, strict=True) if tensor.trained]
    master = sum(
        tensor.num_bytes * tensor.num_copies
        for tensor, before, after in zip(trained, *_trained(stored, computed), strict=True)
        if before.dtype != after.dtype
    )
    weights = _zero3_weights(spec, computed, num_gpus)
    idle = {
        "weights": weights + master + parameters.buffers_bytes(arch, spec.dtype),
        "optimizer_state": optimizer.allocated_state_bytes(spec, trained),
        "batch": 2 * 8 * spec.num_tokens,
    }
    at_step = {"gradients": total.gradients, "optimizer_temporaries": optimizer.temporaries_bytes(spec, trained)}
    bucket = 2 * BUCKET_ELEMENTS * max(ITEMSIZE_BYTES[tensor.dtype] for tensor in computed if tensor.trained)
    gathered, reduced = _zero_buffers(spec, total, largest, bucket if all_buffers else 0)
    made = []
    places = walk_of(setup_of(spec, arch, computed, has_flash)).highest(spec.batch_size, spec.seq_len)
    for moment in moments_at(places, idle, at_step):
        terms, in_step = dict(moment.terms), moment.phase == "optimizer_step"
        gradients = terms.get("gradients", 0)
        divided = sum(share.numel * share.num_copies * ITEMSIZE_BYTES[after.dtype]
                      for share, after in zip(trained, _trained(stored, computed)[1], strict=True))  # fmt: skip
        terms["gradients"] = -(-gradients * divided // total.gradients)
        terms["gathered_weights"] = 0 if in_step else gathered
        terms["gradient_buckets"] = min(reduced, gradients) if moment.phase == "backward" else 0
        made.append(Moment(moment.phase, moment.label, {cause: size for cause, size in terms.items() if size}))
    return made


def _trained(stored: Sequence[Tensor], computed: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return [tensor for tensor in stored if tensor.trained], [tensor for tensor in computed if tensor.trained]


def _zero3_weights(spec: CellSpec, computed: Sequence[Tensor], num_gpus: int) -> int:
    shares = [share_of(spec, tensor, num_gpus, by_rows=False) for tensor in computed]
    return sum(
        (share.weights + share.scales) * tensor.num_copies for tensor, share in zip(computed, shares, strict=True)
    )


def _zero_buffers(spec: CellSpec, total: _Bytes, largest: _Bytes, bucket: int) -> tuple[int, int]:
    """(gathered, being reduced): with buckets at their defaults, or of the largest layer alone."""
    live = MAX_LIVE_ELEMENTS * ITEMSIZE_BYTES[spec.dtype] if bucket else 0
    return max(largest.weights, min(live, total.weights)), max(largest.gradients, bucket)


def _bytes(spec: CellSpec, tensors: Sequence[Tensor]) -> _Bytes:
    return _Bytes(
        parameters.weights_bytes(tensors, spec.quant),
        sum(tensor.num_bytes * tensor.num_copies for tensor in tensors if tensor.trained),
    )


def _largest(spec: CellSpec, tensors: Sequence[Tensor]) -> _Bytes:
    """Of a layer and of each tensor in none."""
    layer = _bytes(spec, [tensor._replace(num_copies=1) for tensor in tensors if tensor.per_layer])
    units = [layer, *(_bytes(spec, [tensor]) for tensor in tensors if not tensor.per_layer)]
    return _Bytes(max(unit.weights for unit in units), max(unit.gradients for unit in units))
