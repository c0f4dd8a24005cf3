"""Ray itself: a cluster of local nodes, one of them killed mid-way; skipped where Ray is not installed."""

import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import HERE
from factories import TINY_LLAMA_PATH, make_spec
from processes import run_until

from vramprobe.errors import MissingDependency
from vramprobe.records import store
from vramprobe.sweep import runner
from vramprobe.sweep.definition import Sweep
from vramprobe.sweep.fleet import Fleet, fleet_on
from vramprobe.sweep.on_ray import RayPool
from vramprobe.sweep.progress import Progress
from vramprobe.sweep.stages import read_records
from vramprobe.units import GIB

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'vramprobe[ray]'")

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without cores; nodes are added by the test."""
    with warnings.catch_warnings(action="ignore"):
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        yield made
        ray.shutdown()
        made.shutdown()


def test_a_killed_node_costs_its_running_cells_which_are_tried_again_elsewhere(cluster: Any, tmp_path: Path) -> None:
    added = [cluster.add_node(num_cpus=1, include_dashboard=False, memory=4 * GIB) for _ in range(2)]
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    cells = tuple(make_spec(seq_len=16 * number, timing_steps=0) for number in range(1, 13))
    sweep = Sweep(name="ray", description="", cells=cells, held_out=frozenset(), notes=())
    fleet, events = Fleet(RayPool()), []
    assert (fleet.device, fleet.card_of(sweep), fleet.num_slots) == ("cpu", None, 2)

    def on_event(event: Progress) -> None:
        events.append(event)
        if len([one for one in events if one.kind == "finished"]) == 4 and event.kind == "finished":
            cluster.remove_node(added[0], allow_graceful=False)

    summary = runner.run(sweep, tmp_path, executor=fleet, on_event=on_event)
    contents = store.read(tmp_path)
    assert (summary.counts(), summary.left) == ({"ok": 12}, 0)
    assert Counter(one.fingerprint for one in contents.records) == Counter(one.fingerprint for one in cells)
    assert {event.node for event in events if event.kind == "finished"} == {node.name for node in fleet.series}
    assert len(contents.unfinished) <= 1  # the cell that the killed node was running, where it was between no two
    assert {record.environment.num_threads for record in contents.records} == {1}


def test_a_cluster_that_does_not_answer_is_an_error_in_one_line() -> None:
    with pytest.raises(MissingDependency, match=r"no Ray cluster answers at ray://127.0.0.1:9"):
        fleet_on("ray://127.0.0.1:9")


@pytest.mark.exhaustive
def test_without_its_head_node_a_sweep_ends_and_goes_on_with_a_new_one(tmp_path: Path) -> None:
    """Ray itself ends the command, once it has waited for the head node; here for 5 seconds instead of 60."""
    from ray.cluster_utils import Cluster

    cells = f"model: {TINY_LLAMA_PATH}, method: lora, batch_size: 1, seq_len: {list(range(16, 216, 16))}"
    (tmp_path / "some.yaml").write_text(f"cells: [{{{cells}, timing_steps: 0}}]")
    words = [sys.executable, "-m", "vramprobe", "run", "some.yaml", "--device", "cpu", "--on", "ray", "--out", "out"]

    for is_enough in (lambda: len(read_records(tmp_path / "out")) >= 3, None):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        cluster.add_node(num_cpus=1, include_dashboard=False, memory=4 * GIB)
        env = os.environ | {"RAY_ADDRESS": cluster.address, "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}

        def end(_: Any, head: Any = cluster.head_node) -> None:
            head.kill_all_processes(check_alive=False, allow_graceful=False)

        status, said = run_until(words, tmp_path / "log", is_enough, end, cwd=tmp_path, env=env | {"PYTHONPATH": HERE})
        cluster.shutdown()
        assert status == 0 if is_enough is None else status and "Failed to connect to GCS within 5 seconds" in said, (
            said
        )
    found = Counter(record.fingerprint for record in store.read(tmp_path / "out").records)
    assert sorted(found.values()) == [1] * 13
