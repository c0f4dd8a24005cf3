"""Words: an Option as people read it, a short text for each column, and a StepCost in a line; the command line and the
page write by the same.

In: an Option or a StepCost. Out: texts. Never computes a figure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vramprobe.speed.figure import Figure
from vramprobe.units import format_usd, spread_of_hours, spread_of_seconds

if TYPE_CHECKING:
    from vramprobe.recommend.options import Option
    from vramprobe.recommend.step_cost import StepCost

#: How a reason begins → what stands for it in a table.
_IN_A_WORD = {
    "takes longer": "too late",
    "may take longer": "may be late",
    "costs more": "too dear",
    "may cost more": "may be too dear",
    "no price": "no price",
}


def cards_of(one: Option) -> str:
    """Format the number and name of the cards: ``2 × GH200``."""
    return f"{one.num_gpus} × {one.gpu}"


def setting_of(one: Option) -> str:
    """Micro-batch × accumulation, and what else is set: ``2 × 4 ckpt fsdp``."""
    setting = one.setting
    words = [f"{setting.batch_size} × {setting.grad_accum}"]
    words += ["ckpt"] if setting.gradient_checkpointing else []
    words += [setting.sharding] if setting.sharding else []
    return " ".join(words)


def rate_of(one: Option) -> str:
    """Tokens per second of all cards."""
    return f"{one.setting.estimate.tokens_per_second.value:,.0f}"


def rate_of_command(one: Option) -> str | None:
    """Format a command's tokens per second; null where its tokens are not known."""
    rate = one.setting.tokens_per_second
    return None if rate is None else f"{rate.value:,.0f}"


def time_of(one: Option) -> str | None:
    """Hours with their interval; null where it does not fit."""
    hours = one.hours
    return None if hours is None else spread_of_hours(hours.value, hours.low, hours.high)


def cost_of(one: Option) -> str | None:
    """Dollars with their interval; null where none are known."""
    return None if one.usd is None else spread_of_usd(one.usd)


def spread_of_usd(usd: Figure) -> str:
    """Dollars with their interval: ``$3.26 (1.93 to 5.48)``."""
    return f"{format_usd(usd.value)} ({format_usd(usd.low)[1:]} to {format_usd(usd.high)[1:]})"


def price_of(one: Option) -> str | None:
    """Format the offer: its provider, its price per hour, and its date."""
    offer = one.offer
    return None if offer is None else f"{offer.provider} {format_usd(offer.hourly(one.num_gpus))}/h, {offer.date}"


def step_in_words(cost: StepCost) -> str:
    """Return the time of a step, the tokens per second of all GPUs, and what a million of them cost, with the price."""
    seconds = cost.step_seconds
    said = [
        f"{spread_of_seconds(seconds.value, seconds.low, seconds.high)} a step",
        f"{cost.tokens_per_second.value:,.0f} tokens/s",
    ]
    if cost.million_tokens_usd is not None and cost.hourly_usd is not None:
        price = f"{cost.provider} {format_usd(cost.hourly_usd)}/h, {cost.price_date}"
        said.append(f"{spread_of_usd(cost.million_tokens_usd)} a million tokens ({price})")
    return f"{', '.join(said)}: predicted, 80 % intervals"


def limits_of(one: Option) -> str:
    """Return the disadvantages of an option beside its figures, a word each; its why_not has them in full."""
    said = [] if one.fits else [one.setting.verdict.verdict]
    for start, word in _IN_A_WORD.items():
        said += [word for text in one.why_not.split("; ") if text.startswith(start)]
    return ", ".join(said)
