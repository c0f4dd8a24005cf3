"""Ranks: a cell on N GPUs under FSDP, ZeRO or DDP -> the moments of the rank that holds the most, by arithmetic.

In: a spec (its batch is one rank's), the kind of sharding and N. Out: Moments as ``terms`` has them for one GPU, with
``gathered_weights`` and ``gradient_buckets`` beside the other causes. Activations are never divided. No torch here.

What is counted, and where the rule stands in the libraries' code:

* ``fsdp``, ``fsdp-shard-grad-op``: torch's ``fully_shard`` (FSDP2) on accelerate's units (rank_tape.py has the order of
  events). Each tensor is cut along its first dimension, padded to a multiple of N, and so are its gradient and, not
  padded, its state (_fsdp_param.py, ``_init_sharding_param``). What is gathered has the dtype of the computation:
  accelerate hands mixed precision over as ``MixedPrecisionPolicy(param_dtype, reduce_dtype)``, so under autocast fp32
  weights are cast as they are gathered, a unit at a time. A rank has no ``cast_copies``, and its activations are those
  of 16-bit weights. bitsandbytes' packed weights are divided, their scales (``QuantState``) are not.
* ``zero1`` … ``zero3``: DeepSpeed's engine cuts what is flattened. With bf16 or fp16 it casts the whole module to that
  dtype and keeps its own fp32 copy of what is trained, divided (``bf16.enabled``; accelerate sets it for mixed
  precision): so an autocast cell's fp32 weights count as 16-bit ones and a divided fp32 copy, both under ``weights``.
* ``ddp``: all is whole, and DDP's buckets hold the gradients a second time (``gradient_as_bucket_view`` is off).

What is not counted: NCCL's buffers and the CUDA context (predict/prediction.py sets both aside in a verdict), rounding
to 512 bytes, what a trainer's ``no_sync`` keeps whole when gradients are accumulated, offloading to the host. Nor
FSDP1, whose flat parameters are copied less often: five published LoRA peaks (torch 2.4, reentrant checkpointing) are
14 to 30 % above this, as if every layer's input and its gradient were kept to the end of backward, which is inferred
from the figures alone (benchmarks/published_ranks.md). DeepSpeed's engine was read, not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.spec import CellSpec
from vramprobe.terms import BATCH_BYTES_PER_TOKEN, Moment, course_of, moments, optimizer, parameters
from vramprobe.terms.graph import CAUSES, ITEMSIZE_BYTES
from vramprobe.terms.parameters import Tensor
from vramprobe.terms.rank_tape import RANK_CAUSES, Unit, Units, rank_units, rank_walk
from vramprobe.terms.setup import setup_of
from vramprobe.terms.sizes import share_of
from vramprobe.terms.walk import Walk, walk_of

#: DDP; DeepSpeed's stages; FSDP's FULL_SHARD and SHARD_GRAD_OP (accelerate's and torch's names).
Sharding = Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-shard-grad-op"]
FSDP = ("fsdp", "fsdp-shard-grad-op")
#: Those under which a rank holds less than a single GPU.
DIVIDING: tuple[Sharding, ...] = get_args(Sharding)[1:]
#: DeepSpeed's defaults in elements: reduce_bucket_size and allgather_bucket_size (two are alive with overlap_comm), and
#: stage3_max_live_parameters (deepspeed/runtime/zero/config.py).
BUCKET_ELEMENTS = 500_000_000
MAX_LIVE_ELEMENTS = 1_000_000_000


def rank_moments(
    spec: CellSpec, num_gpus: int, sharding: Sharding, *, all_buffers: bool, has_flash: bool = True
) -> list[Moment]:
    """The moments of a step on the rank that holds the most, in the order of the step.

    Raises UnsupportedArchitecture where layers differ in their weights or the loss is fused: there is no rule here.

    ``all_buffers``: of DeepSpeed, its buckets are full and its prefetched layers there, as by its defaults; without,
    one layer at a time. Of FSDP, the embedding, last norm and head are one unit with the root, as without accelerate.
    """
    if num_gpus == 1:
        return moments(spec, has_flash)
    if sharding == "ddp":  # its reducer makes its buckets, as large as the gradients, when it is built, and keeps them
        buckets = {"gradient_buckets": course_of(spec, has_flash).at_step["gradients"]}
        return [Moment(one.phase, one.label, one.terms | buckets) for one in moments(spec, has_flash)]
    return _moments_of(_kept(spec, num_gpus, sharding, all_buffers=all_buffers, has_flash=has_flash), spec)


def whole_packed_bytes(spec: CellSpec, num_gpus: int, sharding: Sharding, has_flash: bool = True) -> int:
    """What a rank of FSDP holds more of quantised weights where they are not divided."""
    return _kept(spec, num_gpus, sharding, all_buffers=False, has_flash=has_flash).undivided


class _Zero(NamedTuple):
    """What DeepSpeed holds beside the walk: whole gradients and a rank's share of them, and its buffers; bytes."""

    sharding: str
    gradients: int
    divided: int
    gathered: int
    reduced: int
    at_step: int  # gathered when the optimizer has stepped: the trained weights come from all ranks


