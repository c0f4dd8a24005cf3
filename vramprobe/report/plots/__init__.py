"""A drawing → SVG and PNG that come out the same each time; readable in black and white and by the colour-blind.

In: a size and a function that draws. Out: file name → image bytes. Loads matplotlib only when asked to draw; stays this
side of the torch line.
"""

import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from vramprobe.report.definition import Picture

#: Letters as outlines: a viewer's fonts would move the labels.
_STYLE = {
    "svg.hashsalt": "vramprobe",
    "svg.fonttype": "path",
    "font.size": 9,
    "hatch.linewidth": 0.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_DPI = 150
#: Cause → colour (Okabe and Ito's, told apart by the colour-blind) and hatch, in every picture alike.
LOOKS = {
    "weights": ("#0072b2", ""),
    "optimizer_state": ("#e69f00", "////"),
    "batch": ("#4d4d4d", ""),
    "other": ("#b3b3b3", "|||"),
    "gradients": ("#d55e00", "xxxx"),
    "saved_activations": ("#009e73", "---"),
    "temporaries": ("#e3a5c7", "..."),
    "checkpoint_store": ("#56b4e9", "--"),
    "logits": ("#cc79a7", "\\\\"),
    "recomputed_layer": ("#8fd1b9", "//"),
    "cast_copies": ("#7fb8dd", "||"),
    "optimizer_temporaries": ("#f0e442", ".."),
    "workspaces": ("#999999", "++"),
}
#: Method → marker and colour.
METHODS = {"full": ("o", "#0072b2"), "lora": ("s", "#d55e00"), "qlora": ("^", "#009e73")}

#: Plot → its picture, and the page of the report that shows it.
PICTURES = {
    name: Picture(name, says)
    for name, says in {
        "predicted_vs_measured": "Predicted against measured peak, a mark per cell with its interval; below, errors.",
        "error_by_size": "Mean error of vramprobe and of published formulas by model size, a panel per method.",
        "peak_by_term": "What is alive at the peak by cause, a bar per model and method.",
        "peak_by_length": "Peak against sequence length, marked with the phase that is the peak.",
    }.items()
}
ON_PAGE = {
    "predicted_vs_measured": "measured",
    "error_by_size": "formulas",
    "peak_by_term": "by_term",
    "peak_by_length": "by_size",
}


def files(name: str, size: tuple[float, float], draw: Callable[[Any], None]) -> dict[str, bytes]:
    """NAME.svg and NAME.png of what ``draw`` puts on a figure of ``size`` inches."""
    return {f"{name}.{kind}": content for kind, content in images(("svg", "png"), size, draw).items()}


def images(kinds: Sequence[str], size: tuple[float, float], draw: Callable[[Any], None]) -> dict[str, bytes]:
    """One drawing in each of these kinds (``svg``, ``png``), without a date, stamped with what it shows (drawn.py)."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from vramprobe.report.plots.drawn import settled_svg, stamp_of

    found = {}
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # a model may have any name
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        stamp = {"Description": stamp_of(figure)}
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, for all kinds alike
        for kind in kinds:
            buffer = io.BytesIO()
            metadata = stamp | ({"Date": None, "Creator": None} if kind == "svg" else {"Software": None})
            figure.savefig(buffer, format=kind, dpi=_DPI, metadata=metadata)
            found[kind] = settled_svg(buffer.getvalue()) if kind == "svg" else buffer.getvalue()
    return found


def label_ends(axes: Any, ends: Sequence[tuple[str, float, float, str]], *, least_gap: float, right: float) -> None:
    """Name lines at their right ends: (text, x, y, colour) in data, spread so that no two overlap.

    ``least_gap``: between two labels, as a share of the axes' height, whose limits must be set; ``right``: where they
    begin, 1 being the axes' edge.
    """
    where = axes.transData + axes.transAxes.inverted()
    at = sorted((tuple(map(float, reversed(where.transform((x, y))))), text, colour) for text, x, y, colour in ends)
    places = spread([height for (height, _), *_ in at], least_gap)
    for place, ((height, across), text, colour) in zip(places, at, strict=True):
        axes.text(right, place, text, transform=axes.transAxes, va="center", fontsize=8, color=colour, parse_math=False)
        axes.plot(
            [across + 0.015, right - 0.01],
            [height, place],
            transform=axes.transAxes,
            color="0.65",
            linewidth=0.5,
            clip_on=False,
            zorder=1,
        )


def spread(wanted: Sequence[float], least_gap: float) -> list[float]:
    """Places near the ``wanted`` ones, which ascend, at least ``least_gap`` apart and from 0 up to 1 where they fit."""
    groups: list[tuple[float, int]] = []  # (middle of a run of labels, how many)
    for one in wanted:
        middle, count = one, 1
        while groups and groups[-1][0] + (groups[-1][1] + count) / 2 * least_gap > middle:
            before, number = groups.pop()
            middle, count = (before * number + middle * count) / (number + count), number + count
        half = (count - 1) / 2 * least_gap
        groups.append((max(half, middle), count))
    places = [middle + (index - (count - 1) / 2) * least_gap for middle, count in groups for index in range(count)]
    over = places[-1] - 1 if places else 0.0
    limit = 1.0
    for index in range(len(places) - 1, -1, -1) if over > 0 else ():
        places[index] = min(places[index], limit)
        limit = places[index] - least_gap
    return places
