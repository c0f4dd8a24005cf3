"""Progress: what a sweep tells while it runs, and what it did in the end.

In: what the runner makes of its plan, row by row. Out: frozen events for whoever shows them, and a RunSummary. Runs,
stores and prints nothing.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec
from vramprobe.sweep.limits import SweepLimits
from vramprobe.sweep.plan import Plan, PlanRow

LOGS = "logs"


@dataclass(frozen=True)
class Progress:
    """One thing that happened: the plan was made, or something became of its row ``index`` (1-based) of ``total``.

    ``left``: not started, for want of time, money or cells; ``run``, ``stale``, ``skip``: due, and told as what becomes
    of it. ``status`` is a file that holds the running cell's phase.
    """

    kind: Literal["planned", "run", "stale", "skip", "kept", "quarantined", "skipped", "started", "finished", "left"]
    plan: Plan
    index: int = 0
    row: PlanRow | None = None
    reason: str = ""  # why the cell is run, kept, skipped or left
    record: RunRecord | None = None
    log: Path | None = None
    status: Path | None = None
    attempt_id: str | None = None  # of a cell that was started
    expected_seconds: float | None = None  # for that cell, at the pace so far
    left_seconds: float | None = None  # expected for the rest, this cell included where it has just started
    seconds: float = 0.0  # used since the sweep began
    limits: SweepLimits = field(default_factory=SweepLimits)
    node: str | None = None  # that runs the cell, where it is not this machine

    @property
    def total(self) -> int:
        """Rows of the plan."""
        return len(self.plan.rows)

    @property
    def cell(self) -> PlanRow:
        """Its row, which all but ``planned`` have."""
        assert self.row is not None
        return self.row


@dataclass
class RunSummary:
    """Results of one sweep. ``stopped_by``: the signal or the limit that stopped it, null if it reached its end."""

    journal: Path
    plan: Plan
    records: list[RunRecord] = field(default_factory=list)
    kept: int = 0  # cells that had their record already
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    stopped_by: str | None = None

    @property
    def left(self) -> int:
        """Cells that a limit or a signal kept from being started."""
        return len(self.plan.rows) - len(self.records) - self.kept - self.plan.actions().get("quarantined", 0)

    def log_of(self, record: RunRecord) -> Path:
        """Path of the worker's log of a cell that failed; a good cell's log is deleted."""
        return log_path(self.journal.parent / LOGS, record.spec)

    def failed(self) -> list[RunRecord]:
        """Records of this run that are neither a result nor a cell still to be run."""
        return [record for record in self.records if record.outcome.kind not in store.NOT_FAILED]

    def counts(self) -> dict[str, int]:
        """Records of this run by outcome."""
        return dict(Counter[str](record.outcome.kind for record in self.records))


def log_path(logs: Path, spec: CellSpec) -> Path:
    """Path of a worker's log, cut to a length that file systems take: they count bytes, and a letter may be several."""
    name = spec.cell_id.encode()[:100].decode(errors="ignore")
    return logs / f"{name}.{spec.fingerprint}.log"
