"""Resume: a journal and the cells of a sweep → what to do with each cell, and why. Trusts nothing half-written.

In: the journal's path, cells, and the context that they would be measured in now. Out: one ResumedCell per cell. Reads
the head of each line, and a whole record only where a decision rests on it: a journal may hold 100,000. Writes nothing.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from vramprobe.records import store
from vramprobe.records.outcomes import Interrupted
from vramprobe.records.record import Environment, RunRecord
from vramprobe.records.table import minor_release
from vramprobe.spec import CellSpec
from vramprobe.units import word_for

#: A cell whose attempts ended without a word (kill -9, a lost machine), timed out or ran into the sweep's own limit is
#: retried so often; then it is quarantined. A stop that somebody asked for says nothing of the cell and does not count.
MAX_RETRIES = 2
NO_ATTEMPT_YET = "no attempt yet"

_HEAD = re.compile(
    rb'\{"format":1,"attempt_id":"(?P<attempt_id>[\w.-]*)","cell_id":"(?:[^"\\]|\\.)*","fingerprint":"(?P<fingerprint>'
    rb'[0-9a-f]*)","instrument":"(?P<instrument>\w+)","started_at":"(?P<started_at>[\w:.+-]*)","sweep":(?:null|"[^"\\]*"),'
    rb'"held_out":(?:true|false),"outcome":\{"kind":"(?P<outcome>\w+)"'
)
_BUFFER_BYTES = 2**20
_BEGINNING = b'{"format":1,'


class Attempt(NamedTuple):
    """One attempt in the journal; ``outcome`` is null where it was started and never ended."""

    attempt_id: str
    fingerprint: str
    instrument: str
    started_at: str
    outcome: str | None
    offset_bytes: int
    line_number: int


@dataclass
class Journal:
    """The attempts at each cell, by fingerprint, in the order they were started. ``torn_tail`` as in store.read."""

    path: Path
    attempts: dict[str, list[Attempt]] = field(default_factory=dict)
    torn_tail: str | None = None

    def notes(self) -> list[str]:
        """Lines of the journal that were not taken as they stand in the file."""
        return [self.torn_tail] if self.torn_tail else []

    def record(self, attempt: Attempt) -> RunRecord:
        """The whole record of an attempt that has one. Raises StoreError where its line is damaged."""
        with self.path.open("rb") as file:
            file.seek(attempt.offset_bytes)
            record = store.read_line(file.readline(), self.path, attempt.line_number)
        assert isinstance(record, RunRecord)
        return record


@dataclass(frozen=True)
class ResumedCell:
    """Decision on one cell of a resumed sweep, with its reason. ``record`` is the attempt that counts so far, if any.

    ``stale``: finished, but measured in another context; it is run again.
    """

    spec: CellSpec
    action: Literal["run", "stale", "kept", "quarantined"]
    reason: str
    record: RunRecord | None = None
    num_ok: int = 0  # attempts that ended well, where the cell is kept; more than one: it is replicated


def open_journal(path: str | Path) -> Journal:
    """The attempts that ``path`` holds; an empty journal where there is no such file yet.

    A half-written last line is left out and reported. Raises StoreError for a line that is neither record nor start.
    """
    journal = Journal(Path(path))
    if not journal.path.exists():
        return journal
    by_id: dict[str, Attempt] = {}
    offset, number = 0, 0
    try:
        with journal.path.open("rb", buffering=_BUFFER_BYTES) as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n") or store.is_whole(line):
                    attempt = _attempt(line, journal.path, offset, number)
                    if attempt is not None and (attempt.outcome or attempt.attempt_id not in by_id):
                        by_id[attempt.attempt_id] = attempt
                else:
                    journal.torn_tail = store.describe_torn_tail(journal.path, len(line))
                offset += len(line)
    except OSError as error:
        raise store.cannot_read(journal.path, error) from error
    for attempt in by_id.values():
        journal.attempts.setdefault(attempt.fingerprint, []).append(attempt)
    return journal


def resume(
    cells: Iterable[CellSpec],
    journal: Journal,
    context_of: Callable[[CellSpec], Environment | None],
    *,
    retry_quarantined: bool = False,
) -> list[ResumedCell]:
    """For each cell, in order: whether an attempt in the journal still stands, or it is to be run.

    ``context_of`` gives the environment in which a cell would be measured now, null where that is not known. Of several
    finished attempts the last one counts. Raises StoreError where a record that a decision rests on is damaged.
    """
    return [_resumed(spec, journal, context_of, retry_quarantined) for spec in cells]


def _resumed(
    spec: CellSpec, journal: Journal, context_of: Callable[[CellSpec], Environment | None], retry_quarantined: bool
) -> ResumedCell:
    attempts = journal.attempts.get(spec.fingerprint, [])
    if not attempts:
        return ResumedCell(spec, "run", NO_ATTEMPT_YET)
    finished = [attempt for attempt in attempts if attempt.outcome in store.FINISHED]
    if finished:
        record = journal.record(finished[-1])
        here = context_of(spec)
        differences = differing(record.environment, here) if here is not None else []
        if differences:
            return ResumedCell(spec, "stale", f"{word_for(record.instrument)} with {', '.join(differences)}", record)
        num_ok = sum(attempt.outcome == "ok" for attempt in attempts)
        return ResumedCell(spec, "kept", f"{record.outcome.kind} at {record.started_at}", record, num_ok)
    lost = [attempt for attempt in attempts if _is_lost(attempt, journal)]
    if len(lost) > MAX_RETRIES:
        reason = f"{len(lost)} attempts did not end by themselves, the last one started at {lost[-1].started_at}"
        if not retry_quarantined:
            return ResumedCell(spec, "quarantined", reason)
        return ResumedCell(spec, "run", f"out of quarantine, as you asked ({reason})")
    last = attempts[-1]
    if last.outcome is None:
        reason = f"the attempt of {last.started_at} has no end (killed); retry {len(lost)} of {MAX_RETRIES}"
        return ResumedCell(spec, "run", reason)
    return ResumedCell(spec, "run", f"the last attempt ended as {last.outcome}", journal.record(last))


def _is_lost(attempt: Attempt, journal: Journal) -> bool:
    """Return True if the attempt was cut short, but not by a user."""
    if attempt.outcome != "interrupted":
        return attempt.outcome in (None, "timeout")
    outcome = journal.record(attempt).outcome
    return isinstance(outcome, Interrupted) and outcome.by_limit


def differing(then: Environment, now: Environment) -> list[str]:
    """Return the facts that differ too much for the two to stand in one table, as ``torch 2.12 (now 2.13)``.

    The device, and the minor releases of the libraries that decide memory. What either side does not know is not held
    against it; a driver, a host or a patch release is context that is recorded and not more.
    """
    pairs: list[tuple[str, str | None, str | None]] = [("device", then.device_said, now.device_said)]
    for package in ("torch", "transformers", "peft", "bitsandbytes", "liger-kernel"):
        before, here = (minor_release(side.versions.get(package)) for side in (then, now))
        pairs.append((package, before, here))
    return [f"{name} {before} (now {here})" for name, before, here in pairs if before and here and before != here]


def _attempt(line: bytes, path: Path, offset_bytes: int, number: int) -> Attempt | None:
    """The attempt of one line, from its head where that is as we write it; null for an empty line and a profile."""
    head = _HEAD.match(line)
    if head and line.endswith(b"}\n") and line.rfind(_BEGINNING) == 0:
        attempt_id, fingerprint, instrument, started_at, outcome = (text.decode() for text in head.groups())
        return Attempt(attempt_id, fingerprint, instrument, started_at, outcome, offset_bytes, number)
    if not line.strip() or store.is_profile(line):
        return None
    read = store.read_line(line, path, number)
    outcome = read.outcome.kind if isinstance(read, RunRecord) else None
    return Attempt(read.attempt_id, read.fingerprint, read.instrument, read.started_at, outcome, offset_bytes, number)
