"""Cells → one plot, the peak against the sequence length, each point marked with the phase that is the peak.

In: cells, a CardFit or none. Out: file name → image bytes, or none where no recipe at hand follows a measured cell.
Lines are predicted; filled marks are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vramprobe.errors import VramprobeError
from vramprobe.report.cells import Cell, word_of
from vramprobe.report.plots import METHODS, files, label_ends
from vramprobe.spec import CellSpec
from vramprobe.units import unit_of

if TYPE_CHECKING:
    from vramprobe.choices import PhaseName
    from vramprobe.model.card_fit import CardFit

LENGTHS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
_PHASES = {"forward": "v", "backward": "o", "optimizer_step": "s", "zero_grad": "D"}
_MOST_LINES = 6


@dataclass(frozen=True)
class Line:
    """One method of one model: (length, bytes, phase), predicted and measured."""

    spec: CellSpec
    predicted: list[tuple[int, int, PhaseName]]
    measured: list[tuple[int, int, PhaseName]]


def plot(cells: Sequence[Cell], model: CardFit | None) -> dict[str, bytes]:
    """peak_by_length.svg and .png: the largest model that was measured with most methods, at the batch of its cells."""
    lines = lines_of(cells, model)
    if not lines:
        return {}
    return files("peak_by_length", (7.0, 4.2), lambda figure: _draw(figure, lines, word_of(cells)))


def lines_of(cells: Sequence[Cell], model: CardFit | None) -> list[Line]:
    """A line for each way in which the model was measured that recipes at hand follow, full fine-tuning first."""
    known = [cell for cell in cells if cell.predicted_bytes is not None and cell.measured_bytes is not None]
    of_model: dict[str, list[Cell]] = {}
    for cell in known:
        of_model.setdefault(cell.record.spec.model_label, []).append(cell)
    if not of_model:
        return []
    # The cells come small models first, so that of equals the last is the largest.
    chosen = max(
        of_model.values(), key=lambda found: (len({one.record.spec.method for one in found}), found[0].num_params)
    )
    ways: dict[tuple, list[Cell]] = {}
    for cell in sorted(chosen, key=lambda cell: (list(METHODS).index(cell.record.spec.method), cell.record.cell_id)):
        spec = cell.record.spec
        ways.setdefault((spec.method, spec.gradient_checkpointing), []).append(cell)
    found = [_line(group, model) for group in ways.values()]
    return [line for line in found if len(line.predicted) > 2][:_MOST_LINES]


def _line(cells: Sequence[Cell], model: CardFit | None) -> Line:
    """The first cell's spec at every length; of the others those that differ from it in their length alone."""
    from vramprobe.catalog import gpu_seen
    from vramprobe.predict.expected import predict_at_hand

    spec, gpu = cells[0].record.spec, gpu_seen(cells[0].record.environment.device_name)
    longest = spec.learned_positions or max(LENGTHS)
    predicted = []
    for length in LENGTHS:
        if length <= longest:
            try:
                found = predict_at_hand(spec.model_copy(update={"seq_len": length}), gpu, model)
            except VramprobeError:
                continue
            predicted.append((length, found.peak_allocated_bytes.value, found.peak_phase))
    alike = [cell for cell in cells if cell.record.spec.model_copy(update={"seq_len": spec.seq_len}) == spec]
    peaks = [(cell.record.spec.seq_len, cell.record.peak) for cell in alike]
    measured = [(length, peak.allocated_bytes, peak.phase) for length, peak in peaks if peak is not None]
    return Line(spec, predicted, sorted(measured))


def _draw(figure: Any, lines: Sequence[Line], word: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullLocator

    axes = figure.subplots()
    unit, unit_bytes = unit_of(max(size for line in lines for _, size, _ in line.predicted))
    ends = []
    for line in lines:
        colour = METHODS[line.spec.method][1]
        style = "--" if line.spec.gradient_checkpointing else "-"
        lengths, sizes = [at for at, *_ in line.predicted], [size / unit_bytes for _, size, _ in line.predicted]
        axes.plot(lengths, sizes, color=colour, linestyle=style, linewidth=1.3)
        for points, is_measured in ((line.predicted, False), (line.measured, True)):
            for at, size, phase in points:
                axes.plot(
                    [at],
                    [size / unit_bytes],
                    marker=_PHASES[phase],
                    color=colour,
                    linestyle="",
                    markersize=8 if is_measured else 4.5,
                    markerfacecolor=colour if is_measured else "white",
                )
        ends.append((_label(line.spec), lengths[-1], sizes[-1], colour))
    first = lines[0].spec
    axes.set(xscale="log", yscale="log", xlabel="sequence length, tokens", ylabel=f"peak, {unit} allocated")
    axes.set_title(f"{first.model_label}: predicted, {word} where filled", loc="left", fontsize=9, parse_math=False)
    shown = [
        length for length in LENGTHS if length & (length - 1) == 0 and length <= max(p[0] for p in lines[0].predicted)
    ]
    axes.set_xticks(shown, [f"{length:,}" for length in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(LogLocator(base=2))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    seen = {phase for line in lines for _, _, phase in (*line.predicted, *line.measured)}
    handles = [
        Line2D(
            [],
            [],
            marker=_PHASES[name],
            color="black",
            markerfacecolor="white",
            linestyle="",
            markersize=6,
            label=name.replace("_", " "),
        )
        for name in _PHASES
        if name in seen
    ]
    axes.legend(handles=handles, title="the peak is in", frameon=False, loc="upper left", alignment="left")
    label_ends(axes, ends, least_gap=0.06, right=1.04)


def _label(spec: CellSpec) -> str:
    checkpointing = ", checkpointing" if spec.gradient_checkpointing else ""
    return f"{spec.method}{checkpointing}, batch {spec.batch_size}"
