"""Answer: a question about cards -> every option with its time and money, the answers people ask for, why not others.

In: a Question. Out: a frozen Recommendation. Nothing in it was measured: memory is predict's, speed the fitted
roofline's with its 80 % interval, money an offer's that has a date. Not counted: downloads, evaluation, failed runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from vramprobe.architecture import architecture
from vramprobe.catalog import Gpu, find_gpu, list_gpus
from vramprobe.predict.prediction import Verdict
from vramprobe.recommend.prices import Offer
from vramprobe.recommend.recipes import Kitchen, Setting, Words, best
from vramprobe.spec import CellSpec, resolve
from vramprobe.speed.measured import Measured
from vramprobe.speed.rates import SpeedFit, shipped_speed
from vramprobe.speed.step import Figure
from vramprobe.terms.optimizer import state_bytes
from vramprobe.terms.parameters import tensors
from vramprobe.terms.ranks import Sharding
from vramprobe.units import format_hours, format_usd

METHODS = ("full", "lora", "qlora")
#: Sequences of an optimizer step, unless told.
GLOBAL_BATCH = 16
#: Numbers of cards that are tried, up to ``max_gpus``.
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
#: Checkpoints that are kept while a run goes on, as a trainer's save_total_limit of 2 keeps.
_KEPT_CHECKPOINTS = 2
_HOURS_PER_MONTH = 730
#: Of predict's warnings, those that hold for every answer here.
_SAID_OF_ALL = ("arithmetic alone", "one rank of")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Question(_Frozen):
    """What is asked; ``words`` are a cell's, without batch_size or gradient_checkpointing where they are left open."""

    words: dict[str, Any]
    methods: tuple[str, ...]
    tokens: int
    deadline_seconds: float | None = None
    budget_usd: float | None = None
    global_batch: int = GLOBAL_BATCH
    max_gpus: int = 8
    sharding: Sharding | None = None
    gpus: tuple[str, ...] = ()  # short names; empty: those with an offer


class Host(_Frozen):
    """What the run wants beside its cards, by arithmetic: the machine's memory while loading, and disk."""

    memory_bytes: int
    disk_bytes: int
    checkpoint_bytes: int


class Option(_Frozen):
    """A method on so many of a card at its best setting; without an offer there is no cost."""

    method: str
    gpu: str
    num_gpus: int
    setting: Setting
    hours: Figure | None  # null where it does not fit
    usd: Figure | None
    offer: Offer | None
    host: Host
    why_not: str = ""  # empty for the answers

    @property
    def fits(self) -> bool:
        """Whether the verdict is ``fits``."""
        return self.setting.verdict.verdict == "fits"


class Answer(_Frozen):
    """The option that answers one of the questions people ask; ``doubt`` says what may keep it from being so."""

    question: Literal["cheapest", "fastest", "within the deadline"]
    option: Option | None
    doubt: str


class Effect(_Frozen):
    """Other options than an option's, and what the run is then; the differences are to the option's own figures."""

    options: dict[str, Any]
    verdict: Verdict
    saved_bytes: int  # of one card; negative: it takes more
    hours: float
    saved_hours: float
    usd: float | None
    saved_usd: float | None


class Recommendation(_Frozen):
    """Every option, the cheapest first, and the answers; ``changes`` are about the first, or about what lacks least."""

    model: str
    tokens: int
    seq_len: int
    answers: list[Answer]
    options: list[Option]
    notes: list[str]
    by_method: dict[str, str | None]  # method → what keeps it from an answer; null where it has one
    changes_of: Option | None = None
    changes: list[Effect] = []


def recommended(
    question: Question, offers: list[Offer], *, today: date, fit: SpeedFit | None = None,
    measured: Mapping[str, Measured] = MappingProxyType({}),
) -> Recommendation:  # fmt: skip
    """Every option for the question, judged; ``measured``: what records say of a card's speed.

    Raises SpecError for a cell that cannot be, UnsupportedArchitecture for a model without arithmetic.
    """
    fit = fit or shipped_speed()
    cards = [find_gpu(name) for name in question.gpus] or _with_offers(offers)
    options, by_method = [], {}
    for method in question.methods:
        words = words_of(question.words, method, alone=len(question.methods) == 1)
        kitchen = Kitchen(words, global_batch=question.global_batch, sharding=question.sharding, fit=fit,
                          measured=measured)  # fmt: skip
        made = [
            one for gpu in cards for count in COUNTS
            if count <= question.max_gpus and (one := _option(question, kitchen, words, gpu, count, offers))
        ]  # fmt: skip
        options += made
        by_method[method] = None if any(one.fits for one in made) else _nearest(made)
    return _answered(question, options, by_method, offers, today, fit)


