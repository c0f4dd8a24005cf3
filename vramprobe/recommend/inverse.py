"""Inverse: a budget or a deadline -> the most tokens, the longest sequences or the largest model that it pays for.

In: a Question with one thing left open, and what answers one without. Out: what was found with its Recommendation, or
an error that says what not even the smallest meets. By the best values of speed and cost, not by their intervals.
"""

from collections.abc import Callable
from typing import Any

from vramprobe.catalog import find_gpu, list_gpus, list_models
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.recommend.answer import Recommendation
from vramprobe.recommend.options import Option, Question
from vramprobe.records.frozen import FrozenModel
from vramprobe.records.shown import Shown
from vramprobe.units import format_hours, format_usd

#: Makes a recommendation of a question, with the prices and the day at hand.
Ask = Callable[[Question], Recommendation]
#: Lengths are sought in steps of this.
LENGTH_STEP = 256
#: What is asked with where the number of tokens is open: hours and dollars grow with it in proportion.
SOME_TOKENS = 1_000_000_000


class Most(FrozenModel, Shown):
    """The most of what was left open; ``option`` is what it is for, in ``recommendation``."""

    asked: str  # tokens, seq_len or model
    value: int | str
    option: Option
    recommendation: Recommendation
    not_judged: dict[str, str] = {}  # model → why nothing can be said of it

    def headline(self) -> str:
        """Return the value and the GPUs that it is for."""
        option = self.option
        return f"the most {self.asked}: {self.value} on {option.num_gpus} x {option.gpu}, {option.method}; predicted"

    def rows(self) -> list[dict[str, Any]]:
        """Return the recommendation's rows."""
        return self.recommendation.rows()

    def remarks(self) -> list[str]:
        """Return the recommendation's notes."""
        return self.recommendation.notes


def meets(question: Question, one: Option) -> bool:
    """Return True if an option fits, and ends in time and within the budget by its best values."""
    return one.fits and question.hold(one)


def _require_limit(question: Question, asked: str) -> None:
    if question.deadline_seconds is None and question.budget_usd is None:
        raise SpecError(f"{asked} for what? give a budget in dollars, a deadline, or both")


def _limits(question: Question) -> str:
    said = [] if question.budget_usd is None else [format_usd(question.budget_usd)]
    said += [] if question.deadline_seconds is None else [format_hours(question.deadline_seconds / 3600)]
    return " and ".join(said)


def most_tokens(question: Question, ask: Ask) -> Most:
    """The most tokens, on the option that makes most of them; ``question.tokens`` is not looked at."""
    _require_limit(question, "tokens")
    found = ask(question.model_copy(update={"tokens": SOME_TOKENS}))
    counts = [(_tokens(question, one), index) for index, one in enumerate(found.options) if one.fits]
    tokens, index = max(counts, default=(0, 0), key=lambda pair: (pair[0], -pair[1]))
    if tokens < 1:
        raise SpecError(f"nothing that fits has a price, so {_limits(question)} pays for no tokens")
    exact = question.model_copy(
        update={"tokens": tokens, "methods": (found.options[index].method,), "gpus": (found.options[index].gpu,)}
    )
    again = ask(exact)
    option = next(one for one in again.options if one.num_gpus == found.options[index].num_gpus)
    return Most(asked="tokens", value=tokens, option=option, recommendation=again)


def _tokens(question: Question, one: Option) -> int:
    shares = []
    if question.budget_usd is not None:
        if one.usd is None:
            return 0
        shares.append(question.budget_usd / one.usd.value)
    if question.deadline_seconds is not None and one.hours is not None:
        shares.append(question.deadline_seconds / 3600 / one.hours.value)
    return int(SOME_TOKENS * min(shares))


def longest(question: Question, ask: Ask, *, up_to: int = 131_072) -> Most:
    """The longest sequences, in steps of :data:`LENGTH_STEP`, of a run over the same tokens."""
    _require_limit(question, "the longest sequences")

    def asked(steps: int) -> tuple[Recommendation | None, Option | None]:
        words = question.words | {"seq_len": steps * LENGTH_STEP}
        try:
            return _met(question.model_copy(update={"words": words}), ask)
        except SpecError:  # beyond learned positions
            return None, None

    few = steps = up_to // LENGTH_STEP
    found, option = asked(steps)
    while option is None and few > 1:
        few //= 2
        found, option = asked(few)
    if found is None or option is None:
        raise SpecError(f"not even sequences of {LENGTH_STEP} tokens fit within {_limits(question)}")
    many = min(2 * few, steps + 1)
    while many - few > max(1, few // 8):  # to an eighth of the length
        middle = (few + many) // 2
        now, longer = asked(middle)
        if now is None or longer is None:
            many = middle
        else:
            few, found, option = middle, now, longer
    return Most(asked="seq_len", value=few * LENGTH_STEP, option=option, recommendation=found)


def largest(question: Question, ask: Ask) -> Most:
    """The catalog's largest model that is trained on the tokens; its words' ``model`` is not looked at."""
    _require_limit(question, "the largest model")
    not_judged = {}
    cards = [find_gpu(name) for name in question.gpus] or list_gpus()
    room = question.max_gpus * max(gpu.total_bytes or 0 for gpu in cards)
    least = 0.5 if "qlora" in question.methods else 2.0  # bytes of a weight
    for entry in sorted(list_models(), key=lambda one: -(one.n_params or 0)):
        if least * (entry.n_params or 0) > room:
            continue
        asked = question.model_copy(update={"words": question.words | {"model": entry.name}})
        try:
            found, option = _met(asked, ask)
        except VramprobeError as error:
            not_judged[entry.name] = str(error)
            continue
        if option is not None:
            return Most(asked="model", value=entry.name, option=option, recommendation=found, not_judged=not_judged)
    raise VramprobeError(f"no model of the catalog is trained on so many tokens within {_limits(question)}")


def _met(question: Question, ask: Ask) -> tuple[Recommendation, Option | None]:
    """The recommendation, and its cheapest option that meets the question (the options stand in that order)."""
    found = ask(question)
    return found, next((one for one in found.options if meets(question, one)), None)
