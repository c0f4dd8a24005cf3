"""Cells per second and CPU time per cell on a Ray cluster of four local nodes, against processes without Ray.

``python benchmarks/speed/fleet.py`` (needs Ray; a quarter of an hour on two cores). Tiny CPU cells of one thread. Ray,
one process per core and one process per node take turns, part by part, so that what else the machine does falls on all.
Loading libraries is not counted. Writes a row per part to fleet.csv, and fleet.md of all rows; ``--check``: the page is
that of the rows; needs no Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tables import as_csv, as_markdown, read_csv, write_or_check

from vramprobe.measure.environment import cpu_name
from vramprobe.spec import resolve
from vramprobe.sweep import runner
from vramprobe.sweep.definition import Sweep
from vramprobe.sweep.progress import Progress
from vramprobe.units import GIB

MODEL = Path(__file__).resolve().parents[2] / "tests" / "data" / "tiny-llama"
NUM_NODES, NUM_PARTS, NUM_CELLS = 4, 8, 50  # 400 cells each
ROWS = Path(__file__).with_suffix(".csv")
PAGE = Path(__file__).with_suffix(".md")
#: As Ray gives a task of one core.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SHARD = "import sys, fleet; fleet.shard(*sys.argv[1:])"
RAY, CORES, NODES = "ray", "one process per core", "one process per node"


def cells(first: int, count: int) -> Sweep:
    """So many cells of a tiny model, which differ in their seed."""
    words = {"model": str(MODEL), "method": "lora", "device": "cpu", "batch_size": 1, "seq_len": 16, "timing_steps": 0}
    specs = tuple(resolve(**words, seed=seed) for seed in range(first, first + count))
    return Sweep(name="fleet", description="", cells=specs, held_out=frozenset(), notes=())


def cpu_seconds() -> float:
    """CPU time of this process, of all below it, and of those that have ended."""
    import psutil

    this, total = psutil.Process(), 0.0
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


class Ends:
    """Wall and CPU clock at the end of each cell: the first ones come after a wait for libraries."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, float]] = []

    def on_event(self, event: Progress) -> None:
        if event.kind == "finished":
            assert event.record.outcome.kind == "ok", event.record.outcome
            self._ends.append((time.monotonic(), cpu_seconds()))

    def after(self, left_out: int) -> tuple[int, float, float]:
        """(cells, seconds, CPU seconds) after so many ends."""
        (began, cpu_began), (ended, cpu_ended) = self._ends[left_out - 1], self._ends[-1]
        return len(self._ends) - left_out, ended - began, cpu_ended - cpu_began


def shard(first: str, count: str, out: str) -> None:
    """One process without Ray: says what its cells but the first took."""
    ends = Ends()
    runner.run(cells(int(first), int(count) + 1), Path(out), on_event=ends.on_event)
    print(json.dumps(ends.after(1)), flush=True)


def without_ray(num_processes: int, first: int, count: int, folder: Path) -> tuple[float, float]:
    """(cells per second, CPU seconds per cell) of so many processes at once, each with its share of the cells."""
    shares = [count // num_processes + (number < count % num_processes) for number in range(num_processes)]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SHARD, str(first + 10**6 * number), str(share), str(folder / str(number))],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
            env=os.environ | ONE_THREAD,
        )
        for number, share in enumerate(shares)
    ]
    said = [json.loads(process.communicate()[0]) for process in started]
    rate = sum(done / seconds for done, seconds, _ in said)
    return rate, sum(cpu for _, _, cpu in said) / sum(done for done, _, _ in said)


def with_ray(first: int, count: int, folder: Path) -> tuple[float, float]:
    """The same of the cluster, Ray's own processes included, after one cell for each node; its workers stay."""
    from vramprobe.sweep.fleet import Fleet
    from vramprobe.sweep.on_ray import RayPool

    sweep, fleet, ends = cells(first, count + NUM_NODES), Fleet(RayPool()), Ends()
    fleet.card_of(sweep)
    runner.run(sweep, folder, executor=fleet, on_event=ends.on_event)
    done, seconds, cpu = ends.after(NUM_NODES)
    return done / seconds, cpu / done


def add(cluster: Any) -> Any:
    """A node with one core; a busy machine may need several tries to start one."""
    for tries_left in (2, 1, 0):
        try:
            return cluster.add_node(num_cpus=1, include_dashboard=False, memory=3 * GIB, object_store_memory=80 * 2**20)
        except Exception:  # Ray raises a plain one where a node does not start in time
            if not tries_left:
                raise


