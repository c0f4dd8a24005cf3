"""ZeRO-3: one rank's step as a RankCourse.

In: a spec and its Division. Out: the course of any rank, as each tensor is sharded by itself. Never imports torch.

* Weights are sharded in bf16 where DeepSpeed is told of it, else in fp32, and so is a 16-bit model without mixed
  precision; beside them stand an fp32 copy of the trained ones, its state and its gradients, all sharded.
* A small tensor is whole beside its shard (``persistence_threshold``), except while the optimizer steps.
* Adapters are made after ZeRO's init and keep their dtype; those of quantized weights, which are loaded whole, are cast
  with the module. Nothing runs under autocast.
* Buckets and gradients are allocated once for all (stage3.py, ``__ipg_bucket_flat_buffer``).
* DeepSpeed's own linear layers save the inputs of frozen weights, too (deepspeed/runtime/zero/linear.py).
* Which weights are gathered when is in gather.py; each place has the most that is gathered within it.
* With offload, the shards of small tensors come to the GPU to be gathered after the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from vramprobe.architecture import architecture
from vramprobe.kernels.chip import Chip
from vramprobe.spec import CellSpec
from vramprobe.terms.cell import optimizer, parameters
from vramprobe.terms.cell.parameters import Tensor
from vramprobe.terms.cell.setup import setup_of
from vramprobe.terms.sharding.rank import Division, RankCourse, quantised_parts, share_of, stored_tensors
from vramprobe.terms.sharding.zero.buckets import BucketRank, Rules, placed
from vramprobe.terms.sharding.zero.course import BUCKET_ELEMENTS, COUNTER_BYTES, NORM_BYTES, master_tensor
from vramprobe.terms.sharding.zero.tape import Bucket, bucket_walk
from vramprobe.terms.sharding.zero3.gather import PERSISTENT_ELEMENTS, gathered_bytes
from vramprobe.terms.tape.graph import ITEMSIZE_BYTES

#: DeepSpeed's default of elements that are stepped at once: sub_group_size (deepspeed/runtime/zero/config.py).
SUB_GROUP_ELEMENTS = 1_000_000_000


def course(spec: CellSpec, division: Division, chip: Chip) -> RankCourse:
    """The step of one rank."""
    arch, tensors = architecture(spec.architecture), divided_tensors(spec)
    shares = [share_of(spec, tensor, division.num_gpus, by_rows=False) for tensor in tensors]
    pairs = list(zip(tensors, shares, strict=True))
    width = ITEMSIZE_BYTES[divided_dtype(spec)]
    trained = [tensor for tensor in tensors if tensor.trained]
    part = sum(share.elements * tensor.num_copies for tensor, share in pairs if tensor.trained)
    master = master_tensor(trained, part)
    rules, bucket = stage3_rules(spec)
    walk = bucket_walk(setup_of(spec, arch, tensors, chip, is_zero3=True), bucket)
    gathered = gathered_bytes(
        gathered_tensors(spec, walk.names),
        arch.num_layers,
        division.num_gpus,
        computes_again=spec.gradient_checkpointing,
        reenters=arch.habits.reenters,
        is_quantised=spec.quant != "none",
    )
    rank = BucketRank(walk, placed(trained), division.num_gpus, rules, gathered=gathered)
    as_divided = [_as_divided(spec, tensor) for tensor in tensors]
    small = sum(one.num_bytes * one.num_copies for one in as_divided if one.numel < PERSISTENT_ELEMENTS)
    weights = sum((share.weights + share.scales) * tensor.num_copies for tensor, share in pairs)
    weights += small + parameters.buffers_bytes(arch, spec.dtype)
    state, buckets = optimizer.allocated_state_bytes(spec, [master]), BUCKET_ELEMENTS * width
    if division.offload == "none":
        held = {"weights": weights + master.num_bytes, "gradients": part * width, "optimizer_state": state}
        largest = max(share.elements for tensor, share in pairs if tensor.trained)
        joined = min(part, SUB_GROUP_ELEMENTS) * (width + (4 if width == 2 else 0))  # and in fp32
        stepped = max(NORM_BYTES * largest, joined, optimizer.temporaries_bytes(spec, [master]))
        temporaries = max(stepped - small, 0)  # what is kept whole is freed before the step, and comes back after it
        return RankCourse(rank, {}, {"optimizer_temporaries": temporaries}, held | {"gradient_buckets": buckets}, 0)
    host, at_step = part * (4 + 4 + width) + state - COUNTER_BYTES, {}
    if division.offload == "params":
        moved = sum(share.weights * tensor.num_copies for tensor, share in pairs)
        host, weights = host + moved, weights - moved
        at_step = {
            "optimizer_temporaries": sum(
                share.weights * tensor.num_copies for tensor, share in pairs if tensor.numel < PERSISTENT_ELEMENTS
            )
        }
    return RankCourse(rank, {}, at_step, {"weights": weights, "gradient_buckets": buckets}, 0, host)


def stage3_rules(spec: CellSpec) -> tuple[Rules, Bucket]:
    """The rules of ZeRO-3, whose buckets are there all along."""
    width = ITEMSIZE_BYTES[divided_dtype(spec)]
    rules = Rules(
        in_bucket=width, sent=width, kept=0, held=0, is_compact=False, stage=3, bucket_elements=BUCKET_ELEMENTS
    )
    return rules, Bucket(BUCKET_ELEMENTS, 0, is_first_stage=False, raised=False)


def divided_dtype(spec: CellSpec) -> str:
    """The dtype in which DeepSpeed shards: bf16 where it is told of it, else fp32."""
    return "fp32" if spec.autocast == "none" else spec.autocast


def divided_tensors(spec: CellSpec) -> tuple[Tensor, ...]:
    """The tensors as ZeRO-3 shards them: in one dtype, but for adapters and quantized weights."""
    dtype = divided_dtype(spec)
    return tuple(
        [
            one if one.quantised or (one.role == "adapter" and spec.quant == "none") else one._replace(dtype=dtype)
            for one in stored_tensors(spec)
        ]
    )


def gathered_tensors(spec: CellSpec, names: Sequence[str]) -> list[Tensor]:
    """The tensors of these names, each as it is sharded and gathered."""
    divided = {tensor.name: _as_divided(spec, tensor) for tensor in divided_tensors(spec)}
    return [divided[name] for name in names if name in divided]


def _as_divided(spec: CellSpec, tensor: Tensor) -> Tensor:
    """A packed weight is sharded and gathered as it is stored: as elements of ``bnb_4bit_quant_storage``."""
    if not tensor.quantised:
        return tensor
    packed, _ = quantised_parts(spec, tensor)
    return tensor._replace(shape=(-(-packed // ITEMSIZE_BYTES[spec.dtype]),), dtype=spec.dtype, quantised=False)
