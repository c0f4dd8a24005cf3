"""Tasks for SkyPilot: what is written, what is refused, and that SkyPilot's own loader takes it (if installed)."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from command_line import HERE, vramprobe
from emulated import require_emulation
from processes import run_until
from typer.testing import CliRunner

from vramprobe import api
from vramprobe.cli import verbs
from vramprobe.errors import SpecError, UnknownName
from vramprobe.recommend.prices import skypilot_gpu
from vramprobe.records import store
from vramprobe.sweep.launch import MOUNTED, skypilot_names

#: SkyPilot wants an environment of its own, as in tests/recommend/test_skypilot.py.
PYTHON = os.environ.get("VRAMPROBE_SKYPILOT_PYTHON") or (sys.executable if find_spec("sky") else None)
DATA = Path(__file__).parents[1] / "data" / "skypilot"
#: As SkyPilot tests its own optimizer: catalogs that nobody fetched, and clouds that are called enabled.
CHOOSE = """
import json, sys, sky
from sky import check, clouds, optimizer
check.get_cached_enabled_clouds_or_refresh = lambda *_, **__: [clouds.RunPod(), clouds.Lambda(), clouds.AWS()]
for file in sys.argv[1:]:
    task = sky.Task.from_yaml(file)
    with sky.Dag() as dag:
        dag.add(task)
    optimizer.Optimizer.optimize(dag, quiet=True)
    best = task.best_resources
    print(json.dumps([task.name, str(best.cloud), best.accelerators, best.use_spot, best.get_cost(3600)]))
"""


def test_a_task_gates_runs_and_keeps_its_records(tmp_path: Path) -> None:
    tasks, files = api.launch_tasks(
        "h200-speed", ["H100-SXM", "RTX-4090"], bucket="s3://mine", out=tmp_path, spot=True, budget=5.0
    )
    assert [file.name for file in files] == ["vramprobe-h200-speed-h100-sxm.yaml", "vramprobe-h200-speed-rtx-4090.yaml"]
    content = yaml.safe_load(files[0].read_text())
    assert content["resources"]["use_spot"] is True
    assert content["resources"]["autostop"] == {"idle_minutes": 10, "down": True}
    assert "H100-SXM" in content["resources"]["accelerators"]
    assert content["file_mounts"] == {"/vramprobe-results": {"source": "s3://mine", "mode": "MOUNT_CACHED"}}
    _, gate, run = content["run"].strip().splitlines()
    assert gate == "vramprobe doctor --device cuda"
    assert run.startswith(
        "vramprobe run h200-speed --device cuda --out /vramprobe-results/h100-sxm/h200-speed --budget"
    )
    assert sum(task.budget for task in tasks) == pytest.approx(5.0, abs=0.01)
    assert tasks[0].budget / tasks[1].budget == pytest.approx(tasks[0].plan.dollars / tasks[1].plan.dollars, rel=0.05)


def test_each_of_skypilots_names_leads_back_to_its_gpu() -> None:
    assert skypilot_names("A100-40GB-SXM") == ["A100-40GB-SXM", "A100-40GB", "A100"]
    assert "RTX4090" in skypilot_names("RTX-4090")
    for gpu in ("A100-80GB-SXM", "H100-SXM", "H200", "L4", "L40S", "T4"):
        assert {skypilot_gpu(name) for name in skypilot_names(gpu)} == {gpu}


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    words = {"bucket": "s3://mine", "out": tmp_path}
    with pytest.raises(SpecError, match="bucket 'No Bucket' given"):
        api.launch_tasks("h200-speed", ["H200"], bucket="No Bucket", out=tmp_path)
    with pytest.raises(UnknownName, match="H1000"):
        api.launch_tasks("h200-speed", ["H1000"], **words)
    with pytest.raises(SpecError, match="more than 0 dollars"):
        api.launch_tasks("h200-speed", ["H200"], budget=-1.0, **words)
    (tmp_path / "mine.yaml").write_text("cells: []")
    with pytest.raises(SpecError, match="is not sent to the machine"):
        api.launch_tasks(tmp_path / "mine.yaml", ["H200"], **words)


def test_without_dry_run_skypilots_command_starts_each_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "told"
    fake = tmp_path / "sky"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {told}\n')
    fake.chmod(0o755)
    words = ["launch", "h200-speed", "--gpu", "H200", "--bucket", "mine", "-o", str(tmp_path / "out")]
    dry = CliRunner().invoke(verbs.app, [*words, "--dry-run", "--json"])
    assert dry.exit_code == 0, dry.output
    assert json.loads(dry.stdout)[0]["command"][:3] == ["sky", "jobs", "launch"]
    assert not told.exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert vramprobe(*words).returncode == 0
    assert told.read_text().split()[:4] == ["jobs", "launch", "--yes", "--detach-run"]
    fake.unlink()
    assert "needs SkyPilot's command" in vramprobe(*words).stderr


@pytest.mark.skipif(PYTHON is None, reason="SkyPilot is not installed: pip install 'vramprobe[cloud]'")
def test_skypilots_own_loader_and_optimizer_take_the_tasks(tmp_path: Path) -> None:
    """SkyPilot chooses the machine that each task asks for, among machines and prices that are made up."""
    files, catalogs = [], tmp_path / ".sky" / "catalogs" / "v8"
    for file in DATA.rglob("*.csv"):
        name = file.relative_to(DATA) if file.parent != DATA else Path(file.stem) / "vms.csv"
        (catalogs / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, catalogs / name)
    for provider, gpu, spot in (("runpod", "RTX-4090", True), ("lambda", "A10", False), ("aws", "L4", True)):
        words = {"bucket": "s3://my-records", "out": tmp_path / provider, "provider": provider, "spot": spot}
        files += api.launch_tasks("h200-speed", [gpu], **words)[1]
    env = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(
        [PYTHON, "-c", CHOOSE, *map(str, files)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")] == [
        ["vramprobe-h200-speed-rtx-4090", "RunPod", {"RTX4090": 1}, True, 0.35],
        ["vramprobe-h200-speed-a10", "Lambda", {"A10": 1}, False, 0.75],
        ["vramprobe-h200-speed-l4", "AWS", {"L4": 1}, True, 0.3],
    ]


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_preempted_job_goes_on_from_what_the_bucket_has(tmp_path: Path) -> None:
    """The task's own script, twice ended without a word and started again; the rented GPU is an emulated one."""
    require_emulation()
    (task,), (file,) = api.launch_tasks("quickstart", ["RTX-4090"], bucket="s3://mine", out=tmp_path / "launch")
    script = yaml.safe_load(file.read_text())["run"]
    script = script.replace("--device cuda", "--emulate RTX-4090").replace(MOUNTED, str(tmp_path / "bucket"))
    (tmp_path / "vramprobe").write_text(f'#!/bin/sh\nexec {sys.executable} -m vramprobe "$@"\n')
    (tmp_path / "vramprobe").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": HERE}

    def num_records() -> int:
        return sum(file.read_bytes().count(b'"outcome"') for file in (tmp_path / "bucket").rglob("records.jsonl"))

    for is_enough in (lambda: num_records() >= 2, lambda: num_records() >= 7, None):
        status, said = run_until(["bash", "-c", script], tmp_path / "log", is_enough, env=env)
        assert status == (0 if is_enough is None else -signal.SIGKILL), said
    contents = store.read(tmp_path / "bucket")
    found = Counter(record.fingerprint for record in contents.records)
    assert found == Counter(row.spec.fingerprint for row in task.plan.rows)
    assert len(contents.unfinished) <= 2  # what each kill cost
