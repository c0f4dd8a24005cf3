"""The cells of a fleet as Slurm jobs, through submitit: those due at once are one array; each job starts a station.

In: requests of cells. Out: their answers, over submitit's folder on the shared file system. A preempted job is requeued
by submitit and makes its attempt again. Partition, account and the like are sbatch's own variables (SBATCH_PARTITION).
"""

import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vramprobe.errors import MissingDependency, SpecError, VramprobeError, require_extra
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
#: Slurm's states of a job that has no node; submitit's word where Slurm keeps no accounts is UNKNOWN.
_QUEUED = ("PENDING", "REQUEUED", "CONFIGURING")
#: Slurm signals every process of a job; only submitit's, which requeues it, may end by these.
_FOR_SUBMITIT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class SlurmPool:
    """See nodes.NodePool. At most ``jobs`` cells are queued or running; ``cluster`` is submitit's engine."""

    def __init__(self, jobs: int, cards: str | None = None, *, cluster: str = "slurm", folder: Path = FOLDER) -> None:
        require_extra("slurm", "--on slurm")
        import submitit

        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise MissingDependency("--on slurm needs sbatch, and there is none here: run it on a login node")
        if jobs < 1:
            raise SpecError(f"--jobs must be at least 1, {jobs} given")
        self._jobs, self._cards = jobs, cards
        self._has_gpus = cluster == "slurm" and _has_gpus()
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
            num_gpus=self._jobs if self._has_gpus else 0,
            environments=environments,
            why=why,
            max_slots=self._jobs,
        )

    def require(self, specs: Sequence[str], node: Node) -> None:
        said = self._ask("requires", specs)
        if "refused" in said:
            raise MissingDependency(f"node {said['node']}: {said['refused']}")

    def _ask(self, what: str, specs: Sequence[str]) -> dict[str, Any]:
        """Run a job that answers for its node; it requests a GPU if the cells need one."""
        has_gpu = self._cards is None and any(CellSpec.model_validate_json(one).device == "cuda" for one in specs)
        self._set(Needs(1, int(has_gpu), 2 * GIB), _HOUR_MINUTES)
        try:
            job = self._executor.submit(OnNode(), {what: list(specs)}, self._cards, [])
        except Exception as error:  # whatever submitit raises where sbatch fails
            raise MissingDependency(f"Slurm takes no job that looks at a node: {_reason(error)}") from error
        try:
            return job.result()
        except Exception as error:  # whatever submitit raises for a job that failed
            raise MissingDependency(f"the job {job.job_id} that looks at a node failed: {_reason(error)}") from error
        finally:
            if not job.done():  # interrupted here
                job.cancel(check=False)

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
        whole = needs._replace(memory_bytes=math.ceil(needs.memory_bytes / GIB) * GIB)  # as sbatch is asked
        self._due.append((whole, (request, self._cards, list(model_types))))

    def _submit_what_is_due(self) -> list[tuple[str, dict[str, Any] | Lost]]:
        """One array for those that need the same; what Slurm refuses is lost."""
        refused: list[tuple[str, dict[str, Any] | Lost]] = []
        for needs in dict.fromkeys(needs for needs, _ in self._due):
            alike = [words for other, words in self._due if other == needs]
            seconds = max(min(words[0]["timeout_seconds"], words[0]["left_seconds"]) for words in alike)
            self._set(needs, _START_MINUTES + seconds / 60)
            names = [words[0]["attempt_id"] for words in alike]
            try:
                with self._executor.batch():
                    jobs = [self._executor.submit(OnNode(), *words) for words in alike]
            except Exception as error:  # whatever submitit raises where sbatch fails
                refused += [(name, Lost(f"Slurm took no job: {_reason(error)}")) for name in names]
            else:
                self._running |= dict(zip(names, jobs, strict=True))
        self._due = []
        return refused

    def ended(self, seconds: float) -> list[tuple[str, dict[str, Any] | Lost]]:
        refused = self._submit_what_is_due()
        if refused:
            return refused
        deadline = time.monotonic() + seconds
        while not (done := [name for name, job in self._running.items() if job.done()]):
            if time.monotonic() >= deadline:
                return []
            time.sleep(min(0.2, seconds))
        return [(name, _answer(self._running.pop(name))) for name in done]

    def is_queued(self, attempt_id: str) -> bool:
        job = self._running.get(attempt_id)
        return job is None or job.state in _QUEUED or (job.state == "UNKNOWN" and not job.paths.stdout.exists())

    def cancel(self, attempt_id: str) -> None:
        self._due = [one for one in self._due if one[1][0]["attempt_id"] != attempt_id]
        job = self._running.pop(attempt_id, None)
        if job is not None:
            job.cancel(check=False)

    def close(self) -> None:
        """Nothing is held."""


def _has_gpus() -> bool:
    """Return True if nodes of the partition have GPUs that Slurm knows, or if Slurm does not say."""
    partition = os.environ.get("SBATCH_PARTITION")
    words = ["sinfo", "--noheader", "--format=%G", *(["--partition", partition] if partition else [])]
    try:
        return "gpu" in subprocess.run(words, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return True  # the job that looks at a node will tell


def _answer(job: Any) -> dict[str, Any] | Lost:
    try:
        answer = job.result()
    except Exception as error:  # whatever submitit raises for a job that failed
        return Lost(_reason(error))
    return Lost(answer["refused"]) if "refused" in answer else answer


def _reason(error: Exception) -> str:
    """Return submitit's reason for the failure of a job or of sbatch, in a few words."""
    said = str(error).strip()
    if state := re.search(r"has not produced any output \(state: (.+?)\)", said):
        return f"Slurm says {state[1]}"
    trace = re.search(r"with trace:\n-+\n(.+?)\n-{20,}\n", said, re.DOTALL)
    lines = [line for line in (trace[1] if trace else said).splitlines() if line.strip()] or [""]
    return lines[-1][:200] if trace else f"{type(error).__name__}: {lines[-1][:200]}"


class OnNode:
    """Answer one request on the node of a job, by a station of its own; submitit requeues it as ``checkpoint`` says."""

    def __call__(self, request: dict[str, Any], cards: str | None, model_types: list[str]) -> dict[str, Any]:
        node = {"node": os.uname().nodename}
        if "started_at" in request:  # when it was submitted; it may have waited since
            waited = datetime.now(UTC) - datetime.fromisoformat(request["started_at"])
            request = request | {"left_seconds": max(request["left_seconds"] - waited.total_seconds(), 1.0)}
        try:
            with closing(self._station(model_types, cards)) as station:
                return station.ask(**request) | node
        except VramprobeError as error:
            return {"refused": str(error)} | node

    def _station(self, model_types: list[str], cards: str | None) -> Station:
        """A station that has these signals blocked, and so has every process below it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_SUBMITIT)
        try:
            return Station(model_types, cards)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_SUBMITIT)

    def checkpoint(self, *words: Any) -> Any:
        """Resubmit the same attempt, of which nothing was kept."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(OnNode(), *words)