def measure_all() -> Iterable[dict[str, Any]]:
    """A row per part and way, in turns."""
    warnings.simplefilter("ignore")
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(NUM_NODES):
        add(cluster)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    versions = {"cpu": cpu_name(), "cores": os.cpu_count(), "ray_version": ray.__version__}
    ways: dict[str, Callable[[int, int, Path], tuple[float, float]]] = {
        RAY: with_ray,
        CORES: lambda *words: without_ray(os.cpu_count(), *words),
        NODES: lambda *words: without_ray(NUM_NODES, *words),
    }
    with tempfile.TemporaryDirectory() as name:
        with_ray(10**8, 2 * NUM_NODES, Path(name) / "warm")
        for part in range(NUM_PARTS):
            turns = list(ways.items())
            for number, (way, run) in enumerate(turns if part % 2 == 0 else reversed(turns)):
                load = os.getloadavg()[0]
                rate, cpu = run(10**7 * part + 1000 * number, NUM_CELLS, Path(name) / way / str(part))
                row = {"part": part, "way": way, "cells": NUM_CELLS, "cells_per_second": round(rate, 3)}
                row |= {"cpu_seconds_per_cell": round(cpu, 3), "load_before": round(load, 2)} | versions
                print(row, flush=True)
                yield row
    ray.shutdown()
    cluster.shutdown()


def page(rows: list[dict[str, str]]) -> str:
    """The rows in words and a table."""
    by_way = {way: [row for row in rows if row["way"] == way] for way in (RAY, CORES, NODES)}

    def rate(way: str) -> float:
        return statistics.harmonic_mean(float(row["cells_per_second"]) for row in by_way[way])

    def cpu(way: str) -> float:
        return statistics.fmean(float(row["cpu_seconds_per_cell"]) for row in by_way[way])

    def pairs(way: str) -> str:
        both = zip(by_way[RAY], by_way[way], strict=True)
        found = [float(one["cells_per_second"]) / float(other["cells_per_second"]) for one, other in both]
        return f"{min(found):.2f} to {max(found):.2f}"

    first, loads = rows[0], [float(row["load_before"]) for row in rows]
    count = sum(int(row["cells"]) for row in by_way[RAY])
    table = [
        (
            f"Ray, {NUM_NODES} local nodes" if way == RAY else way,
            f"{rate(way):.2f}",
            f"{cpu(way):.2f}",
            *(("", "") if way == RAY else (f"{rate(RAY) / rate(way):.2f} ×", pairs(way))),
        )
        for way in by_way
    ]
    head = ("", "cells per second", "CPU seconds per cell", "Ray's rate", "in each part")
    return "\n".join(
        [
            "# Cells on a Ray cluster and without Ray",
            "",
            f"**Result:** {count} tiny CPU cells took {cpu(RAY) / cpu(CORES):.2f} × the CPU time on Ray that they took "
            f"in one process per core without Ray: {cpu(CORES) / cpu(RAY):.2f} × the rate where CPU time limits it. "
            f"Measured, the rate was {rate(RAY) / rate(NODES):.2f} × that of as many processes as nodes, and "
            f"{rate(RAY) / rate(CORES):.2f} × that of one process per core.",
            "",
            f"Measured on {first['cores']} cores ({first['cpu']}), Ray {first['ray_version']}, {NUM_NODES} local nodes "
            f"of one core each. The three ways take turns, {NUM_CELLS} cells at a time. Other work shared the machine "
            f"(load average {min(loads):.1f} to {max(loads):.1f} before a turn), where four processes get more of the "
            "cores than two: compare the CPU time. It is that of all processes, Ray's own included. Loading libraries "
            "is not counted, and every cell has one thread.",
            "",
            *as_markdown(head, "lrrrr", table),
            "",
            "[fleet.csv](fleet.csv) has a row per turn. Rebuild: `python benchmarks/speed/fleet.py`",
            "",
        ]
    )


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--check", action="store_true")
    given = words.parse_args()
    if not given.check:
        ROWS.write_text(as_csv(list(measure_all())))
    write_or_check({PAGE: page(read_csv(ROWS))}, "speed/fleet.py", check=given.check)


if __name__ == "__main__":
    main()
