"""Sharding: a cell on N GPUs under DDP, ZeRO or FSDP -> the memory of one rank, by arithmetic; how many GPUs it takes.

In: a spec (its batch is one rank's), the kind of sharding, a fit or none. Out: a Prediction of the rank that holds the
most, and the smallest N that fits a GPU. What is counted, what is not, and by whose code, is said in terms/ranks.py.
Nothing here was measured on a GPU; benchmarks/sharding.md holds it against torch's own FSDP and DDP. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Literal, get_args

from pydantic import BaseModel, ConfigDict

from vramprobe import choices
from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.errors import SpecError
from vramprobe.model.memory_model import MemoryModel, workspaces_bytes
from vramprobe.predict.host import of_machine_bytes
from vramprobe.predict.prediction import (
    TIGHT_SHARE,
    HasKernels,
    Prediction,
    Verdict,
    predict_moments,
    verdict,
    with_retries,
    without_flash,
)  # fmt: skip
from vramprobe.predict.rank_replay import with_rank_replay
from vramprobe.spec import DTENSOR_OPTIMIZERS, CellSpec, cannot_offload, cannot_shard
from vramprobe.terms.ranks import DIVIDING, FSDP, Sharding, rank_moments, whole_packed_bytes
from vramprobe.units import format_bytes

if TYPE_CHECKING:
    from vramprobe.catalog import Gpu

#: Beyond this many GPUs no answer is sought.
MAX_GPUS = 4096


class MinGpus(BaseModel):
    """The fewest GPUs on which each rank fits; null where not even MAX_GPUS do, and ``verdict`` is then theirs.

    ``tight_num_gpus``: fewer, on which it is tight; null where there are none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sharding: Sharding | Literal["tp", "device-map"]
    num_gpus: int | None
    tight_num_gpus: int | None = None
    verdict: Verdict  # of one rank
    offload: str = "none"
    host_bytes: int | None = None  # tensors of all ranks of a machine in its memory, where something is offloaded


def predict_rank(
    spec: CellSpec,
    num_gpus: int,
    sharding: Sharding,
    model: MemoryModel | None = None,
    *,
    allow_extrapolation: bool = False,
    gpu: HasKernels | None = None,
    offload: str = "none",
) -> Prediction:
    """The allocated peak of one rank of ``num_gpus``; ``spec`` has the batch of one rank.

    The interval reaches up to DeepSpeed's buckets and prefetched layers at their defaults, and to FSDP's root as one
    unit. On one GPU, nothing is sharded. Any number of GPUs will do: shards are padded to it.

    Raises SpecError for a kind or number of GPUs that cannot be, and what predict raises.
    """
    _check(spec, num_gpus, sharding)
    has_flash = gpu is None or gpu.has_flash
    few, many = (
        rank_moments(spec, num_gpus, sharding, all_buffers=yes, has_flash=has_flash, offload=offload)
        for yes in (False, True)
    )
    note = f"one rank of {num_gpus} under {sharding}, by arithmetic, per rank, not measured"
    notes = [note, *_doubts(spec, num_gpus, sharding, has_flash)] if num_gpus > 1 else ["one GPU: nothing is sharded"]
    notes += without_flash(spec, gpu)
    return predict_moments(
        spec, few, model, allow_extrapolation=allow_extrapolation, at_most=many, notes=notes, num_gpus=num_gpus,
        sharding=sharding, workspaces=workspaces_bytes(spec, gpu),
    )  # fmt: skip


def min_gpus(
    spec: CellSpec,
    gpu: Gpu,
    sharding: Sharding,
    model: MemoryModel | None = None,
    *,
    offload: str = "none",
    allow_extrapolation: bool = False,
    replays: bool = True,
) -> MinGpus:
    """The fewest of ``gpu`` whose ranks have the verdict ``fits``, each with the batch of ``spec``. On one, nothing is
    offloaded. ``replays``: without a fit by the allocator's replay, where that knows the sharding.

    Raises SpecError for ddp, which divides nothing, and what predict_rank raises.
    """
    if sharding == "ddp":
        raise SpecError(f"sharding: ddp divides nothing, so no number of GPUs makes a cell fit; use {_some(DIVIDING)}")

    require_offload(spec, sharding, offload)

    @cache
    def counted(num_gpus: int) -> Prediction:
        return predict_rank(
            spec, num_gpus, sharding, model, offload=offload, allow_extrapolation=allow_extrapolation, gpu=gpu
        )

    @cache
    def judged(num_gpus: int, *, tries_less: bool) -> Verdict:
        one = counted(num_gpus)
        if replays and model is None:
            ranks = spec.model_copy(update={"num_gpus": num_gpus, "sharding": sharding, "offload": offload})
            one = with_rank_replay(one, ranks, gpu)
            one = with_retries(one, ranks, gpu) if tries_less else one
        return verdict(one, gpu)

    def needed(num_gpus: int) -> Verdict:
        return judged(num_gpus, tries_less=False)

    # What a rank's tensors need by arithmetic is soon known, and the replay never needs less.
    least = _first(lambda num_gpus: verdict(counted(num_gpus), gpu).verdict != "does not fit")
    tight = fewest = None
    if least is not None:
        tight = _first(lambda num_gpus: judged(num_gpus, tries_less=True).verdict != "does not fit", least)
        fewest = _first(lambda num_gpus: needed(num_gpus).verdict == "fits", tight or MAX_GPUS, _guess(needed, tight))
    on_host = None
    if offload != "none" and (fewest or MAX_GPUS) > 1:
        on_host = of_machine_bytes(spec, fewest or MAX_GPUS, sharding, offload)
    return MinGpus(
        sharding=sharding, num_gpus=fewest, tight_num_gpus=None if tight == fewest else tight,
        verdict=needed(fewest or MAX_GPUS), offload=offload, host_bytes=on_host,
    )  # fmt: skip


