"""Answer: a question about cards -> every option with its time and money, the answers people ask for, why not others.

In: a Question, offers. Out: a frozen Recommendation. Nothing in it was measured: memory is predict's, speed the fitted
roofline's with its 80 % interval, money an offer's that has a date. Not counted: downloads, evaluation, failed runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from types import MappingProxyType
from typing import Any, Literal

from vramprobe.catalog import find_gpu, list_gpus
from vramprobe.predict.prediction import Frozen
from vramprobe.predict.verdict import Verdict
from vramprobe.recommend.options import Limits, Option, Question, counts_of, nearest, option_of, words_of
from vramprobe.recommend.prices import Offer
from vramprobe.recommend.settings import SettingsSearch
from vramprobe.records.shown import Shown
from vramprobe.speed.measured import Measured
from vramprobe.speed.rates import SpeedFit, shipped_speed
from vramprobe.units import few_digits, format_hours, format_usd

#: Of predict's warnings, those that hold for every answer here.
_SAID_OF_ALL = ("arithmetic alone", "one rank of", "reserved memory by the allocator")
_REPLAYED = (
    "memory on one GPU: of the answers, and of each method's cheapest and fastest option, as predict judges them "
    "under a Trainer's loop; of the others by arithmetic: ask predict before you rent one"
)
_NEAR = (
    "memory on several GPUs is near (docs/ranks.md says how near); vramprobe predict --num-gpus N --sharding KIND "
    "--gpu GPU records one rank exactly, in seconds: ask it before you rent them"
)


class BestOption(Frozen):
    """The option that answers one of the questions people ask; ``doubt`` says what may keep it from being so."""

    question: Literal["cheapest", "fastest", "within the deadline"]
    option: Option | None
    doubt: str


class Effect(Frozen):
    """Other options than an option's, and what the run is then; the differences are to the option's own figures."""

    options: dict[str, Any]
    verdict: Verdict
    saved_bytes: int  # of one card; negative: it takes more
    hours: float
    saved_hours: float
    usd: float | None
    saved_usd: float | None


class Recommendation(Frozen, Shown):
    """Every option, the cheapest first, and the answers; ``changes`` are about the first, or about what lacks least."""

    model: str  # of a command its words
    tokens: int | None  # null of a command whose steps have no known number of them
    seq_len: int | None  # null of a command
    answers: list[BestOption]
    options: list[Option]
    notes: list[str]
    by_method: dict[str, str | None]  # method → what keeps it from an answer; null where it has one
    changes_of: Option | None = None
    changes: list[Effect] = []
    num_steps: int | None = None  # of a command's run, on the number of GPUs that was emulated
    old_prices: list[str] = []  # dates of the answers' prices that are more than three months old

    def headline(self) -> str:
        """Return the first answer: the GPU, how many, its verdict."""
        found = next((one for one in self.answers if one.option is not None), None)
        if found is None:
            return f"{self.model}: no GPU that was tried answers; to_frame() says what each lacks"
        option = found.option
        said = f"{option.num_gpus} x {option.gpu}, {option.method}, {option.setting.verdict.verdict}"
        return f"{self.model}, {found.question}: {said}; predicted"

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per option, the cheapest first; hours and US dollars are of the whole run."""
        return [
            {
                "gpu": one.gpu,
                "num_gpus": one.num_gpus,
                "method": one.method,
                "verdict": one.setting.verdict.verdict,
                "needed_bytes": one.setting.verdict.needed_bytes.value,
                "hours": one.hours and one.hours.value,
                "usd": one.usd and one.usd.value,
            }
            for one in self.options
        ]

    def remarks(self) -> list[str]:
        """Return the notes."""
        return self.notes


