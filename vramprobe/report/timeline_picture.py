"""A Timeline → a PNG or an SVG that comes out the same each time; readable in black and white by its hatches.

In: a Timeline. Out: the image's bytes.
"""

from typing import Any

from vramprobe.report.plots import LOOKS, images
from vramprobe.report.timeline import SAID, Timeline
from vramprobe.report.timeline_page import phase_name, ticks
from vramprobe.units import format_bytes, unit_of

_NARROW = 0.16  # of the width: below it a phase's name is written aslant
_UNNAMED = 0.03  # below it, not at all


def picture(timeline: Timeline, kind: str) -> bytes:
    """The picture, ``png`` or ``svg``, 7.5 × 4.2 inches."""
    return images([kind], (7.5, 4.2), lambda figure: _draw(figure, figure.subplots(), timeline))[kind]


def _draw(figure: Any, axes: Any, timeline: Timeline) -> None:
    from matplotlib.markers import CARETDOWN

    peak, column = timeline.peak_bytes, timeline.peak_column
    unit, unit_bytes = unit_of(peak)
    scale = timeline.scale_bytes
    tops = timeline.live_bytes.cumsum(axis=1) / unit_bytes
    handles = []
    for index, cause in enumerate(timeline.causes):
        colour, hatch = LOOKS[cause]
        below = tops[:, index - 1] if index else 0
        handles.append(
            axes.stairs(
                tops[:, index],
                timeline.edges,
                baseline=below,
                fill=True,
                facecolor=colour,
                hatch=hatch,
                edgecolor=colour,
                hatchcolor=(0, 0, 0, 0.7),
                linewidth=0.6,
                label=cause.replace("_", " "),
            )
        )
    for phase in timeline.phases:
        ends = [timeline.edges[phase.first], timeline.edges[phase.stop]]
        if phase.reserved_peak_bytes is not None:
            at = phase.reserved_peak_bytes / unit_bytes
            (line,) = axes.plot(ends, [at, at], color="black", linestyle="--", linewidth=1.2, label="reserved")
            handles = [one for one in handles if one.get_label() != "reserved"] + [line]
    for stop, top in timeline.boundaries():
        axes.axvline(timeline.edges[stop], color="0.7", linewidth=0.8, zorder=0)
        axes.vlines(timeline.edges[stop], 0, top / unit_bytes, color="white", linewidth=0.8, alpha=0.7)
    middle = (timeline.edges[column] + timeline.edges[column + 1]) / 2
    axes.plot([middle], [peak / unit_bytes], marker=CARETDOWN, color="black", markersize=6, clip_on=False)
    axes.annotate(
        f"peak {format_bytes(peak)}",
        (middle, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="left" if middle < 0.3 else "right" if middle > 0.7 else "center",
        fontweight="bold",
    )
    axes.set(
        xlim=(0, 1),
        ylim=(0, scale / unit_bytes),
        ylabel=f"live memory, {unit} {timeline.subject.tier}",
        yticks=[tick / unit_bytes for tick in ticks(scale, unit_bytes)],
    )
    _name_phases(axes, timeline)
    axes.set_xlabel("allocations and frees in their order (not time; short phases are drawn wider)")
    subject = timeline.subject
    step = "loading" if subject.step is None else f"step {subject.step}"
    title = f"{subject.name}\n{SAID[subject.word]} ({step})"
    figure.suptitle(title, fontsize=9, x=0.01, ha="left", parse_math=False)
    figure.legend(handles=handles[::-1], loc="outside right center", frameon=False, handlelength=2.4, handleheight=1.4)


def _name_phases(axes: Any, timeline: Timeline) -> None:
    named = []
    for phase in timeline.phases:
        left, right = timeline.edges[phase.first], timeline.edges[phase.stop]
        if right - left >= _UNNAMED:
            named.append(((left + right) / 2, right - left, phase_name(phase)))
    aslant = any(width < _NARROW for _, width, _ in named)
    axes.set_xticks(
        [middle for middle, *_ in named],
        [name for *_, name in named],
        rotation=40 if aslant else 0,
        ha="right" if aslant else "center",
    )
    axes.tick_params(axis="x", length=0)
