"""On data: each cell of a sweep at the longest batch that it makes of a data set's rows, its seq_len the truncation.

In: a Sweep, a data set's lengths in tokens. Out: a Sweep with the padding of each cell. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from vramprobe.errors import SpecError
from vramprobe.lengths.batches import Sampler
from vramprobe.lengths.padding import PaddedData, padded_data
from vramprobe.spec import CellSpec
from vramprobe.sweep.definition import Sweep


@dataclass(frozen=True)
class Data:
    """The rows of a data set, and how they become batches."""

    lengths: Sequence[int]
    sampler: Sampler = "random"
    pad_to_multiple_of: int = 1


def on_data(sweep: Sweep, data: Data) -> Sweep:
    """``sweep`` at this data's longest batches; cells that differ only in the truncation may become one.

    Raises SpecError for a length that a cell cannot have, and what :func:`padded_data` raises.
    """
    padded: dict[tuple[int, int], PaddedData] = {}
    cells: dict[str, CellSpec] = {}
    by_cell: dict[str, PaddedData] = {}
    held_out, notes = set(), list(sweep.notes)
    for cell in sweep.cells:
        key = cell.batch_size, cell.seq_len
        if key not in padded:
            padded[key] = _padded(cell, data)
        at_longest = _with_length(cell, padded[key].longest)
        fingerprint = at_longest.fingerprint
        if fingerprint in cells:
            notes.append(f"{cell.cell_id}: no row is longer than {padded[key].longest:,} tokens; kept once")
        cells.setdefault(fingerprint, at_longest)
        by_cell.setdefault(fingerprint, padded[key])
        held_out |= {fingerprint} if cell.fingerprint in sweep.held_out else set()
    return replace(sweep, cells=tuple(cells.values()), held_out=frozenset(held_out), notes=tuple(notes), data=by_cell)


def _padded(cell: CellSpec, data: Data) -> PaddedData:
    return padded_data(
        data.lengths,
        batch_size=cell.batch_size,
        max_length=cell.seq_len,
        sampler=data.sampler,
        pad_to_multiple_of=data.pad_to_multiple_of,
    )


def _with_length(cell: CellSpec, seq_len: int) -> CellSpec:
    try:
        return CellSpec.model_validate(dict(cell) | {"seq_len": seq_len})
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise SpecError(f"{cell.cell_id} with the data's longest batch, {seq_len:,} tokens: {why}") from None
