"""The counted step on other cards → what it takes and costs there, beside each card's verdict: predicted.

In: a run, the verdicts of cards.py, offers. Out: the verdicts with a CardTime each, the cheapest that fits first. One
count serves all cards: FLOPs and bytes do not depend on the card. Where the choice of kernels does, there is no time.
"""

from collections.abc import Sequence
from datetime import date

from vramprobe.catalog import gpu_seen
from vramprobe.catalog.gpus import Gpu, find_gpu
from vramprobe.emulate.cards import card_properties
from vramprobe.errors import SpecError
from vramprobe.profile.raw import RawRun
from vramprobe.profile.step_time import counted_ranks
from vramprobe.recommend.money import offers_of
from vramprobe.recommend.prices import Offer
from vramprobe.records.profile import CardVerdict
from vramprobe.records.step_time import CardTime
from vramprobe.speed.counted import Count, CountedTime, time_of
from vramprobe.speed.raw_count import count_of

#: Ada's and Hopper's tensor cores are the first for FP8 (NVIDIA's architecture white papers).
_FP8_SINCE = (8, 9)
_NUM_STEPS = 1000
_ORDER = ("fits", "unknown", "does not fit")


def with_times(run: RawRun, found: Sequence[CardVerdict], offers: Sequence[Offer], today: date) -> list[CardVerdict]:
    """The verdicts with times and costs, those that fit by cost, then by time; unchanged without a count."""
    counts = [count_of(raw.count or {}) for raw in counted_ranks(run)]
    if not counts:
        return list(found)
    ran_on = gpu_seen(counted_ranks(run)[0].process.device_name or "")
    num_gpus = num_ranks(run)
    timed = [_timed(one, counts, ran_on, num_gpus, offers, today) for one in found]
    return sorted(timed, key=_place)


def num_ranks(run: RawRun) -> int:
    """Number of ranks of the whole run: those that a launcher started, or that --only-rank assumes."""
    return max([len(run.ranks), *(raw.process.world_size or 1 for raw in run.ranks)])


def slowest_on(gpu: Gpu, counts: Sequence[Count], ran_on: Gpu | None) -> CountedTime:
    """The step of the rank that takes longest. Raises SpecError for a card on which other kernels would run."""
    if ran_on is None or gpu.short_name != ran_on.short_name:
        capability = card_properties(gpu.short_name).compute_capability if gpu.vendor == "NVIDIA" else (0, 0)
        if capability < _FP8_SINCE and any("float8" in row.dtype for one in counts for row in one.rows):
            raise SpecError("the step uses FP8, for which this GPU has no tensor cores")
    return max((time_of(one, gpu) for one in counts), key=lambda one: one.seconds)


def _place(one: CardVerdict) -> tuple[int, float, float]:
    cost, seconds = (one.time.usd_per_1000_steps, one.time.seconds) if one.time else (None, float("inf"))
    return _ORDER.index(one.verdict), float("inf") if cost is None else cost, seconds


def _timed(
    one: CardVerdict, counts: Sequence[Count], ran_on: Gpu | None, num_gpus: int, offers: Sequence[Offer], today: date
) -> CardVerdict:
    if one.verdict == "does not fit" or one.usable_bytes is None:  # it would run other kernels, or otherwise
        return one.model_copy(update={"why_no_time": one.why})
    try:
        found = slowest_on(find_gpu(one.gpu), counts, ran_on)
    except SpecError as error:
        return one.model_copy(update={"why_no_time": str(error)})
    return one.model_copy(update={"time": card_time(one.gpu, found, num_gpus, offers, today)})


def card_time(gpu: str, found: CountedTime, num_gpus: int, offers: Sequence[Offer], today: date) -> CardTime:
    """A time as a record, with the price of the cheapest machine that is rented out with so many of the card."""
    offer = min(offers_of(offers, gpu, num_gpus), key=lambda one: one.hourly(num_gpus), default=None)
    hourly = None if offer is None else offer.hourly(num_gpus)

    def usd(seconds: float) -> float | None:
        return None if hourly is None else seconds * _NUM_STEPS / 3600 * hourly

    return CardTime(
        seconds=found.seconds,
        low_seconds=found.low_seconds,
        high_seconds=found.high_seconds,
        condition=found.condition,
        tokens_per_second=None if found.tokens is None else found.tokens / found.seconds,
        num_gpus=num_gpus,
        usd_per_1000_steps=usd(found.seconds),
        low_usd_per_1000_steps=usd(found.low_seconds),
        high_usd_per_1000_steps=usd(found.high_seconds),
        usd_per_hour=hourly,
        rented_gpus=None if offer is None else -(-num_gpus // offer.num_gpus) * offer.num_gpus,
        provider=offer and offer.provider,
        price_date=offer and offer.date,
        price_is_old=None if offer is None else offer.is_old(today),
    )