def recommended(
    question: Question,
    offers: list[Offer],
    *,
    today: date,
    fit: SpeedFit | None = None,
    measured: Mapping[str, Measured] = MappingProxyType({}),
    replays: bool = True,
) -> Recommendation:
    """Every option for the question, judged; ``measured``: what records say of a card's speed. ``replays``: on one
    GPU the memory of the answers, and of each method's cheapest and fastest option, by the allocator's replay, as
    predict has it; of the others by arithmetic. On several GPUs it is near (predict/shares.py).

    Raises SpecError for a cell that cannot be, UnsupportedArchitecture for a model without arithmetic.
    """
    fit = fit or shipped_speed()
    named = {offer.gpu for offer in offers}
    priced = [gpu for gpu in list_gpus() if gpu.short_name in named and gpu.total_bytes is not None]
    cards = [find_gpu(name) for name in question.gpus] or priced
    options: list[Option] = []
    searches = {
        method: SettingsSearch(
            words_of(question, method),
            global_batch=question.global_batch,
            sharding=question.sharding,
            fit=fit,
            measured=measured,
        )
        for method in question.methods
    }
    for search in searches.values():
        options += [
            one
            for gpu in cards
            for count in counts_of(question, offers, gpu.short_name)
            if (one := option_of(question, search, gpu, count, offers))
        ]
    if replays:
        _replay(question, searches, options, offers)
    answers = answers_of(question, options)
    return Recommendation(
        model=str(question.words["model"]),
        tokens=question.tokens,
        seq_len=question.words["seq_len"],
        answers=answers,
        options=judged(question, options, answers),
        by_method={method: what_it_lacks([one for one in options if one.method == method]) for method in searches},
        old_prices=old_dates([one.option.offer for one in answers if one.option and one.option.offer], today),
        notes=[
            *_notes(question, options, offers, today, fit),
            *([_REPLAYED] if replays else []),
            *([_NEAR] if any(one.num_gpus > 1 for one in options) else []),
            *_doubts(answers),
        ],
    )


def _replay(
    question: Question, searches: Mapping[str, SettingsSearch], options: list[Option], offers: Sequence[Offer]
) -> None:
    """Judge what answers by the allocator's replay, in place, until what answers has been: a setting that is found not
    to fit makes room for the next best, of this option or of another.
    """
    is_open = True
    while is_open:
        shown = list(answers_of(question, options))
        for method in searches:
            shown += answers_of(question, [one for one in options if one.method == method])
        is_open = False
        for at, one in enumerate(options):
            if one.hours is None or not any(one is answer.option for answer in shown):
                continue
            search, gpu = searches[one.method], find_gpu(one.gpu)
            if search.replay(one.setting.candidate, gpu, one.num_gpus):
                is_open = True
                options[at] = option_of(question, search, gpu, one.num_gpus, offers) or one


def what_it_lacks(options: Sequence[Option]) -> str | None:
    """Return what keeps a method from an answer: the reason of the option that is nearest to fitting. None where one
    fits.
    """
    if any(one.fits for one in options):
        return None
    if not options:
        return "no kind of sharding takes it"
    near = nearest(options)
    verdict = near.setting.verdict
    return f"nothing fits; nearest {near.num_gpus} × {near.gpu}, {verdict.verdict}: {verdict.reason}"


def answers_of(limits: Question | Limits, options: Sequence[Option]) -> list[BestOption]:
    """The answers people ask for: of what fits, else of what is tight."""
    possible = [one for one in options if one.fits] or [one for one in options if one.hours is not None]
    cheapest = min([one for one in possible if one.usd is not None], key=_cost, default=None)
    fastest = min(possible, key=_time, default=None)
    answers = [
        BestOption(question="cheapest", option=cheapest, doubt=_doubt(limits, cheapest)),
        BestOption(question="fastest", option=fastest, doubt=_doubt(limits, fastest)),
    ]
    if limits.deadline_seconds is not None:
        answers.append(_in_time(limits, possible))
    return answers


def judged(limits: Question | Limits, options: Sequence[Option], answers: Sequence[BestOption]) -> list[Option]:
    """Every option with what it has against it: the cheapest first, then those without a price, those not fitting."""
    reasons = [one.why_not or _why_not(limits, one, answers) for one in options]
    found = [
        one if why == one.why_not else one.model_copy(update={"why_not": why})
        for one, why in zip(options, reasons, strict=True)
    ]
    return sorted(
        found,
        key=lambda one: (one.hours is None, one.usd is None, 0.0 if one.usd is None else _cost(one), one.num_gpus),
    )


def _cost(one: Option) -> float:
    assert one.usd is not None
    return one.usd.value


