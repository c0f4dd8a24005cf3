"""Cells per second on a Ray cluster of four local nodes, against four processes without Ray.

``python benchmarks/speed/fleet.py`` (needs Ray; about 20 minutes on two cores). Tiny CPU cells. The two take turns,
part by part, so that what else the machine does falls on both. Prints; asserts nothing.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

from vramprobe.spec import resolve
from vramprobe.sweep import runner
from vramprobe.sweep.definition import Sweep
from vramprobe.sweep.fleet import Fleet
from vramprobe.sweep.on_ray import RayPool
from vramprobe.units import GIB

MODEL = Path(__file__).resolve().parents[2] / "tests" / "data" / "tiny-llama"
NUM_NODES = 4
WITHOUT_RAY = "import sys, fleet; fleet.shard(*sys.argv[1:])"


def cells(first: int, count: int) -> Sweep:
    """So many cells of a tiny model, which differ in their seed."""
    words = {"model": str(MODEL), "method": "lora", "device": "cpu", "batch_size": 1, "seq_len": 16, "timing_steps": 0}
    specs = tuple(resolve(**words, seed=seed) for seed in range(first, first + count))
    return Sweep(name="fleet", description="", cells=specs, held_out=frozenset(), notes=())


def shard(first: str, count: str, out: str) -> None:
    """One process without Ray: the seconds from its first cell's end to its last one's, without loading libraries."""
    ends = []
    runner.run(
        cells(int(first), int(count) + 1),
        Path(out),
        on_event=lambda event: ends.append(time.monotonic()) if event.kind == "finished" else None,
    )
    print(ends[-1] - ends[0], flush=True)


def without_ray(first: int, count: int, folder: Path) -> float:
    """Cells per second of four processes, a quarter of the cells each."""
    each = count // NUM_NODES
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WITHOUT_RAY, str(first + count * number), str(each), str(folder / str(number))],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        )
        for number in range(NUM_NODES)
    ]
    return sum(each / float(process.communicate()[0]) for process in started)


def with_ray(first: int, count: int, folder: Path) -> float:
    """Cells per second on the cluster, from the end of the first cell of each node; its workers stay."""
    sweep, fleet = cells(first, count), Fleet(RayPool())
    fleet.card_of(sweep)
    ends: list[float] = []
    runner.run(
        sweep,
        folder,
        executor=fleet,
        on_event=lambda event: ends.append(time.monotonic()) if event.kind == "finished" else None,
    )
    return (count - NUM_NODES) / (ends[-1] - ends[NUM_NODES - 1])


def add(cluster: object) -> object:
    """A node with one core; a busy machine may need several tries to start one."""
    for tries_left in (2, 1, 0):
        try:
            return cluster.add_node(num_cpus=1, include_dashboard=False, memory=3 * GIB, object_store_memory=80 * 2**20)
        except Exception:  # Ray raises a plain one where a node does not start in time
            if not tries_left:
                raise


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--cells", type=int, default=400)
    words.add_argument("--part", type=int, default=100)
    given = words.parse_args()
    warnings.simplefilter("ignore")
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(NUM_NODES):
        add(cluster)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with_ray(10**7, 3 * NUM_NODES, folder / "warm")
        rates: dict[str, list[float]] = {"ray": [], "processes": []}
        for part, first in enumerate(range(0, given.cells, given.part)):
            turns = [("ray", with_ray), ("processes", without_ray)]
            for name, run in turns if part % 2 == 0 else reversed(turns):
                rates[name].append(run(first, given.part, folder / name / str(part)))
            print({name: [round(one, 2) for one in found] for name, found in rates.items()}, flush=True)
        ray_rate, plain_rate = (statistics.harmonic_mean(rates[name]) for name in ("ray", "processes"))
        print(
            f"{given.cells} cells each: {ray_rate:.2f} a second on Ray, {plain_rate:.2f} in {NUM_NODES} processes "
            f"without: {ray_rate / plain_rate:.2f} ×"
        )
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
