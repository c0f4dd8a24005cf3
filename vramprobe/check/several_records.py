"""The rules of check that look at several records at once: do they agree, and may they be compared?

In: all records with their places. Out: doubts with theirs, each an error or a warning with what was found, what is
allowed and what to do.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vramprobe.check.entry import Entry, PlacedDoubt
from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.records.table import COMPARABLE, describe_outcome
from vramprobe.units import MIB, format_bytes

#: The caching allocator's large segment: replicates may differ by where one was cut.
SEGMENT_BYTES = 20 * MIB


def duplicates(lines: Sequence[Entry]) -> Iterator[PlacedDoubt]:
    """An attempt may stand in two files, but not with two contents (in one file, store.read refuses that)."""
    first: dict[str, Entry] = {}
    for entry in lines:
        before = first.setdefault(entry.record.attempt_id, entry)
        if before.record != entry.record:
            yield (
                "error",
                entry.where,
                f"the same attempt has other values in {before.file}; an attempt is written once and never changed: "
                "delete the copy that was edited",
            )


def outcomes(entries: Sequence[Entry]) -> Iterator[PlacedDoubt]:
    """Attempts that must not be believed (invalid) or that a neighbour or a failure spoiled and nobody repeated.

    An error or a contaminated attempt is past once another attempt at the cell finished in the same folder.
    """
    for folder_entries in _by_folder(entries).values():
        records = [entry.record for entry in folder_entries]
        finished = {record.fingerprint for record in records if record.outcome.kind in store.FINISHED}
        for entry in folder_entries:
            outcome = entry.record.outcome
            if outcome.kind == "invalid" and not outcome.reasons:
                yield "error", entry.where, "invalid without a reason; the worker always gives one: restore the record"
            elif outcome.kind == "invalid":
                yield (
                    "warning",
                    entry.where,
                    f"invalid, so left out of fits: {describe_outcome(outcome)}; find out why before publishing",
                )
            elif outcome.kind in ("error", "contaminated") and entry.record.fingerprint not in finished:
                yield (
                    "warning",
                    entry.where,
                    f"{outcome.kind}: {describe_outcome(outcome)}; no attempt at this cell has finished: run the "
                    "sweep again",
                )


def replicates(entries: Sequence[Entry]) -> Iterator[PlacedDoubt]:
    """Attempts at one cell in one context: allocated equal to the byte, reserved within a segment."""
    for group in attempts_by_context(entries):
        place = f"{group[0].where} and {', '.join(entry.record.attempt_id for entry in group[1:])}"
        peaks = [entry.record.peak for entry in group]
        allocated = sorted({peak.allocated_bytes for peak in peaks})
        if len(allocated) > 1:
            is_same_code = len({_code_of(entry.record) for entry in group}) == 1
            yield (
                "error" if is_same_code else "warning",
                place,
                f"replicates peak at {', '.join(map(str, allocated))} B allocated; in one context they must be equal "
                + (
                    "to the byte: measure the cell again and publish none until you know why they differ"
                    if is_same_code
                    else "to the byte, but the measuring code changed in between: measure the older ones again"
                ),
            )
        reserved = [peak.reserved_bytes for peak in peaks if peak.reserved_bytes is not None]
        if reserved and max(reserved) - min(reserved) > SEGMENT_BYTES:
            yield (
                "warning",
                place,
                f"replicates peak from {format_bytes(min(reserved))} to {format_bytes(max(reserved))} reserved; within "
                f"a segment ({format_bytes(SEGMENT_BYTES)}) is usual: measure the cell again and see which is the rule",
            )


def environment(entries: Sequence[Entry]) -> Iterator[PlacedDoubt]:
    """One folder, one way of measuring: instrument, device, driver and libraries."""
    for folder, folder_entries in _by_folder(entries).items():
        records = [entry.record for entry in folder_entries]
        packages = sorted({package for record in records for package in record.environment.versions})
        for key in ("instrument", "device_name", "driver_version", "cuda_version", "num_threads", *packages):
            # What a record does not know differs from nothing, except where fit and report would refuse it.
            counted = Counter(value for record in records if (value := _value(record, key)) is not None)
            is_refused = key in COMPARABLE and len({COMPARABLE[key](record) for record in records}) > 1
            if len(counted) < 2 and not is_refused:
                continue
            known = [f"{value!r} in {count}" for value, count in sorted(counted.items())]
            unknown = [f"unknown in {len(records) - counted.total()}"] if counted.total() < len(records) else []
            advice = (
                "fit and report refuse this: keep one way of measuring in a folder"
                if is_refused
                else "one is usual: measure in one environment, or keep them in folders of their own"
            )
            yield "warning", str(folder), f"{key} is {', '.join(known + unknown)} of {len(records)} records; {advice}"


def _value(record: RunRecord, key: str) -> str | int | None:
    if key == "num_threads":
        return _num_threads(record)
    if key in record.environment.versions:
        return record.environment.versions[key]
    return COMPARABLE[key](record) if key in COMPARABLE else getattr(record.environment, key, None)


def _by_folder(entries: Sequence[Entry]) -> dict[Path, list[Entry]]:
    """A journal is a folder's: the files in it are one machine's (merging puts several beside each other)."""
    folders: dict[Path, list[Entry]] = {}
    for entry in entries:
        folders.setdefault(entry.file.parent, []).append(entry)
    return folders


def attempts_by_context(entries: Sequence[Entry]) -> list[list[Entry]]:
    """The ok attempts at each cell, apart for each context that may change its bytes."""
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        record = entry.record
        machine = record.environment
        if record.outcome.kind == "ok" and record.peak is not None:
            libraries = tuple(sorted(item for item in machine.versions.items() if item[0] != "vramprobe"))
            context = (
                record.instrument,
                machine.device_name,
                machine.driver_version,
                machine.cuda_version,
                machine.alloc_conf,
                _num_threads(record),
                libraries,
            )
            groups.setdefault((record.fingerprint, *context), []).append(entry)
    return list(groups.values())


def _num_threads(record: RunRecord) -> int | None:
    """Part of the context on the CPU, whose flash attention takes a buffer for each thread; not of a GPU's memory."""
    return record.environment.num_threads if record.instrument == "cpu" else None


def _code_of(record: RunRecord) -> tuple[Any, ...]:
    machine = record.environment
    return machine.versions.get("vramprobe"), machine.commit, machine.dirty


RULES_OF_SEVERAL = (outcomes, replicates, environment)
