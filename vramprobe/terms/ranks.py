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
* ``fsdp1``, ``fsdp1-shard-grad-op``: FSDP1 as accelerate asks for it (flat_tape.py): a unit is one flat parameter, its
  tensors aligned to 16 bytes and the whole padded to a multiple of N; adapters are units of their own, and each raises
  its input to its stored dtype before FSDP lowers it again, so that each saves a copy of its own. Left out: that adapters
  are gathered one after the other, and not with their layer (0.02 to 0.04 % of 135M).
* ``zero1``, ``zero2``: DeepSpeed's optimizer (zero_tape.py). With ``bf16.enabled``, which accelerate sets for mixed
  precision, the whole module is cast to bf16; a copy in fp32 of what is trained, divided, is always there (``weights``).
  The bucket is taken whole. A 16-bit model without mixed precision is averaged in fp32, as DeepSpeed is told of no dtype.
* ``zero3``: DeepSpeed's engine cuts what is flattened, and casts as above. Read, and not yet held to what runs: it takes
  its buckets whole, too, and prefetches, so that small models take several GB more than is counted (benchmarks/ranks.md).
* ``ddp``: all is whole, and DDP's buckets hold the gradients a second time (``gradient_as_bucket_view`` is off).

What is not counted: NCCL's buffers and the CUDA context (predict/prediction.py sets both aside in a verdict), rounding
to 512 bytes and what the caching allocator does not split off, what a trainer's ``no_sync`` keeps whole when gradients are
accumulated, offloading to the host. What libraries did otherwise when published LoRA peaks under FSDP1 were measured
(torch 2.4, reentrant checkpointing) is in benchmarks/published_ranks.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment, moments, optimizer, parameters
from vramprobe.terms.flat_tape import flat_walk
from vramprobe.terms.graph import CAUSES, ITEMSIZE_BYTES, Place
from vramprobe.terms.parameters import Tensor
from vramprobe.terms.rank_tape import RANK_CAUSES, Unit, Units, rank_units, rank_walk
from vramprobe.terms.setup import setup_of
from vramprobe.terms.walk import walk_of
from vramprobe.terms.zero_tape import Bucket, zero_walk

#: Those of choices.Sharding that are counted: DDP; DeepSpeed's stages; FSDP2's and FSDP1's FULL_SHARD, SHARD_GRAD_OP.
Sharding = Literal[
    "ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-shard-grad-op", "fsdp1", "fsdp1-shard-grad-op",
]  # fmt: skip
FSDP = ("fsdp", "fsdp-shard-grad-op")
_FLAT = ("fsdp1", "fsdp1-shard-grad-op")
#: Those under which a rank holds less than a single GPU, and that are asked for where nobody names one.
DIVIDING: tuple[Sharding, ...] = ("zero1", "zero2", "zero3", "fsdp", "fsdp-shard-grad-op")
#: A tensor in a flat parameter begins at a multiple of so many bytes (_flat_param.py, ``_get_aligned_numel``).
_ALIGNED_BYTES = 16
#: DeepSpeed's defaults in elements: reduce_bucket_size and allgather_bucket_size (two are alive with overlap_comm), and
#: stage3_max_live_parameters (deepspeed/runtime/zero/config.py).
BUCKET_ELEMENTS = 500_000_000
MAX_LIVE_ELEMENTS = 1_000_000_000
#: Of an element, while its gradient's norm is taken (stage_1_and_2.py, ``get_norm_dtype``: double).
_NORM_BYTES = 8


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
    if sharding == "ddp":
        return [_with_buckets(moment, spec) for moment in moments(spec, has_flash)]
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
    if sharding in _FLAT:
        return _fsdp1(spec, num_gpus, reshards=sharding == "fsdp1", has_flash=has_flash)
    if sharding in ("zero1", "zero2"):
        return _zero12(spec, num_gpus, is_first_stage=sharding == "zero1", has_flash=has_flash)
    return _zero3(spec, num_gpus, all_buffers=all_buffers, has_flash=has_flash)


