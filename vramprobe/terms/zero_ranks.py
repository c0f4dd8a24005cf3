"""One rank under DeepSpeed's ZeRO -> the course of the rank that holds the most, by arithmetic.

In: a spec, the stage and N. Out: a RankCourse, of which ranks.py makes moments; what is counted is said there. No torch
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vramprobe.architecture import architecture
from vramprobe.spec import CellSpec
from vramprobe.terms import optimizer, parameters
from vramprobe.terms.graph import ITEMSIZE_BYTES
from vramprobe.terms.parameters import Tensor
from vramprobe.terms.rank_parts import RankCourse, computed_tensors, quantised_parts, share_of, stored_tensors
from vramprobe.terms.setup import setup_of
from vramprobe.terms.zero_buckets import BucketRank, Rules, placed
from vramprobe.terms.zero_gather import PERSISTENT_ELEMENTS, gathered_bytes
from vramprobe.terms.zero_tape import Bucket, bucket_walk

#: DeepSpeed's defaults in elements: reduce_bucket_size, and of ZeRO-3 how many are stepped at once, sub_group_size
#: (deepspeed/runtime/zero/config.py).
BUCKET_ELEMENTS = 500_000_000
SUB_GROUP_ELEMENTS = 1_000_000_000
#: Of an element, while its gradient's norm is taken (stage_1_and_2.py, ``get_norm_dtype``: double).
NORM_BYTES = 8
#: How many steps there were, which torch's AdamW keeps in a tensor and DeepSpeed's CPUAdam does not.
_COUNTER_BYTES = 4


def bucket_course(
    spec: CellSpec, num_gpus: int, *, is_first_stage: bool, has_flash: bool, on_host: bool = False
) -> RankCourse:
    """Weights whole, an fp32 copy of the trained ones and its state divided; gradients in a bucket, then divided.

    Of the rank with the first part of the flat parameters, which has the largest pieces where an embedding comes first.
    """
    arch, stored = architecture(spec.architecture), stored_tensors(spec)
    computed = computed_tensors(spec, stored)
    trained = [tensor for tensor in computed if tensor.trained]
    weights = placed(trained)
    width = ITEMSIZE_BYTES[trained[0].dtype]
    rules, bucket = bucket_rules(spec, trained[0], is_first_stage=is_first_stage, on_host=on_host)
    raised = rules.is_compact
    walk = bucket_walk(setup_of(spec, arch, computed, has_flash), bucket)
    rank = BucketRank(walk, weights, num_gpus, rules)
    if spec.grad_accum > 1 and not is_first_stage:
        rank = replace(rank, earlier_bytes=rank.kept_bytes)
    part = rank.part
    master = trained[0]._replace(dtype="fp32", role="linear", shape=(part,), num_copies=1)
    kept = max(rank.kept_bytes, rank.earlier_bytes)
    idle = {
        "weights": parameters.weights_bytes(computed, spec.quant)
        + master.num_bytes
        + parameters.buffers_bytes(arch, spec.dtype),
        "optimizer_state": optimizer.allocated_state_bytes(spec, [master]),
    }
    norm = NORM_BYTES * max([min(one.past, part) - one.first for one in weights if one.first < part])
    # Joined and raised to fp32 for the step; in fp32 from the first it is the gradient itself.
    stepped = 0 if raised else part * (width + (4 if width == 2 else 0))
    stays = raised and is_first_stage  # its gradients are views of the bucket
    at_step = {"gradients": kept + (rank.left_bytes if stays else 0),
               "gradient_buckets": bucket.num_bytes if stays else 0,
               "optimizer_temporaries": max(norm, stepped, optimizer.temporaries_bytes(spec, [master]))}  # fmt: skip
    if on_host:
        state = idle.pop("optimizer_state")
        idle["weights"] -= master.num_bytes
        del at_step["optimizer_temporaries"]
        buffer = max(tensor.numel for tensor in trained) * width  # of the largest tensor, there and here
        host = part * (4 + 4 + width) + state - _COUNTER_BYTES + buffer
        if spec.grad_accum > 1 and not is_first_stage and not raised:  # ``accumulated_grads_in_cpu``: whole tensors
            host += width * sum([one.numel for one in weights if one.first < part])
        return RankCourse(rank, idle, at_step, {"gradients": buffer}, {}, 0, host)
    return RankCourse(rank, idle, at_step, {}, {}, 0)


def bucket_rules(
    spec: CellSpec, trained: Tensor, *, is_first_stage: bool, on_host: bool = False
) -> tuple[Rules, Bucket]:
    """Of ZeRO-1 and ZeRO-2; ``trained``: one of the weights, as the step computes with it."""
    width = ITEMSIZE_BYTES[trained.dtype]
    raised = spec.autocast == "none" and width == 2  # a 16-bit model that DeepSpeed is not told of: averaged in fp32
    held = 4 if raised else width
    rules = Rules(
        in_bucket=held if is_first_stage else width, sent=held, kept=0 if on_host and not raised else held, held=held,
        is_compact=raised, stage=1 if is_first_stage else 2, bucket_elements=BUCKET_ELEMENTS,
    )  # fmt: skip
    bucket = Bucket(BUCKET_ELEMENTS, BUCKET_ELEMENTS * rules.in_bucket, is_first_stage, raised and is_first_stage)
    return rules, bucket


def _as_divided(spec: CellSpec, tensor: Tensor) -> Tensor:
    """A packed weight is divided and gathered as it is stored: so many elements of ``bnb_4bit_quant_storage``."""
    if not tensor.quantised:
        return tensor
    packed, _ = quantised_parts(spec, tensor)
    return tensor._replace(shape=(-(-packed // ITEMSIZE_BYTES[spec.dtype]),), dtype=spec.dtype, quantised=False)


def divided_dtype(spec: CellSpec) -> str:
    """Of what DeepSpeed makes: bf16 where it is told of it, else fp32."""
    return "fp32" if spec.autocast == "none" else spec.autocast


def divided_tensors(spec: CellSpec) -> tuple[Tensor, ...]:
    """As ZeRO-3 has them: what it makes itself in one dtype, beside adapters and quantised weights."""
    dtype = divided_dtype(spec)
    return tuple([
        one if one.quantised or (one.role == "adapter" and spec.quant == "none") else one._replace(dtype=dtype)
        for one in stored_tensors(spec)
    ])  # fmt: skip


def gathered_tensors(spec: CellSpec, names: Sequence[str]) -> list[Tensor]:
    """Those of a step that ask for these, each as it is divided and gathered."""
    divided = {tensor.name: _as_divided(spec, tensor) for tensor in divided_tensors(spec)}
    return [divided[name] for name in names if name in divided]


def stage3_rules(spec: CellSpec) -> tuple[Rules, Bucket]:
    """Of ZeRO-3, whose buckets are there all along."""
    width = ITEMSIZE_BYTES[divided_dtype(spec)]
    rules = Rules(
        in_bucket=width, sent=width, kept=0, held=0, is_compact=False, stage=3, bucket_elements=BUCKET_ELEMENTS
    )
    return rules, Bucket(BUCKET_ELEMENTS, 0, is_first_stage=False, raised=False)


def stage3_course(spec: CellSpec, num_gpus: int, *, has_flash: bool, offload: str = "none") -> RankCourse:
    """Each tensor divided, in bf16 where DeepSpeed is told of it, else in fp32; with an fp32 copy, state and gradients.

    Buckets and gradients are there all along (stage3.py, ``__ipg_bucket_flat_buffer``).
    A small tensor is whole beside its part (``persistence_threshold``), but while the optimizer steps. Adapters, which
    are made after ZeRO's init, keep their dtype; those of quantised weights, which are loaded whole, are cast with the
    module. Nothing runs under autocast. What is gathered when is in zero_gather.py; here each place has the most that
    is gathered within it. Offloaded parts of small tensors come to the card to be gathered after the step.
    """
    arch = architecture(spec.architecture)
    computed = divided_tensors(spec)
    divided = {tensor.name: _as_divided(spec, tensor) for tensor in computed}
    dtype = divided_dtype(spec)
    small = sum(one.num_bytes * one.num_copies for one in divided.values() if one.numel < PERSISTENT_ELEMENTS)
    shares = [share_of(spec, tensor, num_gpus, by_rows=False) for tensor in computed]
    width = ITEMSIZE_BYTES[dtype]
    parts = [share.elements * tensor.num_copies for tensor, share in zip(computed, shares, strict=True)
             if tensor.trained]  # fmt: skip
    part = sum(parts)
    master = next(tensor for tensor in computed if tensor.trained)._replace(
        dtype="fp32", role="linear", shape=(part,), num_copies=1
    )
    held = {
        "weights": sum((share.weights + share.scales) * tensor.num_copies
                       for tensor, share in zip(computed, shares, strict=True))
                   + small + master.num_bytes + parameters.buffers_bytes(arch, spec.dtype),
        "gradients": part * width,
        "optimizer_state": optimizer.allocated_state_bytes(spec, [master]),
        "gradient_buckets": BUCKET_ELEMENTS * width,
    }  # fmt: skip
    largest = max(share.elements for tensor, share in zip(computed, shares, strict=True) if tensor.trained)
    raised = min(part, SUB_GROUP_ELEMENTS) * (width + (4 if width == 2 else 0))  # joined, and in fp32
    stepped = max(NORM_BYTES * largest, raised, optimizer.temporaries_bytes(spec, [master]))
    temporaries = max(stepped - small, 0)  # what is kept whole goes before the step, and comes back after it
    rules, bucket = stage3_rules(spec)
    walk = bucket_walk(setup_of(spec, arch, computed, has_flash, is_zero3=True), bucket)
    gathered = gathered_bytes(
        gathered_tensors(spec, walk.names), arch.num_layers, num_gpus, computes_again=spec.gradient_checkpointing,
        reenters=arch.habits.reenters, is_quantised=spec.quant != "none",
    )  # fmt: skip
    rank = BucketRank(
        walk, placed([tensor for tensor in computed if tensor.trained]), num_gpus, rules, gathered=gathered
    )
    if offload == "none":
        return RankCourse(rank, {}, {"optimizer_temporaries": temporaries}, held, {}, 0)
    shares_bytes = sum(share.weights * tensor.num_copies for tensor, share in zip(computed, shares, strict=True))
    moved = shares_bytes if offload == "params" else 0
    on_card = {"weights": held["weights"] - master.num_bytes - moved, "gradient_buckets": held["gradient_buckets"]}
    host = part * (4 + 4 + width) + held["optimizer_state"] - _COUNTER_BYTES + moved
    parts_of_small = sum(share.weights * tensor.num_copies for tensor, share in zip(computed, shares, strict=True)
                         if tensor.numel < PERSISTENT_ELEMENTS)  # fmt: skip
    at_step = {"optimizer_temporaries": parts_of_small} if moved else {}
    return RankCourse(rank, {}, at_step, on_card, {}, 0, host)
