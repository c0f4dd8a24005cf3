"""Records → findings: may these results be believed, compared and published? The gate for contributed ones.

In: a results file or folder. Out: a CheckReport: what contradicts itself (errors) and what a reader should know
(warnings), each with its rule, its place and what to do. Never measures, fits or changes a file; loads no torch and no
pandas. Long because every rule stands here, a function each; what a worker checks too is in measure/observation.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from vramprobe import store
from vramprobe.errors import StoreError
from vramprobe.measure.observation import Observation, closure, ledger_of, order_of_tiers, peak_of, steady_steps
from vramprobe.record import TRAINING_PHASES, RunRecord
from vramprobe.table import COMPARABLE, describe_outcome
from vramprobe.units import MIB, format_bytes

#: Idle allocated memory that no tensor of the workload explains: on cuda cuBLAS workspaces (32 MiB a handle on Hopper,
#: and the autograd thread may hold one of its own), on the CPU the tables of quantisation (about 1 KiB).
MAX_UNACCOUNTED_BYTES = {"cuda": 128 * MIB, "cpu": 1 * MIB}
#: The caching allocator's large segment: replicates may differ by where one was cut (measuring.md).
SEGMENT_BYTES = 20 * MIB

Severity = Literal["error", "warning"]
Doubt = tuple[Severity, str]  # what one rule has against one record
PlacedDoubt = tuple[Severity, str, str]  # the same with its place, from rules that look at several records

_MEASURE_AGAIN = "an instrument would not have called it ok: restore the record, or measure the cell again"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Finding(_Frozen):
    """One broken rule: what was found, what is allowed and what to do."""

    severity: Severity
    rule: str  # one of RULES
    where: str  # the file or folder, with the cell's id and the attempt where it is about one
    message: str


class CheckReport(_Frozen):
    """Everything found; ``ok`` when nothing is an error (when nothing is found at all, if ``strict``)."""

    findings: list[Finding]
    num_records: int
    files: list[Path]
    outcomes: dict[str, int]  # records by outcome
    num_cells: int  # cells with an ok attempt; the same cell in another context (device, versions) is another
    num_replicated_cells: int  # of them, with more than one
    strict: bool
    ok: bool


class Entry(NamedTuple):
    """A record and the file it stands in."""

    file: Path
    record: RunRecord

    @property
    def where(self) -> str:
        """The file, the cell and the attempt."""
        return f"{self.file}: {self.record.cell_id}, attempt {self.record.attempt_id}"


def check(results: str | Path, *, strict: bool = False) -> CheckReport:
    """Every rule over every record under ``results``; ``strict``: warnings make it fail, too.

    A file that cannot be read is a finding and its neighbours are checked all the same. Raises StoreError where there
    is no file at all.
    """
    files = store.journals(results)
    findings: list[Finding] = []
    lines: list[Entry] = []
    for file in files:
        records, doubts = readable(file)
        lines += [Entry(file, record) for record in records]
        findings += [_finding(readable, severity, str(file), message) for severity, message in doubts]
    findings += [_finding(duplicates, *doubt) for doubt in duplicates(lines)]
    by_attempt: dict[str, Entry] = {}
    for entry in lines:
        by_attempt.setdefault(entry.record.attempt_id, entry)
    entries = list(by_attempt.values())
    for entry in entries:
        findings += _findings_of(entry)
    findings += [_finding(rule, *doubt) for rule in RULES_OF_SEVERAL for doubt in rule(entries)]
    groups = _attempts_by_context(entries)
    return CheckReport(
        findings=findings,
        num_records=len(entries),
        files=list(files),
        outcomes=dict(Counter(entry.record.outcome.kind for entry in entries)),
        num_cells=len(groups),
        num_replicated_cells=sum(len(group) > 1 for group in groups),
        strict=strict,
        ok=not any(strict or finding.severity == "error" for finding in findings),
    )


def _findings_of(entry: Entry) -> Iterator[Finding]:
    """What the rules have against one record; the rules of a measurement need one that is complete."""
    record, rules = entry.record, RULES_OF_A_RECORD
    if record.outcome.kind == "ok" and not list(complete(record)):
        rules += RULES_OF_A_MEASUREMENT
    for rule in rules:
        for severity, message in rule(record):
            yield _finding(rule, severity, entry.where, message)


def _finding(rule: Callable[..., Any], severity: Severity, where: str, message: str) -> Finding:
    return Finding(severity=severity, rule=rule.__name__, where=where, message=message)


# -- the files ------------------------------------------------------------------------------------------------------


def readable(file: Path) -> tuple[Sequence[RunRecord], list[Doubt]]:
    """Every line is a record of a format this version knows; a killed writer's torn last line is only worth a word."""
    try:
        contents = store.read(file, allow_empty=True)
    except StoreError as error:
        return (), [("error", f"{error}. Nothing in this file was checked any further")]
    doubts: list[Doubt] = []
    if not contents.records and not contents.unfinished:
        doubts.append(("error", "the file holds no record; delete it, or run its sweep"))
    if contents.torn_tail is not None:
        doubts.append(("warning", f"{contents.torn_tail}; resume the sweep, or delete that piece of a line"))
    ended = {record.fingerprint for record in contents.records if record.is_measured}
    if lost := list(
        {one.fingerprint: one.cell_id for one in contents.unfinished if one.fingerprint not in ended}.values()
    ):
        some = f"{lost[0]}{f' and {len(lost) - 1} more' if len(lost) > 1 else ''}"
        doubts.append(("warning", f"{some}: started, and no attempt has ended (killed); resume the sweep"))
    return contents.records, doubts


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


