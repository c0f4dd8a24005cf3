"""A Timeline → one HTML page that needs nothing else: an inline drawing, all texts escaped, a script to explore it.

In: a Timeline. Out: the page as text. All amounts are put into words here, by units.py; the script only shows them.
"""

import json
from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from vramprobe.log.meanings import MEANINGS
from vramprobe.report.timeline import SAID, Timeline, TimelineSpan
from vramprobe.units import format_bytes, unit_of

_SIZE = 10_000  # of the drawing, both ways; it is stretched to the page
#: Cause → what is drawn over its colour, so that it is told without colours, in a tile of 8 × 8 pixels.
_HATCH = {
    "optimizer_state": "M-2 2 2 -2M0 8 8 0M6 10 10 6",
    "gradients": "M0 0 8 8M0 8 8 0",
    "saved_activations": "M0 4H8",
    "temporaries": "M3 4h2",
    "other": "M4 0V8",
    "checkpoint_store": "M0 2H8M0 6H8",
    "cast_copies": "M2 0V8M6 0V8",
    "logits": "M0 0 8 8",
    "recomputed_layer": "M0 8 8 0",
    "optimizer_temporaries": "M1 2h2M5 6h2",
    "workspaces": "M0 2H8M2 0V8",
}


def page(timeline: Timeline) -> str:
    """The whole page; the same bytes each time."""
    peak, column = timeline.peak_bytes, timeline.peak_column
    unit, unit_bytes = unit_of(peak)
    scale, words = timeline.scale_bytes, _ColumnTexts(timeline)
    fields = {
        "title": escape(timeline.subject.name),
        "word": timeline.subject.word,
        "about": escape(SAID[timeline.subject.word][0].upper() + SAID[timeline.subject.word][1:]),
        "summary": escape(_summary(timeline)),
        "unit": unit,
        "last_column": str(len(timeline.live_bytes) - 1),
        "peak_column": str(column),
        "peak_text": escape(words.moment(column)),
        "peak": format_bytes(peak),
        "peak_x": f"{_middle(timeline, column) / 100:.2f}",
        "patterns": "".join(_pattern(cause, "stretched") for cause in timeline.causes),
        "drawing": _drawing(timeline, scale, unit_bytes),
        "ticks": "".join(
            f'<span class="tick" style="bottom:{100 * tick / scale:.3f}%">{tick / unit_bytes:g}</span>'
            for tick in ticks(scale, unit_bytes)
        ),
        "strip": _strip(timeline),
        "caption": escape(_caption(timeline)),
        "causes": _cause_rows(timeline),
        "largest": "".join(
            f'<tr><td class="number">{escape(size)}</td><td>{escape(cause)}</td></tr>'
            for size, cause in words.blocks(column)
        ),
        "phases": _phase_rows(timeline),
        "footer": escape(timeline.subject.footer),
        "data": _data(timeline, words),
    }
    template = resources.files("vramprobe.report").joinpath("timeline.html").read_text(encoding="utf-8")
    return Template(template).substitute(fields)


def ticks(scale: float, unit_bytes: int) -> list[float]:
    """Four to nine round amounts from 0 to below ``scale``, in bytes."""
    steps = (unit_bytes * factor * 10.0**power for power in range(-3, 6) for factor in (1, 2, 5))
    step = next(step for step in steps if scale / step < 9)
    return [number * step for number in range(int(scale / step) + 1)]


