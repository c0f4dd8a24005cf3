"""A sweep over many nodes, simulated: ``python benchmarks/speed/fleet_simulated.py`` (two minutes).

Up to 10,000 cells over 64 nodes, by the code that submits to Ray and Slurm (sweep/dispatch.py), its journal on this
machine's disk; nodes, cells and time are simulated. Assumed: cells of 60 s (median, log-normal), one node in 20, at
least one, four times as slow, a preemption of each node every 2 hours (its replacement comes 5 minutes later), and one
attempt in 200 whose worker crashes. Writes fleet_simulated.csv and .md. ``--check``: runs the smallest again; what does
not depend on this machine must be the same, and the page that of the rows.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tables import as_csv, as_markdown, read_csv, write_or_check

from vramprobe.records import store
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec, resolve
from vramprobe.sweep import dispatch, fleet, limits, runner
from vramprobe.sweep.definition import Sweep
from vramprobe.sweep.nodes import Lost, Needs, Node

ROOT = Path(__file__).resolve().parents[2]
SIZES = ((200, 8), (1_000, 8), (1_000, 64), (10_000, 8), (10_000, 64))
MEDIAN_SECONDS, SIGMA = 60.0, 0.5
SLOW_SHARE, SLOW_FACTOR = 0.05, 4.0
PREEMPTION_SECONDS, REPLACEMENT_SECONDS, CRASH_SHARE = 7200.0, 300.0, 0.005
ROWS = Path(__file__).with_suffix(".csv")
PAGE = Path(__file__).with_suffix(".md")
#: What this machine's speed and paths decide; the others are the same everywhere.
MEASURED = ("submitter_cpu_seconds", "journal_mb", "mb_moved")


class Clock:
    """Simulated seconds, in the place of the module ``time``."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SimulatedPool:
    """Nodes of one core each that take time to answer, are preempted and come back; see nodes.NodePool."""

    def __init__(self, num_nodes: int, base: RunRecord, clock: Clock) -> None:
        self._chance, self._base, self._clock = random.Random(num_nodes), base, clock
        self._events: list[tuple[float, int, str, str]] = []  # (when, order, what, of which node or attempt)
        self._nodes: dict[str, Node | None] = {}
        self._busy: dict[str, tuple[str, float]] = {}  # node → (attempt, since)
        self._requests: dict[str, dict[str, Any]] = {}
        self.lost_seconds, self.bytes_moved, self.num_preemptions = 0.0, 0, 0
        self._slow = {f"node-{number}" for number in range(num_nodes) if number % round(1 / SLOW_SHARE) == 0}
        for number in range(num_nodes):
            self._join(f"node-{number}")

    def _at(self, seconds: float, what: str, which: str) -> None:
        heapq.heappush(self._events, (self._clock.now + seconds, len(self._events), what, which))

    def _join(self, name: str) -> None:
        environment = self._base.environment
        self._nodes[name] = Node(node_id=name, name=name, num_cpus=1.0, num_gpus=0.0, environments=(environment,))
        self._at(self._chance.expovariate(1 / PREEMPTION_SECONDS), "preempt", name)

    def nodes(self, specs: Sequence[str], *, wait: bool = False) -> list[Node]:
        return [node for node in self._nodes.values() if node is not None]

    def require(self, specs: Sequence[str], node: Node) -> None: ...

    def submit(self, request: dict[str, Any], needs: Needs, nodes: Sequence[Node], model_types: Sequence[str]) -> None:
        self.bytes_moved += len(str(request)) - len(request["log"])  # a path of this machine
        free = [name for name, node in self._nodes.items() if node is not None and name not in self._busy]
        self._requests[request["attempt_id"]] = request
        if not free:  # a node went since the fleet looked: the engine queues the task
            self._at(1.0, "queued", request["attempt_id"])
            return
        self._run(request["attempt_id"], free[0])

    def _run(self, attempt_id: str, name: str) -> None:
        self._busy[name] = attempt_id, self._clock.now
        seconds = self._chance.lognormvariate(0, SIGMA) * MEDIAN_SECONDS * (SLOW_FACTOR if name in self._slow else 1)
        crashes = self._chance.random() < CRASH_SHARE
        self._at(seconds * (self._chance.random() if crashes else 1), "crash" if crashes else "end", attempt_id)

    def ended(self, seconds: float) -> list[tuple[str, dict[str, Any] | Lost]]:
        until = self._clock.now + seconds
        while self._events and self._events[0][0] <= until:
            self._clock.now, _, what, which = heapq.heappop(self._events)
            if (answer := self._happen(what, which)) is not None:
                return [answer]
        self._clock.now = until
        return []

    def _happen(self, what: str, which: str) -> tuple[str, dict[str, Any] | Lost] | None:
        match what:
            case "preempt":
                self._nodes[which] = None
                self.num_preemptions += 1
                self._at(REPLACEMENT_SECONDS, "join", which)
                if which in self._busy:
                    return self._lose(self._busy[which][0], "its node was preempted")
            case "join":
                self._join(which)
            case "queued":
                free = [name for name, node in self._nodes.items() if node is not None and name not in self._busy]
                self._run(which, free[0]) if free else self._at(1.0, "queued", which)
            case "crash" if which in self._requests:
                return self._lose(which, "its worker crashed")
            case "end" if which in self._requests:
                return which, self._answer(which)
        return None

    def _leave(self, attempt_id: str) -> tuple[str, float]:
        """(node, seconds that it took); the node is free again."""
        name, since = next((name, since) for name, (one, since) in self._busy.items() if one == attempt_id)
        del self._busy[name]
        return name, self._clock.now - since

    def _lose(self, attempt_id: str, why: str) -> tuple[str, Lost]:
        del self._requests[attempt_id]
        self.lost_seconds += self._leave(attempt_id)[1]
        return attempt_id, Lost(why)

    def _answer(self, attempt_id: str) -> dict[str, Any]:
        spec = CellSpec.model_validate_json(self._requests.pop(attempt_id)["spec"])
        name, seconds = self._leave(attempt_id)
        of = {"spec": spec, "cell_id": spec.cell_id, "fingerprint": spec.fingerprint, "attempt_id": attempt_id}
        line = self._base.model_copy(update=of).to_json_line()
        self.bytes_moved += len(line)
        return {"record": line, "seconds": seconds, "limit_seconds": 900.0, "log": "", "node": name}

    def is_queued(self, attempt_id: str) -> bool:
        return False

    def cancel(self, attempt_id: str) -> None:
        del self._requests[attempt_id]
        self.lost_seconds += self._leave(attempt_id)[1]

    def close(self) -> None: ...