# -- one record -----------------------------------------------------------------------------------------------------


def identity(record: RunRecord) -> Iterator[Doubt]:
    """Fingerprint and id are those of the spec beside them, and the instrument is one for its device."""
    spec = record.spec
    for name, written, resolved in (
        ("fingerprint", record.fingerprint, spec.fingerprint),
        ("cell_id", record.cell_id, spec.cell_id),
    ):
        if written != resolved:
            yield (
                "error",
                f"{name} is {written!r}, but the record's own spec gives {resolved!r}: one of them was edited, or a "
                "field's meaning changed; restore the record, or measure the cell again",
            )
    if record.instrument not in (spec.device, "simulated"):
        yield (
            "error",
            f"the instrument is {record.instrument}, but the cell is for device {spec.device}; {_MEASURE_AGAIN}",
        )


def measured(record: RunRecord) -> Iterator[Doubt]:
    """An instrument watched a run: results hold no predictions."""
    if not record.is_measured:
        yield (
            "error",
            "simulated: a prediction, no measurement. fit, report and run leave it out; keep it in a file of its own",
        )


def complete(record: RunRecord) -> Iterator[Doubt]:
    """An ok record has its peak, its ledger, the phases of loading and of every step."""
    if record.outcome.kind != "ok":
        return
    missing = [name for name in ("peak", "ledger") if getattr(record, name) is None]
    if not any(phase.name not in TRAINING_PHASES for phase in record.phases):
        missing.append("the phases of loading")
    steps = {phase.step for phase in record.phases if phase.name in TRAINING_PHASES}
    if steps != set(range(1, record.spec.steps + 1)):
        missing.append(f"the phases of steps 1 to {record.spec.steps} and no others")
    if missing:
        yield "error", f"the outcome is ok, but the record lacks {', '.join(missing)}; {_MEASURE_AGAIN}"


def code(record: RunRecord) -> Iterator[Doubt]:
    """A reader can get the code that measured: a commit without changes on top, or a release."""
    machine = record.environment
    if machine.dirty:
        yield (
            "warning",
            f"measured by a checkout with uncommitted changes on {machine.commit}, which nobody else can get; "
            "commit them and measure again, or say with the results what they were",
        )
    if machine.commit is None and machine.versions.get("vramprobe") is None:
        yield (
            "warning",
            "neither a commit nor a vramprobe version says which code measured this; measure from a git checkout or "
            "with an installed vramprobe",
        )


