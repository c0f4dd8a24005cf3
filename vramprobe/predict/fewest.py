"""Fewest: how many of a GPU a cell needs under each kind of sharding.

In: a spec with its sharding and what it offloads, a GPU, a fit or none. Out: a MinGpus; of every kind that divides a
model, and why others have none. By arithmetic, and by the allocator's replay where that knows the sharding; or by
recordings of a few numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import gcd
from typing import TYPE_CHECKING, Literal, get_args

from pydantic import BaseModel, ConfigDict

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.catalog import text_config
from vramprobe.choices import Sharding
from vramprobe.errors import SpecError
from vramprobe.model.memory_model import MemoryModel
from vramprobe.predict.bisection import first_of
from vramprobe.predict.host_memory import of_machine_bytes
from vramprobe.predict.predict import predict
from vramprobe.predict.verdict import TIGHT_SHARE, Verdict, usable_bytes, verdict
from vramprobe.rules.sharding import ONE_GROUP, SHARD_SIZE, SHARDINGS, cannot_offload, cannot_quantize, rules_of
from vramprobe.spec import CellSpec

if TYPE_CHECKING:
    from vramprobe.catalog import Gpu

#: Beyond this many GPUs no answer is sought.
MAX_GPUS = 4096
#: Numbers that are recorded, a rank of each for seconds.
RECORDED_NUMBERS = (1, 2, 4, 8, 16, 32, 64, 128)
_FIRST_RECORDED = 4  # of them, from 1: 8 GPUs
#: The GPUs of one machine, for one process.
MAX_CARDS = 16


class MinGpus(BaseModel):
    """The fewest GPUs on which each rank fits; null where not even the most do.

    ``tight_num_gpus``: fewer, on which it is tight; null where there are none. ``verdict`` is of ``verdict_num_gpus``:
    the fewest, else those on which it is tight, else those of one machine.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sharding: Sharding
    num_gpus: int | None
    tight_num_gpus: int | None = None
    verdict_num_gpus: int
    verdict: Verdict  # of one rank, or of the fullest GPU of one process
    offload: str = "none"
    host_bytes: int | None = None  # tensors of all ranks of a machine in its memory, where something is offloaded
    engine: Literal["formula", "recipe"] = "formula"  # recipe: of the powers of two alone


def min_gpus(
    spec: CellSpec,
    gpu: Gpu,
    model: MemoryModel | None = None,
    *,
    allow_extrapolation: bool = False,
    replays: bool = True,
) -> MinGpus:
    """The fewest of ``gpu`` whose verdict is ``fits``, under the sharding of ``spec``.

    ``replays``: without a fit by the allocator's replay, where that knows the sharding. Raises SpecError for ddp, which
    divides nothing, and for what no library runs so, UnsupportedArchitecture for what is not counted, and what predict
    raises.
    """
    _require_answer(spec.sharding)
    if reason := cannot_offload(spec):
        raise SpecError(reason)
    words = {"model": model, "allow_extrapolation": allow_extrapolation}
    if spec.is_spread:
        return _of_cards(spec, gpu, **words)
    return _of_ranks(spec, gpu, **words, replays=replays and model is None)


def recorded_min_gpus(
    spec: CellSpec, gpu: Gpu, model: MemoryModel | None = None, say: Callable[[str], None] = lambda words: None
) -> MinGpus:
    """The least power of two of ``gpu`` on which the first rank's verdict is ``fits``, by a recording of each number
    that is looked at: three to five of :data:`RECORDED_NUMBERS`. ``say`` hears of the progress.

    Raises SpecError and UnsupportedArchitecture as :func:`min_gpus`, NoRecipe under device-map, and what a recording
    raises.
    """
    from vramprobe.predict import recorded

    _require_answer(spec.sharding)
    if reason := cannot_offload(spec):
        raise SpecError(reason)
    numbers = [number for number in RECORDED_NUMBERS if _parts(spec) % number == 0]

    @cache
    def judged(position: int) -> Verdict:
        ranks = _on(spec, numbers[position - 1])

        def say_of(words: str) -> None:
            say(f"{words}, one of {ranks.num_gpus} GPUs")

        return verdict(recorded.predict(ranks, gpu=gpu, model=model if ranks.num_gpus == 1 else None, say=say_of), gpu)

    first = min(_FIRST_RECORDED, len(numbers))
    fits = first_of(lambda at: judged(at).verdict == "fits", len(numbers), guess=first)
    most = fits or len(numbers)
    tight = first_of(lambda at: judged(at).verdict != "does not fit", most, guess=most)
    shown = fits or tight or len(numbers)
    return MinGpus(
        sharding=spec.sharding,
        num_gpus=fits and numbers[fits - 1],
        tight_num_gpus=None if tight in (None, fits) else numbers[tight - 1],
        verdict_num_gpus=numbers[shown - 1],
        verdict=judged(shown),
        offload=spec.offload,
        engine="recipe",
    )


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


