"""Options: a question about cards -> a method on so many of a card at its best setting, with its time and money.

In: a Question, the cell's SettingsSearch, a card, offers. Out: an Option, or None where the cell runs under no
sharding. Nothing in it was measured: memory is predict's, speed the counted step's with its 80 % interval, money an
offer's that has a date.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from vramprobe.catalog import Gpu
from vramprobe.choices import Sharding
from vramprobe.options import ADAPTER_OPTIONS
from vramprobe.predict.verdict import Verdict
from vramprobe.recommend.money import Host, cheapest, host_of, hours_of, offers_of
from vramprobe.recommend.prices import Offer
from vramprobe.recommend.settings import Setting, SettingsSearch, Words
from vramprobe.records.frozen import FrozenModel
from vramprobe.speed.figure import Figure

METHODS = ("full", "lora", "qlora")
#: Sequences of an optimizer step, unless told.
GLOBAL_BATCH = 16
#: Numbers of cards that are tried, up to ``max_gpus``.
COUNTS = (1, 2, 4, 8)


class Limits(FrozenModel):
    """Limits of an answer."""

    deadline_seconds: float | None = None
    budget_usd: float | None = None

    def hold(self, one: "Option") -> bool:
        """Return True if an option ends in time and within the budget, by its best values."""
        if one.hours is None:
            return False
        in_time = self.deadline_seconds is None or one.hours.value * 3600 <= self.deadline_seconds
        return in_time and (self.budget_usd is None or (one.usd is not None and one.usd.value <= self.budget_usd))

    def verdict_of(self, options: Iterable["Option"]) -> Literal["fits", "tight", "does not fit"]:
        """Return the best verdict of what ends in time and within the budget; *does not fit* where nothing does."""
        held = [one.fits for one in options if self.hold(one)]
        return "fits" if any(held) else "tight" if held else "does not fit"


class Question(Limits):
    """Question to answer; ``words`` are a cell's, without batch_size or gradient_checkpointing where they are left
    open.
    """

    words: dict[str, Any]
    methods: tuple[str, ...]
    tokens: int
    global_batch: int = GLOBAL_BATCH
    max_gpus: int = 8
    sharding: Sharding | None = None
    gpus: tuple[str, ...] = ()  # short names; empty: those with an offer


class CommandSetting(FrozenModel):
    """Setting of a command on ``num_gpus``, each with a replica: its step is predicted from a count."""

    num_gpus: int
    num_steps: int  # of the run
    step_seconds: Figure
    tokens_per_second: Figure | None  # of all GPUs; null where no embedding says how many tokens a step has
    verdict: Verdict
    condition: str  # of the speed model's interval
    warnings: list[str] = []


class Option(FrozenModel):
    """A method on so many of a card at its best setting, or a command; without an offer there is no cost."""

    method: str  # of a command its program
    gpu: str
    num_gpus: int
    setting: Setting | CommandSetting
    hours: Figure | None  # null where it does not fit
    usd: Figure | None
    offer: Offer | None
    host: Host | None  # null of a command, and of a model whose tensors are not known
    why_not: str = ""  # empty for the answers

    @property
    def fits(self) -> bool:
        """Return True if the verdict is ``fits``."""
        return self.setting.verdict.verdict == "fits"


def words_of(question: Question, method: str) -> Words:
    """The cell's words for one method; of several, those about adapters or quantisation go where they cannot be."""
    own = {**question.words, "method": method}
    if len(question.methods) == 1:
        return own
    drop = [name for name in own if method == "full" and name in ADAPTER_OPTIONS]
    drop += [name for name in own if method != "qlora" and name in ("quant", "kbit_prep")]
    return {name: value for name, value in own.items() if name not in drop}


def counts_of(question: Question, offers: Sequence[Offer], gpu: str) -> list[int]:
    """Return the numbers of a GPU to try: those that a provider rents out; all, where the question names its GPUs."""
    few = [count for count in COUNTS if count <= question.max_gpus]
    return [count for count in few if question.gpus or offers_of(offers, gpu, count)]


def option_of(
    question: Question, search: SettingsSearch, gpu: Gpu, num_gpus: int, offers: Sequence[Offer]
) -> Option | None:
    """The cell of a search on so many of a card, by its cheapest offer; None where it runs under no kind of sharding.

    Raises what a recording raises.
    """
    setting = search.best(gpu, num_gpus)
    if setting is None:
        return None
    spec = search.on_ranks(setting.candidate, gpu, num_gpus)
    host, hours, usd, why_not = host_of(spec), None, None, ""
    if setting.verdict.verdict == "does not fit":
        its = offers_of(offers, gpu.short_name, num_gpus)
        offer = min(its, key=lambda one: one.hourly(num_gpus), default=None)
        why_not = f"does not fit: {setting.verdict.reason}"
    else:
        hours = hours_of(question.tokens, setting.estimate.tokens_per_second)
        offer, usd = cheapest(offers, hours, gpu.short_name, num_gpus, host)
    return Option(
        method=spec.method,
        gpu=gpu.short_name,
        num_gpus=num_gpus,
        setting=setting,
        hours=hours,
        usd=usd,
        offer=offer,
        host=host,
        why_not=why_not,
    )


def nearest(options: Sequence[Option]) -> Option:
    """The option whose cards lack least."""
    return min(options, key=lambda one: one.setting.verdict.needed_bytes.value / one.setting.verdict.usable_bytes)