# -- one measurement (outcome ok, complete) -------------------------------------------------------------------------


def tiers(record: RunRecord) -> Iterator[Doubt]:
    """requested ≤ allocated ≤ active ≤ reserved ≤ device, wherever they are known, and no end above its peak."""
    for reason in order_of_tiers(record.phases):
        yield "error", f"{reason}; each tier holds the one before it: {_MEASURE_AGAIN}"
    for phase in record.phases:
        device, reserved = phase.device_used_bytes, phase.reserved_end_bytes
        if device is not None and reserved is not None and device < reserved:
            yield (
                "error",
                f"{phase.name} (step {phase.step}) end: reserved {reserved} B > device {device} B; the device tier "
                "holds the allocator's segments and the CUDA context: was another process on the card? Measure again",
            )
    if record.context_bytes is not None and record.context_bytes < 0:
        yield (
            "error",
            f"context_bytes is {record.context_bytes}, so the device held less than was reserved; "
            "was another process on the card? Measure again",
        )


def steady(record: RunRecord) -> Iterator[Doubt]:
    """Every step after the first repeats the second to the byte."""
    for reason in steady_steps(record.phases):
        yield "error", f"{reason}; with fixed shapes they must be equal to the byte: {_MEASURE_AGAIN}"


def ledger(record: RunRecord) -> Iterator[Doubt]:
    """The ledger is what the phases say, and hardly any memory between two steps is without a cause."""
    written = record.ledger
    held = {cause: getattr(written, f"{cause}_bytes") for cause in ("weights", "gradients", "optimizer_state", "batch")}
    seen = ledger_of(Observation(record.phases, held, at_peak=written.at_peak))
    for name, value in written.model_dump(exclude={"at_peak"}).items():
        if value != getattr(seen, name):
            yield (
                "error",
                f"ledger.{name} is {value} B, but the phases and the other causes give {getattr(seen, name)} B; "
                f"they must be equal: {_MEASURE_AGAIN}",
            )
    for reason in closure(record.phases, written):
        yield "error", f"{reason}; the ledger must close: {_MEASURE_AGAIN}"
    limit = MAX_UNACCOUNTED_BYTES.get(record.instrument)
    if limit is not None and written.unaccounted_bytes > limit:
        yield (
            "warning",
            f"{format_bytes(written.unaccounted_bytes)} allocated between steps have no cause, at most "
            f"{format_bytes(limit)} (libraries' workspaces) are usual on {record.instrument}; find out what keeps them",
        )


def peak(record: RunRecord) -> Iterator[Doubt]:
    """The peak is the highest training phase, tier by tier, and the first of equals."""
    seen = peak_of(Observation(record.phases, {}))
    for name, value in record.peak.model_dump().items():
        if value != getattr(seen, name):
            yield (
                "error",
                f"peak.{name} is {value}, but the highest of the phases gives {getattr(seen, name)}; "
                f"they must be equal: {_MEASURE_AGAIN}",
            )


def composition(record: RunRecord) -> Iterator[Doubt]:
    """What is alive at the peak adds up, and is the peak of the tier it was traced in."""
    alive = record.ledger.at_peak
    if alive is None:
        return
    if (parts_bytes := sum(alive.parts().values())) != alive.total_bytes:
        yield (
            "error",
            f"the parts of ledger.at_peak add up to {parts_bytes} B, its total is {alive.total_bytes} B; they must be "
            f"equal: {_MEASURE_AGAIN}",
        )
    allowed = _traced_peaks(record)
    if alive.total_bytes not in allowed.values():
        peaks = " or ".join(f"{value} B {tier}" for tier, value in allowed.items())
        yield (
            "error",
            f"ledger.at_peak is of {alive.total_bytes} B, but the traced steps peak at {peaks}; they must be equal: "
            f"{_MEASURE_AGAIN}",
        )