def words_of(words: Words, method: str, *, alone: bool) -> Words:
    """A cell's words for one method; of several, those about adapters or quantisation go where they cannot be."""
    own = {**words, "method": method}
    if alone:
        return own
    drop = [name for name in own if method == "full" and (name.startswith("lora_") or name == "dora")]
    drop += [name for name in own if method != "qlora" and name in ("quant", "kbit_prep")]
    return {name: value for name, value in own.items() if name not in drop}


def _with_offers(offers: Iterable[Offer]) -> list[Gpu]:
    named = {offer.gpu for offer in offers}
    return [gpu for gpu in list_gpus() if gpu.short_name in named and gpu.total_bytes is not None]


def _option(
    question: Question, kitchen: Kitchen, words: Words, gpu: Gpu, count: int, offers: list[Offer]
) -> Option | None:
    found = list(kitchen.settings(gpu, count))
    if not found:
        return None  # no kind of sharding takes the cell
    chosen = best(found)
    assert chosen is not None
    offer = min((one for one in offers if one.gpu == gpu.short_name), key=lambda one: one.hourly(count), default=None)
    host = host_of(resolve(**{"device": "cuda", **words, **_of_spec(chosen)}), count)
    if chosen.verdict.verdict == "does not fit":
        return Option(method=words["method"], gpu=gpu.short_name, num_gpus=count, setting=chosen, hours=None, usd=None,
                      offer=offer, host=host, why_not=f"does not fit: {chosen.verdict.reason}")  # fmt: skip
    rate = chosen.estimate.tokens_per_second
    hours = Figure(value=question.tokens / rate.value / 3600, low=question.tokens / rate.high / 3600,
                   high=question.tokens / rate.low / 3600)  # fmt: skip
    return Option(method=words["method"], gpu=gpu.short_name, num_gpus=count, setting=chosen, hours=hours,
                  usd=_usd(hours, offer, count, host), offer=offer, host=host)  # fmt: skip


def _of_spec(setting: Setting) -> Words:
    return {name: value for name, value in setting.words().items() if name not in ("sharding", "num_gpus")}


def host_of(spec: CellSpec, num_gpus: int) -> Host:
    """Loading holds the 16-bit weights once on the first rank; disk holds them and the checkpoints that are kept."""
    stored = tensors(spec, architecture(spec.architecture))
    weights = 2 * sum(t.numel * t.num_copies for t in stored if t.role != "adapter")
    trained = [t for t in stored if t.trained]
    checkpoint = sum(t.num_bytes * t.num_copies for t in trained) + state_bytes(spec, trained)
    return Host(memory_bytes=weights, disk_bytes=weights + _KEPT_CHECKPOINTS * checkpoint, checkpoint_bytes=checkpoint)


def _usd(hours: Figure, offer: Offer | None, count: int, host: Host) -> Figure | None:
    """The cards by the hour, and storage and the last checkpoint's egress where the offer has their price."""
    if offer is None:
        return None
    gb = host.disk_bytes / 1e9
    hourly = offer.hourly(count) + gb * (offer.usd_per_gb_month or 0.0) / _HOURS_PER_MONTH
    once = host.checkpoint_bytes / 1e9 * (offer.usd_per_gb_egress or 0.0)
    return Figure(value=hours.value * hourly + once, low=hours.low * hourly + once, high=hours.high * hourly + once)


def _nearest(options: list[Option]) -> str:
    """What the option that lacks least lacks."""
    if not options:
        return "no kind of sharding takes it"
    near = nearest(options)
    judged = near.setting.verdict
    return f"nothing fits; nearest {near.num_gpus} × {near.gpu}, {judged.verdict}: {judged.reason}"


def nearest(options: Sequence[Option]) -> Option:
    """The option whose cards lack least."""
    return min(options, key=lambda one: one.setting.verdict.needed_bytes.value / one.setting.verdict.usable_bytes)


def _answered(
    question: Question, options: list[Option], by_method: dict[str, str | None], offers: list[Offer], today: date,
    fit: SpeedFit,
) -> Recommendation:  # fmt: skip
    possible = [one for one in options if one.fits] or [one for one in options if one.hours is not None]
    cheapest = min((one for one in possible if one.usd is not None), key=_cost, default=None)
    fastest = min(possible, key=_time, default=None)
    answers = [
        Answer(question="cheapest", option=cheapest, doubt=_doubt(question, cheapest)),
        Answer(question="fastest", option=fastest, doubt=_doubt(question, fastest)),
    ]
    if question.deadline_seconds is not None:
        answers.append(_in_time(question, possible))
    chosen = {id(one.option) for one in answers if one.option is not None}
    judged = [
        one
        if id(one) in chosen or one.why_not
        else one.model_copy(update={"why_not": _why_not(question, one, answers)})
        for one in options
    ]
    judged.sort(key=lambda one: (one.hours is None, one.usd is None, _cost(one) if one.usd else 0.0, one.num_gpus))
    return Recommendation(
        model=str(question.words["model"]), tokens=question.tokens, seq_len=question.words["seq_len"], answers=answers,
        options=judged, notes=[*_notes(question, options, offers, today, fit), *_doubts(answers)], by_method=by_method,
    )  # fmt: skip


