"""Recommend a card for a model without arithmetic: memory by a recording, time by the launches that it counted.

In: a Question, offers. Out: the same Recommendation as by arithmetic, of a few settings for each method and number of
GPUs, since each is recorded for seconds to a minute. Nothing in it was measured. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from typing import Any, NamedTuple

from vramprobe.catalog import Gpu, find_gpu, list_gpus
from vramprobe.errors import VramprobeError
from vramprobe.predict.at_hand import DEFAULT_CARD
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.recorded import over_rows, predict_and_count
from vramprobe.predict.verdict import verdict
from vramprobe.recipe.book import MOST_MICRO_STEPS
from vramprobe.recipe.shipped import answers_for
from vramprobe.recommend.answer import Recommendation, answers_of, judged, old_dates, price_notes, what_it_lacks
from vramprobe.recommend.money import cheapest, hours_of, offers_of
from vramprobe.recommend.options import COUNTS, Option, Question, nearest, words_of
from vramprobe.recommend.prices import Offer
from vramprobe.recommend.settings import Setting
from vramprobe.spec import CellSpec, resolve
from vramprobe.speed.counted import Count
from vramprobe.speed.rates import GPUS_PER_MACHINE
from vramprobe.speed.raw_count import count_of
from vramprobe.speed.scaled import counted_estimate

_NOTES = (
    "no arithmetic for this run: each method was recorded on an emulated GPU, with gradient checkpointing and without "
    "and with 1 to 8 rows a micro-batch unless you say which; several GPUs with --sharding, of one row",
    "time is predicted from the counted launches of one step, not measured; docs/step_time.md says how far its 80 % "
    "intervals were checked",
    "not counted: storage, egress, downloads, evaluation, checkpoints, data loading, runs that fail",
)


class _Way(NamedTuple):
    """A cell as it was recorded, the micro-steps of the run's own step, and what it takes and launches."""

    spec: CellSpec
    grad_accum: int
    prediction: Prediction
    count: Count


def recommended_by_recording(
    question: Question, offers: Sequence[Offer], *, today: date, say: Callable[[str], None] = lambda words: None
) -> Recommendation:
    """Every option for the question, judged; ``say`` hears of the recordings.

    Raises what a recording raises where it does for every method.
    """
    options: list[Option] = []
    by_method: dict[str, str | None] = {}
    refusal: VramprobeError | None = None
    for method in question.methods:
        try:
            own = _options(question, method, offers, say)
        except VramprobeError as error:
            refusal, by_method[method] = refusal or error, f"not recorded: {error}"
            continue
        options += own
        by_method[method] = what_it_lacks(own)
    if refusal is not None and not options:
        raise refusal
    answers = answers_of(question, options)
    offered = [one.offer for one in options if one.offer is not None]
    alike = [] if question.gpus else [f"recorded on {DEFAULT_CARD}, whose kernels the others' are like"]
    return Recommendation(
        model=str(question.words["model"]),
        tokens=question.tokens,
        seq_len=question.words["seq_len"],
        answers=answers,
        options=judged(question, options, answers),
        by_method=by_method,
        old_prices=old_dates([one.option.offer for one in answers if one.option and one.option.offer], today),
        notes=[*_NOTES, *alike, *price_notes(offered, today)],
    )


def _options(question: Question, method: str, offers: Sequence[Offer], say: Callable[[str], None]) -> list[Option]:
    """A method's best option on each card and number of GPUs."""
    counts = [1] if question.sharding is None else [count for count in COUNTS if count > 1]
    found = []
    for count in counts:
        if count > min(question.max_gpus, GPUS_PER_MACHINE):
            continue
        ways: list[_Way] = []
        for gpu in _cards(question, offers, count):
            if question.gpus or not ways:
                ways = _ways(question, method, count, gpu if question.gpus else find_gpu(DEFAULT_CARD), say)
            found.append(_best([_option(question, way, gpu, offers) for way in ways]))
    return found