def _traced_peaks(record: RunRecord) -> dict[str, int]:
    """Tier → the peak that the allocation trace must have reached (measure/cpu.py, measure/cuda.py).

    The trace of the CPU and of a simulation covers the run. On cuda one more steady step is traced,
    in requested bytes, or in allocated ones where torch's history holds those.
    """
    training = [phase for phase in record.phases if phase.name in TRAINING_PHASES]
    covers_the_run = record.instrument != "cuda"
    traced = [phase for phase in training if covers_the_run or phase.step == record.spec.steps]
    requested = [phase.requested_peak_bytes for phase in traced if phase.requested_peak_bytes is not None]
    return ({"requested": max(requested)} if requested else {}) | {
        "allocated": max(phase.allocated_peak_bytes for phase in traced)
    }


def retries(record: RunRecord) -> Iterator[Doubt]:
    """The allocator never had to empty its cache to go on: reserved memory and times would not be the cell's own."""
    if record.num_alloc_retries:
        yield (
            "warning",
            f"num_alloc_retries is {record.num_alloc_retries}, 0 is allowed: the card was full, so reserved memory is "
            "what was left and the times hold the retries; measure this cell on a larger card",
        )


# -- several records ------------------------------------------------------------------------------------------------


def outcomes(entries: Sequence[Entry]) -> Iterator[PlacedDoubt]:
    """Attempts that must not be believed (invalid) or that a neighbour or a failure spoiled and nobody repeated.

    An error or a contaminated attempt is past once another attempt at the cell finished in the same folder.
    """
    for folder_entries in _by_folder(entries).values():
        records = [entry.record for entry in folder_entries]
        finished = {
            record.fingerprint for record in records if record.is_measured and record.outcome.kind in store.FINISHED
        }
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
    for group in _attempts_by_context(entries):
        place = f"{group[0].where} and {', '.join(entry.record.attempt_id for entry in group[1:])}"
        peaks = [entry.record.peak for entry in group]
        allocated = sorted({peak.allocated_bytes for peak in peaks})
        if len(allocated) > 1:
            is_same_code = len({_code_of(entry.record) for entry in group}) == 1
            yield (
                "error" if is_same_code else "warning",
                place,
                f"replicates peak at {', '.join(map(str, allocated))} B allocated; in one context they must be equal "
                + ("to the byte: measure the cell again and publish none until you know why they differ" if is_same_code
                   else "to the byte, but the measuring code changed in between: measure the older ones again"),
            )  # fmt: skip
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
        records = [entry.record for entry in folder_entries if entry.record.is_measured]
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


def _attempts_by_context(entries: Sequence[Entry]) -> list[list[Entry]]:
    """The ok attempts at each cell, apart for each context that may change its bytes."""
    groups: dict[tuple[Any, ...], list[Entry]] = {}
    for entry in entries:
        record = entry.record
        machine = record.environment
        if record.is_measured and record.outcome.kind == "ok" and record.peak is not None:
            libraries = tuple(sorted(item for item in machine.versions.items() if item[0] != "vramprobe"))
            context = (record.instrument, machine.device_name, machine.driver_version, machine.cuda_version,
                       machine.alloc_conf, _num_threads(record), libraries)  # fmt: skip
            groups.setdefault((record.fingerprint, *context), []).append(entry)
    return list(groups.values())


def _num_threads(record: RunRecord) -> int | None:
    """Part of the context on the CPU, whose flash attention takes a buffer for each thread; not of a GPU's memory."""
    return record.environment.num_threads if record.instrument == "cpu" else None


def _code_of(record: RunRecord) -> tuple[Any, ...]:
    machine = record.environment
    return machine.versions.get("vramprobe"), machine.commit, machine.dirty


RULES_OF_A_RECORD = (identity, measured, complete, code)
RULES_OF_A_MEASUREMENT = (tiers, steady, ledger, peak, composition, retries)
RULES_OF_SEVERAL = (outcomes, replicates, environment)
#: Every rule by name, in the order of this module.
RULES = tuple(
    rule.__name__ for rule in (readable, duplicates, *RULES_OF_A_RECORD, *RULES_OF_A_MEASUREMENT, *RULES_OF_SEVERAL)
)
