"""The cells of a fleet on a Ray cluster: each a task with the resources that it needs, on a node that Ray chooses.

In: requests of cells. Out: their answers. A Ray worker keeps a station (measure/station.py) from one task to the next,
so that a node loads the libraries once per worker. Ray tries nothing again: the fleet does, and writes it down.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any

from vramprobe.emulate.installation import NotEmulatable
from vramprobe.errors import MissingDependency, VramprobeError, require_extra
from vramprobe.measure.station import Station
from vramprobe.records.record import Environment
from vramprobe.sweep.nodes import Lost, Needs, Node

#: A node may take so long to say what it is: it starts a worker, or sets up an emulated GPU.
_LOOK_SECONDS = 900.0
_CANCEL_SECONDS = 20.0
_CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"
#: Ray's errors that need no more words.
_REASONS = {
    "NodeDiedError": "its node was lost",
    "WorkerCrashedError": "its worker crashed",
    "LocalRayletDiedError": "its node was lost",
    "OutOfMemoryError": "its node ran short of memory, and Ray ended it",
}


class RayPool:
    """See nodes.NodePool. ``address``: ray (the cluster that this machine knows, else a new one), or ray://HOST:PORT."""

    def __init__(self, address: str = "ray", cards: str | None = None) -> None:
        require_extra("ray", "--on ray")
        import ray

        self._ray, self._cards = ray, cards
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            self._connect(address)
        self._look_task = ray.remote(num_cpus=0, max_retries=0)(look_here)
        self._cell_task = ray.remote(max_retries=0, max_calls=0)(run_here)
        self._looks: dict[str, Any] = {}  # by node
        self._seen: dict[str, Node] = {}
        self._asked: tuple[str, ...] = ()
        self._running: dict[Any, str] = {}  # attempts by their tasks

    def _connect(self, address: str) -> None:
        try:
            self._ray.init(
                address=None if address == "ray" else address,
                logging_level=logging.ERROR,
                log_to_driver=False,
                **({"include_dashboard": False} if address == "ray" and "RAY_ADDRESS" not in os.environ else {}),
            )
        except (ConnectionError, RuntimeError, ImportError, ValueError) as error:
            raise MissingDependency(
                f"no Ray cluster answers at {address} ({str(error).splitlines()[0]}); start one with "
                "`ray start --head`, and name it as ray://HOST:10001 (pip install 'ray[client]'), or set RAY_ADDRESS; "
                "where it wants its token, set RAY_AUTH_MODE=token"
            ) from error

    def nodes(self, specs: Sequence[str], *, wait: bool = False) -> list[Node]:
        """The nodes with cores, each as it said how it would measure ``specs``."""
        if tuple(specs) != self._asked:
            self._looks, self._seen, self._asked = {}, {}, tuple(specs)
        alive = {
            node["NodeID"]: node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
        }
        for node_id in alive.keys() - self._looks.keys():
            task = self._look_task.options(label_selector=_on([node_id]))
            self._looks[node_id] = task.remote(list(specs), self._cards) if specs else None
        pending = [self._looks[one] for one in alive if specs and one not in self._seen]
        ready = []
        if pending:
            ready, _ = self._ray.wait(pending, num_returns=len(pending), timeout=_LOOK_SECONDS if wait else 0)
        for node_id, node in alive.items():
            if node_id not in self._seen and (not specs or self._looks[node_id] in ready):
                self._seen[node_id] = self._node(node, self._looks[node_id])
        return [self._seen[node_id] for node_id in alive if node_id in self._seen]

    def _node(self, node: dict[str, Any], look: Any) -> Node:
        environments, why = [], ""
        if look is not None:
            try:
                said = self._ray.get(look)
                environments, why = said.get("environments", []), said.get("refused", "")
            except self._ray.exceptions.RayError as error:
                why = _reason(error)
        resources = node["Resources"]
        return Node(
            node_id=node["NodeID"],
            name=f"{node['NodeManagerHostname']}/{node['NodeID'][:6]}",
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            memory_bytes=resources.get("memory", 0),
            environments=tuple(Environment.model_validate_json(one) for one in environments),
            why=why,
        )

    def require(self, specs: Sequence[str], node: Node) -> None:
        task = self._look_task.options(label_selector=_on([node.node_id]))
        said = self._ray.get(task.remote(list(specs), self._cards, requires=True))
        if "refused" in said:
            raise MissingDependency(f"node {node.name}: {said['refused']}")

    def submit(self, request: dict[str, Any], needs: Needs, nodes: Sequence[Node], model_types: Sequence[str]) -> None:
        task = self._cell_task.options(
            num_cpus=needs.cpus,
            num_gpus=needs.gpus,
            memory=needs.memory_bytes,
            label_selector=_on([node.node_id for node in nodes]),
            scheduling_strategy="SPREAD",
        )
        self._running[task.remote(request, self._cards, list(model_types))] = request["attempt_id"]

    def ended(self, seconds: float) -> list[tuple[str, dict[str, Any] | Lost]]:
        tasks = list(self._running)
        ready, waiting = self._ray.wait(tasks, num_returns=1, timeout=seconds) if tasks else ([], [])
        if waiting:
            ready += self._ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]
        return [(self._running.pop(task), self._answer(task)) for task in ready]

    def _answer(self, task: Any) -> dict[str, Any] | Lost:
        try:
            return self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            return Lost(_reason(error))

    def is_queued(self, attempt_id: str) -> bool:
        """No: a fleet submits only what a node has room for."""
        return False

    def cancel(self, attempt_id: str) -> None:
        task = next(task for task, name in self._running.items() if name == attempt_id)
        del self._running[task]
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.cancel(task, force=True)
            self._ray.wait([task], timeout=_CANCEL_SECONDS)

    def close(self) -> None:
        """Leave the cluster, unless the caller had joined it; one that was started for this sweep ends with it."""
        if self._is_ours:
            self._ray.shutdown()


