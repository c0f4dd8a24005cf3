"""Fleet: the executor of many machines: many cells at once, each on a node of an engine that exists (Ray, Slurm).

In: what is due, from the bookkeeping. Out: records, each in the one journal as it ends. Nodes that differ in card,
driver or library versions are left out, so that one series has one way of measuring. An attempt whose node was lost has
no record; its cell is tried again elsewhere, as often as a resumed sweep would.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vramprobe.errors import SpecError
from vramprobe.measure.environment import more_packages
from vramprobe.measure.isolation import Ticket, new_ticket, scratch_folder
from vramprobe.records.record import (
    Environment,
    Instrument,
    Interrupted,
    Outcome,
    RunRecord,
    attempt_fields,
    record_from_json,
)
from vramprobe.spec import CellSpec
from vramprobe.sweep.bookkeeping import Bookkeeping
from vramprobe.sweep.card import Card, Rate, card_seen
from vramprobe.sweep.definition import Sweep
from vramprobe.sweep.nodes import Lost, Needs, Node, Pool, difference, identity_of, needs_of, series_of
from vramprobe.sweep.plan import Row
from vramprobe.sweep.progress import Progress
from vramprobe.sweep.resume import MAX_RETRIES, differing

#: How long to wait for one event, between two looks at the nodes, and for a node where none is left.
_POLL_SECONDS, _LOOK_SECONDS, _PATIENCE_SECONDS = 0.2, 2.0, 120.0
#: Slurm jobs at once, unless --jobs says otherwise.
_JOBS = 16
#: An attempt that is so much later than its limit (a node loads its libraries first) is given up.
_SILENCE_SECONDS = 420.0


def fleet_on(on: str, *, cards: str | None = None, gpu: str | None = None, jobs: int | None = None) -> Fleet | None:
    """The fleet that ``--on`` names: ``ray``, ``ray://HOST:PORT`` or ``slurm``; None for ``here``, this machine.

    ``cards`` are emulated on its nodes. Raises SpecError for another name, MissingDependency where the engine's package
    is missing or it does not answer.
    """
    if on == "here":
        for name, given in (("jobs", jobs), ("gpu", gpu), ("emulate", cards)):
            if given is not None:
                raise SpecError(f"{name} {given} is for the nodes of a fleet; name one with --on, or drop it")
        return None
    if on == "ray" or on.startswith("ray://"):
        from vramprobe.sweep.on_ray import RayPool

        if jobs is not None:
            raise SpecError(f"--jobs {jobs} is for --on slurm: Ray knows how many cells its nodes take; drop it")
        return Fleet(RayPool(on, cards), cards=cards, gpu=gpu)
    if on == "slurm":
        from vramprobe.sweep.on_slurm import SlurmPool

        return Fleet(SlurmPool(jobs or _JOBS, cards), cards=cards, gpu=gpu)
    raise SpecError(f"--on {on!r} given; allowed: here, ray (the cluster of this machine), ray://HOST:PORT, slurm")


@dataclass
class _Attempt:
    """An attempt under way."""

    event: Progress
    ticket: Ticket
    needs: Needs
    gives_up_at: float


class Fleet:
    """The nodes of an engine; see executor.Executor. ``card_of`` comes before all else: it looks at the nodes."""

    def __init__(self, pool: Pool, *, cards: str | None = None, gpu: str | None = None) -> None:
        self._pool, self._cards, self._gpu = pool, cards, gpu
        self._kinds: dict[tuple[str, bool], str] = {}
        self.series: list[Node] = []
        self._left_out: dict[str, str] = {}  # by node's id
        self.num_slots = self.num_gpus = 1

    @property
    def device(self) -> str:
        """The device of cells that name none."""
        has_gpus = self._cards is not None or any(node.num_gpus for node in self._pool.nodes((), wait=True))
        return "cuda" if has_gpus else "cpu"

    def card_of(self, sweep: Sweep) -> Card | None:
        """The GPU of the nodes that will share the series; None where the cells are for the CPU."""
        for spec in sweep.cells:
            self._kinds.setdefault(_kind(spec), spec.model_dump_json())
        every = self._pool.nodes(tuple(self._kinds.values()), wait=True)
        needs = [needs_of(spec, None, is_emulated=self._cards is not None) for spec in sweep.cells]
        largest = Needs(max(one.cpus for one in needs), max(one.gpus for one in needs), 1)
        self.series = series_of(every, largest, self._gpu)
        self._note_others(every)
        self.num_slots = max(sum(node.num_slots(min(needs)) for node in self.series), 1)
        self.num_gpus = max(int(sum(node.num_gpus for node in self.series)), 1)
        seen = next((one for one in self.series[0].environments if one.nvml_total_bytes is not None), None)
        return seen and card_seen(seen.device_name, seen.nvml_total_bytes, is_emulated=seen.emulator is not None)

    def context_of(self, spec: CellSpec) -> Environment:
        return self.series[0].environments[list(self._kinds).index(_kind(spec))]

    def instrument_of(self, spec: CellSpec) -> Instrument:
        return "emulated" if spec.device == "cuda" and self._cards is not None else spec.device

    def require(self, specs: Iterable[CellSpec]) -> None:
        alike = {
            (_kind(spec), spec.method, spec.quant, spec.optim, spec.sharding, spec.num_gpus): spec for spec in specs
        }
        if alike:
            self._pool.require([spec.model_dump_json() for spec in alike.values()], self.series[0])

    def run(self, books: Bookkeeping) -> None:
        """Keep the nodes busy until the end of the plan or a signal."""
        with scratch_folder() as scratch:
            books.describe = lambda spec, outcome: self._describe(spec, new_ticket(scratch), outcome)
            _Run(self, self._pool, books, scratch).run()

    def refresh(self) -> list[Node]:
        """The nodes of the series that are there now, with those that have joined; what is left out is noted."""
        identity = identity_of(self.series[0].environments)
        every = self._pool.nodes(tuple(self._kinds.values()))
        self._note_others(every)
        return [node for node in every if node.environments and identity_of(node.environments) == identity]

    def of_all_gpus(self, rate: Rate | None) -> Rate | None:
        """What an hour of the series' nodes costs, where an hour of one GPU costs ``rate``."""
        if rate is None or self.num_gpus == 1:
            return rate
        return Rate(self.num_gpus * rate.usd_per_hour, f"{self.num_gpus} GPUs at ${rate.usd_per_hour}/h, {rate.source}")

    def close(self) -> None:
        """Leave the engine."""
        self._pool.close()

    @property
    def notes(self) -> list[str]:
        """A line for each node that is left out."""
        return list(self._left_out.values())

    def needs_of(self, row: Row) -> Needs:
        """What a cell takes of a node, memory up to what the largest has: there it runs alone."""
        needs = needs_of(row.spec, row.prediction, is_emulated=self._cards is not None)
        largest = max(node.memory_bytes for node in self.series)
        return needs._replace(memory_bytes=int(min(needs.memory_bytes, largest)))

    def _note_others(self, every: list[Node]) -> None:
        first = self.series[0]
        identity = identity_of(first.environments)
        for node in every:
            if not node.environments or identity_of(node.environments) != identity:
                self._left_out.setdefault(node.node_id, f"node {node.name} is left out: {difference(node, first)}")

    def _describe(self, spec: CellSpec, ticket: Ticket, outcome: Outcome) -> RunRecord:
        """The record of a cell that no worker described."""
        fields = attempt_fields(spec, ticket.attempt_id, ticket.started_at, self.instrument_of(spec))
        return RunRecord(**fields, spec=spec, environment=self.context_of(spec), outcome=outcome)

    def interrupted(self, attempt: _Attempt, by: str) -> RunRecord:
        """The record of a cell that a signal stopped."""
        spec = attempt.event.row.spec
        return self._describe(spec, attempt.ticket, Interrupted(message=f"stopped by {by}"))


