"""Traced cells → one plot, what the peak is made of: a bar per model and method, its terms stacked.

In: cells. Out: file name → image bytes, or none where nothing was traced. A colour and a hatch per term.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, get_args

from vramprobe.choices import Method
from vramprobe.log.log import CAUSES
from vramprobe.report.by_term import at_peak, traced
from vramprobe.report.cells import Cell, word_of
from vramprobe.report.columns import method_in_words, precision_in_words, unit_for
from vramprobe.report.plots import LOOKS, files
from vramprobe.units import format_bytes

_MOST_MODELS = 8


def plot(cells: Sequence[Cell]) -> dict[str, bytes]:
    """peak_by_term.svg and .png: the batch, length and checkpointing that most cells share, up to eight models."""
    chosen = choose(traced(cells))
    if not chosen:
        return {}
    num_bars, num_models = len(chosen), len({cell.record.spec.model_label for cell in chosen})
    size = (7.0, 1.8 + 0.2 * num_bars + 0.12 * num_models)
    return files("peak_by_term", size, lambda figure: _draw(figure, chosen))


def choose(cells: Sequence[Cell]) -> list[Cell]:
    """One cell per model and method, alike in batch, length and checkpointing, each method in its most usual way.

    Models from the smallest to the largest, as the ``cells`` come.
    """
    ways = {
        method: Counter(_way(one) for one in cells if one.record.spec.method == method) for method in get_args(Method)
    }
    usual = {method: found.most_common(1)[0][0] for method, found in ways.items() if found}
    by_conditions: dict[tuple, dict[tuple[str, str], Cell]] = defaultdict(dict)
    for cell in cells:
        spec = cell.record.spec
        if _way(cell) == usual[spec.method]:
            conditions = (spec.gradient_checkpointing, spec.batch_size, spec.seq_len, spec.grad_accum)
            by_conditions[conditions].setdefault((spec.model_label, spec.method), cell)
    if not by_conditions:
        return []
    most = max(by_conditions.values(), key=len)
    models = list(dict.fromkeys(model for model, _ in most))  # the cells come small models first
    if len(models) > _MOST_MODELS:
        models = [models[round(i * (len(models) - 1) / (_MOST_MODELS - 1))] for i in range(_MOST_MODELS)]
    order = {method: index for index, method in enumerate(get_args(Method))}
    return sorted(
        (cell for (model, _), cell in most.items() if model in models),
        key=lambda cell: (models.index(cell.record.spec.model_label), order[cell.record.spec.method]),
    )


def _way(cell: Cell) -> str:
    spec = cell.record.spec
    return f"{method_in_words(spec)}: {precision_in_words(spec)}, {spec.optim}"


def _draw(figure: Any, cells: Sequence[Cell]) -> None:
    axes = figure.subplots()
    most = max(cell.measured_bytes or 0 for cell in cells)
    unit = unit_for([most])
    spec = cells[0].record.spec
    places, at, model = [], 0.0, spec.model_label
    for cell in cells:
        at += 1.0 if cell.record.spec.model_label == model else 1.6
        model = cell.record.spec.model_label
        places.append(at)
    left = [0.0] * len(cells)
    for name in CAUSES:
        colour, hatch = LOOKS[name]
        sizes = [getattr(at_peak(cell), f"{name}_bytes") / unit.num_bytes for cell in cells]
        if max(sizes) > 0.002 * most / unit.num_bytes:
            axes.barh(
                places,
                sizes,
                left=left,
                height=0.86,
                facecolor=colour,
                hatch=hatch,
                edgecolor=colour,
                hatchcolor=(0, 0, 0, 0.7),
                linewidth=0.4,
                label=name.replace("_", " "),
            )
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    for place, end, cell in zip(places, left, cells, strict=True):
        assert cell.record.peak is not None
        said = f"{format_bytes(cell.measured_bytes)} in {cell.record.peak.phase.replace('_', ' ')}"
        axes.annotate(said, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(places, [cell.record.spec.method for cell in cells], fontsize=8)
    _name_models(axes, cells, places)
    axes.set(
        ylim=(places[-1] + 0.7, places[0] - 0.7), xlim=(0, 1.32 * max(left)), xlabel=f"alive at the peak, {unit.name}"
    )
    axes.tick_params(axis="y", length=0)
    ways = dict.fromkeys(map(_way, cells))
    word = word_of(cells)
    checkpointing = "with" if spec.gradient_checkpointing else "without"
    figure.legend(
        loc="outside upper left",
        ncols=7,
        frameon=False,
        handlelength=1.8,
        handleheight=1.2,
        columnspacing=1.2,
        alignment="left",
        title_fontsize=8,
        title="\n".join(
            [f"{word}, batch {spec.batch_size} × {spec.seq_len} tokens, {checkpointing} checkpointing", *ways]
        ),
    )


def _name_models(axes: Any, cells: Sequence[Cell], places: Sequence[float]) -> None:
    """Each model's name beside its bars."""
    found: dict[str, list[float]] = defaultdict(list)
    for cell, place in zip(cells, places, strict=True):
        found[cell.record.spec.model_label].append(place)
    for model, bars in found.items():
        axes.annotate(
            model,
            (0, sum(bars) / len(bars)),
            xycoords=("axes fraction", "data"),
            xytext=(-38, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            parse_math=False,
        )
