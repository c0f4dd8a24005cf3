"""Print a run on other cards: memory, step time and cost side by side, the cheapest first.

In: CardVerdicts. Out: a table of those that hold the run, lines for the others, grouped by the reason. Times say that
they are predicted. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from vramprobe.report.definition import Column, Table
from vramprobe.report.formats import terminal
from vramprobe.units import format_bytes, format_usd, spread_of_seconds, spread_of_usd

if TYPE_CHECKING:
    from vramprobe.records.profile import CardVerdict
    from vramprobe.records.step_time import CardTime

_STYLES = {"does not fit": "red", "unknown": "yellow"}


def print_cards(console: Console, cards: Sequence[CardVerdict]) -> None:
    """Those that hold the run in a table, by cost where it is known; then the others."""
    if not cards:
        return
    held = [one for one in cards if one.verdict == "fits"]
    timed = [one.time for one in held if one.time is not None]
    what = "memory by replaying these allocations" + ("; time and cost predicted, 80 % intervals" if timed else "")
    if any(one.served is not None for one in cards):
        what = "KV cache predicted from the engine's account, with the same settings"
    console.print(f"\non other GPUs, {what}:" if len(cards) > 1 else f"\n{what}:")
    terminal.show([Table(title="", columns=_columns(timed), rows=held)], [], console)
    for verdict, style in _STYLES.items():
        for why, names in _by_reason(one for one in cards if one.verdict == verdict).items():
            console.print(f"[{style}]{verdict}[/]: {escape(', '.join(names))}: {escape(why)}")
    for why, names in _by_reason((one for one in held if one.why_no_time), "why_no_time").items():
        console.print(f"no time: {escape(', '.join(names))}: {escape(why)}")
    if old := sorted({one.price_date for one in timed if one.price_is_old and one.price_date}):
        console.print(f"[yellow]prices of {', '.join(old)} are more than 3 months old[/]")


def _columns(timed: Sequence[CardTime]) -> list[Column]:
    """Without those that no card has a value for."""
    columns = [
        Column("gpu", "GPU", lambda one: one.gpu),
        Column("headroom_bytes", "free", lambda one: one.headroom_bytes, format_bytes, is_number=True),
    ]
    if not timed:
        return [*columns, Column("why", "", lambda one: one.why, is_prose=True)]
    several = timed[0].num_gpus > 1
    columns.append(Column("seconds", "step", _of_time(_seconds), is_number=True))
    if any(one.tokens_per_second for one in timed):
        heading = "tokens/s per GPU" if several else "tokens/s"
        columns.append(
            Column("tokens_per_s", heading, _of_time(lambda one: one.tokens_per_second), _whole, is_number=True)
        )
    if any(one.usd_per_1000_steps for one in timed):
        columns.append(Column("usd", "1,000 steps", _of_time(_usd), is_number=True))
        columns.append(Column("price", "price", _of_time(_price)))
    return columns


def _of_time(value: Any) -> Any:
    return lambda one: None if one.time is None else value(one.time)


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _seconds(time: Any) -> str:
    return spread_of_seconds(time.seconds, time.low_seconds, time.high_seconds)


def _usd(time: Any) -> str | None:
    if time.usd_per_1000_steps is None:
        return None
    return spread_of_usd(time.usd_per_1000_steps, time.low_usd_per_1000_steps, time.high_usd_per_1000_steps)


def _price(time: Any) -> str | None:
    if time.provider is None:
        return None
    count = f"{time.rented_gpus} GPUs " if time.rented_gpus > 1 else ""
    return f"{time.provider} {count}{format_usd(time.usd_per_hour)}/h, {time.price_date}"


def _by_reason(cards: Any, field: str = "why") -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in cards:
        found.setdefault(getattr(one, field) or "", []).append(one.gpu)
    return found
