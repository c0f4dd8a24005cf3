"""Fewest: how many of a GPU a cell needs under a kind of sharding, by recordings of a few numbers of them.

In: a spec with its sharding and what it offloads, a GPU. Out: a MinGpus; why a kind of sharding has none. What is
recorded first is what shares of one GPU's recorded step say (shares.py); only recordings answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import gcd
from typing import TYPE_CHECKING, get_args

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.catalog import text_config
from vramprobe.choices import Sharding
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.model.card_fit import CardFit
from vramprobe.predict.bisection import first_of
from vramprobe.predict.shares import near
from vramprobe.predict.verdict import Verdict, verdict
from vramprobe.records.frozen import FrozenModel
from vramprobe.rules.not_sharded import cannot_offload, cannot_quantize, offloads_alone
from vramprobe.rules.sharding import ONE_GROUP, SHARDINGS, rules_of
from vramprobe.spec import CellSpec

if TYPE_CHECKING:
    from vramprobe.catalog import Gpu
    from vramprobe.predict.largest import Judged
    from vramprobe.predict.prediction import Prediction

#: Numbers that are recorded, a rank of each for seconds.
RECORDED_NUMBERS = (1, 2, 4, 8, 16, 32, 64, 128)
_FIRST_RECORDED = 4  # of them, from 1, where nothing else is known: 8 GPUs


class MinGpus(FrozenModel):
    """The fewest GPUs on which each rank fits, of :data:`RECORDED_NUMBERS`; null where not even the most do.

    ``tight_num_gpus``: fewer, on which it is tight; null where there are none. ``verdict`` is of ``verdict_num_gpus``:
    the fewest, else those on which it is tight, else the most.
    """

    sharding: Sharding
    num_gpus: int | None
    tight_num_gpus: int | None = None
    verdict_num_gpus: int
    verdict: Verdict  # of the first rank
    offload: str = "none"
    host_bytes: int | None = None  # tensors of all ranks of a machine in its memory, where something is offloaded


def min_gpus(
    spec: CellSpec,
    gpu: Gpu,
    model: CardFit | None,
    say: Callable[[str], None],
    judge: Callable[[CellSpec, Prediction], Judged],
) -> MinGpus:
    """The least power of two of ``gpu`` on which the first rank's verdict is ``fits``, by a recording of each number
    that is looked at: two to five of :data:`RECORDED_NUMBERS`. ``say`` hears of the progress; ``judge`` gives the
    verdict of a rank.

    Raises SpecError for ddp, which divides nothing, NoRecipe under device-map, UnsupportedArchitecture for a hybrid,
    and what a recording raises.
    """
    from vramprobe.predict import recorded

    sharding = _require_answer(spec.sharding)
    if reason := cannot_offload(spec):
        raise SpecError(reason)
    numbers = [number for number in RECORDED_NUMBERS if _parts(spec) % number == 0]

    @cache
    def judged(position: int) -> Verdict:
        ranks = _on(spec, numbers[position - 1])

        def say_of(words: str) -> None:
            say(f"{words}, one of {ranks.num_gpus} GPUs")

        found = recorded.predict(ranks, gpu=gpu, model=None if ranks.is_sharded else model, say=say_of)
        return judge(ranks, found).verdict

    first = min(_guess(spec, gpu, numbers), len(numbers))
    fits = first_of(lambda at: judged(at).verdict == "fits", len(numbers), guess=first)
    most = fits or len(numbers)
    tight = first_of(lambda at: judged(at).verdict != "does not fit", most, guess=most)
    shown = fits or tight or len(numbers)
    return MinGpus(
        sharding=sharding,
        num_gpus=fits and numbers[fits - 1],
        tight_num_gpus=None if tight is None or tight == fits else numbers[tight - 1],
        verdict_num_gpus=numbers[shown - 1],
        verdict=judged(shown),
        offload=spec.offload,
        host_bytes=_on_host(_on(spec, numbers[shown - 1])),
    )


def _guess(spec: CellSpec, gpu: Gpu, numbers: list[int]) -> int:
    """Return the position of the first number whose rank is not far too large, near."""
    try:
        for position, number in enumerate(numbers[1:], 2):
            found = near(_on(spec, number), gpu)
            if (found.reserved_bytes or found.peak_allocated_bytes).value <= verdict(found, gpu).usable_bytes:
                return position
    except VramprobeError:
        return _FIRST_RECORDED
    return len(numbers)


def _on_host(spec: CellSpec) -> int | None:
    if spec.offload == "none":
        return None
    from vramprobe.predict.host_memory import of_machine_bytes

    try:
        return of_machine_bytes(spec)
    except UnsupportedArchitecture:
        return None


def _parts(spec: CellSpec) -> int:
    """Return the parts that a model can be divided into: its heads under tensor parallelism, else as many as asked."""
    if rules_of(spec.sharding).module != "tensor_parallel":
        return RECORDED_NUMBERS[-1]
    config = text_config(spec.architecture)
    heads = config.get("num_attention_heads") or 1
    return gcd(heads, config.get("num_key_value_heads") or heads)


def why_not(spec: CellSpec) -> str | None:
    """Return why a kind of sharding is not tried; None where it is."""
    return cannot_quantize(spec) or cannot_offload(spec)


def _require_answer(sharding: Sharding | None) -> Sharding:
    if sharding is None or sharding not in SHARDINGS:
        raise SpecError(f"sharding: {sharding!r} given; allowed: {', '.join(get_args(Sharding))}")
    rules = rules_of(sharding)
    if sharding == "ddp":
        asked = ", ".join(kind for kind in ONE_GROUP if rules_of(kind).answers_min_gpus)
        raise SpecError(f"sharding: ddp divides nothing, so no number of GPUs makes a cell fit; use {asked}")
    if rules.within is not None:
        raise UnsupportedArchitecture(
            f"sharding {sharding}: more GPUs make more groups, and a rank of each holds as much; ask how many make a "
            f"group: sharding {rules.within}"
        )
    return sharding


def _on(spec: CellSpec, num_gpus: int) -> CellSpec:
    """On one, nothing is sharded, and DeepSpeed alone offloads."""
    alone = {"sharding": None, "offload": "none"} if num_gpus == 1 and not offloads_alone(spec) else {}
    return spec.model_copy(update={"num_gpus": num_gpus} | alone)