def _require_answer(sharding: str | None) -> None:
    if sharding not in SHARDINGS:
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


def _on(spec: CellSpec, num_gpus: int) -> CellSpec:
    """On one, nothing is sharded or offloaded."""
    alone = {"sharding": None, "offload": "none"} if num_gpus == 1 else {}
    return spec.model_copy(update={"num_gpus": num_gpus} | alone)


def _of_ranks(
    spec: CellSpec, gpu: Gpu, *, model: MemoryModel | None, allow_extrapolation: bool, replays: bool
) -> MinGpus:
    """Find the fewest of any number of ranks, each with the batch of ``spec``."""
    words = {"allow_extrapolation": allow_extrapolation, "gpu": gpu}

    @cache
    def judged(num_gpus: int, *, replays: bool, retries: bool = False) -> Verdict:
        ranks = _on(spec, num_gpus)
        return verdict(predict(ranks, model, replays=replays, retries=retries, **words), gpu)

    def needed(num_gpus: int) -> Verdict:
        return judged(num_gpus, replays=replays)

    # What a rank's tensors need by arithmetic is soon known, and the replay never needs less.
    least = first_of(lambda num_gpus: judged(num_gpus, replays=False).verdict != "does not fit", MAX_GPUS)
    tight = fewest = None
    if least is not None:
        tight = first_of(
            lambda num_gpus: judged(num_gpus, replays=replays, retries=replays).verdict != "does not fit",
            MAX_GPUS,
            least=least,
        )
        fewest = first_of(
            lambda num_gpus: needed(num_gpus).verdict == "fits",
            MAX_GPUS,
            least=tight or MAX_GPUS,
            guess=_guess(needed, tight),
        )
    shown = _on(spec, fewest or tight or SHARD_SIZE)
    return MinGpus(
        sharding=spec.sharding,
        num_gpus=fewest,
        tight_num_gpus=None if tight == fewest else tight,
        verdict_num_gpus=shown.num_gpus,
        verdict=judged(shown.num_gpus, replays=replays, retries=replays and fewest is None),
        offload=spec.offload,
        host_bytes=None if shown.offload == "none" else of_machine_bytes(shown),
    )


def _guess(judged: Callable[[int], Verdict], num_gpus: int | None) -> int:
    """About how many are needed, if what all of them share falls with their number."""
    if num_gpus is None or 2 * num_gpus > MAX_GPUS:
        return 0
    few, many = judged(num_gpus), judged(2 * num_gpus)
    own = 2 * many.needed_bytes.high - few.needed_bytes.high  # of each, however many there are
    shared, left = (few.needed_bytes.high - own) * num_gpus, TIGHT_SHARE * few.usable_bytes - own
    return min(int(shared / left) + 1, MAX_GPUS) if left > 0 else 0


def _of_cards(spec: CellSpec, gpu: Gpu, *, model: MemoryModel | None, allow_extrapolation: bool) -> MinGpus:
    """Find the fewest cards of one machine on each of which its layers fit. Raises what predict raises where it does
    for every number.
    """

    @cache
    def judged(num_gpus: int) -> Verdict:
        return verdict(predict(_on(spec, num_gpus), model, allow_extrapolation=allow_extrapolation, gpu=gpu), gpu)

    fewest = tight = last = None
    refusal: Exception | None = None
    alone = predict(_on(spec, 1), model, allow_extrapolation=True, gpu=gpu)
    standing = sum(alone.terms.get(cause, 0) for cause in ("weights", "optimizer_state"))
    least = min(max(2, standing // usable_bytes(gpu, device_is_known=False)), MAX_CARDS)
    for num_gpus in (1, *range(least, MAX_CARDS + 1)):
        try:
            one = judged(num_gpus)
        except (SpecError, UnsupportedArchitecture) as error:  # of this number: a GPU is left empty
            refusal = refusal or error
            continue
        last = num_gpus
        if one.verdict != "does not fit" and tight is None:
            tight = num_gpus
        if one.verdict == "fits":
            fewest = num_gpus
            break
    if last is None or (last == 1 and fewest is None and refusal is not None):
        assert refusal is not None
        raise refusal
    return MinGpus(
        sharding=spec.sharding,
        num_gpus=fewest,
        tight_num_gpus=None if tight == fewest else tight,
        verdict_num_gpus=fewest or tight or last,
        verdict=judged(fewest or tight or last),
    )
