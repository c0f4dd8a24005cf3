"""Dispatch: one sweep on a fleet, from its first cell to its last: what starts, what ended, what is tried again.

In: what is due, from the bookkeeping; the engine's nodes and answers. Out: records, each in the one journal as it ends.
An attempt whose node was lost has no record; its cell is tried again elsewhere, as often as a resumed sweep would.
"""

import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vramprobe.measure.isolation import Ticket, new_ticket
from vramprobe.records.outcomes import Interrupted
from vramprobe.records.record import RunRecord, record_from_json
from vramprobe.sweep.bookkeeping import Bookkeeping
from vramprobe.sweep.nodes import Lost, Needs, NodePool
from vramprobe.sweep.progress import Progress
from vramprobe.sweep.resume import MAX_RETRIES, differing

#: How long to wait for one event, between two looks at the nodes, and for a node where none is left.
_POLL_SECONDS, _LOOK_SECONDS, _PATIENCE_SECONDS = 0.2, 2.0, 120.0
#: An attempt that is so much later than its limit (a node loads its libraries first) is given up.
_SILENCE_SECONDS = 420.0


@dataclass
class RunningAttempt:
    """An attempt under way."""

    event: Progress
    ticket: Ticket
    needs: Needs
    limit_seconds: float
    gives_up_at: float


class Dispatch:
    """One sweep on a fleet, from its first cell to its last; ``fleet`` is fleet.Fleet, which makes this."""

    def __init__(self, fleet: Any, pool: NodePool, books: Bookkeeping, scratch: Path) -> None:
        self._fleet, self._pool, self._books, self._scratch = fleet, pool, books, scratch
        self._waiting = deque(enumerate(books.plan.rows, start=1))
        self._running: dict[str, RunningAttempt] = {}
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
            assert stopped_by is not None
            self._take(self._pool.ended(0.0))  # nothing that was measured is lost
            for attempt in list(self._running.values()):
                self._stop(attempt, stopped_by)

    def _stop(self, attempt: RunningAttempt, by: str, *, by_limit: bool = False) -> None:
        """End an attempt by a signal or a limit."""
        self._pool.cancel(attempt.ticket.attempt_id)
        self._finish(attempt, self._fleet.interrupted(attempt, by, by_limit=by_limit), 0.0)

    def _look(self) -> None:
        """Refresh the list of nodes; give up attempts that no longer report, and the sweep if no node is left.

        What the engine keeps in its queue has not begun: it is waited for until the sweep's own time is over.
        """
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at, self._nodes = now, self._fleet.refresh()
        if self._nodes:
            self._had_nodes_at = now
        for attempt_id, attempt in list(self._running.items()):
            if self._pool.is_queued(attempt_id):
                attempt.gives_up_at = now + attempt.limit_seconds + _SILENCE_SECONDS
                if self._books.clock.left_seconds <= 0:
                    self._stop(attempt, self._books.limits.limited_by, by_limit=True)
            elif now > attempt.gives_up_at:
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
            running = [one.event.cell.spec.fingerprint for one in self._running.values()]
            if runs and (not self._has_room(needs) or (row.replicates and row.spec.fingerprint in running)):
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

    def _start(self, event: Progress, needs: Needs) -> None:
        books, spec = self._books, event.cell.spec
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
        gives_up_at = time.monotonic() + limit_seconds + _SILENCE_SECONDS
        self._running[ticket.attempt_id] = RunningAttempt(event, ticket, needs, limit_seconds, gives_up_at)
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
                assert attempt.event.log is not None
                attempt.event.log.write_text(answer["log"])
            attempt.event = replace(attempt.event, node=answer["node"])
            self._finish(attempt, record, answer["seconds"])

    def _finish(self, attempt: RunningAttempt, record: RunRecord, seconds: float) -> None:
        del self._running[attempt.ticket.attempt_id]
        if record.environment.isolation_reason is not None:
            self._books.note(f"each cell loads the libraries anew: {record.environment.isolation_reason}")
        self._books.finish(attempt.event, attempt.ticket, record, seconds)

    def _try_again(self, attempt: RunningAttempt, why: str) -> None:
        """Put the cell of a lost attempt first again, unless it was lost too often."""
        index, row = attempt.event.index, attempt.event.cell
        lost = self._lost[index] = self._lost.get(index, 0) + 1
        if lost <= MAX_RETRIES:
            self._waiting.appendleft((index, replace(row, reason=f"retry {lost} of {MAX_RETRIES}: {why}")))
            return
        reason = f"{lost} attempts were lost, the last one because {why}"
        self._books.note(f"{row.spec.cell_id}: {reason}")
        self._books.tell(replace(attempt.event, kind="left", reason=reason))
