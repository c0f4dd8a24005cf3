"""Records → findings: may these results be believed, compared and published? The gate for contributed ones.

In: a results file or folder. Out: a CheckReport: what contradicts itself (errors) and what a reader should know
(warnings), each with its rule, its place and what to do. The rules are functions: of a file here, of one record in
one_record.py, of several in several_records.py. Never measures, fits or changes a file; it stays this side of the torch
line, and loads no pandas.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vramprobe.check.entry import Doubt, Entry, Severity
from vramprobe.check.one_record import RULES_OF_A_MEASUREMENT, RULES_OF_A_RECORD, complete
from vramprobe.check.several_records import RULES_OF_SEVERAL, attempts_by_context, duplicates
from vramprobe.errors import StoreError
from vramprobe.records import store
from vramprobe.records.frozen import FrozenModel
from vramprobe.records.profile import read_profiles
from vramprobe.records.record import RunRecord


class Finding(FrozenModel):
    """One broken rule: what was found, what is allowed and what to do."""

    severity: Severity
    rule: str  # one of RULES
    where: str  # the file or folder, with the cell's id and the attempt where it is about one
    message: str


class CheckReport(FrozenModel):
    """Everything found; ``ok`` when nothing is an error (when nothing is found at all, if ``strict``)."""

    findings: list[Finding]
    num_records: int
    files: list[Path]
    outcomes: dict[str, int]  # records by outcome
    instruments: dict[str, int]  # records by instrument: what was emulated is no measurement
    num_cells: int  # cells with an ok attempt; the same cell in another context (device, versions) is another
    num_replicated_cells: int  # of them, with more than one
    strict: bool
    ok: bool


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
    entries, found = judged(lines)
    findings += found
    groups = attempts_by_context(entries)
    return CheckReport(
        findings=findings,
        num_records=len(entries),
        files=list(files),
        outcomes=dict(Counter(entry.record.outcome.kind for entry in entries)),
        instruments=dict(Counter(entry.record.instrument for entry in entries)),
        num_cells=len(groups),
        num_replicated_cells=sum(len(group) > 1 for group in groups),
        strict=strict,
        ok=not any(strict or finding.severity == "error" for finding in findings),
    )


def judged(lines: Sequence[Entry]) -> tuple[list[Entry], list[Finding]]:
    """Each attempt once, and what the rules have against them."""
    findings = [_finding(duplicates, *doubt) for doubt in duplicates(lines)]
    by_attempt: dict[str, Entry] = {}
    for entry in lines:
        by_attempt.setdefault(entry.record.attempt_id, entry)
    entries = list(by_attempt.values())
    for entry in entries:
        findings += _findings_of(entry)
    findings += [_finding(rule, *doubt) for rule in RULES_OF_SEVERAL for doubt in rule(entries)]
    return entries, findings


def _findings_of(entry: Entry) -> Iterator[Finding]:
    """Apply the rules to one record and yield the findings; the rules of a measurement need a complete record."""
    record, rules = entry.record, RULES_OF_A_RECORD
    if record.outcome.kind == "ok" and not list(complete(record)):
        rules += RULES_OF_A_MEASUREMENT
    for rule in rules:
        for severity, message in rule(record):
            yield _finding(rule, severity, entry.where, message)


def _finding(rule: Callable[..., Any], severity: Severity, where: str, message: str) -> Finding:
    return Finding(severity=severity, rule=rule.__name__, where=where, message=message)


def readable(file: Path) -> tuple[Sequence[RunRecord], list[Doubt]]:
    """Every line is a record, or a profile, of a format this version knows; a killed writer's torn last line is only
    worth a word.
    """
    try:
        contents, profiles = store.read(file, allow_empty=True), read_profiles(file)
    except StoreError as error:
        return (), [("error", f"{error}. Nothing in this file was checked any further")]
    doubts: list[Doubt] = []
    if not contents.records and not contents.unfinished and not profiles:
        doubts.append(("error", "the file holds no record; delete it, or run its sweep"))
    if contents.torn_tail is not None:
        doubts.append(("warning", f"{contents.torn_tail}; resume the sweep, or delete that piece of a line"))
    ended = {record.fingerprint for record in contents.records}
    if lost := list(
        {one.fingerprint: one.cell_id for one in contents.unfinished if one.fingerprint not in ended}.values()
    ):
        some = f"{lost[0]}{f' and {len(lost) - 1} more' if len(lost) > 1 else ''}"
        doubts.append(("warning", f"{some}: started, and no attempt has ended (killed); resume the sweep"))
    return contents.records, doubts


#: Every rule by name, in the order in which they are looked at.
RULES = tuple(
    rule.__name__ for rule in (readable, duplicates, *RULES_OF_A_RECORD, *RULES_OF_A_MEASUREMENT, *RULES_OF_SEVERAL)
)
