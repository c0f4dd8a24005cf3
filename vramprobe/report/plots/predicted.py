"""Cells with predictions → one plot, predicted against measured, and below it the error of each.

In: cells. Out: file name → image bytes. A marker and a colour per method, filled where held out of the fit.
"""

from collections.abc import Callable, Sequence
from typing import Any, get_args

from vramprobe.choices import Method
from vramprobe.report.cells import Cell, word_of
from vramprobe.report.plots import METHODS, files
from vramprobe.units import GIB

#: More marks of one kind are drawn as one image: each is a third of a kilobyte in an SVG otherwise.
_MOST_DRAWN = 1000


def plot(cells: Sequence[Cell]) -> dict[str, bytes]:
    """predicted_vs_measured.svg and .png: a mark per cell with its interval, in GiB; below, the same as error in %."""
    shown = [cell for cell in cells if cell.error_percent is not None]

    def draw(figure: Any) -> None:
        upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 1))
        draw_on(upper, lower, shown)

    return files("predicted_vs_measured", (5.5, 6.5), draw)


def draw_on(upper: Any, lower: Any, cells: Sequence[Cell]) -> None:
    """Both panels."""
    from matplotlib.ticker import LogLocator, NullLocator

    word = word_of(cells)
    pairs = ((cell.measured_bytes, cell.predicted_bytes) for cell in cells)
    amounts = [amount / GIB for pair in pairs for amount in pair if amount is not None]
    low, high = 0.8 * min(amounts), 1.25 * max(amounts)
    upper.plot([low, high], [low, high], color="0.6", linewidth=0.8, zorder=0)
    upper.annotate(
        f"predicted = {word}",
        (high, high),
        xytext=(-4, -14),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8,
        color="0.35",
        rotation=45,
        rotation_mode="anchor",
    )
    lower.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    for method in get_args(Method):
        for held_out, suffix in ((None, ""), (False, ", in the fit"), (True, ", held out")):
            group = [cell for cell in cells if (cell.record.spec.method, cell.held_out) == (method, held_out)]
            if group:
                label = f"{method}{suffix}"
                _marks(upper, group, lambda cell, amount: amount / GIB, label)
                _marks(lower, group, _error_percent, label)
    upper.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), ylabel="predicted peak, GiB allocated")
    lower.set(xlabel=f"{word} peak, GiB allocated", ylabel="error, %")
    lower.yaxis.set_major_formatter("{x:g}")  # tiny errors at the ticks themselves, not as a factor in the corner
    subs = (1, 1.5) if high < 20 * low else (1,)
    for axis in (upper.xaxis, upper.yaxis):
        axis.set_major_locator(LogLocator(base=2, subs=subs))
        axis.set_major_formatter("{x:.3g}")
        axis.set_minor_locator(NullLocator())
    upper.legend(frameon=False, loc="upper left")


def _marks(axes: Any, cells: Sequence[Cell], height: Callable[[Cell, int], float], label: str) -> None:
    """One mark per cell at ``height`` of its prediction, with a bar over its interval."""
    ends = [(cell, (cell.low_bytes, cell.predicted_bytes, cell.high_bytes)) for cell in cells]
    spans = [[height(cell, amount) for amount in amounts if amount is not None] for cell, amounts in ends]
    marker, colour = METHODS[cells[0].record.spec.method]
    axes.errorbar(
        [cell.measured_bytes / GIB for cell in cells if cell.measured_bytes is not None],
        [value for _, value, _ in spans],
        yerr=[[value - low for low, value, _ in spans], [high - value for _, value, high in spans]],
        fmt=marker,
        color=colour,
        markerfacecolor=colour if cells[0].held_out else "white",
        markersize=5,
        elinewidth=0.8,
        label=label,
        rasterized=len(cells) > _MOST_DRAWN,
    )


def _error_percent(cell: Cell, amount: int) -> float:
    assert cell.measured_bytes is not None
    return 100 * (amount - cell.measured_bytes) / cell.measured_bytes