def _on(node_ids: list[str]) -> dict[str, str]:
    """Ray's selector for these nodes alone."""
    return {"ray.io/node-id": f"in({','.join(node_ids)})"}


def _reason(error: Exception) -> str:
    """Return the reason why an attempt was lost, in a few words."""
    cause = getattr(error, "cause", None) or error
    if type(cause).__name__ in _REASONS:
        return _REASONS[type(cause).__name__]
    lines = str(cause).strip().splitlines() or [""]
    return f"{type(cause).__name__}: {lines[0][:200]}"


# On a node, in a Ray worker

_stations: dict[tuple[str | None, str | None], Station] = {}


def look_here(specs: list[str], cards: str | None, requires: bool = False) -> dict[str, Any]:
    """Return this node's environments for cells like ``specs``, or refuse what it cannot run; sets up an emulated GPU
    the first time.
    """
    hidden = os.environ.pop(_CUDA_DEVICES, None)  # a task without GPUs sees none
    try:
        with contextlib.closing(_opened([], cards)) as station:
            return station.ask(**{"requires" if requires else "environments": specs})
    except VramprobeError as error:
        return {"refused": str(error)}
    finally:
        if hidden is not None:
            os.environ[_CUDA_DEVICES] = hidden


def _opened(model_types: list[str], cards: str | None) -> Station:
    try:
        return Station(model_types, cards)
    except NotEmulatable:
        from vramprobe.emulate.environment import set_up_environment

        set_up_environment(None, (), lambda line: None)
        return Station(model_types, cards)


def run_here(request: dict[str, Any], cards: str | None, model_types: list[str]) -> dict[str, Any]:
    """One cell on this node, by the station that this worker keeps for the GPUs that Ray gave it."""
    import ray

    key = (cards, os.environ.get(_CUDA_DEVICES))
    for other in [one for one in _stations if one != key or not _stations[one].is_alive]:
        _stations.pop(other).close()
    if key not in _stations:
        _stations[key] = _opened(model_types, cards)
    context = ray.get_runtime_context()
    answer = _stations[key].ask(**request)
    return answer | {"node": f"{os.uname().nodename}/{context.get_node_id()[:6]}"}
