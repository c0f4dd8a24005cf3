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
  its input to its stored dtype before FSDP lowers it again, so that each saves a copy of its own. Left out: that
  adapters are gathered one after the other, and not with their layer (0.02 to 0.04 % of 135M).
* Accumulated gradients: FSDP reduces them in the last micro-step alone (accelerate's ``no_sync``); until then each rank
  has them whole, in the dtype of the computation, and under FSDP1's SHARD_GRAD_OP the gathered weights, too.
* ``is_replicated``: the same among the ranks of one group (``fsdp-hybrid``, ``fsdp1-hybrid``). FSDP2 keeps what a group
  has reduced and all groups add up until backward has ended (_fsdp_param_group.py, ``_all_reduce_state``), which is
  more where it is cast to the dtype of stored weights.
* ``zero1``, ``zero2``: DeepSpeed's optimizer (zero_tape.py, zero_buckets.py). With ``bf16.enabled``, which accelerate
  sets for mixed precision, the whole module is cast to bf16; a copy in fp32 of what is trained, divided, is there all
  along (``weights``). The bucket is taken whole; ZeRO-1 keeps all gradients until backward has ended, and its bucket
  over micro-steps. A 16-bit model without mixed precision is averaged in fp32, as DeepSpeed is told of no dtype.
* ``zero3``: each tensor is divided, small ones kept whole beside (zero_ranks.py). Its buckets are taken whole, too, and
  stay; weights are gathered, looked ahead for and let go of module by module (zero_gather.py), of which each layer has
  the most. Its own linear layers save the inputs of frozen weights, too. Adapters stay fp32, as nothing runs under
  autocast. A 16-bit model without mixed precision is made in fp32.
* ``ddp``: all is whole, and DDP's buckets hold the gradients a second time (``gradient_as_bucket_view`` is off).

What is not counted: NCCL's buffers and the CUDA context (predict/prediction.py sets both aside in a verdict), rounding
to 512 bytes and what the caching allocator does not split off. What libraries did otherwise
when published LoRA peaks under FSDP1 were measured (torch 2.4, reentrant checkpointing) is in
benchmarks/published_ranks.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment, course_of, moments, optimizer, parameters
from vramprobe.terms.flat_ranks import flat_course
from vramprobe.terms.graph import ITEMSIZE_BYTES
from vramprobe.terms.parameters import Tensor
from vramprobe.terms.rank_parts import (
    RankCourse,
    Share,
    computed_tensors,
    moments_of,
    prepared_tensors,
    quantised_parts,
    share_of,
    walked_micro_steps,
)
from vramprobe.terms.rank_tape import Unit, Units, rank_units, rank_walk
from vramprobe.terms.setup import setup_of
from vramprobe.terms.zero_ranks import bucket_course, stage3_course

#: Those of choices.Sharding that are counted: DDP; DeepSpeed's stages; FSDP2's and FSDP1's FULL_SHARD, SHARD_GRAD_OP.
Sharding = Literal[
    "ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-shard-grad-op", "fsdp1", "fsdp1-shard-grad-op",
]  # fmt: skip
FSDP = ("fsdp", "fsdp-shard-grad-op")
_FLAT = ("fsdp1", "fsdp1-shard-grad-op")
#: Those under which a rank holds less than a single GPU, and that are asked for where nobody names one.
DIVIDING: tuple[Sharding, ...] = ("zero1", "zero2", "zero3", "fsdp", "fsdp-shard-grad-op")


def rank_moments(
    spec: CellSpec, num_gpus: int, sharding: Sharding, *, all_buffers: bool, has_flash: bool = True,
    is_replicated: bool = False, offload: str = "none",
) -> list[Moment]:  # fmt: skip
    """The moments of a step on the rank that holds the most, in the order of the step.

    Raises UnsupportedArchitecture where layers differ in their weights or the loss is fused: there is no rule here.

    ``all_buffers``: of DeepSpeed, its buckets are full and its prefetched layers there, as by its defaults; without,
    one layer at a time. Of FSDP, the embedding, last norm and head are one unit with the root, as without accelerate.
    ``is_replicated``: of FSDP, the ranks are one group of several, among which gradients are added up (HYBRID_SHARD).
    ``offload``: what lies in host memory (choices.Offload), of weights that are not quantised.
    """
    if num_gpus == 1:
        return moments(spec, has_flash)
    made = course_of(spec, has_flash).rank_moments
    micro_steps = walked_micro_steps(spec)
    key = (sharding, num_gpus, all_buffers, is_replicated, offload, micro_steps, spec.batch_size, spec.seq_len)
    if sharding == "ddp":  # the same on any number
        key = (sharding, spec.batch_size, spec.seq_len)
    if key not in made:
        made[key] = _counted(
            spec, num_gpus, sharding, all_buffers=all_buffers, has_flash=has_flash, is_replicated=is_replicated,
            offload=offload,
        )  # fmt: skip
    return made[key]


def _counted(
    spec: CellSpec, num_gpus: int, sharding: Sharding, *, all_buffers: bool, has_flash: bool, is_replicated: bool,
    offload: str,
) -> list[Moment]:  # fmt: skip
    if sharding == "ddp":  # its reducer makes its buckets, as large as the gradients, when it is built, and keeps them
        buckets = {"gradient_buckets": course_of(spec, has_flash).at_step["gradients"]}
        return [Moment(one.phase, one.label, one.terms | buckets) for one in moments(spec, has_flash)]
    course = _kept(
        spec, num_gpus, sharding, all_buffers=all_buffers, has_flash=has_flash, is_replicated=is_replicated,
        offload=offload,
    )  # fmt: skip
    return moments_of(course, spec)


def host_bytes(spec: CellSpec, num_gpus: int, sharding: Sharding, offload: str, has_flash: bool = True) -> int:
    """What a rank has in host memory between two steps: each tensor once, without what pinning rounds up."""
    return _kept(spec, num_gpus, sharding, all_buffers=False, has_flash=has_flash, offload=offload).host


def whole_packed_bytes(spec: CellSpec, num_gpus: int, sharding: Sharding, has_flash: bool = True) -> int:
    """What a rank of FSDP holds more of quantised weights where they are not divided."""
    return _kept(spec, num_gpus, sharding, all_buffers=False, has_flash=has_flash).undivided


def _kept(
    spec: CellSpec, num_gpus: int, sharding: Sharding, *, all_buffers: bool, has_flash: bool,
    is_replicated: bool = False, offload: str = "none",
) -> RankCourse:  # fmt: skip
    """The course of a rank, kept for the next one of a cell that differs in batch size and length only."""
    ranks = course_of(spec, has_flash).ranks
    key = (num_gpus, sharding, all_buffers, is_replicated, offload, walked_micro_steps(spec))
    if key not in ranks:
        ranks[key] = _course(
            spec, num_gpus, sharding, all_buffers=all_buffers, has_flash=has_flash, is_replicated=is_replicated,
            offload=offload,
        )  # fmt: skip
    return ranks[key]


def _course(
    spec: CellSpec, num_gpus: int, sharding: Sharding, *, all_buffers: bool, has_flash: bool, is_replicated: bool,
    offload: str,
) -> RankCourse:  # fmt: skip
    if offload != "none" and spec.quant != "none":
        raise UnsupportedArchitecture(
            f"there is no arithmetic for offload {offload} of {spec.quant} weights; run it, on emulated GPUs say: "
            "vramprobe measure --emulate"
        )
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
        return _fsdp(
            spec, num_gpus, reshards=sharding == "fsdp", apart=not all_buffers, has_flash=has_flash,
            is_replicated=is_replicated, on_host=offload != "none",
        )  # fmt: skip
    if sharding in _FLAT:
        return flat_course(spec, num_gpus, reshards=sharding == "fsdp1", has_flash=has_flash, on_host=offload != "none")
    if sharding in ("zero1", "zero2"):
        return bucket_course(
            spec, num_gpus, is_first_stage=sharding == "zero1", has_flash=has_flash, on_host=offload != "none"
        )
    return stage3_course(spec, num_gpus, has_flash=has_flash, offload=offload)


# -- FSDP ---------------------------------------------------------------------------------------------------------


def _fsdp(
    spec: CellSpec, num_gpus: int, *, reshards: bool, apart: bool, has_flash: bool, is_replicated: bool, on_host: bool
) -> RankCourse:
    arch, stored = architecture(spec.architecture), prepared_tensors(spec)
    computed = computed_tensors(spec, stored)
    shares = [share_of(spec, tensor, num_gpus, by_rows=True) for tensor in stored]
    units = fsdp_units(spec, num_gpus, reshards=reshards, apart=apart, is_replicated=is_replicated, on_host=on_host)
    walk = rank_walk(setup_of(spec, arch, computed, has_flash), units)
    trained = [share.as_state for tensor, share in zip(stored, shares, strict=True) if tensor.trained]
    idle = {
        "weights": parameters.buffers_bytes(arch, spec.dtype)
                   + sum((share.weights + share.scales) * tensor.num_copies
                         for tensor, share in zip(stored, shares, strict=True)),
        "optimizer_state": optimizer.allocated_state_bytes(spec, trained),
    }  # fmt: skip
    at_step = {"gradients": sum(tensor.num_bytes * tensor.num_copies for tensor in trained),
               "optimizer_temporaries": optimizer.temporaries_bytes(spec, trained)}  # fmt: skip
    undivided = sum((quantised_parts(spec, tensor)[0] - share.weights) * tensor.num_copies
                    for tensor, share in zip(stored, shares, strict=True) if tensor.quantised)  # fmt: skip
    if on_host:
        buffers = parameters.buffers_bytes(arch, spec.dtype)
        held = sum(idle.values()) - buffers + at_step["gradients"]
        return RankCourse(walk, {"weights": buffers}, {}, {}, {}, undivided, held)
    return RankCourse(walk, idle, at_step, {}, {}, undivided)


def fsdp_units(
    spec: CellSpec, num_gpus: int, *, reshards: bool, apart: bool, is_replicated: bool, on_host: bool = False
) -> Units:
    """What a rank of FSDP2 gathers and reduces at a time, of so many that share the model."""
    stored = prepared_tensors(spec)
    shares = [share_of(spec, tensor, num_gpus, by_rows=True) for tensor in stored]
    units = _units(
        stored, computed_tensors(spec, stored), shares, num_gpus, reshards=reshards, apart=apart, on_host=on_host
    )
    return units._replace(is_replicated=is_replicated, on_host=on_host, micro_steps=walked_micro_steps(spec))


def unit_parts(spec: CellSpec, num_gpus: int) -> dict[str, list[int]]:
    """Bytes of each weight that is copied out, by the name of its unit, a layer's under "layer"."""
    stored = prepared_tensors(spec)
    found: dict[str, list[int]] = {"layer": [], "root": [], "embedding": [], "loss": []}
    is_tied = not any(tensor.name.startswith("lm_head.") for tensor in stored)
    for tensor, computed in zip(stored, computed_tensors(spec, stored), strict=True):
        unit = _unit(tensor, computed, share_of(spec, tensor, num_gpus, by_rows=True), num_gpus, False)
        name = (
            "layer"
            if tensor.per_layer
            else "root"
            if is_tied
            else "embedding"
            if tensor.role == "embedding"
            else "loss"
        )
        found[name].append(unit.gathered)
    return found


def _units(
    stored: Sequence[Tensor], computed: Sequence[Tensor], shares: Sequence[Share], num_gpus: int, *, reshards: bool,
    apart: bool, on_host: bool = False,
) -> Units:  # fmt: skip
    """Accelerate's (utils/fsdp_utils.py, ``fsdp2_prepare_model``): each layer, the embedding, the last norm with the
    head. Tied, the embedding is in one unit with the norm; without ``apart`` all outside the layers is the root's."""
    made = [_unit(*one, num_gpus, on_host) for one in zip(stored, computed, shares, strict=True)]
    pairs = list(zip(stored, made, strict=True))
    layer = rank_units([unit for tensor, unit in pairs if tensor.per_layer])
    outside = [(tensor, unit) for tensor, unit in pairs if not tensor.per_layer]
    if not apart or not any(tensor.name.startswith("lm_head.") for tensor, _ in outside):
        return Units(layer, rank_units([unit for _, unit in outside]), apart=apart, reshards=reshards)
    embedding = rank_units([unit for tensor, unit in outside if tensor.role == "embedding"])
    tail = rank_units([unit for tensor, unit in outside if tensor.role != "embedding"])
    return Units(layer, Unit(), embedding, tail, apart=True, reshards=reshards)


def _unit(stored: Tensor, computed: Tensor, share: Share, num_gpus: int, on_host: bool) -> Unit:
    """One copy of a tensor, padded."""
    width = 1 if stored.quantised else ITEMSIZE_BYTES[computed.dtype]
    sent = share.elements * width
    is_cast = not stored.quantised and stored.dtype != computed.dtype
    cast = sent if is_cast or on_host else 0
    if not stored.trained:
        return Unit(sent * num_gpus, cast)
    return Unit(sent * num_gpus, cast, sent * num_gpus, sent, share.weights)
