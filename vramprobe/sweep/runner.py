"""Sweep → records: each cell in its own process, each record stored and synced as it ends.

In: cells and a results folder. Out: the journal in that folder, and a summary. Plans before it runs, resumes where it
stopped, starts nothing that time or money forbid; a failed cell never ends the sweep; SIGINT, SIGTERM and SIGHUP end it
with the running cell recorded as interrupted. Never prints: whoever shows progress passes ``on_event``.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from vramprobe.errors import StoreError
from vramprobe.measure.environment import is_slow_for
from vramprobe.measure.isolation import new_ticket, require_packages, run_isolated, scratch_folder
from vramprobe.measure.launcher import Spawner, worker_environment
from vramprobe.model.card_fit import CardFit
from vramprobe.records import writing
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec
from vramprobe.sweep.bookkeeping import Bookkeeping
from vramprobe.sweep.card import Card, Rate
from vramprobe.sweep.definition import Sweep
from vramprobe.sweep.executor import Executor
from vramprobe.sweep.here import Here
from vramprobe.sweep.limits import DEFAULT_TIMEOUT_SECONDS, Clock, SweepLimits
from vramprobe.sweep.plan import Recording, SweepPolicy, plan_sweep
from vramprobe.sweep.progress import LOGS, Progress, RunSummary
from vramprobe.sweep.resume import Journal, open_journal
from vramprobe.sweep.signals import Signals

_LOG = logging.getLogger("vramprobe")  # at level INFO, which the command line prints as notes
JOURNAL = "records.jsonl"


def measure(
    spec: CellSpec,
    *,
    log: Path,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    snapshot: Path | None = None,
    verify: bool = False,
) -> RunRecord:
    """Run one cell in a process of its own and return its record; nothing is stored but a ``snapshot`` (cuda only)."""
    require_packages([spec])
    if is_slow_for(spec):
        _LOG.info("without AVX-512 torch multiplies bf16 number by number: a step takes minutes (docs/measuring.md)")
    launcher = Spawner(worker_environment(), log)
    with scratch_folder() as folder:
        try:
            return run_isolated(spec, launcher, new_ticket(folder, snapshot, verify=verify), log, timeout_seconds)
        finally:
            launcher.close()


def run(
    sweep: Sweep,
    folder: Path,
    *,
    card: Card | None = None,
    fit: CardFit | None = None,
    rate: Rate | None = None,
    policy: SweepPolicy | None = None,
    limits: SweepLimits | None = None,
    recording: Recording | None = None,
    executor: Executor | None = None,
    on_event: Callable[[Progress], None] = lambda event: None,
) -> RunSummary:
    """Run the cells of ``sweep`` that ``folder`` has no finished record of, within ``limits``.

    ``card`` is the GPU that is used, null on a CPU; ``recording`` predicts what has no recipe at hand; ``executor`` is
    where cells run, this machine by default. Raises StoreError before running anything where the folder cannot be read
    or written, or another sweep writes to it, MissingDependency where a package or the GPU is not there.
    """
    policy, limits = policy or SweepPolicy(), limits or SweepLimits()
    logs = folder / LOGS
    with writing.lock(folder), Signals().caught() as signals:
        clock = Clock(limits)
        journal = open_journal(folder / JOURNAL)
        executor = executor or Here()
        _require_one_kind(sweep, journal, executor)
        plan = plan_sweep(
            sweep,
            journal,
            card=card,
            context_of=executor.context_of,
            fit=fit,
            policy=policy,
            rate=rate,
            recording=recording,
            stop=lambda: signals.stopped_by is not None,
            num_slots=executor.num_slots,
        )
        executor.require([row.spec for row in plan.to_run])
        summary = RunSummary(journal.path, plan, kept=plan.actions().get("kept", 0), notes=journal.notes())
        try:
            logs.mkdir(exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot write logs to {logs}: {error.strerror}; choose another folder") from error
        on_event(Progress("planned", plan, left_seconds=plan.seconds, seconds=clock.elapsed_seconds, limits=limits))
        books = Bookkeeping(
            sweep, summary, policy, limits, clock, signals, executor.instrument_of, logs, on_event, list(plan.ooms)
        )
        executor.run(books)
        summary.stopped_by = signals.stopped_by or summary.stopped_by
        summary.seconds = clock.elapsed_seconds
    return summary


def _require_one_kind(sweep: Sweep, journal: Journal, executor: Executor) -> None:
    """Raise StoreError where a journal would hold emulated and other records: no fit and no table would take both."""
    there = {attempt.instrument for attempts in journal.attempts.values() for attempt in attempts}
    here = {executor.instrument_of(spec) for spec in sweep.cells}
    if there and ("emulated" in there) != ("emulated" in here):
        raise StoreError(
            f"{journal.path} holds records of the instrument {' and '.join(sorted(there))}, and these would be of "
            f"{' and '.join(sorted(here))}, which must not be mixed: name another folder with --out"
        )
