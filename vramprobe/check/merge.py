"""Merge: several journals, of shards or contributors → one, each attempt once; refuses records that cannot be.

In: files and folders. Out: a new journal, and who gave what: records by source, card and version. Changes no source,
and writes nothing where one record breaks a rule.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vramprobe.check import Finding, judged, readable
from vramprobe.check.entry import Entry
from vramprobe.errors import IncomparableRecords, StoreError
from vramprobe.records import store, writing
from vramprobe.records.record import RunRecord
from vramprobe.records.whole_file import replacing

_MOST_NAMED = 5


class Share(NamedTuple):
    """Number of records that one source gave of one card and version."""

    source: str
    instrument: str
    device: str
    torch: str | None
    code: str | None  # the commit, or the version of an installed vramprobe
    num_records: int
    num_cells: int


class Merged(NamedTuple):
    """A merged journal; ``num_repeated`` attempts stood in several files and are in it once."""

    journal: Path
    shares: list[Share]
    num_records: int
    num_repeated: int
    warnings: list[Finding]


def merge(sources: Sequence[str | Path], out: str | Path) -> Merged:
    """Write the records of ``sources`` to the new file ``out``.

    Raises StoreError where ``out`` is there already, IncomparableRecords for a record that breaks a rule of check, an
    attempt with two contents, or a measurement that was copied under another name.
    """
    out = Path(out)
    if out.exists():
        raise StoreError(f"{out} is there already; name a new file: merging never changes records")
    given: list[tuple[str, Entry]] = []
    for source in dict.fromkeys(map(str, sources)):
        for file in store.journals(source):
            records, doubts = readable(file)
            _refuse([message for severity, message in doubts if severity == "error"])
            given += [(source, Entry(file, record)) for record in records]
    entries, findings = judged([entry for _, entry in given])
    _refuse([f"{one.where}: {one.message}" for one in findings if one.severity == "error"])
    _refuse(_copies(entries))
    if not entries:
        raise StoreError(f"{', '.join(map(str, sources))}: no records to merge")
    _write(out, [entry.record for entry in entries])
    source_of: dict[str, str] = {}
    for source, entry in given:
        source_of.setdefault(entry.record.attempt_id, source)
    return Merged(
        journal=out,
        shares=_shares([(source_of[entry.record.attempt_id], entry.record) for entry in entries]),
        num_records=len(entries),
        num_repeated=len(given) - len(entries),
        warnings=[one for one in findings if one.severity == "warning"],
    )


def _refuse(reasons: list[str]) -> None:
    if reasons:
        more = f" (and {len(reasons) - _MOST_NAMED} more)" if len(reasons) > _MOST_NAMED else ""
        raise IncomparableRecords(f"nothing was merged: {'; '.join(reasons[:_MOST_NAMED])}{more}")


def _copies(entries: Sequence[Entry]) -> list[str]:
    """Attempts with another's very times: two runs never take the same time to the nanosecond."""
    first: dict[tuple[str, str], Entry] = {}
    found = []
    for entry in entries:
        record = entry.record
        if record.timing is not None:
            before = first.setdefault((record.fingerprint, record.timing.model_dump_json()), entry)
            if before is not entry:
                found.append(
                    f"{entry.where}: has the very times of attempt {before.record.attempt_id} in {before.file}, so it "
                    "is a copy under another name; delete one of them"
                )
    return found


def _shares(records: Sequence[tuple[str, RunRecord]]) -> list[Share]:
    groups: dict[tuple[str | None, ...], list[RunRecord]] = {}
    for source, record in records:
        machine = record.environment
        code = (machine.commit or "")[:12] or machine.versions.get("vramprobe")
        key = (source, record.instrument, machine.device_said, machine.versions.get("torch"), code)
        groups.setdefault(key, []).append(record)
    return [
        Share(*key, num_records=len(group), num_cells=len({record.fingerprint for record in group}))
        for key, group in groups.items()
    ]


def _write(out: Path, records: Sequence[RunRecord]) -> None:
    """All lines, synced, or no file."""
    writing.require_writable(out)
    try:
        with replacing(out) as part, part.open("w") as file:
            file.writelines(f"{record.to_json_line()}\n" for record in records)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"cannot write {out}: {error.strerror}; free some space, or name another file") from error
