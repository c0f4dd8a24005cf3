"""Results → pandas DataFrames: one row per record, per phase or per rank.

In: a results file or folder, of cells, profiles of commands, or both. Out: DataFrames with the columns of columns.py.
Drops no record: failures are rows, and what is not known is NA. Needs no torch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from vramprobe.errors import SpecError
from vramprobe.records import columns, store
from vramprobe.records.profile import ProfileRecord, RankProfile, read_profiles
from vramprobe.records.record import RankRecord, RunRecord
from vramprobe.records.table import ledger_columns, peak_columns, to_row

Of = Literal["records", "phases", "ranks"]
#: A record of one GPU has the first two itself.
_OWN_OF_RANK = ("context_bytes", "num_alloc_retries", "host_peak_bytes", "host_tensors_bytes", "host_pinned_bytes")


def load(path: str | Path, of: Of = "records") -> pd.DataFrame:
    """Return the rows under ``path``; see :func:`vramprobe.load`. Raises StoreError where nothing can be read."""
    if of not in columns.COLUMNS:
        raise SpecError(f"load(of={of!r}) is not known; use records, phases or ranks")
    if of == "records":
        return records_frame(store.read(path).records)
    profiles = read_profiles(path)
    records = store.read(path, allow_empty=bool(profiles)).records
    return (phases_frame if of == "phases" else ranks_frame)(records, profiles)


def records_frame(records: Iterable[RunRecord]) -> pd.DataFrame:
    """One row per record, with one ``version_PACKAGE`` column per library that any of them names."""
    rows = [to_row(record) for record in records]
    kinds = {name: columns.of_records(name) for row in rows for name in row}
    return _frame(rows, kinds or columns.RECORDS)


def ranks_frame(records: Iterable[RunRecord], profiles: Iterable[ProfileRecord] = ()) -> pd.DataFrame:
    """One row per rank of each record and of each profiled command; a cell of one GPU has rank 0."""
    return _frame([*_ranks_of_cells(records), *_ranks_of_commands(profiles)], columns.RANKS)


def phases_frame(records: Iterable[RunRecord], profiles: Iterable[ProfileRecord] = ()) -> pd.DataFrame:
    """One row per phase: of each rank where the ranks' phases are kept, else of the record (the highest rank's).

    A profiled command has one row per rank and name of phase, with the highest of all phases of that name.
    """
    rows = [
        _of_cell(record, rank) | phase.model_dump(exclude={"name"}) | {"phase": phase.name}
        for record in records
        for rank, phases in _phases_by_rank(record)
        for phase in phases
    ]
    rows += [
        _of_command(profile, rank)
        | {
            "phase": phase.name,
            "num_phases": phase.num_phases,
            "allocated_peak_bytes": phase.allocated_bytes,
            "reserved_peak_bytes": phase.reserved_bytes,
            "device_used_bytes": phase.device_bytes,
        }
        for profile in profiles
        for rank in profile.ranks
        for phase in rank.phases
    ]
    return _frame(rows, columns.PHASES)


def _phases_by_rank(record: RunRecord) -> list[tuple[int | None, Sequence[Any]]]:
    kept: list[tuple[int | None, Sequence[Any]]] = [(one.rank, one.phases) for one in record.ranks if one.phases]
    return kept or [(None if record.ranks else 0, record.phases)]


def _ranks_of_cells(records: Iterable[RunRecord]) -> Iterator[dict[str, Any]]:
    for record in records:
        for one in record.ranks or [record]:
            rank = one.rank if isinstance(one, RankRecord) else None if record.spec.num_gpus > 1 else 0
            own = {name: getattr(one, name, None) for name in _OWN_OF_RANK}
            yield _of_cell(record, rank) | own | peak_columns(one.peak) | ledger_columns(one.ledger) | _link(one)


def _ranks_of_commands(profiles: Iterable[ProfileRecord]) -> Iterator[dict[str, Any]]:
    for profile in profiles:
        for rank in profile.ranks:
            row = _of_command(profile, rank) | {f"peak_{name}": value for name, value in (rank.peak or {})}
            row |= {f"at_peak_{name}": value for name, value in (rank.at_peak or {})}
            own = ("num_steps", "fragmentation_bytes", "num_alloc_retries")
            yield (
                row
                | {name: getattr(rank, name) for name in own}
                | {"context_bytes": profile.context_bytes}
                | _link(rank)
            )


def _link(rank: RankRecord | RankProfile | RunRecord) -> dict[str, int | None]:
    traffic = getattr(rank, "traffic", None)
    return {"link_bytes": None if traffic is None else sum(moved.link_bytes for moved in traffic)}


def _of_cell(record: RunRecord, rank: int | None) -> dict[str, Any]:
    return {
        "attempt_id": record.attempt_id,
        "cell_id": record.cell_id,
        "command": None,
        "instrument": record.instrument,
        "device_name": record.environment.device_name,
        "model_label": record.spec.model_label,
        "method": record.spec.method,
        "outcome": record.outcome.kind,
        "rank": rank,
    }


def _of_command(profile: ProfileRecord, rank: RankProfile) -> dict[str, Any]:
    return {
        "attempt_id": profile.attempt_id,
        "command": profile.name,
        "instrument": profile.instrument,
        "device_name": profile.environment.device_name,
        "outcome": profile.outcome.kind,
        "rank": rank.rank,
    }


def _frame(rows: Sequence[Mapping[str, Any]], kinds: Mapping[str, columns.RecordColumn]) -> pd.DataFrame:
    return pd.DataFrame({name: _array([row.get(name) for row in rows], kind.dtype) for name, kind in kinds.items()})


def _array(values: list[Any], dtype: Any) -> Any:
    if dtype.startswith("datetime"):
        return pd.to_datetime(pd.Series(values, dtype="string"), utc=True, format="ISO8601").astype(dtype)
    return pd.array(values, dtype=dtype)