def cells(count: int) -> tuple[CellSpec, ...]:
    """So many cells of a small model, which differ in their seed."""
    first = resolve(model="smollm2-135m", method="lora", device="cpu", batch_size=1, seq_len=16, timing_steps=0)
    return tuple(first.model_copy(update={"seed": seed}) for seed in range(count))


def simulated(num_cells: int, num_nodes: int) -> dict[str, Any]:
    """One sweep of so many cells over so many nodes."""
    base = next(one for one in store.read(ROOT / "results/cpu/quickstart").records if one.outcome.kind == "ok")
    sweep = Sweep(name="simulated", description="", cells=cells(num_cells), held_out=frozenset(), notes=())
    clock = Clock()
    pool = SimulatedPool(num_nodes, base, clock)
    began = time.process_time()
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.object(dispatch, "time", clock),
        mock.patch.object(limits, "time", clock),
    ):
        many = fleet.Fleet(pool)
        many.card_of(sweep)
        summary = runner.run(sweep, Path(name), executor=many)
        cpu_seconds = time.process_time() - began
        found = store.read(name)
        journal_mb = summary.journal.stat().st_size / 1e6
    records = Counter(record.fingerprint for record in found.records)
    worked = (num_nodes * clock.now) or 1.0
    return {
        "cells": num_cells,
        "nodes": num_nodes,
        "records": records.total(),
        "missing": num_cells - len(records),
        "doubled": records.total() - len(records),
        "hours": round(clock.now / 3600, 3),
        "preemptions": pool.num_preemptions,
        "lost_attempts": len(found.unfinished),
        "lost_share": round(pool.lost_seconds / worked, 4),
        "mb_moved": round(pool.bytes_moved / 1e6, 1),
        "journal_mb": round(journal_mb, 1),
        "submitter_cpu_seconds": round(cpu_seconds, 1),
    }


def page(rows: list[dict[str, str]]) -> str:
    """The table; raises where a sweep lacks or doubles a record."""
    assert all(row["missing"] == row["doubled"] == "0" for row in rows), rows
    table = [
        (
            f"{int(row['cells']):,}",
            row["nodes"],
            f"{float(row['hours']):.2f} h",
            row["preemptions"],
            row["lost_attempts"],
            f"{100 * float(row['lost_share']):.1f} %",
            f"{row['mb_moved']} MB",
            f"{row['journal_mb']} MB",
            f"{row['submitter_cpu_seconds']} s",
        )
        for row in rows
    ]
    head = "cells", "nodes", "time", "preemptions", "attempts lost", "time lost", "moved", "journal", "submitter's CPU"
    lines = [
        "# A sweep over many nodes, simulated",
        "",
        "**Result:** each sweep has one record of each planned cell, whatever became of the nodes.",
        "",
        *(__doc__ or "").split("\n\n", 1)[1].strip().splitlines(),
        "",
        *as_markdown(head, "rrrrrrrrr", table),
        "",
        "Time, preemptions and attempts are simulated. Moved: requests and answers as text, counted. Time lost: of all "
        "the nodes' time, the part of attempts that ended without a record. Measured here: the CPU time of the process "
        "that submits and keeps the journal, its 2 synced lines a cell included.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--check", action="store_true")
    given = words.parse_args()
    if given.check:
        known, fresh = read_csv(ROWS)[0], simulated(*SIZES[0])
        differs = [name for name in known if name not in MEASURED and known[name] != str(fresh[name])]
        if differs:
            sys.exit(f"{ROWS.name} has another {', '.join(differs)} than {fresh}; rebuild it")
    else:
        rows = []
        for size in SIZES:
            rows.append(simulated(*size))
            print(rows[-1], flush=True)
        ROWS.write_text(as_csv(rows))
    write_or_check({PAGE: page(read_csv(ROWS))}, "speed/fleet_simulated.py", check=given.check)


if __name__ == "__main__":
    main()