def _with_buckets(moment: Moment, spec: CellSpec) -> Moment:
    """DDP's reducer makes its buckets when it is built and keeps them."""
    trained = [tensor for tensor in _stored(spec) if tensor.trained]
    buckets = sum(tensor.num_bytes * tensor.num_copies for tensor in trained)
    return Moment(moment.phase, moment.label, moment.terms | {"gradient_buckets": buckets})


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


def whole_packed_bytes(spec: CellSpec, num_gpus: int) -> int:
    """What a rank of FSDP holds more of quantised weights where they are not divided."""
    quantised = [tensor for tensor in _stored(spec) if tensor.quantised]
    return sum(
        (_quantised_parts(spec, tensor)[0] - _share(spec, tensor, num_gpus, by_rows=True).weights) * tensor.num_copies
        for tensor in quantised
    )


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


def _fsdp(spec: CellSpec, num_gpus: int, *, reshards: bool, apart: bool, has_flash: bool) -> list[Moment]:
    arch, stored = architecture(spec.architecture), _stored(spec)
    computed = _computed(spec, stored)
    shares = [_share(spec, tensor, num_gpus, by_rows=True) for tensor in stored]
    units = _units(stored, computed, shares, num_gpus, reshards=reshards, apart=apart)
    walk = rank_walk(setup_of(spec, arch, computed, has_flash), units)
    trained = [share.as_state for tensor, share in zip(stored, shares, strict=True) if tensor.trained]
    idle = {
        "weights": parameters.buffers_bytes(arch, spec.dtype)
                   + sum((share.weights + share.scales) * tensor.num_copies
                         for tensor, share in zip(stored, shares, strict=True)),
        "optimizer_state": optimizer.allocated_state_bytes(spec, trained),
        "batch": 2 * 8 * spec.num_tokens,
    }  # fmt: skip
    at_step = {"gradients": sum(tensor.num_bytes * tensor.num_copies for tensor in trained),
               "optimizer_temporaries": optimizer.temporaries_bytes(spec, trained)}  # fmt: skip
    return _made(walk.highest(spec.batch_size, spec.seq_len), idle, at_step)


# -- FSDP1 --------------------------------------------------------------------------------------------------------


