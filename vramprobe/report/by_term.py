"""Cells → the page of what the peak is made of: bytes alive at the highest moment, by cause.

In: cells, where they come from and the command. Out: a Document; each row adds up to its total exactly.
"""

from collections.abc import Sequence
from dataclasses import replace

from vramprobe.records.phase_memory import Composition
from vramprobe.report.cells import Cell
from vramprobe.report.columns import cell_columns, cell_row, unit_for
from vramprobe.report.definition import Column, Document, Table

_ABOUT = (
    "Bytes alive at the highest moment, by cause; a part is 0 where it is not alive then (gradients at a peak in "
    "forward, saved activations at the optimizer's step)."
)


def traced(cells: Sequence[Cell]) -> list[Cell]:
    """The cells whose peak is known by cause."""
    return [cell for cell in cells if cell.measured_bytes is not None and at_peak(cell) is not None]


def at_peak(cell: Cell) -> Composition | None:
    """Return the live tensors at the cell's peak; null where it was not traced."""
    return cell.record.ledger.at_peak if cell.record.ledger else None


def by_term(cells: Sequence[Cell], origin: Sequence[str], command: str) -> Document:
    """by_term: the total, then its parts."""
    known = traced(cells)
    unit = unit_for(alive.total_bytes for cell in known if (alive := at_peak(cell)) is not None)
    columns = [*cell_columns(), Column("peak_phase", "peak phase")]
    for name in Composition.model_fields:  # what is 0.0 everywhere is said once
        amount = unit.amount(name, name.removesuffix("_bytes").replace("_", " "))
        columns.append(replace(amount, is_condition=name != "total_bytes"))
    rows = [cell_row(cell) | alive.model_dump() for cell in known if (alive := at_peak(cell)) is not None]
    others = sum(cell.measured_bytes is not None for cell in cells) - len(known)
    remarks = [f"{others} measured cells were not traced and are left out."] if others else []
    table = Table(title="The peak by term", columns=columns, rows=rows, otherwise="No cell was traced.")
    return Document(
        name="by_term",
        title="What the peak is made of",
        about=[_ABOUT],
        tables=[table],
        data=table,
        remarks=remarks,
        origin=origin,
        command=command,
    )
