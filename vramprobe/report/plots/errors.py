"""Cells with predictions → one plot, how far ours and the published formulas are from what was measured, by size.

In: cells. Out: file name → image bytes, or none without predictions. All are judged on the same cells: those that the
fit has not seen, where there are any. A panel per method; formulas in grey, named at their ends.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, get_args

from vramprobe.choices import Method
from vramprobe.literature.formulas import FORMULAS, facts_of
from vramprobe.report.cells import Cell, word_of
from vramprobe.report.plots import METHODS, files, label_ends

OURS = "vramprobe"
#: Who → [(parameters in billions, mean error in percent of the measured)], by size; negative is an under-prediction.
Curves = dict[str, list[tuple[float, float]]]
_ALIKE_PERCENT = 0.05  # formulas that are never farther apart are one line with all their names


def plot(cells: Sequence[Cell]) -> dict[str, bytes]:
    """error_by_size.svg and .png: mean error per model, above 0 where too much is said."""
    judged = judged_cells(cells)
    panels = {method: curves(judged, method) for method in get_args(Method)}
    panels = {method: found for method, found in panels.items() if found}
    if not panels:
        return {}
    said = {True: "cells that the fit has not seen", False: "cells of the fit", None: "cells"}
    of_what = said[judged[0].held_out]
    of_what += f": said less {word_of(judged)}, of the {word_of(judged)}"
    heights = [max(1.8, 0.17 * len(found)) for found in panels.values()]
    return files("error_by_size", (8.0, 0.8 + sum(heights)), lambda figure: _draw(figure, panels, heights, of_what))


def judged_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Those with an error that the fit has not seen; all with an error where it has seen every one."""
    known = [cell for cell in cells if cell.error_percent is not None and cell.record.facts is not None]
    return [cell for cell in known if cell.held_out] or known


def curves(cells: Sequence[Cell], method: str) -> Curves:
    """Ours, and each formula that says something of a cell's allocated peak."""
    errors: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        spec, seen, measured, error = cell.record.spec, cell.record.facts, cell.measured_bytes, cell.error_percent
        if spec.method != method or seen is None or measured is None or error is None:
            continue
        size, facts = seen.num_params / 1e9, facts_of(spec)
        errors[OURS][size].append(error)
        for formula in FORMULAS:
            answer = formula.apply(facts)
            if not isinstance(answer, str) and formula.predicts == "peak":
                errors[formula.name][size].append(100 * (answer.allocated_bytes - measured) / measured)
    means = {
        who: [(size, statistics.fmean(found)) for size, found in sorted(by_size.items())]
        for who, by_size in errors.items()
    }
    return merged(means)


def merged(found: Curves) -> Curves:
    """Formulas that say the same everywhere under one name: ``16-bytes, zero-paper``; ours stays apart."""
    groups: list[tuple[list[str], list[tuple[float, float]]]] = []
    for who, points in found.items():
        alike = next((names for names, others in groups if OURS not in names and _are_alike(points, others)), None)
        if alike is not None:
            alike.append(who)
        else:
            groups.append(([who], points))
    return {", ".join(names): points for names, points in groups}


def _are_alike(points: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> bool:
    return [size for size, _ in points] == [size for size, _ in others] and all(
        abs(one - other) <= _ALIKE_PERCENT for (_, one), (_, other) in zip(points, others, strict=True)
    )


def _draw(figure: Any, panels: dict[str, Curves], heights: Sequence[float], of_what: str) -> None:
    from matplotlib.ticker import NullLocator

    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    sizes = sorted({size for found in panels.values() for points in found.values() for size, _ in points})
    for axes, height, (method, found) in zip(all_axes, heights, panels.items(), strict=True):
        ends = []
        for who, points in found.items():
            is_ours = who == OURS
            colour = METHODS[method][1] if is_ours else "0.55"
            width, size, order = (2, 5, 3) if is_ours else (0.8, 2.5, 2)
            axes.plot(
                *zip(*points, strict=True),
                color=colour,
                linewidth=width,
                marker=METHODS[method][0],
                markersize=size,
                zorder=order,
            )
            ends.append((who, *points[-1], colour if is_ours else "0.25"))
        axes.set(xscale="log", xlim=(sizes[0] / 1.08, sizes[-1] * 1.08), ylim=axes.get_ylim(), ylabel="error, %")
        axes.set_title(f"{method}, {of_what}", loc="left", fontsize=9)
        axes.grid(axis="y", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        label_ends(axes, ends, least_gap=0.155 / height, right=1.05)
    bottom = all_axes[-1]
    digits = (1, 2, 5) if sizes[-1] > 20 * sizes[0] else (1, 1.5, 2, 3, 4, 5, 7)
    ticks = [digit * 10.0**power for power in range(-2, 3) for digit in digits]
    ticks = [tick for tick in ticks if sizes[0] / 1.05 <= tick <= sizes[-1] * 1.05]
    bottom.set_xticks(ticks, [f"{tick:g}B" if tick >= 1 else f"{tick * 1000:g}M" for tick in ticks])
    bottom.xaxis.set_minor_locator(NullLocator())
    bottom.set_xlabel("parameters")