class _ColumnTexts:
    """Texts about each column."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._totals = timeline.total_bytes.tolist()

    def moment(self, column: int) -> str:
        """Describe a column: where it is, and its live bytes."""
        timeline, total = self._timeline, self._totals[column]
        phase = phase_name(timeline.phase_at(column))
        events = int(timeline.events[column])
        moment = f"after event {events:,} of {timeline.num_events:,}" if events else "before the first event"
        top = ", the peak" if column == timeline.peak_column else ""
        return f"In {phase}, {moment}: {format_bytes(total)} ({total:,} B){top}"

    def blocks(self, column: int) -> list[tuple[str, str]]:
        """(size, how many and of which cause) of the largest blocks."""
        return [
            (format_bytes(one.size_bytes), f"{_plain(one.cause)}{f' × {one.num_blocks:,}' * (one.num_blocks > 1)}")
            for one in self._timeline.largest[column]
        ]


def phase_name(phase: TimelineSpan) -> str:
    """The phase, with its micro step under gradient accumulation."""
    return phase.name if phase.micro_step is None else f"{phase.name} {phase.micro_step}"


def _plain(cause: str) -> str:
    return cause.replace("_", " ")


def _summary(timeline: Timeline) -> str:
    subject, peak = timeline.subject, timeline.peak_bytes
    phase = phase_name(timeline.phase_at(timeline.peak_column))
    over = "loading" if subject.step is None else f"step {subject.step}"
    text = (
        f"Live memory over {over}{', a steady one' if (subject.step or 0) > 1 else ''}. "
        f"Peak {format_bytes(peak)} {subject.tier} ({peak:,} B), in {phase}."
    )
    if subject.tier == "requested" and subject.allocated_bytes is not None:
        text += f" With the allocator's rounding {format_bytes(subject.allocated_bytes)} allocated."
    if subject.reserved_bytes is not None:
        text += f" Reserved from the device: {format_bytes(subject.reserved_bytes)}."
    return text


def _caption(timeline: Timeline) -> str:
    text = (
        "From left to right: allocations and frees in their order; this is no time axis, and a phase of few events is "
        "drawn wider than its share."
    )
    if len(timeline.live_bytes) < timeline.num_events:
        text += f" Each of the {len(timeline.live_bytes):,} columns shows the highest moment of its events."
    return f"{text} Point, tap or use the arrow keys (p: the peak) to see any moment."


def _middle(timeline: Timeline, column: int) -> float:
    return float(timeline.edges[column] + timeline.edges[column + 1]) / 2 * _SIZE


def _drawing(timeline: Timeline, scale: float, unit_bytes: int) -> str:
    """Areas from the whole stack down to its bottom layer, each over the one before; then lines."""

    def height(num_bytes: float) -> int:
        return round(_SIZE * (1 - num_bytes / scale))

    x = [round(edge * _SIZE) for edge in timeline.edges.tolist()]
    level = "".join(f"M0 {height(at)}H{_SIZE}" for at in ticks(scale, unit_bytes))
    upright = "".join(f"M{x[stop]} 0V{_SIZE}" for stop, _ in timeline.boundaries())
    parts = [f'<path class="grid" d="{level}{upright}"/>']
    tops = timeline.live_bytes.cumsum(axis=1)
    for index in reversed(range(len(timeline.causes))):
        line, cause = _steps(x, [height(top) for top in tops[:, index].tolist()]), timeline.causes[index]
        parts.append(
            # The stroke is of the area's own colour: a peak of one column would else be too thin to be seen.
            f'<path class="area" fill="url(#{cause})" stroke="var(--{cause})" d="M0 {_SIZE}V{line}V{_SIZE}Z"/>'
        )
    lines = "".join(f"M{x[stop]} {height(top)}V{_SIZE}" for stop, top in timeline.boundaries())
    parts.append(f'<path class="bound" d="{lines}"/><path class="grid" d="M0 0V{_SIZE}H{_SIZE}" fill="none"/>')
    for phase in timeline.phases:
        if phase.reserved_peak_bytes is not None:
            at = height(phase.reserved_peak_bytes)
            parts.append(f'<path class="reserved" d="M{x[phase.first]} {at}H{x[phase.stop]}"/>')
    middle = round(_middle(timeline, timeline.peak_column))
    parts.append(f'<path class="top" d="M{middle} 0V{height(timeline.peak_bytes)}"/>')
    return "\n".join(parts)


def _steps(x: Sequence[int], heights: Sequence[int]) -> str:
    """``y H x V y H x``: a line of steps without those that do not change anything."""
    parts, last = [str(heights[0])], heights[0]
    for edge, here in zip(x[1:-1], heights[1:], strict=True):
        if here != last:
            parts.append(f"H{edge}V{here}")
            last = here
    return "".join([*parts, f"H{x[-1]}"])


def _pattern(cause: str, kind: str) -> str:
    prefix = "" if kind == "stretched" else f"{kind}-"
    hatch = _HATCH.get(cause)
    lines = f'<path d="{hatch}" stroke="var(--hatch)" stroke-width="1.6" fill="none"/>' if hatch else ""
    # As if the page were 900 × 400 pixels; the script then sets what it is.
    stretch = f' patternTransform="scale({_SIZE / 900:.2f} {_SIZE / 400:.2f})"' if kind == "stretched" else ""
    return (
        f'<pattern id="{prefix}{cause}" class="{kind}" width="8" height="8" patternUnits="userSpaceOnUse"{stretch}>'
        f'<rect width="8" height="8" fill="var(--{cause})"/>{lines}</pattern>'
    )


def _strip(timeline: Timeline) -> str:
    parts = []
    for number, phase in enumerate(timeline.phases, start=1):
        left, right = timeline.edges[phase.first], timeline.edges[phase.stop]
        name = escape(phase_name(phase))
        parts.append(
            f'<span style="left:{100 * left:.3f}%;width:{100 * (right - left):.3f}%" title="{name}">'
            f'{number}<span class="name">{name}</span></span>'
        )
    return "".join(parts)


def _cause_rows(timeline: Timeline) -> str:
    """The legend and the amounts in one, in the order of the stack from the top."""
    rows = []
    at_peak = timeline.live_bytes[timeline.peak_column].tolist()
    for cause, size in reversed(list(zip(timeline.causes, at_peak, strict=True))):
        swatch = (
            f"<svg><defs>{_pattern(cause, 'key')}</defs>"
            f'<rect width="100%" height="100%" fill="url(#key-{cause})"/></svg>'
        )
        rows.append(
            f'<tr><td>{swatch}</td><td>{_plain(cause)}<br><span class="soft">{MEANINGS[cause]}</span></td>'
            f'<td class="number bytes">{format_bytes(size)}</td></tr>'
        )
    reserved = max((phase.reserved_peak_bytes or 0 for phase in timeline.phases), default=0)
    if reserved:
        swatch = '<svg viewBox="0 0 38 18"><path class="reserved" d="M0 9H38"/></svg>'
        rows.append(
            f'<tr><td>{swatch}</td><td>reserved<br><span class="soft">the most in each phase</span></td>'
            f'<td class="number">{format_bytes(reserved)}</td></tr>'
        )
    return "".join(rows)


def _phase_rows(timeline: Timeline) -> str:
    with_reserved = any(phase.reserved_peak_bytes is not None for phase in timeline.phases)
    heads = ["highest", "at its end", *(["reserved"] if with_reserved else [])]
    rows = [
        '<th></th><th>phase</th><th class="number events">events</th>'
        + "".join(f'<th class="number">{head}</th>' for head in heads)
    ]
    for number, phase in enumerate(timeline.phases, start=1):
        amounts = [format_bytes(phase.peak_bytes), format_bytes(phase.end_bytes)]
        amounts += [format_bytes(phase.reserved_peak_bytes)] if with_reserved else []
        cells = "".join(f'<td class="number">{amount}</td>' for amount in amounts)
        rows.append(
            f'<td>{number}</td><td>{escape(phase_name(phase))}</td><td class="number events">{phase.num_events:,}</td>'
            + cells
        )
    return "".join(f"<tr>{row}</tr>" for row in rows)


def _data(timeline: Timeline, words: _ColumnTexts) -> str:
    """Return the data of the page's script as JSON, each text once.

    ``moments``: per column, the positions in ``texts`` of what it is and of the amounts by cause, from the stack's top.
    ``largest``: per column, the position in ``blocks`` of its largest blocks.
    """
    texts, blocks = _Numbered(), _Numbered()
    moments, largest = [], []
    for column, parts in enumerate(timeline.live_bytes.tolist()):
        said = [words.moment(column), *(format_bytes(size) for size in reversed(parts))]
        moments.append([texts.number(text) for text in said])
        largest.append(blocks.number(tuple(words.blocks(column))))
    data = {
        "peak": timeline.peak_column,
        "edges": [round(edge * _SIZE) for edge in timeline.edges.tolist()],
        "texts": list(texts),
        "moments": moments,
        "blocks": list(blocks),
        "largest": largest,
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


class _Numbered(dict[Any, int]):
    """Values in the order in which they were first seen, with their positions."""

    def number(self, value: Any) -> int:
        """The value's position."""
        return self.setdefault(value, len(self))