@dataclass(frozen=True)
class RankCourse:
    """A step of a rank whose batch size and length are left open, as ``terms.Course`` is one of a single GPU's."""

    walk: Walk
    idle: dict[str, int]  # alive between two steps, but for the batch
    at_step: dict[str, int]
    undivided: int = 0  # what packed weights take more where FSDP leaves them whole
    zero: _Zero | None = None


def _kept(spec: CellSpec, num_gpus: int, sharding: Sharding, *, all_buffers: bool, has_flash: bool) -> RankCourse:
    """The course of a rank, kept for the next one of a cell that differs in batch size and length only."""
    ranks, key = course_of(spec, has_flash).ranks, (num_gpus, sharding, all_buffers)
    if key not in ranks:
        ranks[key] = _course(spec, num_gpus, sharding, all_buffers=all_buffers, has_flash=has_flash)
    return ranks[key]


def _course(spec: CellSpec, num_gpus: int, sharding: Sharding, *, all_buffers: bool, has_flash: bool) -> RankCourse:
    if spec.fused_linear_cross_entropy:
        raise UnsupportedArchitecture(
            f"a rank of {spec.model} cannot be counted under {sharding} with a fused loss, which reads the head's "
            "weight past its own module; ddp can"
        )
    if any(parameter.only for parameter in architecture(spec.architecture).parameters):
        raise UnsupportedArchitecture(
            f"a rank of {spec.model} cannot be counted under {sharding}: its layers differ in their weights; ddp can"
        )
    if sharding in FSDP:
        return _fsdp(spec, num_gpus, reshards=sharding == "fsdp", apart=not all_buffers, has_flash=has_flash)
    return _zero(spec, num_gpus, sharding, all_buffers=all_buffers, has_flash=has_flash)


def _moments_of(course: RankCourse, spec: CellSpec) -> list[Moment]:
    idle = course.idle | {"batch": BATCH_BYTES_PER_TOKEN * spec.num_tokens}
    places = course.walk.highest(spec.batch_size, spec.seq_len)
    found = [*places.items(), (("optimizer_step", "optimizer"), course.at_step)]
    made = []
    for (phase, label), terms in found:
        known = idle | terms
        moment = Moment(phase, label, {cause: known[cause] for cause in (*CAUSES, *RANK_CAUSES) if known.get(cause)})
        made.append(moment if course.zero is None else _with_buffers(moment, course.zero))
    return made


# -- the tensors of a rank ----------------------------------------------------------------------------------------


def _stored(spec: CellSpec) -> tuple[Tensor, ...]:
    return parameters.tensors(spec, architecture(spec.architecture))


