"""Cells → the page of speed and cost: seconds per step, tokens per second, dollars per billion tokens where known.

In: cells, where they come from and the command. Out: a Document, or None where no step was timed. A price is put
only on what was measured on that very GPU.
"""

from collections.abc import Sequence

from vramprobe.records.record import RunRecord
from vramprobe.report.cells import Cell
from vramprobe.report.columns import cell_columns, cell_row, unit_for
from vramprobe.report.definition import Column, Document, Table
from vramprobe.sweep.card import Rate, card_seen, hourly_rate

_ABOUT = (
    "Median of the steps that nobody traced. Tokens are those of the batch, padding included, of all accumulated "
    "micro-batches."
)


def speed(cells: Sequence[Cell], origin: Sequence[str], command: str) -> Document | None:
    """speed: a row per timed cell; None without any."""
    timed = [cell for cell in cells if cell.measured_bytes is not None and _is_timed(cell)]
    if not timed:
        return None
    rate = rate_of(timed[0].record)
    threads = sorted({num for cell in timed if (num := cell.record.environment.num_threads) is not None})
    note = f"On the CPU, {' and '.join(map(str, threads))} threads." if timed[0].record.instrument == "cpu" else ""
    if rate is not None:
        note = f"At ${rate.usd_per_hour:.2f} per hour ({rate.source})."
    rows = [cell_row(cell) | {"tokens_per_second": tokens_per_second(cell)} for cell in timed]
    columns = [
        *cell_columns(),
        unit_for(cell.measured_bytes for cell in timed).amount("measured_bytes", "peak"),
        Column("step_seconds", "step, s", text="{:.3f}".format, is_number=True),
        Column("tokens_per_second", "tokens/s", text="{:,.0f}".format, is_number=True),
    ]
    if rate is not None:
        rows = [row | {"usd_per_billion_tokens": rate.dollars(1e9 / row["tokens_per_second"])} for row in rows]
        columns.append(Column("usd_per_billion_tokens", "$/billion tokens", text="{:,.2f}".format, is_number=True))
    table = Table(title="Speed and cost", columns=columns, rows=rows, note=note)
    return Document(
        name="speed",
        title="Speed" + (" and cost" if rate else ""),
        about=[_ABOUT],
        tables=[table],
        data=table,
        origin=origin,
        command=command,
    )


def tokens_per_second(cell: Cell) -> float:
    """Tokens per second of a timed cell."""
    spec, seconds = cell.record.spec, _step_seconds(cell)
    assert seconds is not None
    return spec.num_tokens * spec.grad_accum / seconds


def rate_of(record: RunRecord) -> Rate | None:
    """The catalog's cheapest on-demand price of the GPU that the record was measured on; None where it has none."""
    if record.instrument != "cuda":
        return None
    return hourly_rate(card_seen(record.environment.device_name, record.environment.device_total_bytes or 0))


def _is_timed(cell: Cell) -> bool:
    """An emulated step's time is that of launching nothing, whatever a record says."""
    return cell.record.instrument != "emulated" and _step_seconds(cell) is not None


def _step_seconds(cell: Cell) -> float | None:
    return cell.record.timing.median_step_seconds if cell.record.timing else None
