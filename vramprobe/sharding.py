"""Sharding: a cell on N GPUs under ZeRO or FSDP -> the memory of one rank, by arithmetic; and how many GPUs it takes.

In: a spec (its batch is one rank's), the kind of sharding, a fit or none. Out: a Prediction of the rank that holds the
most, and the smallest N that fits a GPU. The single GPU's moments are taken term by term: states are divided,
activations are not, and what is gathered for a moment comes back. Nothing here was measured. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict

from vramprobe.architecture import architecture
from vramprobe.errors import SpecError
from vramprobe.memory_model import MemoryModel
from vramprobe.predict import HasMemory, Prediction, Verdict, predict_moments, verdict
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment, moments, optimizer, parameters
from vramprobe.terms.parameters import Tensor
from vramprobe.terms.tape import ITEMSIZE_BYTES

#: DeepSpeed's stages, and FSDP's FULL_SHARD and SHARD_GRAD_OP (accelerate's and torch's names).
Sharding = Literal["zero1", "zero2", "zero3", "fsdp", "fsdp-shard-grad-op"]
#: DeepSpeed's defaults in elements: reduce_bucket_size and allgather_bucket_size (two are alive with overlap_comm), and
#: stage3_max_live_parameters (deepspeed/runtime/zero/config.py).
BUCKET_ELEMENTS = 500_000_000
MAX_LIVE_ELEMENTS = 1_000_000_000
#: Beyond this many GPUs no answer is sought.
MAX_GPUS = 4096


class MinGpus(BaseModel):
    """The fewest GPUs on which each rank fits; null where not even MAX_GPUS do, and ``verdict`` is then theirs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sharding: Sharding
    num_gpus: int | None
    verdict: Verdict  # of one rank


class _Unit(NamedTuple):
    """Bytes of a stretch of the model that is gathered at once: its weights as stored, and its gradients."""

    weights: int
    gradients: int


def predict_rank(
    spec: CellSpec,
    num_gpus: int,
    sharding: Sharding,
    model: MemoryModel | None = None,
    *,
    allow_extrapolation: bool = False,
) -> Prediction:
    """The allocated peak of one rank of ``num_gpus``; ``spec`` has the batch of one rank.

    The interval reaches up to all buckets and prefetched layers at their defaults. On one GPU, nothing is sharded.

    Raises SpecError for a kind or number of GPUs that cannot be, and what predict raises.
    """
    if sharding not in get_args(Sharding):
        raise SpecError(f"sharding: {sharding!r} given; allowed: {', '.join(get_args(Sharding))}")
    if num_gpus < 1:
        raise SpecError(f"num_gpus: {num_gpus} given; must be at least 1")
    few, many = (rank_moments(spec, num_gpus, sharding, all_buffers=yes) for yes in (False, True))
    note = f"one rank of {num_gpus} under {sharding}, by arithmetic, per rank, not measured"
    notes = [note, *_doubts(spec, sharding)] if num_gpus > 1 else ["one GPU: nothing is sharded"]
    return predict_moments(
        spec, few, model, allow_extrapolation=allow_extrapolation, at_most=many, notes=notes, num_gpus=num_gpus,
        sharding=sharding,
    )  # fmt: skip


def min_gpus(
    spec: CellSpec,
    gpu: HasMemory,
    sharding: Sharding,
    model: MemoryModel | None = None,
    *,
    allow_extrapolation: bool = False,
) -> MinGpus:
    """The fewest of ``gpu`` whose ranks have the verdict ``fits``, each with the batch of ``spec``."""

    def judged(num_gpus: int) -> Verdict:
        one = predict_rank(spec, num_gpus, sharding, model, allow_extrapolation=allow_extrapolation)
        return verdict(one, gpu)

    few, many, found = 0, 1, judged(1)
    while found.verdict != "fits" and many < MAX_GPUS:
        few, many = many, 2 * many
        found = judged(many)
    if found.verdict != "fits":
        return MinGpus(sharding=sharding, num_gpus=None, verdict=found)
    while many - few > 1:
        middle = (few + many) // 2
        at_middle = judged(middle)
        if at_middle.verdict == "fits":
            many, found = middle, at_middle
        else:
            few = middle
    return MinGpus(sharding=sharding, num_gpus=many, verdict=found)


