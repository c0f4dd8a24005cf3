"""Techniques → one plot: a panel for each base, GiB saved against predicted time lost, the frontier named.

In: each technique's run beside its base. Out: file name → image bytes.
"""

from collections.abc import Sequence
from typing import Any

from vramprobe.report.plots import images
from vramprobe.techniques.registry import KINDS, bases, techniques
from vramprobe.techniques.savings import Saving
from vramprobe.units import GIB

_SIZE = (9.0, 7.0)
#: Percent. What takes longer is only counted: the others could not be told apart.
_LONGEST = 120.0
_MARKERS = dict(zip(KINDS, ("s", "P", "o", "^", "D", "v"), strict=True))
_COLOURS = dict(zip(KINDS, ("#0072B2", "#CC79A7", "#D55E00", "#009E73", "#56B4E9", "#E69F00"), strict=True))


def plot(found: Sequence[Saving]) -> dict[str, bytes]:
    """techniques.svg: a mark for each that has a saving and a time."""
    shown = [one for one in found if one.saved_bytes is not None and one.slower_share is not None]
    return {"techniques.svg": images(("svg",), _SIZE, lambda figure: _draw(figure, shown))["svg"]}


def frontier(rows: Sequence[Saving]) -> list[Saving]:
    """Those that save memory and that no other beats in both memory and time, the fastest first."""
    best: list[Saving] = []
    for row in sorted(rows, key=lambda row: (_lost(row), -_saved(row))):
        if _saved(row) > max((_saved(one) for one in best), default=0.0):
            best.append(row)
    return best


def _draw(figure: Any, rows: Sequence[Saving]) -> None:
    names = [name for name in bases() if frontier([row for row in rows if row.base == name])]
    panels = figure.subplots(-(-max(len(names), 1) // 2), 2, squeeze=False).ravel()
    for axes, name in zip(panels, names, strict=False):
        own = [row for row in rows if row.base == name and _lost(row) <= _LONGEST]
        slower = [row for row in rows if row.base == name and _lost(row) > _LONGEST]
        if slower:
            said = f"{len(slower)} more, up to {max(map(_lost, slower)):.0f} % longer"
            axes.text(1, 0.02, said, transform=axes.transAxes, ha="right", fontsize=6, color="0.35")
        for row in own:
            kind = techniques()[row.technique].kind
            axes.plot(_lost(row), _saved(row), color=_COLOURS[kind], marker=_MARKERS[kind], linestyle="", markersize=5)
        best = frontier(own)
        axes.plot([_lost(row) for row in best], [_saved(row) for row in best], color="0.6", linewidth=1, zorder=0)
        for row in best:
            at = (_lost(row), _saved(row))
            axes.annotate(techniques()[row.technique].name, at, (4, 3), textcoords="offset points", fontsize=6)
        axes.axhline(0, color="0.85", linewidth=0.8, zorder=0)
        axes.axvline(0, color="0.85", linewidth=0.8, zorder=0)
        axes.set_title(f"{name}, {bases()[name].gpu}", loc="left", fontsize=9)
        axes.set(xlabel="predicted step time, % longer", ylabel="saved, GiB (emulated)")
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    _legend(figure, rows)


def _legend(figure: Any, rows: Sequence[Saving]) -> None:
    from matplotlib.lines import Line2D

    kinds = [kind for kind in KINDS if any(techniques()[row.technique].kind == kind for row in rows)]
    handles = [Line2D([], [], color=_COLOURS[kind], marker=_MARKERS[kind], linestyle="", label=kind) for kind in kinds]
    if handles:
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)


def _saved(row: Saving) -> float:
    assert row.saved_bytes is not None
    return row.saved_bytes / GIB


def _lost(row: Saving) -> float:
    assert row.slower_share is not None
    return 100 * row.slower_share
