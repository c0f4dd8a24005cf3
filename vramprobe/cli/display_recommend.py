"""Print a recommendation: the answers, the cards, the changes, the basis.

In: a frozen Recommendation or Most. Out: tables on the terminal, within its width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from vramprobe.cli.display_record import print_notes
from vramprobe.options import as_typed
from vramprobe.recommend.answer import Recommendation
from vramprobe.recommend.inverse import Most
from vramprobe.recommend.options import Option, nearest
from vramprobe.recommend.settings import Setting
from vramprobe.report.definition import Column, Table
from vramprobe.report.formats import terminal
from vramprobe.speed.figure import Figure
from vramprobe.units import (
    format_bytes,
    format_hours,
    format_usd,
    short_count,
    short_seconds,
    spread_of_hours,
    spread_of_usd,
)

_MOST_CHANGES = 8
#: Differences below this share of the option's own are not written.
_LEAST_SHARE = 0.005
#: How a reason begins → what stands for it in a table.
_IN_A_WORD = {
    "takes longer": "too late",
    "may take longer": "may be late",
    "costs more": "too dear",
    "may cost more": "may be too dear",
    "no price": "no price",
}


@dataclass(frozen=True)
class _Line:
    """An option, and what it answers."""

    option: Option
    answers: str


def print_recommendation(found: Recommendation, *, every: bool) -> None:
    """The answers and their doubts, the cards, what does not fit, what would change, what all of it rests on."""
    console = Console(highlight=False)
    console.print(f"[bold]{escape(found.model)}[/], {_length(found)}: predicted, not measured{_old_prices(found)}")
    if found.num_steps is not None and found.options:
        needed = max(one.setting.verdict.needed_bytes.value for one in found.options)
        console.print(f"memory: {format_bytes(needed)} reserved by one GPU at its peak, emulated")
    lines = _answer_lines(found)
    terminal.show([Table(title="", columns=_answer_columns(found), rows=lines)], [], console)
    for answer in found.answers:
        if answer.doubt:
            console.print(f"[yellow]{answer.question}[/]: {escape(answer.doubt)}")
    for line in lines:
        if (host := line.option.host) is not None:
            console.print(
                f"{line.answers}: {format_bytes(host.memory_bytes)} of the machine's memory while loading, "
                f"{format_bytes(host.disk_bytes)} of disk"
            )
    shown = found.options if every else _best_of_each(found)
    able = [one for one in shown if one.hours is not None]
    console.print()
    columns = [*_common_columns(found), Column("limits", "but", limits_of)]
    terminal.show([Table(title="", columns=columns, rows=able)], [], console)
    if not every and len(shown) < len(found.options):
        of_each = "each card and method" if found.num_steps is None else "each card"
        console.print(f"{of_each} at its cheapest number; --all shows {len(found.options)}")
    _print_what_does_not_fit(console, [one for one in shown if one.hours is None])
    _print_changes(console, found)
    console.print()
    print_notes(console, found.notes)


def _length(found: Recommendation) -> str:
    """Format the length of the run: in tokens, of a command in steps too."""
    tokens = "" if found.tokens is None else f"{short_count(found.tokens)} tokens"
    if found.num_steps is None:
        return f"{tokens} in sequences of {found.seq_len:,}"
    num_steps = {one.setting.num_steps for one in found.options if not isinstance(one.setting, Setting)}
    if tokens and len(num_steps) > 1:
        return tokens
    return f"{found.num_steps:,} steps" + (f", {tokens}" if tokens else "")


def _old_prices(found: Recommendation) -> str:
    dates = ", ".join(found.old_prices)
    return f"; [yellow]prices of {dates} are more than 3 months old[/]" if dates else ""


def print_most(found: Most) -> None:
    """Print what the limits pay for, and on which cards."""
    console = Console(highlight=False)
    name = {"tokens": "tokens", "seq_len": "sequence length", "model": "model"}[found.asked]
    value = f"{found.value:,}" if isinstance(found.value, int) else found.value
    said = f"predicted, not measured{_old_prices(found.recommendation)}"
    console.print(f"the most: [bold]{name} {escape(value)}[/], {said}")
    terminal.show(
        [Table(title="", columns=_answer_columns(found.recommendation), rows=[_Line(found.option, "on")])], [], console
    )
    if found.not_judged:
        console.print(f"[yellow]not judged[/]: {', '.join(found.not_judged)}; --json says why")
    print_notes(console, found.recommendation.notes)


def _answer_lines(found: Recommendation) -> list[_Line]:
    """One option once, with all that it answers."""
    lines: dict[int, _Line] = {}
    for answer in found.answers:
        if answer.option is not None:
            known = lines.get(id(answer.option))
            said = f"{known.answers}, {answer.question}" if known else answer.question
            lines[id(answer.option)] = _Line(answer.option, said)
    return list(lines.values())


def _best_of_each(found: Recommendation) -> list[Option]:
    """Return for each card and method the first option that fits (they are in order of cost), else the nearest; and the
    answers.
    """
    answers = [id(answer.option) for answer in found.answers]
    groups: dict[tuple[str, str], list[Option]] = {}
    for one in found.options:
        groups.setdefault((one.gpu, one.method), []).append(one)
    best = [id(next((one for one in group if one.fits), None) or nearest(group)) for group in groups.values()]
    return [one for one in found.options if id(one) in (*best, *answers)]


def _answer_columns(found: Recommendation) -> list[Column]:
    return [
        Column("question", "", lambda line: line.answers),
        *(
            Column(one.name, one.heading, lambda line, one=one: one.of(line.option), one.text, one.is_number)
            for one in _common_columns(found)
        ),
        Column("provider", "price", lambda line: price_of(line.option)),
    ]


def _common_columns(found: Recommendation) -> list[Column]:
    if found.num_steps is None:
        how = [Column("method", "method", lambda one: one.method), Column("setting", "batch", setting_of)]
    else:
        how = [
            Column("num_steps", "steps", lambda one: f"{one.setting.num_steps:,}", is_number=True),
            Column("seconds", "step", lambda one: short_seconds(one.setting.step_seconds.value), is_number=True),
        ]
    return [
        Column("cards", "cards", cards_of),
        *how,
        Column("tokens_per_s", "tokens/s", _rate, "{:,.0f}".format, is_number=True),
        Column("hours", "time", lambda one: _spread(spread_of_hours, one.hours), is_number=True),
        Column("usd", "cost", lambda one: _spread(spread_of_usd, one.usd), is_number=True),
    ]


def _print_what_does_not_fit(console: Console, options: Sequence[Option]) -> None:
    for one in options:
        judged = one.setting.verdict
        console.print(
            f"does not fit: {cards_of(one)}{_setting(one)}: "
            f"{format_bytes(judged.needed_bytes.value)} of {format_bytes(judged.usable_bytes)}"
        )


def _setting(one: Option) -> str:
    return f", {one.method} ({setting_of(one)})" if isinstance(one.setting, Setting) else ""


def _print_changes(console: Console, found: Recommendation) -> None:
    """Print the effect of other settings on the first answer, or on the nearest option; those that save money first."""
    if not found.changes or found.changes_of is None:
        return
    option = found.changes_of
    console.print(f"\nwhat would change {cards_of(option)}, {option.method}, each line by itself:")
    now = option.setting.verdict.needed_bytes.value
    columns = [
        Column("options", "option", lambda one: " ".join(as_typed(one.options))),
        Column("verdict", "verdict", lambda one: one.verdict.verdict),
        Column("memory", "memory", lambda one: _less(one.saved_bytes, now, format_bytes), is_number=True),
        Column("time", "time", lambda one: _less(one.saved_hours, one.hours, format_hours), is_number=True),
        Column("cost", "cost", lambda one: _less(one.saved_usd, one.usd, format_usd), is_number=True),
    ]
    terminal.show([Table(title="", columns=columns, rows=list(found.changes[:_MOST_CHANGES]))], [], console)
    if (more := len(found.changes) - _MOST_CHANGES) > 0:
        console.print(f"  … and {more} more; --json tells all")


def _less(saved: float | None, whole: float | None, written: Callable[[Any], str]) -> str | None:
    if saved is None or whole is None or abs(saved) < _LEAST_SHARE * whole:
        return None
    return f"{written(abs(saved))} {'less' if saved >= 0 else 'more'}"


def _rate(one: Option) -> float | None:
    """Tokens per second of all cards; null where a command's tokens are not known."""
    rate = one.setting.estimate.tokens_per_second if isinstance(one.setting, Setting) else one.setting.tokens_per_second
    return rate.value if rate else None


