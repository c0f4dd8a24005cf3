"""Changes: an option -> what another setting would change: bytes, hours and dollars, by the same list as predict's.

In: a Question and the option it is about. Out: Changes with time and money, those that cost less first. What saves
neither memory nor money is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vramprobe.catalog import find_gpu
from vramprobe.errors import VramprobeError
from vramprobe.predict.changes import LEAST_SHARE, candidates
from vramprobe.predict.verdict import Verdict, verdict
from vramprobe.recommend.answer import Effect
from vramprobe.recommend.memory import predict_on
from vramprobe.recommend.money import cheapest, host_of, hours_of
from vramprobe.recommend.options import Option, Question, words_of
from vramprobe.recommend.prices import Offer
from vramprobe.recommend.settings import SettingsSearch, Words, without_bf16
from vramprobe.rules.not_sharded import cannot_shard
from vramprobe.spec import RECIPES, resolve
from vramprobe.speed.measured import Measured
from vramprobe.speed.rates import SpeedFit, shipped_speed
from vramprobe.speed.work import work_of

#: Words of a candidate that are no cell's.
_OF_RANKS = ("num_gpus", "sharding")


def effects(
    question: Question,
    option: Option,
    offers: Sequence[Offer],
    *,
    fit: SpeedFit | None = None,
    measured: Mapping[str, Measured] | None = None,
) -> list[Effect]:
    """Return the effect of each single change on ``option``: those that save money first; where it does not fit,
    memory.

    Fewer tokens of a step are made up for by more steps, so that the tokens stay.
    """
    gpu, setting = find_gpu(option.gpu), option.setting
    words = words_of(question, option.method)
    words = RECIPES.get(words.get("recipe") or "", {}) | {name: v for name, v in words.items() if name != "recipe"}
    words |= (without_bf16(words) if gpu.bf16_dense_tflops is None else {}) | setting.words()
    search = SettingsSearch(
        words,
        global_batch=question.global_batch,
        sharding=question.sharding,
        fit=fit or shipped_speed(),
        measured=measured or {},
    )
    now = _run(search, words, option, offers, question.tokens)
    assert now is not None
    spec = resolve(**_cell(words)).model_copy(update={"num_gpus": setting.num_gpus})
    others = [
        *candidates(spec),
        {"gradient_checkpointing": False},
        {"batch_size": 2 * setting.batch_size},
    ]
    found = []
    for one in others:
        if all(words.get(name) == value for name, value in one.items()):
            continue
        made = _run(search, words | one, option, offers, question.tokens)
        if made is None:
            continue
        judged, hours, usd = made
        effect = Effect(
            options=one,
            verdict=judged,
            saved_bytes=now[0].needed_bytes.value - judged.needed_bytes.value,
            hours=hours,
            saved_hours=now[1] - hours,
            usd=usd,
            saved_usd=None if usd is None or now[2] is None else now[2] - usd,
        )
        if _is_worth_a_line(effect, now[0], now[1]):
            found.append(effect)
    if option.hours is None:  # it does not fit
        return sorted(found, key=lambda one: -one.saved_bytes)
    return sorted(found, key=lambda one: (one.usd if one.usd is not None else one.hours, -one.saved_bytes))


def _is_worth_a_line(effect: Effect, now: Verdict, hours: float) -> bool:
    saves_bytes = effect.saved_bytes > LEAST_SHARE * now.needed_bytes.value
    saves_time = effect.saved_hours > LEAST_SHARE * hours and effect.verdict.verdict != "does not fit"
    return saves_bytes or saves_time


def _cell(words: Words) -> Words:
    return {"device": "cuda"} | {name: value for name, value in words.items() if name not in _OF_RANKS}


def _run(
    search: SettingsSearch, words: Words, option: Option, offers: Sequence[Offer], tokens: int
) -> tuple[Verdict, float, float | None] | None:
    """(verdict, hours, dollars) with these words; None where they cannot be or are not counted."""
    gpu = find_gpu(option.gpu)
    num_gpus = words.get("num_gpus") or 1
    sharding = (words.get("sharding") or "fsdp") if num_gpus > 1 else None
    try:
        spec = resolve(**_cell(words)).model_copy(update={"num_gpus": num_gpus, "sharding": sharding})
        if cannot_shard(spec) is not None:
            return None
        judged = verdict(predict_on(spec, gpu), gpu)
        made = search.estimate(work_of(spec), spec.grad_accum, gpu, num_gpus, sharding)
    except VramprobeError:
        return None
    hours = hours_of(tokens, made.tokens_per_second)
    host = host_of(spec)
    _, usd = cheapest(offers, hours, option.gpu, num_gpus, host)
    return judged, hours.value, None if usd is None else usd.value