def _time(one: Option) -> float:
    assert one.hours is not None
    return one.hours.value


def _in_time(limits: Question | Limits, possible: list[Option]) -> BestOption:
    """The cheapest that ends in time even at the slow end of its interval; else by its best value, with a doubt."""
    limit = (limits.deadline_seconds or 0.0) / 3600
    priced = [one for one in possible if one.usd is not None]
    sure = [one for one in priced if one.hours is not None and one.hours.high <= limit]
    likely = [one for one in priced if one.hours is not None and one.hours.value <= limit]
    found = min(sure or likely, key=_cost, default=None)
    doubt = _doubt(limits, found)
    if found is None:
        soonest = min(possible, key=_time, default=None)
        doubt = (
            "nothing fits"
            if soonest is None
            else (f"none ends within {format_hours(limit)}; the fastest takes {format_hours(_time(soonest))}")
        )
    return BestOption(question="within the deadline", option=found, doubt=doubt)


def _doubt(limits: Question | Limits, one: Option | None) -> str:
    if one is None:
        return "nothing fits"
    said = [] if one.fits else [f"memory is tight ({one.setting.verdict.reason})"]
    limit, budget = limits.deadline_seconds, limits.budget_usd
    assert one.hours is not None
    if limit is not None and one.hours.high * 3600 > limit:
        word = "may take longer than" if one.hours.value * 3600 <= limit else "takes longer than"
        said.append(f"{word} the deadline of {format_hours(limit / 3600)}")
    if budget is not None and one.usd is not None and one.usd.high > budget:
        word = "may cost" if one.usd.value <= budget else "costs"
        said.append(f"{word} more than the budget of {format_usd(budget)}")
    return "; ".join(said)


def _why_not(limits: Question | Limits, one: Option, answers: list[BestOption]) -> str:
    """Return the disadvantages of an option that can run, beside the answers; of an answer, only its doubts."""
    if any(one is answer.option for answer in answers):
        return _doubt(limits, one)
    said = []
    if not one.fits:
        said.append(f"tight: {one.setting.verdict.reason}")
    if doubt := _doubt(limits, one) if one.fits else "":
        said.append(doubt)
    cheapest, fastest = (answer.option for answer in answers[:2])
    if one.usd is None:
        said.append(f"no price of {one.num_gpus} × {one.gpu} is known")
    elif cheapest is not None and cheapest.usd is not None:
        said.append(f"{few_digits(_cost(one) / _cost(cheapest))} × the cost of {cheapest.num_gpus} × {cheapest.gpu}")
    if fastest is not None and fastest.hours is not None:
        said.append(f"{few_digits(_time(one) / _time(fastest))} × the time of {fastest.num_gpus} × {fastest.gpu}")
    return "; ".join(said)


def _doubts(answers: Sequence[BestOption]) -> list[str]:
    """Return predict's doubts about the answers' settings: that libraries do so at all, or not by default."""
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
        notes.append(f"fewer than two sources publish steps of {', '.join(unseen)}: a wide interval")
    used = [one.offer for one in options if one.offer is not None]
    return [*notes, *price_notes(used, today), _not_counted(used)]


def price_notes(used: Sequence[Offer], today: date) -> list[str]:
    """Return a note of the prices' dates and sources, which names old ones; nothing without prices."""
    if not used:
        return []
    dates = sorted({offer.date for offer in used})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    text = f"prices {used[0].terms}, of {when}, from {', '.join(sorted({offer.source for offer in used}))}"
    if old := old_dates(used, today):
        text += f"; those of {', '.join(old)} are more than 3 months old: "
        text += "give --prices FILE.csv or --prices skypilot"
    return [text]


def old_dates(offers: Sequence[Offer], today: date) -> list[str]:
    """The dates of the offers that are old."""
    return sorted({offer.date for offer in offers if offer.is_old(today)})


def _not_counted(offers: Sequence[Offer]) -> str:
    unknown = [one.provider for one in offers if one.usd_per_gb_month is None or one.usd_per_gb_egress is None]
    whose = f"storage and egress of {', '.join(sorted(set(unknown)))} (no price is known), " if unknown else ""
    return f"not counted: {whose}downloads, evaluation, runs that fail"
