"""Nodes: the machines of a fleet, what a cell needs of one, and which of them may share a series of records.

In: what each node says of itself. Out: the nodes whose records may stand in one table, and why the others are left out.
Starts nothing and knows no engine.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from vramprobe import catalog
from vramprobe.errors import MissingDependency, SpecError
from vramprobe.records.record import Environment
from vramprobe.spec import CellSpec
from vramprobe.units import GIB

#: What a cell's process takes beside its tensors on the CPU; all that one on a GPU takes of the machine's memory.
_HOST_BYTES_ON_CPU, _HOST_BYTES_ON_GPU = GIB, 2 * GIB


class Needs(NamedTuple):
    """CPUs, GPUs and bytes that a cell takes on one node while it runs."""

    cpus: int
    gpus: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine. ``environments``: of each kind of cell, in the order of asking; empty, with ``why``, without any."""

    node_id: str
    name: str
    num_cpus: float
    num_gpus: float
    memory_bytes: float = math.inf
    environments: tuple[Environment, ...] = ()
    why: str = ""
    max_slots: int | None = None  # of an engine that hides its machines: how many cells run at once

    def num_slots(self, needs: Needs) -> int:
        """Cells with such needs that run at once."""
        if self.max_slots is not None:
            return self.max_slots
        free = (self.num_cpus / needs.cpus, self.memory_bytes / needs.memory_bytes)
        return int(min(*free, self.num_gpus / needs.gpus if needs.gpus else math.inf))


@dataclass(frozen=True)
class Lost:
    """An attempt that nothing is known of: its node, its worker or its station went."""

    why: str


class NodePool(Protocol):
    """Interface of an engine to a fleet: it finds a node for each cell, and reports which attempts ended."""

    def nodes(self, specs: Sequence[str], *, wait: bool = False) -> list[Node]:
        """The nodes there are now, each having said how it would measure ``specs``; ``wait`` for the slow ones."""

    def require(self, specs: Sequence[str], node: Node) -> None:
        """Raise VramprobeError where ``node`` lacks what these cells need."""

    def submit(self, request: dict[str, Any], needs: Needs, nodes: Sequence[Node], model_types: Sequence[str]) -> None:
        """Have one of ``nodes`` answer the request of a cell (measure/station.py), which its attempt_id names."""

    def ended(self, seconds: float) -> list[tuple[str, dict[str, Any] | Lost]]:
        """(attempt_id, answer with ``node``) of what ended, after at most so long."""

    def is_queued(self, attempt_id: str) -> bool:
        """Return True if an attempt waits for a node, as far as the engine reports it."""

    def cancel(self, attempt_id: str) -> None:
        """End a running attempt; it is told as ended no more."""

    def close(self) -> None:
        """Give back what is held."""


def needs_of(spec: CellSpec, *, is_emulated: bool) -> Needs:
    """CPUs, GPUs and bytes that the cell takes on a node; bytes are a coarse estimate that overloads no node."""
    processes = spec.num_gpus if spec.only_rank is None and not spec.is_spread else 1
    if spec.device == "cpu":
        return Needs(1, 0, GIB + _HOST_BYTES_ON_CPU)
    return Needs(processes, 0 if is_emulated else spec.num_gpus, processes * _HOST_BYTES_ON_GPU)


def series_of(nodes: Iterable[Node], needs: Needs, gpu: str | None) -> list[Node]:
    """The nodes that may share a series: alike in card, driver and versions; of several such groups the largest.

    ``gpu``: only those with this GPU. Raises SpecError or MissingDependency where no node is left.
    """
    nodes = list(nodes)
    able = [node for node in nodes if node.environments]
    if not able:
        reasons = "; ".join(dict.fromkeys(f"{node.name}: {node.why}" for node in nodes)) or "there are no nodes"
        raise MissingDependency(f"no node can run a cell ({reasons})")
    if gpu is not None:
        wanted = catalog.find_gpu(gpu)
        found = {node.environments[0].device_name for node in able}
        able = [node for node in able if catalog.gpu_seen(node.environments[0].device_name) == wanted]
        if not able:
            raise SpecError(f"no node has {wanted.name}; the nodes have {', '.join(sorted(found))}")
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in able:
        groups.setdefault(identity_of(node.environments), []).append(node)
    chosen = max(groups.values(), key=lambda group: sum(node.num_slots(needs) for node in group))
    if not any(node.num_slots(needs) for node in chosen):
        raise SpecError(
            f"a cell needs {needs.cpus} cores, {needs.gpus} GPUs and {needs.memory_bytes / GIB:.1f} GiB of one node, "
            "and no node has as much; add a larger one, or leave such cells out with --skip"
        )
    return chosen


def identity_of(environments: Iterable[Environment]) -> tuple[object, ...]:
    """Return the facts that nodes must share so that their records may stand in one series."""
    return tuple(tuple(_parts(one).items()) for one in environments)


def difference(node: Node, others: Node) -> str:
    """In words, how a node differs from those of the series: ``driver 570.1 (the others 580.2)``."""
    if not node.environments:
        return node.why
    for mine, theirs in zip(node.environments, others.environments, strict=True):
        here, there = _parts(mine), _parts(theirs)
        for name in {**here, **there}:
            if here.get(name) != there.get(name):
                return f"{name} {here.get(name)} (the others {there.get(name)})"
    return "it is not needed"


def _parts(environment: Environment) -> dict[str, object]:
    """Facts that decide whether two environments are alike, by name."""
    parts: dict[str, object] = {
        "device": environment.device_said,
        "memory": environment.nvml_total_bytes,
        "driver": environment.driver_version,
        "emulator": environment.emulator,
    }
    return parts | dict(sorted(environment.versions.items())) | {"commit": environment.commit}
