"""Readings of claims about peaks, what fits, and how many GPUs it takes.

In: a claim and the cells. Out: its Reading. A job over several GPUs is one rank of it, as predict counts it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vramprobe import catalog
from vramprobe.catalog import Claim, Gpu
from vramprobe.choices import Sharding
from vramprobe.literature.claims.conditions import STAND_INS, Conditions, others, recipes_of, stand_ins, usual
from vramprobe.literature.claims.figures import Cells, Figure, Source, evaluate, figure
from vramprobe.literature.claims.judge import Case, Reading
from vramprobe.predict.verdict import CONTEXT_ALLOWANCE_BYTES, NCCL_ALLOWANCE_BYTES, usable_bytes

_FLOORS = {
    "full": "Weights and optimizer state alone take",
    "lora": "The frozen 16-bit weights alone take",
    "qlora": "The 4-bit weights with 16-bit embeddings and head take",
}
PER_RANK = (
    "One rank of several, by arithmetic: states divided, activations not, and what is gathered to compute with; from "
    "usable memory, 1 GiB of the card's reported size is set aside for the context and 0.5 GiB for NCCL."
)


def peak_reading(claim: Claim, cells: Cells) -> Reading:
    """A peak in GB on one GPU, or the sum over all where it needs several."""
    return Reading(
        cases=tuple(Case(one.words, peak_figure(one, cells)) for one in _usual(claim)),
        floor=floor_of(claim, cells),
        floor_is=_FLOORS[claim.method or "lora"],
        others=lambda: (Case(one.words, peak_figure(one, cells)) for one in _others(claim, cells)),
        note=_peak_note(claim) + (" Unsloth's own kernels are not among ours." if claim.recipe == "unsloth" else ""),
    )


def conditions_of(claim: Claim) -> list[Conditions]:
    """The usual conditions of a claim about a peak or about what fits, the most usual first."""
    return list(_ranging(claim)) if claim.quantity == "fits" else _usual(claim)


def _usual(claim: Claim) -> list[Conditions]:
    if is_mixture(claim):
        return list(mixture_conditions(claim))
    return list(usual(claim))


def _others(claim: Claim, cells: Cells) -> Iterable[Conditions]:
    return others(claim)


def is_mixture(claim: Claim) -> bool:
    """Whether its model is a mixture of experts, whose adapters may be on the experts or not."""
    return claim.params_b == 30


def mixture_conditions(claim: Claim) -> Iterable[Conditions]:
    """At 2,048 tokens: adapters on every linear layer and expert, or on q and v alone."""
    for one in usual(claim):
        if one.options["seq_len"] != 2048 or one.options.get("kbit_prep") == "trl":
            continue
        if claim.method == "full":
            yield one
            continue
        for name, targets in (("all linear", "all-linear"), ("q and v", "q_v")):
            yield Conditions(one.words | {"adapters": f"adapters on {name}"}, one.options | {"lora_targets": targets})


def peak_figure(one: Conditions, cells: Cells) -> Figure:
    """The peak in GB, from what tensors take to what nvidia-smi may show."""
    peak = cells.peak(one.options)
    extra = one.recipe.extra if one.recipe else 0
    arithmetic = f"{peak.source} / 1e9"
    added = 0
    if extra:
        count = num_params(one.options["model"])
        arithmetic, added = f"({peak.source} + {extra} * {count:_}) / 1e9", extra * count
    return figure(
        "GB",
        arithmetic,
        [peak.source],
        engine=peak.engine,
        low=(peak.low + added) / 1e9,
        high=(peak.high + added) / 1e9,
    )


def _peak_note(claim: Claim) -> str:
    match claim.method:
        case "full" if is_mixture(claim):
            return "All 30.5 billion parameters have gradients and state, not only the 3.3 that a token uses."
        case "full":
            return "Weights, gradients and AdamW's state by recipe, and activations with the logits by tokens."
        case "qlora" if is_mixture(claim):
            return (
                "bitsandbytes quantises linear layers; transformers keeps experts as one fused tensor per layer, which "
                "stays in 16 bit (peft's preparation raises it to fp32)."
            )
        case "qlora":
            return (
                "Embeddings and head stay in 16 or 32 bit, the 4-bit weights take 0.516 B each, and without "
                "checkpointing the activations outweigh both."
            )
    return "The frozen weights take 2 B each; activations and logits grow with the tokens."


def floor_of(claim: Claim, cells: Cells) -> Figure | None:
    """What the claim's method takes at the least: frozen weights, or weights and state while gradients come and go."""
    found = []
    for model in stand_ins(claim):
        count = num_params(model)
        if claim.method == "full":
            least = min(recipe.weights + recipe.optimizer for recipe in recipes_of(claim))
            found.append(figure("GB", f"{least} * {count:_} / 1e9"))
        elif claim.method == "lora":
            found.append(figure("GB", f"2 * {count:_} / 1e9"))
        elif model != "qwen3-30b-a3b":
            found.append(_quantised_floor(model, cells))
    return min(found, key=lambda one: one.value) if len(found) == len(stand_ins(claim)) else None


