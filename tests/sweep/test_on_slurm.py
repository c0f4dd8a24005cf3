"""Slurm, by submitit's local engine: jobs are processes of this machine; skipped where submitit is not installed."""

import os
import signal
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from factories import make_spec
from grids import exhaustive
from processes import command_line

from vramprobe.errors import MissingDependency, SpecError
from vramprobe.records import store
from vramprobe.records.record import record_from_json
from vramprobe.sweep import on_slurm, runner
from vramprobe.sweep.definition import Sweep
from vramprobe.sweep.fleet import Fleet, fleet_on
from vramprobe.sweep.nodes import Lost, Needs
from vramprobe.sweep.on_slurm import OnNode, SlurmPool
from vramprobe.units import GIB

submitit = pytest.importorskip("submitit", reason="submitit is not installed: pip install 'vramprobe[slurm]'")

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def asked(attempt_id: str, **more: Any) -> dict[str, Any]:
    words = {"spec": make_spec(timing_steps=0).model_dump_json(), "started_at": datetime.now(UTC).isoformat()}
    limits = {"timeout_seconds": 100.0, "left_seconds": 100.0}
    return words | limits | {"attempt_id": attempt_id, "verify": False, "log": "a.log"} | more


@exhaustive  # the same station as tests/sweep/test_fleet.py's, which three processes load libraries for
def test_a_job_looks_at_its_node_runs_a_cell_and_one_that_fails_is_lost(tmp_path: Path) -> None:
    pool = SlurmPool(2, cluster="local", folder=tmp_path)
    (node,) = pool.nodes([make_spec().model_dump_json()])
    assert (node.environments[0].versions["torch"] is not None, node.num_slots(Needs(1, 0, GIB))) == (True, 2)
    pool.submit(asked("good"), Needs(1, 0, GIB), [node], ["llama"])
    pool.submit(asked("bad", spec="{}"), Needs(1, 0, GIB), [node], ["llama"])
    found: dict[str, Any] = {}
    deadline = time.monotonic() + 200
    while len(found) < 2:
        assert time.monotonic() < deadline
        found |= pool.ended(1.0)
    assert record_from_json(found["good"]["record"]).outcome.kind == "ok"
    assert found["good"]["node"] == os.uname().nodename
    assert isinstance(found["bad"], Lost)


def jobs_of(process: psutil.Process) -> list[psutil.Process]:
    return [one for one in process.children(recursive=True) if "submitit.core._submit" in command_line(one)]


@exhaustive
def test_a_killed_job_is_tried_again(tmp_path: Path) -> None:
    cells = tuple(make_spec(seq_len=16 * number, timing_steps=0) for number in range(1, 5))
    sweep = Sweep(name="slurm", description="", cells=cells, held_out=frozenset(), notes=())
    fleet, killed = Fleet(SlurmPool(2, cluster="local", folder=tmp_path / "jobs")), []
    fleet.card_of(sweep)

    def on_event(event: runner.Progress) -> None:
        if event.kind == "finished" and not killed:
            for job in jobs_of(psutil.Process())[:1]:
                job.send_signal(signal.SIGKILL)
                killed.append(job)

    summary = runner.run(sweep, tmp_path / "out", executor=fleet, on_event=on_event)
    assert (summary.counts(), summary.left) == ({"ok": 4}, 0)
    contents = store.read(tmp_path / "out")
    assert Counter(one.fingerprint for one in contents.records) == Counter(one.fingerprint for one in cells)


def test_a_preempted_job_makes_its_attempt_again() -> None:
    again = OnNode().checkpoint({"attempt_id": "a"}, None, ["llama"])
    assert isinstance(again.function, OnNode)
    assert again.args == ({"attempt_id": "a"}, None, ["llama"])


SBATCH = """#!/bin/sh
cat "$1" >> {folder}/scripts
[ -e {folder}/refuses ] && echo 'sbatch: error: Invalid account' >&2 && exit 1
echo Submitted batch job 7
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of PATH with Slurm's commands, played: jobs wait in the queue."""
    folder = tmp_path / "bin"
    folder.mkdir()
    accounts = "#!/bin/sh\necho 'JobID|State|NodeList'\nfor task in 0 1; do echo \"7_$task|PENDING|\"; done\n"
    commands = {"sbatch": SBATCH.format(folder=tmp_path), "sacct": accounts, "sinfo": "#!/bin/sh\necho '(null)'\n"}
    for name, text in (commands | {"srun": "#!/bin/sh\n", "scancel": "#!/bin/sh\n"}).items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path


def test_cells_that_need_about_the_same_are_one_array_and_wait_in_the_queue(slurm: Path) -> None:
    pool = SlurmPool(4, folder=slurm / "jobs")
    (node,) = pool.nodes([])
    assert node.num_gpus == 0  # as sinfo says
    for name, size in (("a", 1.2), ("b", 1.9)):
        pool.submit(asked(name), Needs(1, 0, int(size * GIB)), [node], ["llama"])
    assert pool.ended(0.0) == []
    script = (slurm / "scripts").read_text()
    assert [line for line in script.splitlines() if "--array" in line or "--mem" in line] == [
        "#SBATCH --array=0-1%2",
        "#SBATCH --mem=2GB",
    ]
    assert [pool.is_queued(name) for name in "ab"] == [True, True]


def test_what_slurm_refuses_is_said_in_a_line(slurm: Path) -> None:
    (slurm / "refuses").touch()
    pool = SlurmPool(4, folder=slurm / "jobs")
    with pytest.raises(MissingDependency, match=r"Slurm takes no job that looks at a node: .*Invalid account"):
        pool.nodes([make_spec().model_dump_json()])
    pool.submit(asked("a"), Needs(1, 0, GIB), [], ["llama"])
    (lost,) = pool.ended(0.0)
    assert lost[1].why.endswith("Invalid account")


def test_why_a_job_failed_is_the_last_line_of_its_trace_or_slurms_state() -> None:
    rule = "-" * 22
    trace = f"Job (task=0) failed during processing with trace:\n{rule}\nTraceback\nOSError: full\n{rule}\nYou can"
    assert on_slurm._reason(RuntimeError(trace)) == "OSError: full"
    gone = "Job 7 (task: 0) with path a.pkl\nhas not produced any output (state: CANCELLED by 0)\nError stream"
    assert on_slurm._reason(RuntimeError(gone)) == "Slurm says CANCELLED by 0"


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(on_slurm.shutil, "which", lambda name: None)
    with pytest.raises(MissingDependency, match="needs sbatch, and there is none here"):
        fleet_on("slurm")
    with pytest.raises(SpecError, match="--jobs must be at least 1, 0 given"):
        SlurmPool(0, cluster="local", folder=tmp_path)
    with pytest.raises(SpecError, match="--jobs 3 is for --on slurm"):
        fleet_on("ray", jobs=3)
