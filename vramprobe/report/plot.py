"""Cells with predictions → one plot, predicted against measured, as SVG and PNG that come out the same each time.

In: cells. Out: file name → image bytes. Readable in black and white: a marker per method, filled where held out.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, get_args

from vramprobe.report.rows import Cell
from vramprobe.spec import Method
from vramprobe.units import GIB

_MARKERS = {"full": "o", "lora": "s", "qlora": "^"}
_STYLE = {"svg.hashsalt": "vramprobe", "svg.fonttype": "path", "font.size": 9}


def predicted_against_measured(cells: Sequence[Cell]) -> dict[str, bytes]:
    """predicted_vs_measured.svg and .png: a mark per cell with its interval, in GiB; below, the same as error in %."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [cell for cell in cells if cell.error_percent is not None]
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_STYLE}):
        figure = Figure(figsize=(5.5, 6.5), layout="constrained")
        FigureCanvasAgg(figure)
        _draw(*figure.subplots(2, sharex=True, height_ratios=(3, 1)), shown)
        return {
            "predicted_vs_measured.svg": _image(figure, "svg", {"Date": None, "Creator": None}),
            "predicted_vs_measured.png": _image(figure, "png", {"Software": None}),
        }


def _draw(upper: Any, lower: Any, cells: Sequence[Cell]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    amounts = [amount / GIB for cell in cells for amount in (cell.measured_bytes, cell.predicted_bytes)]
    low, high = 0.8 * min(amounts), 1.25 * max(amounts)
    upper.plot([low, high], [low, high], color="0.6", linewidth=0.8, zorder=0, label="equal")
    lower.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    for method in get_args(Method):
        for held_out in (False, True):
            group = [cell for cell in cells if (cell.record.spec.method, cell.held_out) == (method, held_out)]
            if group:
                label = f"{method}, {'held out' if held_out else 'in the fit'}"
                _marks(upper, group, lambda cell, amount: amount / GIB, label)
                _marks(lower, group, _error_percent, label)
    upper.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), ylabel="predicted peak, GiB allocated")
    lower.set(xlabel="measured peak, GiB allocated", ylabel="error, %")
    for axis in (upper.xaxis, upper.yaxis):
        axis.set_major_locator(LogLocator(base=2, subs=(1, 1.5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    upper.legend(frameon=False, loc="upper left")


def _marks(axes: Any, cells: Sequence[Cell], height: Callable[[Cell, int], float], label: str) -> None:
    """One mark per cell at ``height`` of its prediction, with a bar over its interval."""
    at = [height(cell, cell.predicted_bytes) for cell in cells]
    below = [height(cell, cell.predicted_bytes) - height(cell, cell.low_bytes) for cell in cells]
    above = [height(cell, cell.high_bytes) - height(cell, cell.predicted_bytes) for cell in cells]
    axes.errorbar(
        [cell.measured_bytes / GIB for cell in cells],
        at,
        yerr=[below, above],
        fmt=_MARKERS[cells[0].record.spec.method],
        color="black",
        markerfacecolor="black" if cells[0].held_out else "white",
        markersize=5,
        elinewidth=0.8,
        label=label,
    )


def _error_percent(cell: Cell, amount: int) -> float:
    return 100 * (amount - cell.measured_bytes) / cell.measured_bytes


def _image(figure: Any, kind: str, metadata: dict[str, None]) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()
