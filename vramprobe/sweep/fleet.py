"""Fleet: the executor of many machines: many cells at once, each on a node of an engine that exists (Ray, Slurm).

In: what is due, from the bookkeeping. Out: records, by dispatch.py. Nodes that differ in card, driver or library
versions are left out, so that one series has one way of measuring.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from vramprobe.errors import SpecError
from vramprobe.measure.environment import more_packages
from vramprobe.measure.isolation import Ticket, new_ticket, scratch_folder
from vramprobe.records.outcomes import Interrupted, Outcome
from vramprobe.records.record import Environment, Instrument, RunRecord, attempt_fields
from vramprobe.spec import CellSpec
from vramprobe.sweep.bookkeeping import Bookkeeping
from vramprobe.sweep.card import Card, Rate, card_seen
from vramprobe.sweep.definition import Sweep
from vramprobe.sweep.dispatch import Dispatch, RunningAttempt
from vramprobe.sweep.nodes import Needs, Node, NodePool, difference, identity_of, needs_of, series_of
from vramprobe.sweep.plan import PlanRow

#: Slurm jobs at once, unless --jobs says otherwise.
_JOBS = 16


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


class Fleet:
    """The nodes of an engine; see executor.Executor. ``card_of`` comes before all else: it looks at the nodes."""

    def __init__(self, pool: NodePool, *, cards: str | None = None, gpu: str | None = None) -> None:
        self._pool, self._cards, self._gpu = pool, cards, gpu
        self._kinds: dict[tuple[str, tuple[str, ...]], str] = {}
        self.series: list[Node] = []
        self._left_out: dict[str, str] = {}  # by node's id
        self.num_slots = self.num_gpus = 1

    @functools.cached_property
    def device(self) -> str:
        """The device of cells that name none."""
        has_gpus = self._cards is not None or any(node.num_gpus for node in self._pool.nodes((), wait=True))
        return "cuda" if has_gpus else "cpu"

    def card_of(self, sweep: Sweep) -> Card | None:
        """The GPU of the nodes that will share the series; None where the cells are for the CPU."""
        for spec in sweep.cells:
            self._kinds.setdefault(_kind(spec), spec.model_dump_json())
        every = self._pool.nodes(tuple(self._kinds.values()), wait=True)
        needs = [needs_of(spec, is_emulated=self._cards is not None) for spec in sweep.cells]
        largest = Needs(max(one.cpus for one in needs), max(one.gpus for one in needs), 1)
        self.series = series_of(every, largest, self._gpu)
        self._note_others(every)
        self.num_slots = max(sum(node.num_slots(min(needs)) for node in self.series), 1)
        self.num_gpus = max(int(sum(node.num_gpus for node in self.series)), 1)
        for seen in self.series[0].environments:
            if (total_bytes := seen.nvml_total_bytes) is not None:
                return card_seen(seen.device_name, total_bytes, is_emulated=seen.emulator is not None)
        return None

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
            Dispatch(self, self._pool, books, scratch).run()

    def refresh(self) -> list[Node]:
        """The nodes of the series that are there now, with those that have joined; what is left out is noted."""
        identity = identity_of(self.series[0].environments)
        every = self._pool.nodes(tuple(self._kinds.values()))
        self._note_others(every)
        return [node for node in every if node.environments and identity_of(node.environments) == identity]

    def of_all_gpus(self, rate: Rate | None) -> Rate | None:
        """Return the price of an hour of the series' nodes; ``rate`` is that of one GPU."""
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

    def needs_of(self, row: PlanRow) -> Needs:
        """CPUs, GPUs and bytes that a cell takes on a node; bytes at most those of the largest node, where the cell
        runs alone.
        """
        needs = needs_of(row.spec, is_emulated=self._cards is not None)
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

    def interrupted(self, attempt: RunningAttempt, by: str, *, by_limit: bool) -> RunRecord:
        """The record of a cell that a signal or the sweep's own limit stopped."""
        spec, outcome = attempt.event.cell.spec, Interrupted(message=f"stopped by {by}", by_limit=by_limit)
        return self._describe(spec, attempt.ticket, outcome)


def _kind(spec: CellSpec) -> tuple[str, tuple[str, ...]]:
    """Cells of one kind are measured in one environment."""
    return spec.device, more_packages(spec)
