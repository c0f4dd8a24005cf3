"""A training command on a rented GPU: its task, the prediction that its first steps must hold, status and collect.

SkyPilot and the bucket's command are played by scripts on the PATH; SkyPilot's own loader reads the task, if installed.
"""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import vramprobe
from factories import make_record
from test_launch import PYTHON
from typer.testing import CliRunner

from vramprobe import api
from vramprobe.cli import verbs
from vramprobe.cli.diff import ProfileLimits
from vramprobe.errors import MissingDependency, SpecError, StoreError, VramprobeError
from vramprobe.records import writing
from vramprobe.records.profile import ProfileEnvironment, ProfileRecord, RankProfile
from vramprobe.records.profile_memory import ProfilePeak
from vramprobe.records.profile_outcomes import ProfileError, ProfileOk
from vramprobe.records.step_time import StepTime
from vramprobe.sweep import rented

COMMAND = ["python", "train.py", "--name", "two words"]


def profiled(seconds: float | None = 0.5, **more: Any) -> ProfileRecord:
    """An emulated run of a training command on one H100."""
    peak = ProfilePeak(phase="backward", allocated_bytes=10 * 2**30, reserved_bytes=11 * 2**30)
    rank = RankProfile(pid=1, device=0, phases=[], num_steps=3, peak=peak)
    step = {"gpu": "H100-SXM", "step": 2, "low_seconds": 0.4, "high_seconds": 0.6, "condition": "c", "mfu": 0.4}
    step |= {"hfu": 0.4, "by_class": {}, "flops": 1, "num_bytes": 1, "num_launches": 1, "unclaimed_share": 0.0}
    values = {
        "attempt_id": "a",
        "name": "train.py",
        "command": COMMAND,
        "started_at": "2026-03-01T12:00:00Z",
        "instrument": "emulated",
        "outcome": ProfileOk(stopped=True),
        "environment": ProfileEnvironment(device_name="NVIDIA H100 80GB HBM3", emulator="1"),
        "ranks": [rank],
        "step_time": None if seconds is None else StepTime(seconds=seconds, **step),
    }
    return ProfileRecord(**(values | more))


def saved(file: Path, record: ProfileRecord) -> Path:
    writing.append(file, record)
    return file


def launched(tmp_path: Path, record: ProfileRecord, gpu: str = "H100-SXM", **more: Any) -> tuple[Any, dict[str, Any]]:
    predicted = saved(tmp_path / "predicted.jsonl", record)
    words = {"predicted": predicted, "bucket": "s3://mine", "out": tmp_path / "out", "folder": tmp_path} | more
    task, file = api.launch_command(COMMAND, gpu, **words)
    return task, yaml.safe_load(file.read_text())


