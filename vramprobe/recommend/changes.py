"""Changes: an option -> what another setting would change: bytes, hours and dollars, by the same list as predict's.

In: a Question and the option it is about. Out: Changes with time and money, those that cost less first. What saves
neither memory nor money is left out.
"""

from collections.abc import Mapping, Sequence

from vramprobe.catalog import Gpu, find_gpu
from vramprobe.choices import RECIPES
from vramprobe.errors import VramprobeError
from vramprobe.predict.at_hand import NotAtHand
from vramprobe.predict.changes import LEAST_SHARE, candidates
from vramprobe.predict.verdict import Verdict
from vramprobe.recommend.answer import Effect
from vramprobe.recommend.money import cheapest, hours_of
from vramprobe.recommend.options import Option, Question, words_of
from vramprobe.recommend.prices import Offer
from vramprobe.recommend.settings import Setting, SettingsSearch, Words, without_bf16
from vramprobe.resolve import resolve
from vramprobe.speed.measured import Measured

#: Words of a candidate that are no cell's.
_OF_RANKS = ("num_gpus", "sharding")


def effects(
    question: Question,
    option: Option,
    offers: Sequence[Offer],
    *,
    measured: Mapping[str, Measured] | None = None,
    left_out: list[Words] | None = None,
) -> list[Effect]:
    """Return the effect of each single change on ``option``: those that save money first; where it does not fit,
    memory. ``left_out`` takes those that a recording would be needed for.

    Fewer tokens of a step are made up for by more steps, so that the tokens stay.
    """
    gpu, setting = find_gpu(option.gpu), option.setting
    assert isinstance(setting, Setting)  # no command's
    words = words_of(question, option.method)
    words = RECIPES.get(words.get("recipe") or "", {}) | {name: v for name, v in words.items() if name != "recipe"}
    words |= (without_bf16(words) if gpu.bf16_dense_tflops is None else {}) | setting.words()
    own: Words = {"device": "cuda"} | _without_ranks(words)
    spec = resolve(**own).model_copy(update={"num_gpus": setting.num_gpus})
    hours = hours_of(question.tokens, setting.estimate.tokens_per_second)
    _, usd = cheapest(offers, hours, option.gpu, setting.num_gpus, option.host)
    others = [*candidates(spec), {"gradient_checkpointing": False}, {"batch_size": 2 * setting.batch_size}]
    found = []
    for one in others:
        if all(words.get(name) == value for name, value in one.items()):
            continue
        try:
            made = _setting(words | one, gpu, measured)
        except NotAtHand:
            if left_out is not None:
                left_out.append(one)
            continue
        except VramprobeError:
            continue  # it cannot be
        if made is None:
            continue
        then = hours_of(question.tokens, made.estimate.tokens_per_second)
        _, usd_then = cheapest(offers, then, option.gpu, made.num_gpus, option.host)
        effect = Effect(
            options=one,
            verdict=made.verdict,
            saved_bytes=setting.verdict.needed_bytes.value - made.verdict.needed_bytes.value,
            hours=then.value,
            saved_hours=hours.value - then.value,
            usd=None if usd_then is None else usd_then.value,
            saved_usd=None if usd_then is None or usd is None else usd.value - usd_then.value,
        )
        if _is_worth_a_line(effect, setting.verdict, hours.value):
            found.append(effect)
    if option.hours is None:  # it does not fit
        return sorted(found, key=lambda one: -one.saved_bytes)
    return sorted(found, key=lambda one: (one.usd if one.usd is not None else one.hours, -one.saved_bytes))


def _is_worth_a_line(effect: Effect, now: Verdict, hours: float) -> bool:
    saves_bytes = effect.saved_bytes > LEAST_SHARE * now.needed_bytes.value
    saves_time = effect.saved_hours > LEAST_SHARE * hours and effect.verdict.verdict != "does not fit"
    return saves_bytes or saves_time


def _without_ranks(words: Words) -> Words:
    return {name: value for name, value in words.items() if name not in _OF_RANKS}


def _setting(words: Words, gpu: Gpu, measured: Mapping[str, Measured] | None) -> Setting | None:
    """Return the setting of these words, all of them given; None where nothing is known of a rank."""
    own, sharding = {"grad_accum": 1} | _without_ranks(words), words.get("sharding") or "fsdp"
    search = SettingsSearch(own, global_batch=1, sharding=sharding, measured=measured, records=False)
    return search.best(gpu, words.get("num_gpus") or 1)