def _guess(judged: Callable[[int], Verdict], num_gpus: int | None) -> int:
    """About how many are needed, if what all of them share falls with their number."""
    if num_gpus is None or 2 * num_gpus > MAX_GPUS:
        return 0
    few, many = judged(num_gpus), judged(2 * num_gpus)
    own = 2 * many.needed_bytes.high - few.needed_bytes.high  # of each, however many there are
    shared, room = (few.needed_bytes.high - own) * num_gpus, TIGHT_SHARE * few.usable_bytes - own
    return min(int(shared / room) + 1, MAX_GPUS) if room > 0 else 0


def _first(holds: Callable[[int], bool], least: int = 1, guess: int = 0) -> int | None:
    """The least number from ``least`` to MAX_GPUS of which that holds, and of all above it; looked for from ``guess``
    on, in steps that double.

    Under ZeRO-3 a number that divides a large weight without a rest may need less than the next one does.
    """
    few, many, step = least - 1, max(guess, least), 1
    if holds(many):
        while many > least and holds(lower := max(many - step, least)):
            many, step = lower, 2 * step
        few = max(many - step, few) if many > least else few
    else:
        while not holds(many):
            if many == MAX_GPUS:
                return None
            few, many, step = many, min(many + step, MAX_GPUS), 2 * step
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if holds(middle) else (middle, many)
    return many


def require_offload(spec: CellSpec, sharding: str, offload: str) -> None:
    """Raises SpecError for what cannot be offloaded so."""
    if offload not in get_args(choices.Offload):
        raise SpecError(f"offload: {offload!r} given; allowed: {_some(get_args(choices.Offload))}")
    if reason := cannot_offload(spec.model_copy(update={"offload": offload}), sharding):
        raise SpecError(reason)


def require_arithmetic(sharding: str | None) -> Sharding:
    """The same name. Raises UnsupportedArchitecture for ranks that are run and not counted, SpecError for any other."""
    for counted in get_args(Sharding):
        if sharding == counted:
            return counted
    if sharding in choices.HYBRID:
        raise UnsupportedArchitecture(
            f"sharding {sharding}: more GPUs make more groups, and a rank of each holds as much; ask how many make a "
            f"group: sharding {sharding.removesuffix('-hybrid')}"
        )
    if sharding in get_args(choices.Sharding):
        raise UnsupportedArchitecture(
            f"there is no arithmetic for sharding {sharding}; run it, on emulated GPUs say: vramprobe measure --emulate"
        )
    raise SpecError(f"sharding: {sharding!r} given; allowed: {_some(get_args(Sharding))}")


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def _check(spec: CellSpec, num_gpus: int, sharding: str) -> None:
    if sharding not in get_args(Sharding):
        raise SpecError(f"sharding: {sharding!r} given; allowed: {_some(get_args(Sharding))}")
    if num_gpus < 1:
        raise SpecError(f"num_gpus: {num_gpus} given; must be at least 1")
    if num_gpus > 1 and (reason := cannot_shard(spec, sharding)):
        raise SpecError(reason)


def _doubts(spec: CellSpec, num_gpus: int, sharding: Sharding, has_flash: bool) -> list[str]:
    """What the libraries do not do, or not by default, and what the arithmetic does not know of them."""
    found = []
    if sharding in FSDP and spec.optim not in DTENSOR_OPTIMIZERS:
        found.append(
            f"fully_shard hands the optimizer DTensors, which {spec.optim} does not take (bitsandbytes 0.50, "
            f"transformers 5.23); those that do: {_some(DTENSOR_OPTIMIZERS)}"
        )
    if sharding in FSDP and spec.quant != "none":
        whole = whole_packed_bytes(spec, num_gpus, sharding, has_flash)
        found.append(
            f"4-bit weights are divided only with bnb_4bit_quant_storage {spec.dtype}; as uint8, its default, "
            f"accelerate leaves them whole on each rank: {format_bytes(whole)} more"
        )
    if sharding == "zero3":
        found.append(
            "what ZeRO-3 gathers is counted layer by layer: 35 emulated ranks are off by 0.1 % on average and 0.7 % at "
            "worst (benchmarks/ranks.md), one of 405B by 3 %"
        )
    return found
