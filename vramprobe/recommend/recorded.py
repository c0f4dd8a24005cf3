"""Recommend a card for a model without arithmetic: memory by a recording, time by the launches that it counted.

In: a Question, offers. Out: the same Recommendation as by arithmetic, of one setting for each method and number of
GPUs, since each is recorded for seconds to a minute. Nothing in it was measured. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from typing import Any

from vramprobe.catalog import Gpu, find_gpu, list_gpus
from vramprobe.errors import VramprobeError
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.recorded import DEFAULT_CARD, predict_and_count
from vramprobe.predict.verdict import verdict
from vramprobe.recipe.launches import Launches
from vramprobe.recommend.answer import Recommendation, answers_of, judged, old_dates, price_notes, what_it_lacks
from vramprobe.recommend.options import COUNTS, Option, Question, hours_of, offers_of, usd_of, words_of
from vramprobe.recommend.prices import Offer
from vramprobe.recommend.recipes import Setting
from vramprobe.spec import CellSpec, resolve
from vramprobe.speed.counted import Count, time_of
from vramprobe.speed.rates import GPUS_PER_MACHINE
from vramprobe.speed.raw_count import count_of
from vramprobe.speed.step import Estimate, Figure

#: Kernels of cards from Ampere on are alike but for cuBLAS's workspace: one recording answers for all that are not
#: named.
_LEAST_CAPABILITY = (8, 0)
_NOTES = (
    "no arithmetic for the model: one setting for each method was recorded on an emulated GPU. Its micro-batch is "
    "--batch-size (default 1) with gradient checkpointing unless you say otherwise; several GPUs with --sharding",
    "time is predicted from the counted launches of one step, not measured; docs/step_time.md says how far its 80 % "
    "intervals were checked",
    "not counted: storage, egress, downloads, evaluation, checkpoints, data loading, runs that fail",
)


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
    """A method's option on each card and number of GPUs."""
    counts = [1] if question.sharding is None else [count for count in COUNTS if count > 1]
    found = []
    for count in counts:
        if count > min(question.max_gpus, GPUS_PER_MACHINE):
            continue
        recorded: tuple[Prediction, Launches] | None = None
        spec, accum = _cell(question, method, count)
        for gpu in _cards(question, offers, count):
            if question.gpus or not recorded:
                recorded = predict_and_count(spec, gpu=gpu if question.gpus else find_gpu(DEFAULT_CARD), say=say)
            prediction, launches = recorded
            counted = _for_accumulation(count_of(launches), accum / spec.grad_accum)
            found.append(_option(question, spec, accum, gpu, prediction, counted, offers))
    return found


def _cards(question: Question, offers: Sequence[Offer], count: int) -> list[Gpu]:
    if question.gpus:
        return [find_gpu(name) for name in question.gpus]
    return [
        gpu
        for gpu in list_gpus()
        if (gpu.capability or (0, 0)) >= _LEAST_CAPABILITY
        and gpu.total_bytes is not None
        and offers_of(offers, gpu.short_name, count)
    ]


def _cell(question: Question, method: str, count: int) -> tuple[CellSpec, int]:
    """The cell that is recorded, and how many micro-steps the run's step has; the third is like the second."""
    words: dict[str, Any] = {"batch_size": 1, "gradient_checkpointing": True} | words_of(question, method)
    accum = words.get("grad_accum") or max(1, round(question.global_batch / count / words["batch_size"]))
    spec = resolve(**{"device": "cuda"} | words | {"grad_accum": min(accum, 2)})
    return spec.model_copy(update={"num_gpus": count, "sharding": question.sharding if count > 1 else None}), accum


def _for_accumulation(count: Count, factor: float) -> Count:
    """The count with ``factor`` times as many micro-steps before the optimizer's."""

    def times(number: int) -> int:
        return round(number * factor)

    rows = tuple(
        row
        if row.phase == "optimizer"
        else replace(
            row,
            calls=times(row.calls),
            flops=times(row.flops),
            read=times(row.read),
            written=times(row.written),
            launches=times(row.launches),
        )
        for row in count.rows
    )
    claimed = sum(row.launches for row in rows)
    return replace(
        count,
        rows=rows,
        num_claimed=claimed,
        num_launches=claimed + times(max(0, count.num_launches - count.num_claimed)),
        link_bytes=tuple((kind, times(num_bytes), ranks) for kind, num_bytes, ranks in count.link_bytes),
    )


def _option(
    question: Question,
    spec: CellSpec,
    accum: int,
    gpu: Gpu,
    prediction: Prediction,
    counted: Count,
    offers: Sequence[Offer],
) -> Option:
    time, num_gpus = time_of(counted, gpu), spec.num_gpus
    tokens = num_gpus * accum * spec.batch_size * spec.seq_len
    rate = Figure(value=tokens / time.seconds, low=tokens / time.high_seconds, high=tokens / time.low_seconds)
    setting = Setting(
        num_gpus=num_gpus,
        sharding=spec.sharding,
        batch_size=spec.batch_size,
        grad_accum=accum,
        gradient_checkpointing=spec.gradient_checkpointing,
        verdict=verdict(prediction, gpu),
        estimate=Estimate(
            seconds=time.seconds,
            tokens_per_second=rate,
            mfu=time.mfu,
            parts=time.by_class,
            condition=time.condition,
        ),
        warnings=prediction.warnings,
    )
    fits = setting.verdict.verdict != "does not fit"
    hours, its = hours_of(question.tokens, rate) if fits else None, offers_of(offers, gpu.short_name, num_gpus)
    offer = min(its, key=lambda one: one.hourly(num_gpus), default=None)
    return Option(
        method=spec.method,
        gpu=gpu.short_name,
        num_gpus=num_gpus,
        setting=setting,
        hours=hours,
        usd=None if hours is None or offer is None else usd_of(hours, offer, num_gpus, None),
        offer=offer,
        host=None,
        why_not="" if fits else f"does not fit: {setting.verdict.reason}",
    )