def test_the_first_steps_are_a_gate_and_then_the_command_runs(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("trl\n")
    task, content = launched(tmp_path, profiled(), usd_per_hour=2.0)
    assert task.usd_per_1000_steps == pytest.approx(2.0 * 500 / 3600)
    assert content["workdir"] == str(tmp_path)
    assert content["setup"].startswith("pip install -r requirements.txt\npip install ")
    assert content["file_mounts"]["~/.vramprobe/predicted.jsonl"] == str(tmp_path / "predicted.jsonl")
    lines = content["run"].splitlines()
    assert lines[0] == "set -e"
    assert lines[-1] == shlex.join(COMMAND)
    (gate,) = [line for line in lines if "vramprobe profile" in line]
    assert "--trace none --steps 10 --max-growth 5% --max-slowdown 1.5 --baseline" in gate
    assert gate.endswith(f"-- {shlex.join(COMMAND)}")


@pytest.mark.parametrize(("status", "runs"), [(0, ["profile", "train"]), (1, ["profile"])])
def test_the_shell_goes_on_only_where_the_gate_holds(status: int, runs: list[str], tmp_path: Path) -> None:
    """The task's own script, by a shell that has a vramprobe and a python that only tell; a second run asks no more."""
    _, content = launched(tmp_path, profiled())
    told, script = tmp_path / "told", content["run"].replace("/vramprobe-results", str(tmp_path / "mount"))
    for name, line in (
        ("vramprobe", f'echo "$1" >> {told}; [ "$1" != profile ] || exit {status}'),
        ("python", f"echo train >> {told}"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", script], env=env)
    assert (done.returncode, told.read_text().split()) == (status, runs)
    told.unlink()
    subprocess.run(["bash", "-c", script], env=env)
    assert told.read_text().split() == [one for one in runs if status or one != "profile"]


def test_what_cannot_be_held_to_a_prediction_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"is of emulated NVIDIA H100 80GB HBM3, and H200 is to be rented"):
        launched(tmp_path, profiled(), "H200")
    with pytest.raises(SpecError, match="ended as error"):
        launched(tmp_path, profiled(outcome=ProfileError(exit_status=1, last_lines=[])))
    with pytest.raises(StoreError):
        api.launch_command(COMMAND, "H100-SXM", predicted=tmp_path / "none", bucket="s3://mine", out=tmp_path)
    _, content = launched(tmp_path, profiled(seconds=None))
    assert "--max-slowdown" not in content["run"]
    words = ["launch", "--gpu", "H200", "--bucket", "mine", "--dry-run", "--", *COMMAND]
    assert "is a command: predict it first" in vramprobe(*words, cwd=tmp_path).stderr


def test_a_step_slower_than_allowed_ends_with_1(tmp_path: Path) -> None:
    predicted = str(saved(tmp_path / "predicted.jsonl", profiled(0.5)))
    limits = ProfileLimits(None, None, Path(predicted), 1.5)
    for seconds, exceeded in ((0.7, False), (0.8, True), (None, True)):
        real = profiled(None, instrument="cuda", measured_step_seconds=seconds)
        assert limits.exceeded_by(real, None) is exceeded
    with pytest.raises(SpecError, match="of which time"):
        ProfileLimits(None, None, saved(tmp_path / "other.jsonl", profiled(None)), 1.5)


def play(folder: Path, **scripts: str) -> dict[str, str]:
    """The environment of a shell that has these commands."""
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_status_and_collect_show_each_job_beside_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    task, _ = launched(tmp_path, profiled(), usd_per_hour=2.0)
    (sweep,), _ = api.launch_tasks("h200-speed", ["H200"], bucket="s3://mine", out=out, usd_per_hour=3.0)
    jobs = [
        {"job_id": 1, "job_name": sweep.name, "status": "FAILED", "job_duration": 60.0, "recovery_count": 0},
        {"job_id": 2, "job_name": sweep.name, "status": "RUNNING", "job_duration": 1800.0, "recovery_count": 1},
    ]
    costs = [{"name": f"{sweep.name}-2", "total_cost": 1.75}, {"name": "other-1", "total_cost": 9.0}]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    sky = f'echo "SkyPilot says hello"; [ "$1" = jobs ] && cat {tmp_path}/jobs.json || cat {tmp_path}/costs.json'
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "records.jsonl").write_text(make_record().to_json_line() + "\n")
    aws = f'[ "$1 $2 $3" = "s3 sync s3://mine" ] && cp {tmp_path}/bucket/* "$4"'
    for name, value in play(tmp_path, sky=sky, aws=aws).items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(verbs.app, ["status", "-o", str(out), "--json"])
    waiting, running = json.loads(done.stdout)
    assert (waiting["name"], waiting["status"], waiting["dollars"]) == (task.name, None, None)
    assert (running["status"], running["num_recoveries"]) == ("RUNNING", 1)
    assert (running["dollars"], running["billed"]) == (1.5, 1.75)
    assert running["planned_dollars"] == pytest.approx(sweep.plan.dollars, abs=1e-4)
    done = CliRunner().invoke(verbs.app, ["collect", "-o", str(out), "--json"])
    said = json.loads(done.stdout)
    assert (said["outcomes"], len(said["jobs"])) == ({"ok": 1}, 2)
    assert (out / "records" / "records.jsonl").exists()
    shown = CliRunner().invoke(verbs.app, ["status", "-o", str(out)]).stdout
    assert "not started" in shown
    assert "$1.75" in shown


def test_what_status_and_collect_cannot_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="no launch was planned in"):
        rented.status(tmp_path / "none")
    api.launch_tasks("h200-speed", ["H200"], bucket="plain-name", out=tmp_path)
    with pytest.raises(SpecError, match="has a launch into plain-name"):
        api.launch_tasks("h200-speed", ["H200"], bucket="s3://other", out=tmp_path)
    with pytest.raises(SpecError, match="only s3:// and gs:// are copied"):
        rented.collect(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependency, match="the jobs are SkyPilot's"):
        rented.status(tmp_path)
    play(tmp_path, sky="echo no server >&2; exit 3")
    with pytest.raises(VramprobeError, match="ended with 3: no server"):
        rented.status(tmp_path)


LOAD = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
print(json.dumps([task.name, [str(one.cloud) for one in task.resources], [one.use_spot for one in task.resources]]))
"""


@pytest.mark.skipif(PYTHON is None, reason="SkyPilot is not installed: pip install 'vramprobe[cloud]'")
def test_skypilots_own_loader_takes_the_task_of_a_command(tmp_path: Path) -> None:
    launched(tmp_path, profiled(), bucket="my-records", provider="runpod", spot=True)
    (file,) = (tmp_path / "out").glob("*.yaml")
    env = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run([PYTHON, "-c", LOAD, str(file)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert found == ["vramprobe-train-h100-sxm", ["RunPod"] * len(found[1]), [True] * len(found[1])]