def _quantised_floor(model: str, cells: Cells) -> Figure:
    """The linear layers in NF4 with double quantisation, everything else in 16 bit."""
    arch = cells.architecture(model)
    linear = sum(p.numel * arch.num_copies(p) for p in arch.parameters if p.role == "linear")
    return figure("GB", f"(0.5158 * {linear:_} + 2 * {arch.num_params - linear:_}) / 1e9")


def fits_reading(claim: Claim, cells: Cells) -> Reading:
    """Whether a cell fits: its need as a share of the usable memory, per rank where there are several GPUs."""
    num_gpus = claim.num_gpus or 1
    if num_gpus > 1:
        cases = [
            Case(one.words | _gpu_words(claim, gpu), _rank_share(one, gpu, num_gpus, _sharding(claim), cells))
            for gpu in claim.gpus
            for one in usual(claim)
        ]
        return Reading(cases=tuple(cases), note=f"{PER_RANK}{_no_layer(claim)}")
    wanted = list(_ranging(claim))
    floor = floor_of(claim, cells)
    return Reading(
        cases=tuple(
            Case(one.words | _gpu_words(claim, gpu), _share(one, gpu, cells)) for gpu in claim.gpus for one in wanted
        ),
        floor_is=_FLOORS[claim.method or "lora"],
        floor=floor and min((_floor_share(floor, gpu) for gpu in claim.gpus), key=lambda one: one.value),
        others=lambda: (Case(one.words, _share(one, gpu, cells)) for gpu in claim.gpus for one in others(claim)),
        note=_peak_note(claim),
    )


def _no_layer(claim: Claim) -> str:
    return "" if claim.method == "full" else " A model cut by layers over the GPUs divides alike."


def _ranging(claim: Claim) -> Iterable[Conditions]:
    """The conditions; where the words give a range of sizes or methods, of each of its ends."""
    if "LoRA/QLoRA" not in claim.statement:
        return usual(claim)
    ends = [("qlora", 34.0), ("qlora", 7.0), ("lora", 7.0), ("lora", 34.0)]
    return [
        Conditions({"model": one.words["model"], "method": method, **one.words}, one.options)
        for method, size in ends
        for one in usual(claim, method=method, models=STAND_INS[size][:1])
    ]


def _gpu_words(claim: Claim, gpu: Gpu) -> dict[str, str]:
    return {"GPU": gpu.short_name} if len(claim.gpus) > 1 else {}


def usable(gpu: Gpu, num_gpus: int = 1) -> str:
    """The usable bytes of a card as an expression."""
    assert gpu.total_bytes is not None
    nccl = f" - {NCCL_ALLOWANCE_BYTES:_}" if num_gpus > 1 else ""
    return f"({gpu.total_bytes:_} - {CONTEXT_ALLOWANCE_BYTES:_}{nccl})"


