"""``vramprobe calibrate-gpu`` whole, on an emulated card where the GPU would be, with faults injected."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from command_line import HERE, vramprobe
from emulated import require_emulation
from grids import exhaustive
from processes import cell_of

from vramprobe import api
from vramprobe.records import store

#: One that fits, one that runs out of memory for real (t5 has no arithmetic, so it is not skipped), one that is long.
SWEEP = """
defaults: {timing_steps: 1}
cells:
  - {model: smollm2-135m, method: lora, batch_size: 1, seq_len: 128, num_layers: 2}
  - {model: t5-small, method: full, batch_size: 64, seq_len: 1024, limit_vram: 2GiB}
  - {model: smollm2-135m, method: full, batch_size: 1, seq_len: 128, num_layers: 8, steps: 40}
"""
WORDS = ("calibrate-gpu", "./cells.yaml", "--emulate", "RTX-4090", "--no-doctor", "-o", "out")


def test_without_a_gpu_there_is_one_line_that_says_so(tmp_path: Path) -> None:
    done = vramprobe("calibrate-gpu", "--no-doctor", "-o", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert "no NVIDIA GPU is visible here" in done.stderr
    assert "nothing to contribute" in done.stdout
    refused = vramprobe("calibrate-gpu", "--minutes", "0", cwd=tmp_path)
    assert "--minutes 0 given; allowed: 1 to 1440" in refused.stderr


@exhaustive
@pytest.mark.timeout(900)
def test_it_goes_on_after_an_oom_a_killed_worker_and_an_interruption(tmp_path: Path) -> None:
    require_emulation()
    (tmp_path / "cells.yaml").write_text(SWEEP)
    command, env = [sys.executable, "-m", "vramprobe", *WORDS], os.environ | {"PYTHONPATH": HERE}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=tmp_path, env=env, text=True, **pipes)
    journal, killed = tmp_path / "out" / "measured" / "records.jsonl", False
    deadline = time.monotonic() + 300
    while not journal.exists() or len(store.read(journal, allow_empty=True).records) < 2:  # kill one, then interrupt
        assert time.monotonic() < deadline
        if not killed and (cell := cell_of(psutil.Process(process.pid))) is not None:
            cell.kill()
            killed = True
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 143, said
    assert (tmp_path / "out" / "truth.md").exists()
    done = vramprobe(*WORDS, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    records = store.latest_by_fingerprint(store.read(journal).records).values()
    assert sorted(record.outcome.kind for record in records) == ["ok", "ok", "oom"]
    assert "outcome: 0 of 3 cells ended otherwise" in done.stdout
    assert "allocated: 2 of 2 cells within 1 KiB" in done.stdout
    assert api.check(tmp_path / "out" / "contribution.jsonl").ok
