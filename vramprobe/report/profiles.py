"""Profiles of commands → the page of them: a row for each rank, with its peak in every tier and by cause.

In: ProfileRecords and the command that rebuilds the page. Out: a Document. Says of each row whether it was measured or
emulated; a command that failed has its row, with what was seen until then.
"""

from collections.abc import Sequence

from vramprobe.records.profile import ProfileRecord
from vramprobe.report.columns import ByteUnit, unit_for
from vramprobe.report.definition import Column, Document, Table, rows_of
from vramprobe.units import word_for

_ABOUT = (
    "Allocated by tensors at the highest moment of the whole run, loading included. What was alive is in requested "
    "bytes, without what the allocator rounds up."
)
_PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes")
_CAUSES = ("weights", "gradients", "optimizer_state", "saved_activations", "temporaries")
_FROM_RANKS = ("num_steps", "fragmentation_bytes", "num_alloc_retries")


def profiles_document(records: Sequence[ProfileRecord], command: str) -> Document:
    """profiles: in the order of the files, ranks by number. Expects at least one record."""
    from vramprobe.records.frames import ranks_frame

    frame = ranks_frame([], records)
    own = frame[[name for name in map(str, frame) if name.startswith("at_peak_")]].rename(columns=lambda name: name[8:])
    peaks = frame[["attempt_id", "command", "rank", "outcome", "peak_phase", *_FROM_RANKS]].assign(
        instrument=frame.instrument.map(word_for),
        device=frame.device_name,
        **{name.removeprefix("peak_"): frame[name] for name in _PEAKS},
    )
    rows = rows_of(peaks.join(own))
    columns = _columns(unit_for(row["allocated_bytes"] for row in rows))
    tables = [Table(title="Peaks by rank", columns=columns, rows=rows, otherwise="No process used a GPU.")]
    instruments = {record.instrument for record in records}
    document = Document(
        name="profiles",
        title="Profiles of commands",
        about=[_ABOUT],
        tables=tables,
        data=Table(title="Profiles of commands", columns=columns, rows=rows),
        origin=_origin(records),
        command=command,
    )
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


def _columns(unit: ByteUnit) -> list[Column]:
    return [
        Column("attempt_id"),
        Column("command", "command"),
        Column("instrument", "how", is_condition=True),
        Column("device", "GPU", is_condition=True),
        Column("rank", "rank", is_number=True),
        Column("outcome", "outcome"),
        Column("peak_phase", "peak in"),
        *(unit.amount(name.removeprefix("peak_"), name.split("_")[1]) for name in _PEAKS),
        *(unit.amount(f"{cause}_bytes", cause.replace("_", " ")) for cause in _CAUSES),
        unit.amount("other_bytes", None),
        *(Column(name, is_number=True) for name in _FROM_RANKS),
    ]
