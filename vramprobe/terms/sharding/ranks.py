"""One rank of several: which arithmetic each kind of sharding has, and its answers, kept for the next cell.

In: a spec (its batch is one rank's), a kind of sharding and N. Out: the Moments of the rank that holds the most, as
``terms`` has them for one GPU, with ``gathered_weights`` and ``gradient_buckets`` beside the other causes; its bytes in
host memory; the Run that requests what it allocates. Activations are never divided. Never imports torch.

Each kind is a module or package beside this one, which says what is counted and cites the libraries' code. A kind has
``course(spec, division, chip)``, the RankCourse of a rank, and a subclass of Run; ``_KINDS`` lists them.
device_map.py and context_parallel.py answer by themselves; tensor parallelism is recorded.

Not counted: NCCL's buffers and the CUDA context (predict/prediction.py sets both aside in a verdict), rounding to 512
bytes and what the caching allocator does not split off. LoRA peaks under FSDP1 of torch 2.4 with reentrant
checkpointing are higher; run them (benchmarks/truth/reproduce.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.choices import Sharding
from vramprobe.kernels.chip import A100, Chip
from vramprobe.rules.sharding import rules_of
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment, course_of, moments
from vramprobe.terms.cell.loading import Allocator
from vramprobe.terms.sharding import fsdp1, fsdp2
from vramprobe.terms.sharding.ddp import DdpRun, replica_moments
from vramprobe.terms.sharding.fsdp import walked_micro_steps
from vramprobe.terms.sharding.rank import Division, RankCourse, moments_of
from vramprobe.terms.sharding.zero import course as zero
from vramprobe.terms.sharding.zero.requests import BucketRun
from vramprobe.terms.sharding.zero3 import course as zero3
from vramprobe.terms.sharding.zero3.requests import GatheringRun
from vramprobe.terms.step.requests import Run

_Course = Callable[[CellSpec, Division, Chip], RankCourse]
#: The course and the Run of a rank, by the module of its sharding (rules/sharding.py); DDP has a single GPU's moments.
_KINDS: dict[str, tuple[_Course | None, type[Run]]] = {
    "ddp": (None, DdpRun),
    "fsdp1": (fsdp1.course, fsdp1.Fsdp1Run),
    "fsdp2": (fsdp2.course, fsdp2.Fsdp2Run),
    "zero": (zero.course, BucketRun),
    "zero3": (zero3.course, GatheringRun),
}


#: Under which TRL's head and trainers are counted.
COUNTED_WITH_TRL = ("ddp", "fsdp", "fsdp-shard-grad-op", "zero1", "zero2")


def _require_known(spec: CellSpec, division: Division) -> None:
    if division.offload != "none" and spec.quant != "none":
        raise UnsupportedArchitecture(
            f"there is no arithmetic for offload {division.offload} of {spec.quant} weights; run it, on emulated GPUs "
            "say: vramprobe measure --emulate"
        )
    if spec.uses_trl and division.sharding not in COUNTED_WITH_TRL:
        raise UnsupportedArchitecture(
            f"there is no arithmetic for {spec.of_trl} under {division.sharding}, but under "
            f"{', '.join(COUNTED_WITH_TRL)}; run it, on emulated GPUs say: vramprobe measure --emulate"
        )
    if spec.fused_linear_cross_entropy or spec.loss == "cut_cross_entropy":
        raise UnsupportedArchitecture(
            f"a rank of {spec.model} cannot be counted under {division.sharding} with a fused loss, which reads the "
            "head's weight past its own module; ddp can. What a trainer with Liger does: vramprobe profile "
            "--emulate GPU --empty-weights --only-rank 0 --world-size N -- COMMAND"
        )
    if any(parameter.only for parameter in architecture(spec.architecture).parameters):
        raise UnsupportedArchitecture(
            f"a rank of {spec.model} cannot be counted under {division.sharding}: its layers differ in their weights; "
            "ddp can"
        )


# -- moments ------------------------------------------------------------------------------------------------------


def rank_moments(
    spec: CellSpec,
    num_gpus: int,
    sharding: Sharding,
    *,
    all_buffers: bool,
    chip: Chip = A100,
    is_replicated: bool = False,
    offload: str = "none",
) -> list[Moment]:
    """The moments of a step on the rank that holds the most, in the order of the step.

    Raises UnsupportedArchitecture where layers differ in their weights or the loss is fused: there is no rule here.

    ``all_buffers``: under DeepSpeed, its buckets are full and its prefetched layers gathered, as by its defaults;
    without, one layer at a time. Under FSDP, the embedding, last norm and head are one unit with the root, as without
    accelerate.
    ``is_replicated``: under FSDP, the ranks are one group of several that all-reduce gradients (HYBRID_SHARD).
    ``offload``: what lies in host memory (choices.Offload), of weights that are not quantized.
    """
    if num_gpus == 1:
        return moments(spec, chip)
    made = course_of(spec, chip).rank_moments
    division = Division(sharding, num_gpus, all_buffers, is_replicated, offload)
    key = (*_key(spec, division), spec.batch_size, spec.seq_len)
    if sharding == "ddp":  # the same on any number
        key = (sharding, spec.batch_size, spec.seq_len)
    if key not in made:
        if sharding == "ddp":
            made[key] = replica_moments(spec, chip)
        else:
            made[key] = moments_of(rank_course(spec, division, chip), spec)
    return made[key]


def host_bytes(spec: CellSpec, num_gpus: int, sharding: Sharding, offload: str, chip: Chip = A100) -> int:
    """A rank's tensors in host memory between two steps, each once, without what pinning rounds up."""
    return rank_course(spec, Division(sharding, num_gpus, offload=offload), chip).host


