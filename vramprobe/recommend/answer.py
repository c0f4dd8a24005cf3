"""Answer: a question about cards -> every option with its time and money, the answers people ask for, why not others.

In: a Question, offers. Out: a frozen Recommendation. Nothing in it was measured: memory is predict's, speed the counted
step's with its 80 % interval, money an offer's that has a date. Not counted: downloads, evaluation, failed runs.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import date
from types import MappingProxyType
from typing import Any, Literal

from vramprobe.catalog import Gpu, find_gpu, list_gpus
from vramprobe.errors import VramprobeError
from vramprobe.predict.verdict import Verdict
from vramprobe.recipe.shipped import answers_for
from vramprobe.recommend.options import Limits, Option, Question, counts_of, nearest, option_of, words_of
from vramprobe.recommend.prices import Offer, old_dates, price_notes
from vramprobe.recommend.settings import SettingsSearch
from vramprobe.records.frozen import FrozenModel
from vramprobe.records.shown import Shown
from vramprobe.speed.measured import Measured
from vramprobe.units import few_digits, format_hours, format_usd

#: Of predict's warnings about the answers' settings, those that hold for every answer here.
_SAID_OF_ALL = ("one rank of", "recorded on the emulated GPU", "its later micro-steps")
_SPEED = (
    "time is predicted from the counted launches of one step, not measured; docs/step_time.md says how far its 80 % "
    "intervals were checked"
)
_NEAR = (
    "memory on several GPUs is near (docs/ranks.md says how near); vramprobe predict --num-gpus N --sharding KIND "
    "--gpu GPU records one rank exactly, in seconds: ask it before you rent them"
)


class BestOption(FrozenModel):
    """The option that answers one of the questions people ask; ``doubt`` says what may keep it from being so."""

    question: Literal["cheapest", "fastest", "within the deadline"]
    option: Option | None
    doubt: str


class Effect(FrozenModel):
    """Other options than an option's, and what the run is then; the differences are to the option's own figures."""

    options: dict[str, Any]
    verdict: Verdict
    saved_bytes: int  # of one card; negative: it takes more
    hours: float
    saved_hours: float
    usd: float | None
    saved_usd: float | None


class Recommendation(FrozenModel, Shown):
    """Every option, the cheapest first, and the answers; ``changes`` are about the first, or about what lacks least."""

    model: str  # of a command its words
    tokens: int | None  # null of a command whose steps have no known number of them
    seq_len: int | None  # null of a command
    answers: list[BestOption]
    options: list[Option]
    notes: list[str]
    by_method: dict[str, str | None]  # method → what keeps it from an answer; null where it has one
    verdict: Literal["fits", "tight", "does not fit"]  # the best of the options that hold the budget and the deadline
    changes_of: Option | None = None
    changes: list[Effect] = []
    num_steps: int | None = None  # of a command's run, on the number of GPUs that was emulated
    old_prices: list[str] = []  # dates of the answers' prices that are more than three months old

    def headline(self) -> str:
        """Return the first answer: the GPU, how many, its verdict."""
        found = next(((one.question, one.option) for one in self.answers if one.option is not None), None)
        if found is None:
            return f"{self.model}: no GPU that was tried answers; to_frame() says what each lacks"
        question, option = found
        said = f"{option.num_gpus} x {option.gpu}, {option.method}, {option.setting.verdict.verdict}"
        return f"{self.model}, {question}: {said}; predicted"

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
    measured: Mapping[str, Measured] = MappingProxyType({}),
    records: bool = True,
    say: Callable[[str], None] = lambda words: None,
) -> Recommendation:
    """Every option for the question, judged as predict does; ``measured``: what records say of a card's speed.

    ``records``: False for recipes at hand alone; ``say`` hears of recordings. A method or a card that cannot be
    recorded is left out; raises the first such error where all are.
    """
    options: list[Option] = []
    by_method: dict[str, str | None] = {}
    refused: dict[str, VramprobeError] = {}
    for method in question.methods:
        search = SettingsSearch(
            words_of(question, method),
            global_batch=question.global_batch,
            sharding=question.sharding,
            measured=measured,
            records=records,
            say=say,
        )
        own, errors = _options(question, search, offers)
        options += own
        by_method[method] = f"not recorded: {next(iter(errors.values()))}" if errors and not own else what_it_lacks(own)
        refused = errors | refused
    if refused and not options:
        raise next(iter(refused.values()))
    answers = answers_of(question, options)
    judged_cards = {one.gpu for one in options}
    doubts = [text for one in answers if one.option is not None for text in one.option.setting.warnings]
    return Recommendation(
        model=str(question.words["model"]),
        tokens=question.tokens,
        seq_len=question.words["seq_len"],
        answers=answers,
        options=judged(question, options, answers),
        by_method=by_method,
        verdict=question.verdict_of(options),
        old_prices=old_dates([one.option.offer for one in answers if one.option and one.option.offer], today),
        notes=[
            *_notes(question, options, today),
            *(f"left out: {gpu}: {error}" for gpu, error in refused.items() if gpu not in judged_cards),
            *([_NEAR] if any(one.num_gpus > 1 for one in options) else []),
            *(text for text in dict.fromkeys(doubts) if not text.startswith(_SAID_OF_ALL)),
        ],
    )


def _options(
    question: Question, search: SettingsSearch, offers: Sequence[Offer]
) -> tuple[list[Option], dict[str, VramprobeError]]:
    """A method's options on every card and number of them, and by card why there is none."""
    options, errors = [], {}
    for gpu in _cards(question, offers):
        for count in counts_of(question, offers, gpu.short_name):
            try:
                option = option_of(question, search, gpu, count, offers)
            except VramprobeError as error:
                errors.setdefault(gpu.short_name, error)
                continue
            options += [] if option is None else [option]
    return options, errors