def _share(one: Conditions, gpu: Gpu, cells: Cells) -> Figure:
    peak = cells.peak(one.options)
    high = peak.high - CONTEXT_ALLOWANCE_BYTES  # it is set aside already
    room = usable_bytes(gpu, device_is_known=False)
    return figure(
        "bool",
        f"{peak.source} / {usable(gpu)}",
        [peak.source],
        engine=peak.engine,
        low=peak.low / room,
        high=high / room,
    )


def _floor_share(floor: Figure, gpu: Gpu) -> Figure:
    return figure("bool", f"{floor.arithmetic.removesuffix(' / 1e9')} / {usable(gpu)}")


def _sharding(claim: Claim) -> Sharding:
    """What the statement names; FSDP where it leaves it open, as its rank is what was held against the real thing."""
    return "zero3" if "ZeRO-3" in claim.statement and "FSDP" not in claim.statement else "fsdp"


@dataclass(frozen=True)
class _Rank:
    """What one rank needs: in words, and in bytes from ``low`` to ``high``."""

    text: str
    source: Source
    low: float
    high: float

    @property
    def value(self) -> float:
        return evaluate(self.text)


def _rank(one: Conditions, num_gpus: int, sharding: Sharding, cells: Cells) -> _Rank:
    """The peak of one rank; what the recipe holds beyond its cell (an engine's fp32 copies) is divided."""
    peak = cells.rank(one.options, num_gpus, sharding)
    extra = one.recipe.extra if one.recipe else 0
    if not extra:
        return _Rank(str(peak.source), peak.source, peak.low, peak.high)
    count = num_params(one.options["model"])
    share = extra * count / num_gpus
    text = f"({peak.source} + {extra} * {count:_} / {num_gpus})"
    return _Rank(text, peak.source, peak.low + share, peak.high + share)


def _rank_share(one: Conditions, gpu: Gpu, num_gpus: int, sharding: Sharding, cells: Cells) -> Figure:
    rank, room = _rank(one, num_gpus, sharding, cells), usable_bytes(gpu, device_is_known=False, num_gpus=num_gpus)
    return figure(
        "bool", f"{rank.text} / {usable(gpu, num_gpus)}", [rank.source], low=rank.low / room, high=rank.high / room
    )


def min_gpus_reading(claim: Claim, cells: Cells) -> Reading:
    """The least number of GPUs on which a rank's share fits; with checkpointing, as anyone short of memory would."""
    cases = [
        Case(one.words | _gpu_words(claim, gpu), _num_gpus(one, gpu, _sharding(claim), cells))
        for gpu in claim.gpus
        for one in usual(claim, checkpointing=(True,))
    ]
    return Reading(cases=tuple(cases), note=f"{PER_RANK} Checkpointing on.")


def _num_gpus(one: Conditions, gpu: Gpu, sharding: Sharding, cells: Cells) -> Figure:
    """The number whose rank fits while that of one fewer does not, written as what is true of both."""

    def fewest(need: Callable[[_Rank], float]) -> float:
        def fits(num_gpus: int) -> bool:
            room = usable_bytes(gpu, device_is_known=False, num_gpus=num_gpus)
            return need(_rank(one, num_gpus, sharding, cells)) <= room

        many = next((2**power for power in range(13) if fits(2**power)), math.inf)
        if many in (1, math.inf):
            return many
        return bisect_left(range(int(many)), True, lo=int(many) // 2 + 1, key=fits)

    found = fewest(lambda rank: rank.value)
    if found == math.inf:
        return figure("GPUs", "1e999")
    many = int(found)
    enough = _rank(one, many, sharding, cells)
    text, sources = f"{enough.text} <= {usable(gpu, many)}", [enough.source]
    if many > 1:
        fewer = _rank(one, many - 1, sharding, cells)
        text, sources = f"{text}) * ({fewer.text} > {usable(gpu, many - 1)}", [*sources, fewer.source]
    return figure(
        "GPUs", f"{many} * ({text})", sources, low=fewest(lambda rank: rank.low), high=fewest(lambda rank: rank.high)
    )


def num_params(model: str) -> int:
    """Parameters of a catalog model."""
    found = catalog.find_model(model).n_params
    assert found is not None
    return found
