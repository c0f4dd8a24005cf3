"""A campaign on Ray and on Slurm (submitit's local engine) with real cells, killed and run again."""

import contextlib
import importlib.util
import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from factories import TINY_LLAMA_PATH
from processes import is_alive, run_until

from vramprobe.records import store
from vramprobe.sweep import stages

#: ``vramprobe``, where ``slurm`` is submitit's local engine.
VRAMPROBE = """
from vramprobe.sweep.on_slurm import SlurmPool
from vramprobe.__main__ import main
SlurmPool.__init__.__kwdefaults__["cluster"] = "local"
main()
"""
PACKAGES = {"ray": "ray", "slurm": "submitit"}
SMALL = f"model: {TINY_LLAMA_PATH}, seq_len: [16, 32], timing_steps: 0"
CAMPAIGN = f"""
stages:
  calibration: {{sweep: {{cells: [{{{SMALL}, method: [full, lora], batch_size: [1, 2]}}]}}}}
  model: {{fit: calibration}}
  held-out: {{predict_with: model, sweep: {{cells: [{{{SMALL}, method: full, batch_size: 4}}]}}}}
"""


def running_in(folder: Path) -> list[psutil.Process]:
    """Living processes whose working folder this is: of a killed command, jobs that go on."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and is_alive(process):
                found.append(process)
    return found


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("on", PACKAGES)
def test_kill_9_of_a_campaign_on_a_fleet_loses_no_record_and_doubles_none(on: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(PACKAGES[on]) is None:
        pytest.skip(f"{PACKAGES[on]} is not installed")
    (tmp_path / "some.yaml").write_text(CAMPAIGN)
    words = [sys.executable, "-c", VRAMPROBE, "run", "some.yaml", "--device", "cpu", "--on", on, "--out", "out"]
    words += ["--jobs", "2"] if on == "slurm" else []

    def num_records() -> int:
        return sum(len(stages.read_records(folder)) for folder in (tmp_path / "out").glob("*"))

    for is_enough in (lambda: num_records() >= 3, lambda: num_records() >= 9, None):
        status, said = run_until(words, tmp_path / "log", is_enough, cwd=tmp_path)
        ends = {0} if is_enough is None else {-signal.SIGKILL}
        if num_records() == 10:  # the last cell may have ended before the kill
            ends.add(0)
        assert status in ends, said
    found = Counter(record.fingerprint for record in store.read(tmp_path / "out").records)
    assert sorted(found.values()) == [1] * 10
    assert "stage model: no fit, as no record was measured on a GPU" in said
    assert (
        json.loads((tmp_path / "out" / "held-out" / stages.PREDICTIONS).read_text()) == {}
    )  # the CPU is not predicted
    while running_in(tmp_path):
        time.sleep(0.1)
