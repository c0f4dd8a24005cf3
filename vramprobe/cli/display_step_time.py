"""Print a predicted step time: seconds with an interval, classes, lines, unclaimed launches; or one line with its cost.

In: a StepTime or a StepCost. Out: text on the terminal (rich). Every time says that it is predicted. Decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from vramprobe.units import format_usd, short_count, short_seconds, spread_of_seconds, spread_of_usd

if TYPE_CHECKING:
    from vramprobe.profile.diff_time import TimeDifference
    from vramprobe.recommend.step_cost import StepCost
    from vramprobe.records.step_time import StepTime

_BAR_WIDTH = 24


def print_step_time(console: Console, time: StepTime) -> None:
    """The step's time, its rate and utilization, where it goes, and what is not in it."""
    low, high = short_seconds(time.low_seconds), short_seconds(time.high_seconds)
    console.print(
        f"\nstep time [bold]{short_seconds(time.seconds)}[/] predicted ({low} to {high}, 80 %), by counting step "
        f"{time.step} for {time.gpu}"
    )
    sharing = time.parallel.get("tensor", 1) * time.parallel.get("pipeline", 1)
    shared = f" on {sharing} GPUs that share a model ({_shared(time)})" if sharing > 1 else ""
    if time.condition == "card never seen":
        console.print(
            f"     fewer than two sources have published steps of {time.gpu}: the interval is a guess from other "
            "cards, and a card that throttles takes longer"
        )
    if time.condition == "short steps" and time.num_launches:
        each = short_seconds(time.by_class.get("launches", 0.0) / time.num_launches)
        console.print(
            f"     the host decides: {each} a launch, as in the fit's runs; with more Python between launches it takes "
            "longer, and no bound for that is known"
        )
    for rate, amount, what in (
        (time.tokens_per_second, time.tokens, "tokens"),
        (time.samples_per_second, time.samples, "samples"),
    ):
        if rate is not None and amount is not None:
            console.print(
                f"     {rate:,.{0 if rate >= 100 else 2}f} {what}/s per GPU predicted, {amount * sharing:,} {what} a "
                f"step{shared}"
            )
    console.print(f"     {time.mfu:.1%} MFU, {time.hfu:.1%} HFU predicted; {short_count(time.flops)} FLOPs a step")
    if time.bubble_share is not None:
        _print_bubble(console, time)
    print_unclaimed(console, time)
    console.print("\npredicted time by class, which overlap:")
    top = max(time.by_class.values(), default=0.0) or 1.0
    width = max(map(len, time.by_class), default=0)
    for name, seconds in sorted(time.by_class.items(), key=lambda pair: -pair[1]):
        bar = "█" * round(_BAR_WIDTH * seconds / top)
        console.print(f"  {name:<{width}}  {short_seconds(seconds):>9}  {bar}", soft_wrap=True)
    if time.by_line:
        console.print("\npredicted kernel time by line, forward and backward:")
        for one in time.by_line:
            console.print(f"  {short_seconds(one.seconds):>9}  {escape(f'{one.line} {one.function}')}", soft_wrap=True)


def _shared(time: StepTime) -> str:
    return ", ".join(f"{name} {size}" for name, size in time.parallel.items() if name != "virtual")


def _print_bubble(console: Console, time: StepTime) -> None:
    """Print the share of a pipeline's waiting in the time, and what it leaves out."""
    assert time.bubble_share is not None
    chunks = time.parallel.get("virtual", 1)
    schedule = f"interleaved 1F1B ({chunks} chunks a stage)" if chunks > 1 else "1F1B"
    console.print(
        f"     {short_seconds(time.by_class.get('waiting', 0.0))} of it is waiting for other stages: with "
        f"{time.parallel['pipeline']} equal stages and {time.num_micro_steps} micro-batches {schedule} adds "
        f"{time.bubble_share:.0%}; another schedule or a slower stage may add more"
    )


def print_step_cost(cost: StepCost) -> None:
    """Print the time of a cell's step, the tokens per second of all GPUs, and what a million of them cost in one line,
    with the price.
    """
    seconds, usd = cost.step_seconds, cost.million_tokens_usd
    said = [
        f"{spread_of_seconds(seconds.value, seconds.low, seconds.high)} a step",
        f"{cost.tokens_per_second.value:,.0f} tokens/s",
    ]
    if usd is not None and cost.hourly_usd is not None:
        price = f"{cost.provider} {format_usd(cost.hourly_usd)}/h, {cost.price_date}"
        said.append(f"{spread_of_usd(usd.value, usd.low, usd.high)} a million tokens ({price})")
    Console(highlight=False, emoji=False).print(escape(f"{', '.join(said)}: predicted, 80 % intervals"))


def print_time_difference(console: Console, time: TimeDifference) -> None:
    """Two predicted step times, the classes that changed, and whether the change pays."""
    rows = [("step", time.before_seconds, time.after_seconds)]
    rows += [(f"  {one.what}", one.before_seconds, one.after_seconds) for one in time.by_class]
    width = max(len(name) for name, _, _ in rows)
    console.print("\ntime, predicted, by class, which overlap:" if time.by_class else "\ntime, predicted:")
    for name, before, after in rows:
        share = f"  {after / before - 1:+.1%}" if before else ""
        spans = [short_seconds(one) if one else "-" for one in (before, after)]
        console.print(f"  {name:<{width}}  {spans[0]:>9} → {spans[1]:>9}{share}")
    if time.per == "token":
        console.print(f"  a token takes {time.ratio - 1:+.1%}: the two steps have different numbers of them")
    console.print(f"{time.verdict}, predicted from {time.compared}")


def print_unclaimed(console: Console, time: StepTime) -> None:
    """Print the number of launches, and the share of those that no operator claims."""
    console.print(
        f"     {time.num_launches:,} launches; {time.unclaimed_share:.1%} unclaimed, whose work is not counted"
    )
    for one in time.unclaimed:
        console.print(f"       {one.num_launches:,} in {escape(one.where)}")
