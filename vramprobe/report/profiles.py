"""Profiles of commands → the page of them: a row for each rank, with its peak in every tier and by cause.

In: ProfileRecords and the command that rebuilds the page. Out: a Document. Says of each row whether it was measured or
emulated; a command that failed has its row, with what was seen until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vramprobe.records.profile import ProfileRecord, RankProfile
from vramprobe.report.columns import Unit, unit_for
from vramprobe.report.definition import Column, Document, Table
from vramprobe.units import word_for

_ABOUT = (
    "Allocated by tensors at the highest moment of the whole run, loading included. What was alive is in requested "
    "bytes, without what the allocator rounds up."
)
_CAUSES = ("weights", "gradients", "optimizer_state", "saved_activations", "temporaries", "other")


@dataclass(frozen=True)
class _Row:
    record: ProfileRecord
    rank: RankProfile


def profiles_document(records: Sequence[ProfileRecord], command: str) -> Document:
    """profiles: in the order of the files, ranks by number. Expects at least one record."""
    rows = [_Row(record, rank) for record in records for rank in record.ranks]
    columns = _columns(unit_for(row.rank.peak.allocated_bytes for row in rows if row.rank.peak is not None))
    tables = [Table(title="Peaks by rank", columns=columns, rows=rows, otherwise="No process used a GPU.")]
    instruments = {record.instrument for record in records}
    document = Document(
        name="profiles", title="Profiles of commands", about=[_ABOUT], tables=tables,
        data=Table(title="Profiles of commands", columns=columns, rows=rows), origin=_origin(records), command=command,
    )  # fmt: skip
    return document.of(instruments.pop()) if len(instruments) == 1 else document


def _origin(records: Sequence[ProfileRecord]) -> list[str]:
    devices = sorted({record.environment.device_said for record in records})
    torches = sorted({record.environment.torch for record in records if record.environment.torch})
    days = sorted({record.started_at[:10] for record in records})
    return [
        f"{len(records)} profiles on {' and '.join(devices)}",
        f"torch {' and '.join(torches)}" if torches else "torch unknown",
        f"from {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else ""),
    ]


def _columns(unit: Unit) -> list[Column]:
    return [
        Column("attempt_id", None, lambda row: row.record.attempt_id),
        Column("command", "command", lambda row: row.record.name),
        Column("instrument", "how", lambda row: word_for(row.record.instrument), is_condition=True),
        Column("device", "GPU", lambda row: row.record.environment.device_name, is_condition=True),
        Column("rank", "rank", lambda row: row.rank.rank, is_number=True),
        Column("outcome", "outcome", lambda row: row.record.outcome.kind),
        Column("peak_phase", "peak in", lambda row: _of_peak(row, "phase")),
        unit.amount("allocated_bytes", "allocated", lambda row: _of_peak(row, "allocated_bytes")),
        unit.amount("reserved_bytes", "reserved", lambda row: _of_peak(row, "reserved_bytes")),
        unit.amount("device_bytes", "device", lambda row: _of_peak(row, "device_bytes")),
        *(
            unit.amount(f"{cause}_bytes", None if cause == "other" else cause.replace("_", " "), _cause(cause))
            for cause in _CAUSES
        ),
        Column("num_steps", None, lambda row: row.rank.num_steps, is_number=True),
        Column("fragmentation_bytes", None, lambda row: row.rank.fragmentation_bytes, is_number=True),
        Column("num_alloc_retries", None, lambda row: row.rank.num_alloc_retries, is_number=True),
    ]


def _of_peak(row: _Row, name: str) -> Any:
    return None if row.rank.peak is None else getattr(row.rank.peak, name)


def _cause(name: str):
    return lambda row: None if row.rank.at_peak is None else getattr(row.rank.at_peak, f"{name}_bytes")