def _ways(question: Question, method: str, count: int, gpu: Gpu, say: Callable[[str], None]) -> list[_Way]:
    """Return the ways to run a method: on one GPU with several rows, with checkpointing and without, where the question
    leaves them open. What cannot be recorded beside the first way is left out."""
    words = words_of(question, method)
    open_rows = count == 1 and "batch_size" not in words
    checkpointing = [words["gradient_checkpointing"]] if "gradient_checkpointing" in words else [True, False]
    found: list[_Way] = []
    for one in checkpointing if count == 1 else checkpointing[:1]:
        own = words | {"gradient_checkpointing": one}
        try:
            found.append(first := _way_of(question, own, count, gpu, say))
            found += _of_several_rows(question, first.spec, gpu, say) if open_rows else []
        except VramprobeError as error:
            if not found:
                raise
            say(f"left out: {error}")
    return found


def _way_of(question: Question, words: dict[str, Any], count: int, gpu: Gpu, say: Callable[[str], None]) -> _Way:
    """The cell is recorded with one micro-step or two."""
    words = {"batch_size": 1} | words
    accum = words.get("grad_accum") or max(1, round(question.global_batch / count / words["batch_size"]))
    spec = resolve(**{"device": "cuda"} | words | {"grad_accum": min(accum, MOST_MICRO_STEPS)})
    spec = spec.model_copy(update={"num_gpus": count, "sharding": question.sharding if count > 1 else None})
    prediction, launches = predict_and_count(spec, gpu=gpu, say=say)
    return _Way(spec, accum, prediction, count_of(launches))


def _of_several_rows(question: Question, spec: CellSpec, gpu: Gpu, say: Callable[[str], None]) -> list[_Way]:
    """Two rows, four and so on, as far as the question's batch goes: all from one recipe of several shapes."""
    found: list[_Way] = []
    rows = [2**power for power in range(1, 16) if 2**power <= question.global_batch]
    if not rows or question.words.get("grad_accum"):
        return []
    most, predicted = over_rows(spec, gpu=gpu, say=say)
    for number in (number for number in rows if number <= most):
        cell = spec.model_copy(update={"batch_size": number})
        prediction, launches = predicted(cell)
        found.append(_Way(cell, max(1, round(question.global_batch / number)), prediction, count_of(launches)))
    return found


def _best(options: Sequence[Option]) -> Option:
    """The fastest that fits, else the fastest that is tight, else the one that lacks least."""
    for wanted in ("fits", "tight"):
        if some := [one for one in options if one.setting.verdict.verdict == wanted]:
            return min(some, key=lambda one: one.hours.value if one.hours else 0.0)
    return nearest(options)


def _cards(question: Question, offers: Sequence[Offer], count: int) -> list[Gpu]:
    if question.gpus:
        return [find_gpu(name) for name in question.gpus]
    return [
        gpu
        for gpu in list_gpus()
        if answers_for(gpu) and gpu.total_bytes is not None and offers_of(offers, gpu.short_name, count)
    ]


def _option(question: Question, way: _Way, gpu: Gpu, offers: Sequence[Offer]) -> Option:
    spec, accum, prediction = way.spec, way.grad_accum, way.prediction
    estimate, num_gpus = counted_estimate(spec, way.count, accum, gpu), spec.num_gpus
    setting = Setting(
        num_gpus=num_gpus,
        sharding=spec.sharding,
        batch_size=spec.batch_size,
        grad_accum=accum,
        gradient_checkpointing=spec.gradient_checkpointing,
        verdict=verdict(prediction, gpu),
        estimate=estimate,
        warnings=prediction.warnings,
    )
    fits = setting.verdict.verdict != "does not fit"
    hours = hours_of(question.tokens, estimate.tokens_per_second)
    offer, usd = cheapest(offers, hours, gpu.short_name, num_gpus, None)
    return Option(
        method=spec.method,
        gpu=gpu.short_name,
        num_gpus=num_gpus,
        setting=setting,
        hours=hours if fits else None,
        usd=usd if fits else None,
        offer=offer,
        host=None,
        why_not="" if fits else f"does not fit: {setting.verdict.reason}",
    )