def _cards(question: Question, offers: Sequence[Offer]) -> list[Gpu]:
    """Those that are named, else all with an offer that share one recipe."""
    if question.gpus:
        return [find_gpu(name) for name in question.gpus]
    named = {offer.gpu for offer in offers}
    return [gpu for gpu in list_gpus() if gpu.short_name in named and gpu.total_bytes is not None and answers_for(gpu)]


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


def answers_of(limits: Limits, options: Sequence[Option]) -> list[BestOption]:
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


def judged(limits: Limits, options: Sequence[Option], answers: Sequence[BestOption]) -> list[Option]:
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


def _in_time(limits: Limits, possible: list[Option]) -> BestOption:
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


def _doubt(limits: Limits, one: Option | None) -> str:
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


def _why_not(limits: Limits, one: Option, answers: Sequence[BestOption]) -> str:
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


def _notes(question: Question, options: list[Option], today: date) -> list[str]:
    notes = [_SPEED]
    if "full" in question.methods and not any(question.words.get(name) for name in ("recipe", "dtype", "autocast")):
        notes.append("full: weights, gradients and AdamW's state all in bf16 (8 B/param); --recipe mixed takes 16")
    timed = sorted({one.gpu for one in options if one.setting.condition == "measured"})
    if timed:
        notes.append(f"the speed of {', '.join(timed)} is scaled to your records of it")
    unseen = sorted({one.gpu for one in options if one.hours and one.setting.condition == "card never seen"})
    if unseen:
        notes.append(f"fewer than two sources publish steps of {', '.join(unseen)}: a wide interval")
    used = [one.offer for one in options if one.offer is not None]
    return [*notes, *price_notes(used, today), _not_counted(used)]


def _not_counted(offers: Sequence[Offer]) -> str:
    unknown = [one.provider for one in offers if one.usd_per_gb_month is None or one.usd_per_gb_egress is None]
    whose = f"storage and egress of {', '.join(sorted(set(unknown)))} (no price is known), " if unknown else ""
    return f"not counted: {whose}downloads, evaluation, runs that fail"