def _fsdp1(spec: CellSpec, num_gpus: int, *, reshards: bool, has_flash: bool) -> list[Moment]:
    """Units are the layers and, as the root's, all outside them; an adapter is a unit of its own (peft's policy)."""
    arch, stored = architecture(spec.architecture), _stored(spec)
    computed = _computed(spec, stored)
    made, held, trained = {True: [], False: []}, 0, []
    for per_layer in (True, False):
        for group in _flat_groups(stored, computed, per_layer=per_layer):
            unit, shard = _flat_unit(spec, group, num_gpus)
            copies = group[0][0].num_copies if per_layer else 1
            made[per_layer].append(unit)
            held += shard * copies
            held += sum(_quantised_parts(spec, one)[1] for one, _ in group if one.quantised) * copies
            if unit.reduced:
                first = group[0][0]
                width = ITEMSIZE_BYTES[first.dtype]
                trained.append(first._replace(shape=(shard // width,), num_copies=copies))
    units = Units(rank_units(made[True]), rank_units(made[False]), reshards=reshards)
    # peft asks an adapter for its dtype before its unit is gathered, and FSDP casts what comes to the gathered one's.
    raised = spec.lora_dtype if spec.autocast != "none" and spec.method != "full" else None
    walk = flat_walk(replace(setup_of(spec, arch, computed, has_flash), adapter_input=raised), units)
    idle = {
        "weights": parameters.buffers_bytes(arch, spec.dtype) + held,
        "optimizer_state": optimizer.allocated_state_bytes(spec, trained),
        "batch": 2 * 8 * spec.num_tokens,
    }
    at_step = {"gradients": sum(tensor.num_bytes * tensor.num_copies for tensor in trained),
               "optimizer_temporaries": optimizer.temporaries_bytes(spec, trained)}  # fmt: skip
    return _made(walk.highest(spec.batch_size, spec.seq_len), idle, at_step)


_Pair = tuple[Tensor, Tensor]  # as stored, as computed with


def _flat_groups(stored: Sequence[Tensor], computed: Sequence[Tensor], *, per_layer: bool) -> list[list[_Pair]]:
    """The tensors of each flat parameter: an adapter's alone, all others of a layer or outside the layers together."""
    pairs = [pair for pair in zip(stored, computed, strict=True) if pair[0].per_layer == per_layer]
    has_frozen = any(not one.trained for one in stored)
    together = [pair for pair in pairs if not (has_frozen and pair[0].trained)]
    return [group for group in (together, *([pair] for pair in pairs if pair not in together)) if group]


def _flat_unit(spec: CellSpec, group: Sequence[_Pair], num_gpus: int) -> tuple[Unit, int]:
    """(what is gathered and reduced, this rank's bytes of it) of one flat parameter."""
    stored_bytes, computed_bytes = ITEMSIZE_BYTES[group[0][0].dtype], ITEMSIZE_BYTES[group[0][1].dtype]
    aligned = _ALIGNED_BYTES // computed_bytes
    elements = 0
    for stored, _ in group:
        numel = stored.numel
        if stored.quantised:
            computed_bytes = stored_bytes = ITEMSIZE_BYTES[spec.dtype]
            numel = -(-_quantised_parts(spec, stored)[0] // stored_bytes)
        elements += -(-numel // aligned) * aligned
    share = -(-elements // num_gpus)
    sent, shard = share * computed_bytes, share * stored_bytes
    cast = sent if stored_bytes != computed_bytes else 0
    if not group[0][0].trained:
        return Unit(sent * num_gpus, cast), shard
    return Unit(sent * num_gpus, cast, sent * num_gpus, sent, shard), shard


def _made(places: dict[Place, dict[str, int]], idle: dict[str, int], at_step: dict[str, int]) -> list[Moment]:
    found = [*places.items(), (("optimizer_step", "optimizer"), at_step)]
    return [
        Moment(phase, label, {cause: size for cause in (*CAUSES, *RANK_CAUSES) if (size := (idle | terms).get(cause))})
        for (phase, label), terms in found
    ]


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


def _zero12(spec: CellSpec, num_gpus: int, *, is_first_stage: bool, has_flash: bool) -> list[Moment]:
    """Weights whole, an fp32 copy of the trained ones and its state divided; gradients in a bucket, then divided.

    Of the rank with the first part of the flat parameters, which has the largest pieces where an embedding comes first.
    """
    arch, stored = architecture(spec.architecture), _stored(spec)
    computed = _computed(spec, stored)
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
    return _made(walk.highest(spec.batch_size, spec.seq_len), idle, at_step)


def _first_pieces(trained: Sequence[Tensor], part: int) -> list[tuple[int, int]]:
    """(elements, of them on the rank) of each tensor in the first part: what stands outside the layers in front first."""
    outside = [tensor for tensor in trained if not tensor.per_layer]
    front = [tensor for tensor in outside if tensor.role == "embedding"]
    layers = [tensor for tensor in trained if tensor.per_layer]
    found, left = [], part
    depth = max((tensor.num_copies for tensor in layers), default=0)
    for tensor in (*front, *layers * depth, *(tensor for tensor in outside if tensor not in front)):
        if left <= 0:
            break
        found.append((tensor.numel, min(tensor.numel, left)))
        left -= tensor.numel
    return found


class _Bytes(NamedTuple):
    """Bytes of a stretch of the model that is gathered at once: its weights, and its gradients."""

    weights: int
    gradients: int


def _zero3(spec: CellSpec, num_gpus: int, *, all_buffers: bool, has_flash: bool) -> list[Moment]:
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
    for moment in _made(places, idle, at_step):
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
    shares = [_share(spec, tensor, num_gpus, by_rows=False) for tensor in computed]
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