def _kind(spec: CellSpec) -> tuple[str, tuple[str, ...]]:
    """Cells of one kind are measured in one environment."""
    return spec.device, more_packages(spec)


class _Run:
    """One sweep on a fleet, from its first cell to its last."""

    def __init__(self, fleet: Fleet, pool: Pool, books: Bookkeeping, scratch: Path) -> None:
        self._fleet, self._pool, self._books, self._scratch = fleet, pool, books, scratch
        self._waiting = deque(enumerate(books.plan.rows, start=1))
        self._running: dict[str, _Attempt] = {}
        self._lost: dict[int, int] = {}  # attempts that were lost, by row
        self._nodes = list(fleet.series)
        self._looked_at = self._had_nodes_at = time.monotonic()
        self._model_types = sorted({row.spec.model_type for row in books.plan.to_run})

    def run(self) -> None:
        try:
            self._run()
        finally:
            for attempt_id in self._running:  # only where something failed here, such as a full disk
                self._pool.cancel(attempt_id)
            for note in self._fleet.notes:
                self._books.note(note)

    def _run(self) -> None:
        stopped_by = None
        while (self._waiting or self._running) and stopped_by is None:
            self._look()
            self._start_what_can_be()
            if self._running:
                self._take(self._pool.ended(_POLL_SECONDS))
            elif self._waiting:
                time.sleep(_POLL_SECONDS)
            stopped_by = self._books.signals.stopped_by
        if self._running:
            self._take(self._pool.ended(0.0))  # nothing that was measured is lost
            for attempt_id, attempt in list(self._running.items()):
                self._pool.cancel(attempt_id)
                self._finish(attempt, self._fleet.interrupted(attempt, stopped_by), 0.0)

    def _look(self) -> None:
        """Which nodes there are; give up attempts that say nothing any more, and the sweep where no node is left."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at, self._nodes = now, self._fleet.refresh()
        if self._nodes:
            self._had_nodes_at = now
        for attempt_id, attempt in list(self._running.items()):
            if now > attempt.gives_up_at:
                self._pool.cancel(attempt_id)
                self._try_again(self._running.pop(attempt_id), "it gave no answer")
        if now - self._had_nodes_at > _PATIENCE_SECONDS and not self._running:
            while self._waiting:
                index, row = self._waiting.popleft()
                self._books.leave(Progress(row.action, self._books.plan, index, row), "no node left")

    def _start_what_can_be(self) -> None:
        while self._waiting and self._books.signals.stopped_by is None:
            index, row = self._waiting[0]
            needs = self._fleet.needs_of(row)
            runs = row.is_run or row.action == "skip"
            if runs and (not self._has_room(needs) or (row.replicates and self._is_running(row))):
                return
            self._waiting.popleft()
            event = self._books.due(index, row)
            if event is not None:
                self._start(event, needs)

    def _has_room(self, needs: Needs) -> bool:
        if not self._running:
            return bool(self._nodes)  # the engine waits until one of them has as much
        slots = [node.max_slots for node in self._nodes if node.max_slots is not None]
        if slots:
            return len(self._running) < sum(slots)
        used = [attempt.needs for attempt in self._running.values()]
        cpus = sum(node.num_cpus for node in self._nodes) - sum(one.cpus for one in used)
        gpus = sum(node.num_gpus for node in self._nodes) - sum(one.gpus for one in used)
        memory = sum(node.memory_bytes for node in self._nodes) - sum(one.memory_bytes for one in used)
        return cpus >= needs.cpus and gpus >= needs.gpus and memory >= needs.memory_bytes

    def _is_running(self, row: Row) -> bool:
        return any(one.event.row.spec.fingerprint == row.spec.fingerprint for one in self._running.values())

    def _start(self, event: Progress, needs: Needs) -> None:
        books, spec = self._books, event.row.spec
        ticket = new_ticket(self._scratch, verify=books.policy.verify)
        event = books.announce(event, ticket)
        books.journal_start(event, ticket)
        limit_seconds = books.clock.begin()
        request = {
            "spec": spec.model_dump_json(),
            "attempt_id": ticket.attempt_id,
            "started_at": ticket.started_at.isoformat(),
            "timeout_seconds": books.limits.timeout_seconds,
            "left_seconds": books.clock.left_seconds,
            "verify": ticket.verify,
            "log": str(event.log),
        }
        self._running[ticket.attempt_id] = _Attempt(
            event, ticket, needs, time.monotonic() + limit_seconds + _SILENCE_SECONDS
        )
        self._pool.submit(request, needs, self._nodes, self._model_types)

    def _take(self, ended: list[tuple[str, dict[str, Any] | Lost]]) -> None:
        for attempt_id, answer in ended:
            attempt = self._running.get(attempt_id)
            if attempt is None:  # it was given up
                continue
            if isinstance(answer, Lost):
                self._try_again(self._running.pop(attempt_id), answer.why)
                continue
            record = record_from_json(answer["record"])
            differs = differing(record.environment, self._fleet.context_of(record.spec))
            if differs:
                self._books.note(f"node {answer['node']} measured with {', '.join(differs)}; that is not kept")
                self._try_again(self._running.pop(attempt_id), "it ran in another environment")
                continue
            if record.outcome.kind == "timeout" and answer["limit_seconds"] < self._books.limits.timeout_seconds:
                limit = Interrupted(message=f"stopped by {self._books.limits.limited_by}", by_limit=True)
                record = record.model_copy(update={"outcome": limit})
            if answer["log"]:
                attempt.event.log.write_text(answer["log"])
            attempt.event = replace(attempt.event, node=answer["node"])
            self._finish(attempt, record, answer["seconds"])

    def _finish(self, attempt: _Attempt, record: RunRecord, seconds: float) -> None:
        del self._running[attempt.ticket.attempt_id]
        if record.environment.isolation_reason is not None:
            self._books.note(f"each cell loads the libraries anew: {record.environment.isolation_reason}")
        self._books.finish(attempt.event, attempt.ticket, record, seconds)

    def _try_again(self, attempt: _Attempt, why: str) -> None:
        """Put the cell of a lost attempt first again, unless it was lost too often."""
        index, row = attempt.event.index, attempt.event.row
        lost = self._lost[index] = self._lost.get(index, 0) + 1
        if lost <= MAX_RETRIES:
            self._waiting.appendleft((index, replace(row, reason=f"retry {lost} of {MAX_RETRIES}: {why}")))
            return
        reason = f"{lost} attempts were lost, the last one because {why}"
        self._books.note(f"{row.spec.cell_id}: {reason}")
        self._books.tell(replace(attempt.event, kind="left", reason=reason))
