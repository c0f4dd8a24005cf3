"""Ranks: a cell under DDP, ZeRO or FSDP, in one group or several, or with parts of each sequence -> one rank's moments.

In: a spec with its ranks, whose batch is one rank's. Out: Counted of the rank that holds the most, or SpecError for
what no library runs, UnsupportedArchitecture for what is run and not counted. What is counted is said in
terms/sharding/ranks.py; benchmarks/truth/recipes.md holds it against emulated ranks.
"""

from __future__ import annotations

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.errors import SpecError
from vramprobe.kernels.chip import A100, Chip, chip_like
from vramprobe.predict.host_memory import in_words, of_rank_bytes
from vramprobe.predict.one_gpu import Counted, without_flash
from vramprobe.predict.prediction import HasKernels
from vramprobe.rules.sharding import (
    cannot_group,
    cannot_offload,
    cannot_quantize,
    cannot_rotate,
    cannot_shard,
    cannot_share_sequences,
    cannot_step,
    rules_of,
    sharing_ranks,
)
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment
from vramprobe.terms.sharding.context_parallel import Ring, ring_moments
from vramprobe.terms.sharding.ranks import rank_moments, whole_packed_bytes
from vramprobe.units import format_bytes


def require_possible(spec: CellSpec) -> None:
    """Raises SpecError for ranks that no library runs so, UnsupportedArchitecture for some that are not counted."""
    if reason := cannot_offload(spec) or cannot_rotate(spec):
        raise SpecError(reason)
    if spec.offload != "none" and spec.num_gpus == 1:
        raise SpecError(
            f"offload {spec.offload} is for several GPUs; give num_gpus 2 or more, or leave it out. DeepSpeed's "
            "offload on one GPU is not predicted: vramprobe profile --emulate GPU --empty-weights -- COMMAND runs it"
        )
    beside = {f"offload {spec.offload}": spec.offload != "none", f"loss {spec.loss}": spec.loss == "chunked_nll"}
    if spec.cp_size > 1 and (uncounted := [option for option, is_given in beside.items() if is_given]):
        raise UnsupportedArchitecture(
            f"there is no arithmetic for {uncounted[0]} with cp_size; run it, on emulated GPUs say: vramprobe measure "
            "--emulate"
        )
    if reason := cannot_group(spec) or cannot_share_sequences(spec):
        raise SpecError(reason)
    if spec.num_gpus > 1 and (reason := cannot_quantize(spec)):
        raise SpecError(reason)
    if spec.uses_trl and (reason := cannot_step(spec)):
        raise SpecError(reason)
    if rules_of(spec.sharding).module == "tensor_parallel":
        if spec.num_gpus < 2:
            raise SpecError(f"num_gpus {spec.num_gpus} under tp: layers are divided among 2 GPUs or more; give so many")
        if reason := cannot_shard(spec):
            raise SpecError(reason)
        raise UnsupportedArchitecture(
            "there is no arithmetic for sharding tp: a rank of it is recorded on an emulated GPU, by engine recipe, or "
            "run: vramprobe measure --emulate"
        )


def count_rank(spec: CellSpec, gpu: HasKernels | None) -> Counted:
    """The rank that holds the most; on one GPU, nothing is sharded. Any number will do: shards are padded to it.

    The interval reaches up to DeepSpeed's buckets and prefetched layers at their defaults, and to FSDP's root as one
    unit. Raises UnsupportedArchitecture for what is not counted.
    """
    chip = chip_like(gpu)
    few, many = (_moments(spec, all_buffers=yes, chip=chip) for yes in (False, True))
    notes = ["one GPU: nothing is sharded"]
    if spec.num_gpus > 1:
        note = (
            f"one rank of {spec.num_gpus} under {spec.sharding}{_in_parts(spec)}, by arithmetic, per rank, not measured"
        )
        notes = [note, *_doubts(spec, chip)]
    notes = [*notes, *without_flash(spec, gpu)]
    if spec.offload == "none":
        return Counted(few, notes, many)
    return Counted(few, [*notes, in_words(spec)], many, of_rank_bytes(spec))


def _in_parts(spec: CellSpec) -> str:
    """In words: how many share a sequence, or a model."""
    if spec.cp_size > 1:
        by_turns = "" if spec.cp_rotation == "allgather" else f" by {spec.cp_rotation}"
        return f", {spec.cp_size} to a sequence{by_turns}"
    return "" if spec.shard_size is None else f", {spec.shard_size} to a group"


def _moments(spec: CellSpec, *, all_buffers: bool, chip: Chip) -> list[Moment]:
    if spec.cp_size > 1:  # the first and the last that share a sequence, and one between: the others are like these
        places = sorted({0, spec.cp_size - 2, spec.cp_size - 1})
        each = [part_moments(spec, place, all_buffers=all_buffers, chip=chip) for place in places]
        return max(each, key=lambda moments: max(moment.total_bytes for moment in moments))
    within = rules_of(spec.sharding).within
    return rank_moments(
        spec,
        sharing_ranks(spec),
        within or spec.sharding,
        all_buffers=all_buffers,
        chip=chip,
        is_replicated=within is not None,
        offload=spec.offload,
    )


def part_moments(spec: CellSpec, place: int, *, all_buffers: bool, chip: Chip = A100) -> list[Moment]:
    """The moments of the rank at this place of those that share a sequence."""
    return ring_moments(
        spec,
        sharing_ranks(spec),
        Ring(spec.cp_size, place, spec.cp_rotation == "allgather"),
        reshards=rules_of(spec.sharding).num_gathers > 1,
        is_replicated=rules_of(spec.sharding).within is not None,
        all_buffers=all_buffers,
        chip=chip,
    )


def _doubts(spec: CellSpec, chip: Chip) -> list[str]:
    """Return warnings of what the libraries do not do, or not by default, and what the arithmetic does not know of
    them.
    """
    found, rules = [], rules_of(spec.sharding)
    if rules.optimizers and spec.optim not in rules.optimizers:
        found.append(
            f"fully_shard hands the optimizer DTensors, which {spec.optim} does not take (bitsandbytes 0.50, "
            f"transformers 5.23); those that do: {', '.join(rules.optimizers)}"
        )
    if rules.module == "fsdp2" and spec.quant != "none":
        whole = whole_packed_bytes(spec, sharing_ranks(spec), rules.within or spec.sharding, chip)
        found.append(
            f"4-bit weights are divided only with bnb_4bit_quant_storage {spec.dtype}; as uint8, its default, "
            f"accelerate leaves them whole on each rank: {format_bytes(whole)} more"
        )
    if rules.module == "zero3":
        found.append(
            "what ZeRO-3 gathers is counted layer by layer: 35 emulated ranks are off by 0.1 % on average and 0.7 % at "
            "worst (benchmarks/truth/recipes.md), one of 405B by 3 %"
        )
    return found
