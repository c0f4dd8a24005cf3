"""Nodes of a Ray cluster killed at random: ``python benchmarks/speed/node_kills.py`` (needs Ray; half an hour).

50 sweeps of 12 tiny CPU cells on four local nodes. In each, one node is killed at a random moment while cells run, and
replaced after the sweep. The journal must have the planned records, each once. Writes a row per sweep to node_kills.csv
as it ends, resumes there, and makes node_kills.md of all rows. ``--check``: the page is that of the rows, and none of
them lacks or doubles a record; needs no Ray.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tables import as_csv, as_markdown, read_csv, write_or_check

NUM_SWEEPS, NUM_CELLS, NUM_NODES = 50, 12, 4
#: A kill comes at most so long after the start of the cell that was drawn.
MOST_SECONDS = 0.8
ROWS = Path(__file__).with_suffix(".csv")
PAGE = Path(__file__).with_suffix(".md")


class Killer:
    """Kills one node, drawn at random, some time after one cell, drawn at random, has started."""

    def __init__(self, cluster: Any, nodes: list[Any], chance: random.Random) -> None:
        self._cluster, self._nodes, self._chance = cluster, nodes, chance
        self._due, self._delay = chance.randrange(NUM_CELLS), chance.uniform(0.0, MOST_SECONDS)
        self._started, self._finished = 0, 0
        self._thread = threading.Thread(target=self._kill)
        self.after_records: int | None = None  # that had come when the node was killed

    def on_event(self, event: Any) -> None:
        self._started += event.kind == "started"
        self._finished += event.kind == "finished"
        if self._started > self._due and self._thread.ident is None:
            self._thread.start()

    def _kill(self) -> None:
        time.sleep(self._delay)
        node = self._nodes.pop(self._chance.randrange(len(self._nodes)))
        self.after_records = self._finished
        self._cluster.remove_node(node, allow_graceful=False)

    def wait(self) -> None:
        self._thread.join()


def killed_once(number: int, cluster: Any, nodes: list[Any], folder: Path) -> dict[str, Any]:
    """One sweep, whose cells no other one has: what its journal holds in the end."""
    import fleet

    from vramprobe.records import store
    from vramprobe.sweep import runner
    from vramprobe.sweep.fleet import Fleet
    from vramprobe.sweep.on_ray import RayPool

    sweep, many = fleet.cells(number * NUM_CELLS, NUM_CELLS), Fleet(RayPool())
    many.card_of(sweep)
    killer = Killer(cluster, nodes, random.Random(number))
    summary = runner.run(sweep, folder, executor=many, on_event=killer.on_event)
    killer.wait()
    found = store.read(folder)
    records = Counter(record.fingerprint for record in found.records)
    return {
        "sweep": number,
        "killed_after_records": killer.after_records,
        "planned": len(sweep.cells),
        "records": records.total(),
        "missing": sum(cell.fingerprint not in records for cell in sweep.cells),
        "doubled": sum(count - 1 for count in records.values()),
        "lost_attempts": len(found.unfinished),
        "seconds": round(summary.seconds, 1),
    }


def page(rows: list[dict[str, str]]) -> str:
    """The table in words; raises where a sweep lacks or doubles a record."""
    names = ("records", "missing", "doubled")
    wrong = [row["sweep"] for row in rows if [row[name] for name in names] != [row["planned"], "0", "0"]]
    assert not wrong, f"sweeps {', '.join(wrong)} lack or double records"
    while_running = [row for row in rows if int(row["killed_after_records"]) < int(row["planned"])]
    lost = Counter(int(row["lost_attempts"]) for row in rows)
    total = {name: sum(int(row[name]) for row in rows) for name in ("planned", "records", "lost_attempts")}
    table = [
        (attempts, count, sum(int(row["planned"]) for row in rows if int(row["lost_attempts"]) == attempts))
        for attempts, count in sorted(lost.items())
    ]
    lines = [
        "# A node of a Ray cluster killed at random",
        "",
        f"**Result:** {len(while_running)} nodes were killed while cells ran. {total['records']} records of "
        f"{total['planned']} planned cells: none missing, none doubled. {total['lost_attempts']} attempts were lost "
        "and made again.",
        "",
        f"Measured on {NUM_NODES} local nodes of one core each, on one machine with two cores: {len(rows)} sweeps of "
        f"{NUM_CELLS} tiny CPU cells, one kill (SIGKILL of the node's raylet) in each.",
        "",
        *as_markdown(("attempts lost", "sweeps", "records, each cell once"), "rrr", table),
        "",
        "[node_kills.csv](node_kills.csv) has a row per sweep. Rebuild: `python benchmarks/speed/node_kills.py`",
        "",
    ]
    return "\n".join(lines)


def measure_all() -> None:
    """The sweeps that have no row yet, each row written as it ends."""
    warnings.simplefilter("ignore")
    import fleet
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [fleet.add(cluster) for _ in range(NUM_NODES)]
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    rows: list[dict[str, Any]] = list(read_csv(ROWS))
    with tempfile.TemporaryDirectory() as name:
        for number in range(len(rows), NUM_SWEEPS):
            while len(nodes) < NUM_NODES:
                nodes.append(fleet.add(cluster))
            rows.append(killed_once(number, cluster, nodes, Path(name) / str(number)))
            ROWS.write_text(as_csv(rows))
            print(rows[-1], flush=True)
    ray.shutdown()
    cluster.shutdown()


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--check", action="store_true")
    given = words.parse_args()
    if not given.check:
        measure_all()
    write_or_check({PAGE: page(read_csv(ROWS))}, "speed/node_kills.py", check=given.check)


if __name__ == "__main__":
    main()