def _computed(spec: CellSpec, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """As the step computes with them: mixed precision casts what is gathered (FSDP) or the module (DeepSpeed)."""
    if spec.autocast == "none":
        return tuple(tensors)
    return tuple(tensor if tensor.quantised else tensor._replace(dtype=spec.autocast) for tensor in tensors)


def _quantised_parts(spec: CellSpec, tensor: Tensor) -> tuple[int, int]:
    """(packed elements, their scales) in bytes; the scales are an attribute of the weight and never divided."""
    whole = parameters.quantised_bytes(tensor, spec.quant)
    packed = tensor.numel if spec.quant == "int8" else -(-tensor.numel // 2)
    return packed, whole - packed


class _Share(NamedTuple):
    """One tensor of a rank: ``elements`` of it, padded, and the bytes of its quantisation state."""

    elements: int
    weights: int
    scales: int
    as_state: Tensor  # what the optimizer sees


def _share(spec: CellSpec, tensor: Tensor, num_gpus: int, *, by_rows: bool) -> _Share:
    """The largest share: FSDP cuts rows (of a packed weight: of its storage, one column of ``spec.dtype``)."""
    if tensor.quantised:
        packed, scales = _quantised_parts(spec, tensor)
        width = ITEMSIZE_BYTES[spec.dtype] if by_rows else 1
        share = -(-packed // (width * num_gpus)) * width
        return _Share(share, share, scales, tensor)
    if by_rows:
        cut = tensor._replace(shape=(-(-tensor.shape[0] // num_gpus), *tensor.shape[1:]))
    else:
        cut = tensor._replace(shape=(-(-tensor.numel // num_gpus),))
    return _Share(cut.numel, cut.num_bytes, 0, cut)


# -- FSDP ---------------------------------------------------------------------------------------------------------


def _fsdp(spec: CellSpec, num_gpus: int, *, reshards: bool, apart: bool, has_flash: bool) -> RankCourse:
    arch, stored = architecture(spec.architecture), _stored(spec)
    computed = _computed(spec, stored)
    shares = [_share(spec, tensor, num_gpus, by_rows=True) for tensor in stored]
    units = _units(stored, computed, shares, num_gpus, reshards=reshards, apart=apart)
    trained = [share.as_state for tensor, share in zip(stored, shares, strict=True) if tensor.trained]
    idle = {
        "weights": parameters.buffers_bytes(arch, spec.dtype)
                   + sum((share.weights + share.scales) * tensor.num_copies
                         for tensor, share in zip(stored, shares, strict=True)),
        "optimizer_state": optimizer.allocated_state_bytes(spec, trained),
    }  # fmt: skip
    at_step = {"gradients": sum(tensor.num_bytes * tensor.num_copies for tensor in trained),
               "optimizer_temporaries": optimizer.temporaries_bytes(spec, trained)}  # fmt: skip
    undivided = sum((_quantised_parts(spec, tensor)[0] - share.weights) * tensor.num_copies
                    for tensor, share in zip(stored, shares, strict=True) if tensor.quantised)  # fmt: skip
    return RankCourse(rank_walk(setup_of(spec, arch, computed, has_flash), units), idle, at_step, undivided)


def _units(
    stored: Sequence[Tensor], computed: Sequence[Tensor], shares: Sequence[_Share], num_gpus: int, *, reshards: bool,
    apart: bool,
) -> Units:  # fmt: skip
    """Accelerate's (utils/fsdp_utils.py, ``fsdp2_prepare_model``): each layer, the embedding, the last norm with the
    head. Tied, the embedding is in one unit with the norm; without ``apart`` all outside the layers is the root's."""
    made = [_unit(*one, num_gpus) for one in zip(stored, computed, shares, strict=True)]
    pairs = list(zip(stored, made, strict=True))
    layer = rank_units([unit for tensor, unit in pairs if tensor.per_layer])
    outside = [(tensor, unit) for tensor, unit in pairs if not tensor.per_layer]
    if not apart or not any(tensor.name.startswith("lm_head.") for tensor, _ in outside):
        return Units(layer, rank_units([unit for _, unit in outside]), apart=apart, reshards=reshards)
    embedding = rank_units([unit for tensor, unit in outside if tensor.role == "embedding"])
    tail = rank_units([unit for tensor, unit in outside if tensor.role != "embedding"])
    return Units(layer, Unit(), embedding, tail, apart=True, reshards=reshards)


def _unit(stored: Tensor, computed: Tensor, share: _Share, num_gpus: int) -> Unit:
    """One copy of a tensor, padded."""
    width = 1 if stored.quantised else ITEMSIZE_BYTES[computed.dtype]
    sent = share.elements * width
    is_cast = not stored.quantised and stored.dtype != computed.dtype
    cast = sent if is_cast else 0
    if not stored.trained:
        return Unit(sent * num_gpus, cast)
    return Unit(sent * num_gpus, cast, sent * num_gpus, sent, share.weights)


# -- DeepSpeed ----------------------------------------------------------------------------------------------------


class _Bytes(NamedTuple):
    """Bytes of a stretch of the model that is gathered at once: its weights, and its gradients."""

    weights: int
    gradients: int


def _zero(spec: CellSpec, num_gpus: int, sharding: str, *, all_buffers: bool, has_flash: bool) -> RankCourse:
    arch, stored = architecture(spec.architecture), _stored(spec)
    computed = _computed(spec, stored)
    total, largest = _bytes(spec, computed), _largest(spec, computed)
    shares = [_share(spec, tensor, num_gpus, by_rows=False) for tensor in stored]
    trained = [share.as_state for tensor, share in zip(stored, shares, strict=True) if tensor.trained]
    master = sum(
        tensor.num_bytes * tensor.num_copies
        for tensor, before, after in zip(trained, *_trained(stored, computed), strict=True)
        if before.dtype != after.dtype
    )
    weights = total.weights if sharding != "zero3" else _zero3_weights(spec, computed, num_gpus)
    idle = {
        "weights": weights + master + parameters.buffers_bytes(arch, spec.dtype),
        "optimizer_state": optimizer.allocated_state_bytes(spec, trained),
    }
    at_step = {"gradients": total.gradients, "optimizer_temporaries": optimizer.temporaries_bytes(spec, trained)}
    bucket = 2 * BUCKET_ELEMENTS * max(ITEMSIZE_BYTES[tensor.dtype] for tensor in computed if tensor.trained)
    gathered, reduced = _zero_buffers(spec, sharding, total, largest, bucket if all_buffers else 0)
    divided = sum(share.numel * share.num_copies * ITEMSIZE_BYTES[after.dtype]
                  for share, after in zip(trained, _trained(stored, computed)[1], strict=True))  # fmt: skip
    zero = _Zero(sharding, total.gradients, divided, gathered, reduced,
                 min(total.gradients, bucket) if all_buffers else 0)  # fmt: skip
    return RankCourse(walk_of(setup_of(spec, arch, computed, has_flash)), idle, at_step, zero=zero)


def _with_buffers(moment: Moment, zero: _Zero) -> Moment:
    terms, in_step = dict(moment.terms), moment.phase == "optimizer_step"
    gradients = terms.get("gradients", 0)
    if zero.sharding != "zero1":
        terms["gradients"] = share_of(gradients, zero.divided, zero.gradients)
    if zero.sharding == "zero3":
        terms["gathered_weights"] = 0 if in_step else zero.gathered
    elif in_step:
        terms["gathered_weights"] = zero.at_step
    terms["gradient_buckets"] = min(zero.reduced, gradients) if moment.phase == "backward" else 0
    return Moment(moment.phase, moment.label, {cause: size for cause, size in terms.items() if size})


def _trained(stored: Sequence[Tensor], computed: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return [tensor for tensor in stored if tensor.trained], [tensor for tensor in computed if tensor.trained]


def _zero3_weights(spec: CellSpec, computed: Sequence[Tensor], num_gpus: int) -> int:
    shares = [_share(spec, tensor, num_gpus, by_rows=False) for tensor in computed]
    return sum(
        (share.weights + share.scales) * tensor.num_copies for tensor, share in zip(computed, shares, strict=True)
    )


def _zero_buffers(spec: CellSpec, sharding: str, total: _Bytes, largest: _Bytes, bucket: int) -> tuple[int, int]:
    """(gathered, being reduced): with buckets at their defaults, or of the largest layer alone."""
    if sharding == "zero1":
        return 0, bucket
    if sharding == "zero2":
        return 0, bucket or largest.gradients
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