def _spread(written: Callable[[float, float, float], str], figure: Figure | None) -> str | None:
    return written(figure.value, figure.low, figure.high) if figure else None


def cards_of(one: Option) -> str:
    """Format the number and name of the cards: ``2 × GH200``."""
    return f"{one.num_gpus} × {one.gpu}"


def setting_of(one: Option) -> str:
    """Micro-batch × accumulation, and what else is set: ``2 × 4 ckpt fsdp``."""
    setting = one.setting
    assert isinstance(setting, Setting)
    words = [f"{setting.batch_size} × {setting.grad_accum}"]
    words += ["ckpt"] if setting.gradient_checkpointing else []
    words += [setting.sharding] if setting.sharding else []
    return " ".join(words)


def price_of(one: Option) -> str | None:
    """Format the offer: its provider, its price per hour, and its date."""
    offer = one.offer
    return None if offer is None else f"{offer.provider} {format_usd(offer.hourly(one.num_gpus))}/h, {offer.date}"


def limits_of(one: Option) -> str:
    """Return the disadvantages of an option beside its figures, a word each; its why_not has them in full."""
    said = [] if one.fits else [one.setting.verdict.verdict]
    for start, word in _IN_A_WORD.items():
        said += [word for text in one.why_not.split("; ") if text.startswith(start)]
    return ", ".join(said)
