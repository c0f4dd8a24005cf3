"""Cells → the report's pages: what was measured (and predicted), what failed, and what the peak is made of.

In: cells and a footer. Out: file name → content. Each table is defined once, here, for Markdown and CSV alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vramprobe.record import Composition, RunRecord
from vramprobe.report.render import Column, to_csv, to_markdown
from vramprobe.report.rows import Cell, Summary, summaries
from vramprobe.spec import CellSpec
from vramprobe.store import StoreContents
from vramprobe.table import describe_outcome, to_row
from vramprobe.units import GIB, MIB

_SMALLEST_PERCENT = 0.01  # an error below it is said to be below it; the CSV has all digits
_LONGEST_DETAIL = 200  # characters of a failure in Markdown; the CSV has all


@dataclass(frozen=True)
class _Unit:
    name: str
    num_bytes: int
    num_decimals: int

    def text(self, value: float) -> str:
        return f"{value / self.num_bytes:.{self.num_decimals}f}"


def measured(cells: Sequence[Cell], footer: str) -> dict[str, bytes]:
    """measured.md and measured.csv: peaks, predictions where there is a fit (held out apart), and failures."""
    believed = [cell for cell in cells if cell.measured_bytes is not None]
    failed = [cell for cell in cells if cell.measured_bytes is None]
    unit = _unit(cell.measured_bytes for cell in believed)
    columns = _measured_columns(unit, is_predicted=any(cell.held_out is not None for cell in cells))
    parts = [
        "# Measured peak memory\n",
        "Allocated by tensors at the highest moment of the training steps (loading apart). Precision is the dtype the "
        "weights are loaded in, `+` autocast; adapters' own dtype in brackets.\n",
    ]
    if quality := summaries(cells):
        parts += ["## Summary\n", to_markdown(_SUMMARY_COLUMNS, quality)]
    if any(cell.held_out is not None for cell in cells):
        held_out = [cell for cell in believed if cell.held_out]
        in_fit = [cell for cell in believed if not cell.held_out]
        parts += ["## Held out of the fit\n", _or_none(columns, held_out, "No cell: the fit has seen every one.")]
        parts += ["## In the fit\n", _or_none(columns, in_fit, "No cell: the fit was made from other records.")]
    else:
        parts += ["## Cells\n", _or_none(columns, believed, "No cell finished; see below.")]
    if remarks := [cell for cell in believed if cell.remark]:
        parts += ["## About the predictions\n", to_markdown(_REMARK_COLUMNS, remarks)]
    if failed:
        parts += ["## Cells without a result\n", to_markdown(_failure_columns(), failed)]
    return {
        "measured.md": "\n".join([*parts, footer]).encode(),
        "measured.csv": to_csv(columns, cells).encode(),
    }


def by_term(cells: Sequence[Cell], footer: str) -> dict[str, bytes]:
    """by_term.md and by_term.csv: what is alive at the allocated peak, by cause; the parts add up to the total."""
    known = [cell for cell in cells if cell.measured_bytes is not None and _at_peak(cell) is not None]
    unit = _unit(_at_peak(cell).total_bytes for cell in known)
    columns = [*_cell_columns(), _PEAK_PHASE, *(_term_column(name, unit) for name in Composition.model_fields)]
    others = sum(cell.measured_bytes is not None for cell in cells) - len(known)
    text = (
        "Bytes alive at the highest moment, by cause; a part is 0 where it is not alive then (gradients at a peak in "
        "forward, saved activations at the optimizer's step)."
        + (f" {others} measured cells were not traced and are left out." if others else "")
    )
    parts = ["# The peak by term\n", f"{text}\n", _or_none(columns, known, "No cell was traced.")]
    return {
        "by_term.md": "\n".join([*parts, footer]).encode(),
        "by_term.csv": to_csv(columns, known).encode(),
    }


def footer(contents: StoreContents, command: str) -> str:
    """Where the numbers come from and how to rebuild the page; what was measured must be comparable."""
    records = [record for record in contents.records if record.is_measured]
    num_simulated = len(contents.records) - len(records)
    attempts, cells = len(records), len({record.fingerprint for record in records})
    days = sorted({record.started_at[:10] for record in records})
    lines = [
        f"instrument `{records[0].instrument}`",
        f"device {records[0].environment.device_name}",
        _versions(records),
        f"{attempts} records of {cells} cells"
        + (f"; of {attempts - cells} more attempts only the one that counts is shown" if attempts > cells else ""),
        f"measured {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else ""),
    ]
    lines += [f"left out: {num_simulated} simulated records (predicted, not measured)"] if num_simulated else []
    lines += [contents.torn_tail] if contents.torn_tail else []
    return "---\n\n" + "".join(f"- {line}\n" for line in lines) + f"\nRebuild this page:\n\n```\n{command}\n```\n"


def _versions(records: Sequence[RunRecord]) -> str:
    packages = sorted({package for record in records for package in record.environment.versions})
    known = []
    for package in packages:
        seen = dict.fromkeys(record.environment.versions.get(package) for record in records)
        known.append(f"{package} {' and '.join(version for version in seen if version) or 'absent'}")
    python = sorted({record.environment.python for record in records})
    return f"python {' and '.join(python)}, {', '.join(known)}"


def _unit(amounts: Iterable[int]) -> _Unit:
    """One unit per table, so that its numbers compare: GiB where the smallest fills one, else MiB."""
    return _Unit("GiB", GIB, 2) if min(amounts, default=0) >= GIB else _Unit("MiB", MIB, 1)


def _of_row(name: str) -> Callable[[Cell], Any]:
    return lambda cell: to_row(cell.record)[name]


def _of_spec(name: str) -> Callable[[Cell], Any]:
    return lambda cell: getattr(cell.record.spec, name)


def _method(cell: Cell) -> str:
    spec = cell.record.spec
    if spec.method == "full":
        return "full"
    kind = "lora" if spec.method == "lora" else f"qlora {spec.quant}, {spec.kbit_prep} prep"
    targets = spec.lora_targets if isinstance(spec.lora_targets, str) else "+".join(spec.lora_targets)
    return f"{kind}, r {spec.lora_r}, {targets}{', DoRA' if spec.dora else ''}"


def _precision(spec: CellSpec) -> str:
    base = spec.dtype if spec.autocast == "none" else f"{spec.dtype} + {spec.autocast}"
    return base if spec.lora_dtype is None else f"{base} ({spec.lora_dtype})"


_PEAK_PHASE = Column("peak_phase", "peak phase", _of_row("peak_phase"))


def _cell_columns() -> list[Column]:
    def size(cell: Cell) -> str:
        spec = cell.record.spec
        steps = "" if spec.grad_accum == 1 else f", {spec.grad_accum} accumulated"
        return f"{spec.batch_size} × {spec.seq_len}{steps}"

    return [
        Column("fingerprint", None, _of_row("fingerprint")),
        Column("cell_id", None, _of_row("cell_id")),
        Column("model", "model", _of_spec("model_label")),
        Column("method", "method", _method),
        Column("precision", "precision", lambda cell: _precision(cell.record.spec)),
        Column("optimizer", "optimizer", _of_spec("optim")),
        Column("batch_by_length", "batch × length", size, is_number=True),
        Column("gradient_checkpointing", "checkpointing", _of_spec("gradient_checkpointing"), _yes_no),
    ]


def _measured_columns(unit: _Unit, *, is_predicted: bool) -> list[Column]:
    def amount(name: str, heading: str | None, value: Callable[[Cell], Any]) -> Column:
        return Column(name, heading and f"{heading}, {unit.name}", value, unit.text, is_number=True)

    columns = [
        *_cell_columns(),
        Column("outcome", None, _of_row("outcome")),
        Column("outcome_detail", None, _of_row("outcome_detail")),
        _PEAK_PHASE,
        amount("measured_bytes", "measured", lambda cell: cell.measured_bytes),
        amount("reserved_bytes", None, _of_row("peak_reserved_bytes")),
        amount("device_bytes", None, _of_row("peak_device_bytes")),
        Column("step_seconds", None, _of_row("step_seconds")),
    ]
    if not is_predicted:
        return columns
    return [
        *columns,
        Column("held_out", None, lambda cell: cell.held_out),
        amount("predicted_bytes", "predicted", lambda cell: cell.predicted_bytes),
        amount("low_bytes", "at least", lambda cell: cell.low_bytes),
        amount("high_bytes", "at most", lambda cell: cell.high_bytes),
        Column("error_percent", "error, %", lambda cell: cell.error_percent, _signed, is_number=True),
        Column("remark", None, lambda cell: cell.remark),
    ]


def _failure_columns() -> list[Column]:
    return [
        *_cell_columns(),
        Column("outcome", "outcome", _of_row("outcome")),
        Column("outcome_detail", "detail", lambda cell: describe_outcome(cell.record.outcome), _shortened),
    ]


_REMARK_COLUMNS = [
    Column("cell_id", "cell", _of_row("cell_id")),
    Column("remark", "remark", lambda cell: cell.remark, lambda text: _shortened(text)),
]


def _summary_column(name: str, heading: str, text: Callable[[float], str]) -> Column:
    def value(summary: Summary) -> float | None:
        return getattr(summary, name)

    return Column(name, heading, value, text, is_number=True)


_SUMMARY_COLUMNS = [
    Column("group", "cells", lambda summary: summary.group),
    _summary_column("num_cells", "n", str),
    _summary_column("mean_abs_error_percent", "mean absolute error, %", lambda value: _unsigned(value)),
    _summary_column("worst_abs_error_percent", "worst absolute error, %", lambda value: _unsigned(value)),
    _summary_column("worst_under_prediction_percent", "worst under-prediction, %", lambda value: _signed(value)),
    _summary_column("inside_interval_percent", "measured inside the interval, %", "{:.0f}".format),
]


def _term_column(name: str, unit: _Unit) -> Column:
    heading = f"{name.removesuffix('_bytes').replace('_', ' ')}, {unit.name}"
    return Column(name, heading, lambda cell: getattr(_at_peak(cell), name), unit.text, is_number=True)


def _at_peak(cell: Cell) -> Composition | None:
    return cell.record.ledger and cell.record.ledger.at_peak


def _or_none(columns: Sequence[Column], cells: Sequence[Cell], otherwise: str) -> str:
    return to_markdown(columns, cells) if cells else f"{otherwise}\n"


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"


def _signed(value: float) -> str:
    return f"{value:+.2f}" if abs(value) >= _SMALLEST_PERCENT else f"≤ {_SMALLEST_PERCENT}"


def _unsigned(value: float) -> str:
    return f"{value:.2f}" if value >= _SMALLEST_PERCENT else f"≤ {_SMALLEST_PERCENT}"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_DETAIL else text[: _LONGEST_DETAIL - 1] + "…"
