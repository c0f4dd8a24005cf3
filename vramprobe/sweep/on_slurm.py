"""The cells of a fleet as Slurm jobs, through submitit: those due at once are one array; each job starts a station.

In: requests of cells. Out: their answers, over submitit's folder on the shared file system. A preempted job is requeued
by submitit and makes its attempt again. Partition, account and the like are sbatch's own variables (SBATCH_PARTITION).
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from vramprobe.errors import MissingDependency, SpecError, VramprobeError
from vramprobe.measure.station import Station
from vramprobe.records.record import Environment
from vramprobe.spec import CellSpec
from vramprobe.sweep.nodes import Lost, Needs, Node
from vramprobe.units import GIB

#: In the working folder, which must be on the shared file system: what submitit writes for its jobs.
FOLDER = Path("slurm-jobs")
_HOUR_MINUTES = 60
#: For a job to start its station and load the libraries.
_START_MINUTES = 10


class SlurmPool:
    """See nodes.Pool. At most ``jobs`` cells are queued or running; ``cluster`` is submitit's name of the engine."""

    def __init__(self, jobs: int, cards: str | None = None, *, cluster: str = "slurm", folder: Path = FOLDER) -> None:
        try:
            import submitit
        except ModuleNotFoundError as error:
            raise MissingDependency(
                "--on slurm needs submitit, not installed here: pip install 'vramprobe[slurm]'"
            ) from error
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise MissingDependency("--on slurm needs sbatch, and there is none here: run it on a login node")
        if jobs < 1:
            raise SpecError(f"--jobs must be at least 1, {jobs} given")
        self._jobs, self._cards = jobs, cards
        self._executor = submitit.AutoExecutor(folder=folder.resolve() / "%j", cluster=cluster)
        self._seen: dict[tuple[str, ...], Node] = {}
        self._due: list[tuple[Needs, tuple[Any, ...]]] = []
        self._running: dict[str, Any] = {}  # jobs by attempt

    def nodes(self, specs: Sequence[str], *, wait: bool = False) -> list[Node]:
        """One entry, for all nodes that Slurm may choose, as one says; what differs is seen in its records."""
        key = tuple(specs)
        if not key:
            return [self._node("slurm", ())]
        if key not in self._seen:
            said = self._ask("environments", specs)
            self._seen[key] = self._node(
                said.get("node", "slurm"),
                tuple(Environment.model_validate_json(one) for one in said.get("environments", ())),
                said.get("refused", ""),
            )
        return [self._seen[key]]

    def _node(self, name: str, environments: tuple[Environment, ...], why: str = "") -> Node:
        return Node(
            node_id="slurm",
            name=name,
            num_cpus=math.inf,
            num_gpus=self._jobs,
            environments=environments,
            why=why,
            max_slots=self._jobs,
        )

    def require(self, specs: Sequence[str], node: Node) -> None:
        said = self._ask("requires", specs)
        if "refused" in said:
            raise MissingDependency(f"node {said['node']}: {said['refused']}")

    def _ask(self, what: str, specs: Sequence[str]) -> dict[str, Any]:
        """What a job finds on its node; the GPU that it asks for is there to be seen."""
        has_gpu = self._cards is None and any(CellSpec.model_validate_json(one).device == "cuda" for one in specs)
        self._set(Needs(1, int(has_gpu), 2 * GIB), _HOUR_MINUTES)
        job = self._executor.submit(OnNode(), {what: list(specs)}, self._cards, [])
        try:
            return job.result()
        except Exception as error:  # whatever submitit raises for a job that failed
            raise MissingDependency(f"the job {job.job_id} that looks at a node failed: {_reason(error)}") from error

    def _set(self, needs: Needs, minutes: float) -> None:
        self._executor.update_parameters(
            name="vramprobe",
            timeout_min=math.ceil(minutes),
            cpus_per_task=needs.cpus,
            gpus_per_node=needs.gpus,
            mem_gb=math.ceil(needs.memory_bytes / GIB),
            nodes=1,
            tasks_per_node=1,
        )

    def submit(self, request: dict[str, Any], needs: Needs, nodes: Sequence[Node], model_types: Sequence[str]) -> None:
        self._due.append((needs, (request, self._cards, list(model_types))))

    def _submit_what_is_due(self) -> None:
        """One array for those that need the same."""
        for needs in dict.fromkeys(needs for needs, _ in self._due):
            alike = [words for other, words in self._due if other == needs]
            seconds = max(min(words[0]["timeout_seconds"], words[0]["left_seconds"]) for words in alike)
            self._set(needs, _START_MINUTES + seconds / 60)
            with self._executor.batch():
                jobs = [self._executor.submit(OnNode(), *words) for words in alike]
            self._running |= {words[0]["attempt_id"]: job for words, job in zip(alike, jobs, strict=True)}
        self._due = []

    def ended(self, seconds: float) -> list[tuple[str, dict[str, Any] | Lost]]:
        self._submit_what_is_due()
        deadline = time.monotonic() + seconds
        while not (done := [name for name, job in self._running.items() if job.done()]):
            if time.monotonic() >= deadline:
                return []
            time.sleep(min(0.2, seconds))
        return [(name, _answer(self._running.pop(name))) for name in done]

    def cancel(self, attempt_id: str) -> None:
        self._due = [one for one in self._due if one[1][0]["attempt_id"] != attempt_id]
        job = self._running.pop(attempt_id, None)
        if job is not None:
            job.cancel(check=False)

    def close(self) -> None:
        """Nothing is held."""


def _answer(job: Any) -> dict[str, Any] | Lost:
    try:
        answer = job.result()
    except Exception as error:  # whatever submitit raises for a job that failed
        return Lost(_reason(error))
    return Lost(answer["refused"]) if "refused" in answer else answer


def _reason(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1][:200]}"


class OnNode:
    """What a job does: one request, by a station of its own; submitit requeues it as ``checkpoint`` says."""

    def __call__(self, request: dict[str, Any], cards: str | None, model_types: list[str]) -> dict[str, Any]:
        node = {"node": os.uname().nodename}
        try:
            with closing(Station(model_types, cards)) as station:
                return station.ask(**request) | node
        except VramprobeError as error:
            return {"refused": str(error)} | node

    def checkpoint(self, *words: Any) -> Any:
        """The same attempt again: nothing of it was kept."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(OnNode(), *words)
