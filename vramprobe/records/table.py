"""Records → rows: one flat mapping per record, as plain Python.

In: RunRecords. Out: rows with one value per column; bytes are ints with ``_bytes`` last, and what is not known is null.
Never drops a record, and refuses (require_comparable) to let what was measured differently pass for one data set.
"""

from collections.abc import Callable, Iterable
from typing import Any

from vramprobe.errors import IncomparableRecords
from vramprobe.records import outcomes
from vramprobe.records import record as rec
from vramprobe.records.phase_memory import Composition, MemoryLedger, Peak
from vramprobe.spec import CellSpec
from vramprobe.units import format_bytes

_SPEC_COLUMNS = tuple(name for name in CellSpec.model_fields if name != "architecture")

#: Key → its value in a record: all must be equal in one table or fit (require_comparable).
COMPARABLE: dict[str, Callable[[rec.RunRecord], Any]] = {
    "instrument": lambda record: record.instrument,
    "device_name": lambda record: record.environment.device_name,
    "torch": lambda record: minor_release(record.environment.versions.get("torch")),
}


def to_row(record: rec.RunRecord) -> dict[str, Any]:
    """One record as column → value: the cell, its outcome, the peak by tier, the ledger, times, machine, versions.

    ``at_peak_…_bytes`` are the parts of the peak (in requested bytes on cuda); ``step_seconds`` is the median of
    the timed steps.
    """
    spec, environment = record.spec, record.environment
    return {
        "cell_id": record.cell_id,
        "fingerprint": record.fingerprint,
        "attempt_id": record.attempt_id,
        "started_at": record.started_at,
        "instrument": record.instrument,
        **{name: _plain(getattr(spec, name)) for name in _SPEC_COLUMNS},
        "model_label": spec.model_label,
        "model_type": spec.model_type,
        "num_tokens": spec.num_tokens,
        **{name: _plain(value) for name, value in _fields(rec.ModelFacts, record.facts).items()},
        "outcome": record.outcome.kind,
        "outcome_detail": describe_outcome(record.outcome),
        **peak_columns(record.peak),
        **ledger_columns(record.ledger),
        "context_bytes": record.context_bytes,
        "num_alloc_retries": record.num_alloc_retries,
        "step_seconds": record.timing and record.timing.median_step_seconds,
        "total_seconds": record.timing and record.timing.total_seconds,
        "device_name": environment.device_name,
        "device_total_bytes": environment.device_total_bytes,
        **{f"version_{package}": version for package, version in sorted(environment.versions.items())},
        "commit": environment.commit,
        "dirty": environment.dirty,
        "sweep": record.sweep,
        "held_out": record.held_out,
    }


def require_comparable(records: Iterable[rec.RunRecord], *, across_cards: bool = False) -> None:
    """Raise IncomparableRecords, naming the key, both values and both cells, unless all were measured in one way.

    One way is: the same instrument, on the same kind of device, with the same minor release of torch (allocators and
    kernels change between them): the keys of ``COMPARABLE``. ``across_cards``: emulated GPUs may be several, for what
    counts each card's own share by arithmetic.
    """
    records = list(records)
    across_cards = across_cards and all(record.instrument == "emulated" for record in records)
    for record in records[1:]:
        for key, value_of in COMPARABLE.items():
            if key == "device_name" and across_cards:
                continue
            here, there = value_of(record), value_of(records[0])
            if here != there:
                raise IncomparableRecords(
                    f"these records must not be mixed: {key} is {there!r} in {records[0].cell_id} and {here!r} in "
                    f"{record.cell_id}; keep them in folders of their own and name one of these"
                )


def describe_outcome(outcome: outcomes.Outcome) -> str:
    """One line on what went wrong, with its amounts; empty when nothing did."""
    match outcome:
        case outcomes.Ok():
            return ""
        case outcomes.Oom():
            when = outcome.phase if outcome.step is None else f"{outcome.phase} of step {outcome.step}"
            amounts = {
                "requested": outcome.requested_bytes,
                "allocated": outcome.allocated_bytes,
                "reserved": outcome.reserved_bytes,
                "free": outcome.free_bytes,
            }
            known = [f"{format_bytes(value)} {name}" for name, value in amounts.items() if value is not None]
            return f"in {when}: {', '.join(known) or outcome.message}"
        case outcomes.OomHost() | outcomes.Error():
            when = f"in {outcome.phase}: " if outcome.phase else ""
            kind = f"{outcome.error_type}: " if isinstance(outcome, outcomes.Error) else ""
            return f"{when}{kind}{outcome.message}"
        case outcomes.Timeout():
            return f"no end after {outcome.limit_seconds:g} s"
        case outcomes.Interrupted():
            return outcome.message
        case outcomes.Skipped():
            return outcome.evidence
        case outcomes.Invalid():
            return "; ".join(outcome.reasons)
        case outcomes.Contaminated():
            moved = outcome.baseline_after_bytes - outcome.baseline_before_bytes
            return f"someone else's memory moved by {format_bytes(moved)}"


def peak_columns(peak: Peak | None) -> dict[str, Any]:
    """A peak as column → value, null for every column where there is none."""
    names = {
        "peak_phase": "phase",
        "peak_step": "step",
        "peak_allocated_bytes": "allocated_bytes",
        "peak_reserved_bytes": "reserved_bytes",
        "peak_device_bytes": "device_bytes",
        "load_allocated_bytes": "load_allocated_bytes",
    }
    assert set(names.values()) == set(Peak.model_fields)
    return {column: peak and getattr(peak, field) for column, field in names.items()}


def ledger_columns(ledger: MemoryLedger | None) -> dict[str, int | None]:
    """A ledger as column → bytes, with ``at_peak_`` before the parts of the peak."""
    at_peak = _fields(Composition, ledger and ledger.at_peak)
    values = _fields(MemoryLedger, ledger)
    del values["at_peak"]
    return values | {f"at_peak_{name}": value for name, value in at_peak.items()}


def _fields(kind: type, value: Any) -> dict[str, Any]:
    """Field → value, or null for every field where there is nothing."""
    return {name: None if value is None else getattr(value, name) for name in kind.model_fields}


def _plain(value: Any) -> Any:
    return ",".join(value) if isinstance(value, tuple | list) else value


def minor_release(version: str | None) -> str | None:
    """``2.13.0+cpu`` → ``2.13``; null stays null."""
    return None if version is None else ".".join(version.split(".")[:2])