def whole_packed_bytes(spec: CellSpec, num_gpus: int, sharding: Sharding, chip: Chip = A100) -> int:
    """Additional bytes on a rank of FSDP2 whose quantized weights are not sharded."""
    return rank_course(spec, Division(sharding, num_gpus), chip).undivided


def rank_course(spec: CellSpec, division: Division, chip: Chip) -> RankCourse:
    """The course of a rank, kept for the next cell that differs only in batch size and length."""
    kept = course_of(spec, chip).ranks
    key = _key(spec, division)
    if key not in kept:
        _require_known(spec, division)
        course, _ = _KINDS[rules_of(division.sharding).module]
        kept[key] = course(spec, division, chip)
    found: RankCourse = kept[key]
    return found


def _key(spec: CellSpec, division: Division) -> tuple[Any, ...]:
    """What a course depends on beside the single GPU's."""
    one = division
    return one.sharding, one.num_gpus, one.all_buffers, one.is_replicated, one.offload, walked_micro_steps(spec)


# -- requests -----------------------------------------------------------------------------------------------------


def is_logged(spec: CellSpec) -> bool:
    """Whether the requests of a rank are known in their order; those of a single GPU always are."""
    if spec.num_gpus == 1:
        return True
    return rules_of(spec.sharding).module in _KINDS and spec.cp_size == 1 and spec.offload == "none"


def run_class(spec: CellSpec) -> type[Run]:
    """The class of the run of a cell whose requests are known."""
    return Run if spec.num_gpus == 1 else _KINDS[rules_of(spec.sharding).module][1]


def run_of(spec: CellSpec, allocator: Allocator, **options: Any) -> Run:
    """The run of a cell, of its first rank if there are several.

    Raises UnsupportedArchitecture for ranks whose requests are not known in their order.
    """
    if not is_logged(spec):
        raise UnsupportedArchitecture(
            f"the requests of a rank under sharding {spec.sharding} are not known in their order; run it, on emulated "
            "GPUs say: vramprobe measure --emulate"
        )
    return run_class(spec)(spec, allocator, **options)
