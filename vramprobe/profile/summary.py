"""A profile, or one beside its baseline → the Markdown that a CI shows of a pull request.

In: a ProfileRecord, what grew since the baseline, the limits that are exceeded. Out: text in GitHub's Markdown, in
which no line of others' can be anything but itself. Decides nothing.
"""

from collections.abc import Iterable, Iterator, Sequence

from vramprobe.profile.diff import Difference, ProfileChange
from vramprobe.records.profile import ProfileRecord, RankProfile
from vramprobe.report.formats.markdown import escape
from vramprobe.units import format_bytes, short_seconds, signed_bytes, word_for

_NUM_LINES = 10
Row = tuple[str, ...]


def markdown(record: ProfileRecord, difference: Difference | None = None, exceeded: Sequence[str] = ()) -> str:
    """Format the run's outcome, its peaks, causes and lines; with a ``difference``, beside those of the baseline.

    ``exceeded``: a sentence for each limit that the run is over.
    """
    rank = record.highest_rank
    lines = [f"### GPU memory of {_code(record.name)}", ""]
    lines += [f"- **{_ended(record)}**"] if record.outcome.kind != "ok" else []
    lines += [f"- **over the limit**: {escape(one)}" for one in exceeded]
    lines += ["- **no training step was seen**: this is not what training needs"] if record.lacks_a_step else []
    lines += [""] if lines[2:] else []
    lines += [_where(record, rank), ""]
    if rank is None or rank.peak is None:
        lines.append("No process used a GPU.")
    elif difference is None:
        lines += _alone(record, rank)
    else:
        lines += _compared(difference)
    notes = [*(difference.warnings if difference else ()), *record.warnings]
    lines += ["", *(f"- {escape(note)}" for note in notes)] if notes else []
    return "\n".join(lines) + "\n\n"


def _ended(record: ProfileRecord) -> str:
    outcome = record.outcome
    match outcome.kind:
        case "oom":
            asked = f": {format_bytes(outcome.requested_bytes)} requested" if outcome.requested_bytes else ""
            at = f" by {_code(outcome.line)}" if outcome.line else ""
            return f"Out of memory in {outcome.phase or 'an unknown phase'}{asked}{at}"
        case "error":
            how = f"signal {outcome.signal}" if outcome.signal else f"exit status {outcome.exit_status}"
            said = outcome.exception or "".join(outcome.last_lines[-1:])
            said = f": {escape(said)}" if said else ""
            return f"The command ended with {how}{said}"
        case kind:
            return f"The run is {kind}: below is what was seen until then"


def _where(record: ProfileRecord, rank: RankProfile | None) -> str:
    """Describe the device, and the number of steps on which the numbers rest."""
    how = f"{word_for(record.instrument)} on " if record.emulation is None else ""
    said = [f"{how}{escape(record.environment.device_said)}", f"torch {record.environment.torch or 'unknown'}"]
    said += [f"{len(record.ranks)} ranks, the highest shown"] if len(record.ranks) > 1 else []
    if rank is not None:
        said.append(f"{rank.num_steps} step{'' if rank.num_steps == 1 else 's'}{escape(rank.repeats_said)}")
    return ", ".join(said)


def _alone(record: ProfileRecord, rank: RankProfile) -> Iterator[str]:
    peak = rank.peak
    assert peak is not None
    tiers = [(name, getattr(peak, f"{name}_bytes")) for name in ("allocated", "reserved", "device")]
    seconds = record.step_time and record.step_time.seconds
    rows = [(name, format_bytes(size)) for name, size in tiers if size is not None]
    yield from _grid(("peak", ""), rows + ([("step time, predicted", short_seconds(seconds))] if seconds else []))
    yield ""
    if rank.at_peak is not None:
        parts = {name.removesuffix("_bytes").replace("_", " "): size for name, size in rank.at_peak.parts().items()}
        yield from _grid(
            (f"live at the peak, {rank.at_peak_of or 'in the highest phase'}", ""),
            [(name, format_bytes(size)) for name, size in parts.items() if size],
        )
        yield ""
    places = sorted(rank.by_line, key=lambda one: -one.num_bytes)
    words = [(_code(f"{one.place} ({(one.cause or 'several').replace('_', ' ')})"), one.num_bytes) for one in places]
    yield from _lines("line", [(word, format_bytes(size)) for word, size in words])


def _compared(difference: Difference) -> Iterator[str]:
    rows = [_change(one, one.what) for one in difference.tiers]
    if (time := difference.time) is not None:
        seconds = short_seconds(time.before_seconds), short_seconds(time.after_seconds)
        share = time.after_seconds / time.before_seconds - 1
        rows.append(("step time, predicted", *seconds, f"{share:+.1%}"))
    yield from _grid(("peak", "baseline", "this run", "change"), rows)
    yield ""
    if difference.time is not None:
        yield f"Time, predicted: {escape(difference.time.verdict)} ({escape(difference.time.compared)})."
        yield ""
    changed = [one for one in difference.causes if one.grown_bytes]
    if changed:
        at = "live at the peak" + (f", {difference.after_phase}" if difference.after_phase else "")
        names = [(one, one.what.replace("_", " ")) for one in changed]
        yield from _grid((at, "baseline", "this run", "change"), [_change(*one) for one in names])
        yield ""
    elif difference.causes:
        yield "No cause grew or shrank at the peak."
        yield ""
    lines = [
        (_code(one.what), format_bytes(one.before_bytes), format_bytes(one.after_bytes)) for one in difference.lines
    ]
    grown = [signed_bytes(one.grown_bytes) for one in difference.lines]
    yield from _lines("line that changed", [(*line, more) for line, more in zip(lines, grown, strict=True)])


def _change(one: ProfileChange, name: str) -> Row:
    share = f" ({one.grown_bytes / one.before_bytes:+.1%})" if one.grown_bytes and one.before_bytes else ""
    return (
        name,
        format_bytes(one.before_bytes),
        format_bytes(one.after_bytes),
        f"{signed_bytes(one.grown_bytes)}{share}",
    )


def _lines(title: str, rows: Sequence[Row]) -> Iterator[str]:
    """The first few, all that a reader of a pull request looks at."""
    if not rows:
        return
    names = {2: ("",), 4: ("baseline", "this run", "change")}[len(rows[0])]
    yield from _grid((title, *names), rows[:_NUM_LINES])
    if (more := len(rows) - _NUM_LINES) > 0:
        yield ""
        yield f"and {more} more lines"


def _grid(names: Row, rows: Iterable[Row]) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield f"| --- |{' ---: |' * (len(names) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _code(text: str) -> str:
    """Others' text as code, in a table as well."""
    plain = " ".join(text.split()).replace("`", "'").replace("|", "\\|")
    return f"`{plain}`"