def rank_moments(spec: CellSpec, num_gpus: int, sharding: Sharding, *, all_buffers: bool) -> list[Moment]:
    """The moments of a step on the rank that holds the most, in the order of the step.

    Without ``all_buffers`` one unit is gathered at a time and reduced at once; with them, the libraries' buckets are
    full and the next layer is there already.
    """
    whole = moments(spec)
    if num_gpus == 1:
        return whole
    arch = architecture(spec.architecture)
    tensors = parameters.tensors(spec, arch)
    trained = [_shard(tensor, num_gpus, sharding) for tensor in tensors if tensor.trained]
    layer, root, largest = _units(spec, tensors)
    total = _unit(spec, tensors)
    state = optimizer.allocated_state_bytes(spec, trained)
    temporaries = optimizer.temporaries_bytes(spec, trained)
    trained_bytes = sum(tensor.num_bytes * tensor.num_copies for tensor in trained)
    weights = sum(_shard_bytes(spec, tensor, num_gpus, sharding) * tensor.num_copies for tensor in tensors)
    bucket = 2 * BUCKET_ELEMENTS * max(ITEMSIZE_BYTES[tensor.dtype] for tensor in trained)
    made = []
    for moment in whole:
        terms = dict(moment.terms)
        in_step = moment.phase == "optimizer_step"
        terms["optimizer_state"] = state
        if in_step:
            terms["optimizer_temporaries"] = temporaries
        gradients = terms.get("gradients", 0)
        if sharding != "zero1":
            terms["gradients"] = -(-gradients * trained_bytes // total.gradients)
        gathered = reduced = 0
        match sharding:
            case "zero1" | "zero2":
                if all_buffers:
                    gathered = min(total.gradients, bucket) if in_step else 0  # the trained weights, from all ranks
                    reduced = bucket
                elif sharding == "zero2":
                    reduced = largest.gradients
            case "zero3":
                terms["weights"] += weights - total.weights
                gathered, reduced = largest.weights, largest.gradients
                if all_buffers:
                    live = MAX_LIVE_ELEMENTS * ITEMSIZE_BYTES[spec.dtype]
                    gathered, reduced = max(gathered, min(live, total.weights)), max(reduced, bucket)
            case "fsdp" | "fsdp-shard-grad-op":
                # The root's own parameters (embedding, head, last norm) stay whole from the start of forward to the end
                # of backward; of the layers one, or with SHARD_GRAD_OP all. At most the next layer is there as well,
                # and the flat buffer it is copied out of; gradients are reduced from a second copy.
                terms["weights"] += weights - total.weights
                gathered = root.weights + layer.weights if sharding == "fsdp" else total.weights
                reduced = root.gradients + layer.gradients
                if all_buffers:
                    gathered, reduced = gathered + 2 * layer.weights, reduced + 2 * layer.gradients
        if in_step and sharding not in ("zero1", "zero2"):
            gathered = 0
        terms["gathered_weights"] = gathered
        terms["gradient_buckets"] = min(reduced, gradients) if moment.phase == "backward" else 0
        made.append(Moment(moment.phase, moment.label, {cause: size for cause, size in terms.items() if size}))
    return made


def _shard(tensor: Tensor, num_gpus: int, sharding: Sharding) -> Tensor:
    """The largest shard: FSDP cuts the first dimension (fully_shard), ZeRO the flattened tensor."""
    if sharding.startswith("fsdp"):
        return tensor._replace(shape=(-(-tensor.shape[0] // num_gpus), *tensor.shape[1:]))
    return tensor._replace(shape=(-(-tensor.numel // num_gpus),))


def _shard_bytes(spec: CellSpec, tensor: Tensor, num_gpus: int, sharding: Sharding) -> int:
    if tensor.quantised:
        return -(-parameters.quantised_bytes(tensor, spec.quant) // num_gpus)
    return _shard(tensor, num_gpus, sharding).num_bytes


def _unit(spec: CellSpec, tensors: Sequence[Tensor]) -> _Unit:
    return _Unit(
        parameters.weights_bytes(tensors, spec.quant),
        sum(tensor.num_bytes * tensor.num_copies for tensor in tensors if tensor.trained),
    )


def _units(spec: CellSpec, tensors: Sequence[Tensor]) -> tuple[_Unit, _Unit, _Unit]:
    """(one layer, all that is in no layer, the largest of a layer and of each tensor in none)."""
    layer = _unit(spec, [tensor._replace(num_copies=1) for tensor in tensors if tensor.per_layer])
    outside = [tensor for tensor in tensors if not tensor.per_layer]
    single = [_unit(spec, [tensor]) for tensor in outside]
    largest = _Unit(max(unit.weights for unit in [layer, *single]), max(unit.gradients for unit in [layer, *single]))
    return layer, _unit(spec, outside), largest


def _doubts(spec: CellSpec, sharding: Sharding) -> list[str]:
    """What the arithmetic does not know of the libraries."""
    if spec.quant == "none" or sharding in ("zero1", "zero2"):
        return []
    return [f"whether your libraries can shard {spec.quant} weights under {sharding} is not checked here"]
