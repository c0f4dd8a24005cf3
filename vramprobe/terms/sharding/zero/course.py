"""ZeRO-1 and ZeRO-2: one rank's step as a RankCourse.

In: a spec and its Division. Out: the course of the first rank. Weights are whole; the fp32 copy of the trained ones and
its state are sharded; gradients go into a bucket and are then sharded. Never imports torch.

* Under mixed precision, which accelerate passes on as ``bf16.enabled``, the whole module is cast to bf16. The shard of
  the fp32 copy stays all along (``weights``).
* A 16-bit model without mixed precision is averaged in fp32, as DeepSpeed is told of no dtype.
* The bucket is allocated whole; ZeRO-1 keeps all gradients until backward has ended, and its bucket over micro-steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vramprobe.architecture import architecture
from vramprobe.kernels.chip import Chip
from vramprobe.spec import CellSpec
from vramprobe.terms.cell import optimizer, parameters
from vramprobe.terms.cell.parameters import Tensor
from vramprobe.terms.cell.setup import setup_of
from vramprobe.terms.sharding.rank import Division, RankCourse, computed_tensors, stored_tensors
from vramprobe.terms.sharding.zero.buckets import BucketRank, Placed, Rules, placed
from vramprobe.terms.sharding.zero.tape import Bucket, bucket_walk
from vramprobe.terms.tape.graph import ITEMSIZE_BYTES

#: DeepSpeed's defaults in elements: reduce_bucket_size (deepspeed/runtime/zero/config.py).
BUCKET_ELEMENTS = 500_000_000
#: Bytes of an element while its gradient's norm is computed (stage_1_and_2.py, ``get_norm_dtype``: double).
NORM_BYTES = 8
#: The number of steps, which torch's AdamW keeps in a tensor and DeepSpeed's CPUAdam does not.
COUNTER_BYTES = 4


def course(spec: CellSpec, division: Division, chip: Chip) -> RankCourse:
    """The step of the rank with the first shard of the flat parameters, which has the largest pieces where an embedding
    comes first."""
    arch, stored = architecture(spec.architecture), stored_tensors(spec)
    computed = computed_tensors(spec, stored)
    trained = [tensor for tensor in computed if tensor.trained]
    weights = placed(trained)
    is_first_stage, on_host = division.sharding == "zero1", division.offload != "none"
    rules, bucket = bucket_rules(spec, trained[0], is_first_stage=is_first_stage, on_host=on_host)
    walk = bucket_walk(setup_of(spec, arch, computed, chip), bucket)
    rank = BucketRank(walk, weights, division.num_gpus, rules)
    if spec.grad_accum > 1 and not is_first_stage:
        rank = replace(rank, earlier_bytes=rank.kept_bytes)
    master = master_tensor(trained, rank.part)
    buffers = parameters.buffers_bytes(arch, spec.dtype)
    whole = spec.num_models * (parameters.weights_bytes(computed, spec.quant) + buffers)  # a reference's, at stage 0
    state = optimizer.allocated_state_bytes(spec, [master])
    stays = rules.is_compact and is_first_stage  # the bucket, of which its gradients are views
    at_step = {
        "gradients": max(rank.kept_bytes, rank.earlier_bytes) + (rank.left_bytes if stays else 0),
        "gradient_buckets": bucket.num_bytes if stays else 0,
    }
    if on_host:
        width = ITEMSIZE_BYTES[trained[0].dtype]
        buffer = max(tensor.numel for tensor in trained) * width  # of the largest tensor, on the GPU and on the host
        host = rank.part * (4 + 4 + width) + state - COUNTER_BYTES + buffer
        if spec.grad_accum > 1 and not is_first_stage and not rules.is_compact:  # ``accumulated_grads_in_cpu``
            host += width * sum([one.numel for one in weights if one.first < rank.part])
        return RankCourse(rank, {"weights": whole}, at_step, {"gradients": buffer}, 0, host)
    idle = {"weights": whole + master.num_bytes, "optimizer_state": state}
    return RankCourse(rank, idle, at_step | {"optimizer_temporaries": _stepping_bytes(spec, rank, master)}, {}, 0)


def _stepping_bytes(spec: CellSpec, rank: BucketRank, master: Tensor) -> int:
    """The most that norms, the joined gradients with their fp32 copy, or the optimizer take for a moment."""
    norms = [NORM_BYTES * (min(one.past, rank.part) - one.first) for one in own_weights(rank.weights, rank.part)]
    width = rank.rules.held
    joined = 0 if rank.rules.is_compact else rank.part * (width + (4 if width == 2 else 0))
    return max([*norms, joined, optimizer.temporaries_bytes(spec, [master])])


def own_weights(weights: Sequence[Placed], part: int) -> list[Placed]:
    """Those of which the first rank has any element."""
    return [one for one in weights if one.first < part]


def master_tensor(trained: Sequence[Tensor], num_elements: int) -> Tensor:
    """The rank's shard of the fp32 copy of what is trained, which the optimizer steps."""
    return trained[0]._replace(dtype="fp32", role="linear", shape=(num_elements,), num_copies=1)


def bucket_rules(
    spec: CellSpec, trained: Tensor, *, is_first_stage: bool, on_host: bool = False
) -> tuple[Rules, Bucket]:
    """The rules of ZeRO-1 or ZeRO-2; ``trained``: one of the weights, as the step computes with it."""
    width = ITEMSIZE_BYTES[trained.dtype]
    raised = spec.autocast == "none" and width == 2
    held = 4 if raised else width
    rules = Rules(
        in_bucket=held if is_first_stage else width,
        sent=held,
        kept=0 if on_host and not raised else held,
        held=held,
        is_compact=raised,
        stage=1 if is_first_stage else 2,
        bucket_elements=BUCKET_ELEMENTS,
    )
    bucket = Bucket(BUCKET_ELEMENTS, BUCKET_ELEMENTS * rules.in_bucket, is_first_stage, raised and is_first_stage)
    return rules, bucket