def _cost(one: Option) -> float:
    assert one.usd is not None
    return one.usd.value


def _time(one: Option) -> float:
    assert one.hours is not None
    return one.hours.value


def _in_time(question: Question, possible: list[Option]) -> Answer:
    """The cheapest that ends in time even at the slow end of its interval; else by its best value, with a doubt."""
    limit = (question.deadline_seconds or 0.0) / 3600
    priced = [one for one in possible if one.usd is not None]
    sure = [one for one in priced if one.hours is not None and one.hours.high <= limit]
    likely = [one for one in priced if one.hours is not None and one.hours.value <= limit]
    found = min(sure or likely, key=_cost, default=None)
    doubt = _doubt(question, found)
    if found is None:
        soonest = min(possible, key=_time, default=None)
        doubt = "nothing fits" if soonest is None else (
            f"none ends within {format_hours(limit)}; the fastest takes {format_hours(_time(soonest))}"
        )  # fmt: skip
    return Answer(question="within the deadline", option=found, doubt=doubt)


def _doubt(question: Question, one: Option | None) -> str:
    if one is None:
        return "nothing fits"
    said = [] if one.fits else [f"memory is tight ({one.setting.verdict.reason})"]
    limit, budget = question.deadline_seconds, question.budget_usd
    assert one.hours is not None
    if limit is not None and one.hours.high * 3600 > limit:
        word = "may take longer than" if one.hours.value * 3600 <= limit else "takes longer than"
        said.append(f"{word} the deadline of {format_hours(limit / 3600)}")
    if budget is not None and one.usd is not None and one.usd.high > budget:
        word = "may cost" if one.usd.value <= budget else "costs"
        said.append(f"{word} more than the budget of {format_usd(budget)}")
    return "; ".join(said)


def _why_not(question: Question, one: Option, answers: list[Answer]) -> str:
    """What an option that can run has against it, beside the answers."""
    said = []
    if not one.fits:
        said.append(f"tight: {one.setting.verdict.reason}")
    if doubt := _doubt(question, one) if one.fits else "":
        said.append(doubt)
    cheapest, fastest = (answer.option for answer in answers[:2])
    if one.usd is None:
        said.append("no price is known")
    elif cheapest is not None and cheapest.usd is not None:
        said.append(f"{_cost(one) / _cost(cheapest):.2g} × the cost of {cheapest.num_gpus} × {cheapest.gpu}")
    if fastest is not None and fastest.hours is not None:
        said.append(f"{_time(one) / _time(fastest):.2g} × the time of {fastest.num_gpus} × {fastest.gpu}")
    return "; ".join(said)


def _doubts(answers: Sequence[Answer]) -> list[str]:
    """What predict doubts of the answers' settings: that libraries do so at all, or not by default."""
    said = [warning for one in answers if one.option is not None for warning in one.option.setting.warnings]
    return [text for text in dict.fromkeys(said) if not text.startswith(_SAID_OF_ALL)]


def _notes(question: Question, options: list[Option], offers: list[Offer], today: date, fit: SpeedFit) -> list[str]:
    notes = [
        f"speed is estimated, not measured: by {fit.num_configurations} published configurations of "
        f"{len(fit.sources)} sources, {fit.median_error:.0%} off (median) on sources left out; intervals hold 80 %",
    ]
    if "full" in question.methods and not any(question.words.get(name) for name in ("recipe", "dtype", "autocast")):
        notes.append("full: weights, gradients and AdamW's state all in bf16 (8 B/param); --recipe mixed takes 16")
    timed = sorted({one.gpu for one in options if one.setting.estimate.condition == "measured"})
    if timed:
        notes.append(f"the speed of {', '.join(timed)} is scaled to your records of it")
    unseen = sorted({one.gpu for one in options if one.hours and one.setting.estimate.condition == "card never seen"})
    if unseen:
        notes.append(f"no published step of {', '.join(unseen)} was at hand: by the data sheet, and a wide interval")
    if any(one.offer is not None and one.offer.num_gpus < one.num_gpus for one in options):
        notes.append(
            "several of a card cost the offer so many times: that they are to be had in one machine is assumed"
        )
    used = [one.offer for one in options if one.offer is not None]
    if used:
        dates = sorted({offer.date for offer in used})
        old = any(offer.is_old(today) for offer in used)
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        text = f"prices {used[0].terms}, of {when}, from {', '.join(sorted({offer.source for offer in used}))}"
        notes.append(text + ("; they are more than 3 months old: give --prices FILE.csv or --prices skypilot" * old))
    if not any(offer.usd_per_gb_month for offer in offers):
        notes.append("not counted: storage and egress (no price is known), downloads, evaluation, runs that fail")
    return notes
