"""``watch()`` and VramprobeCallback in processes of their own: on the CPU, and on an emulated GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from emulated import require_emulation

import vramprobe
from vramprobe.emulate.enter import entrance
from vramprobe.errors import SpecError

pytest.importorskip("transformers")
SCRIPT = Path(__file__).with_name("watched_loop.py")


def ran(what: str, folder: Path, *, is_emulated: bool) -> dict[str, Any]:
    """Run the script, and return what its last line says."""
    python, environment = Path(sys.executable), None
    if is_emulated:
        require_emulation()
        way = entrance("RTX-4090")
        python, environment = way.python, way.environment | {"TMPDIR": str(folder)}
    done = subprocess.run([python, SCRIPT, what], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not list(folder.glob("vramprobe-profile-*"))
    return json.loads(done.stdout.splitlines()[-1])


def test_a_trainer_without_a_gpu_measures_nothing_and_predicts(tmp_path: Path) -> None:
    found = ran("trained", tmp_path, is_emulated=False)
    assert found["ranks"] == 0
    assert found["options"]["seq_len"] == 256
    assert found["options"]["batch_size"] == 4
    last = found["reported"][-1]
    assert last["vramprobe/predicted_allocated_gib"] == pytest.approx(found["predicted"] / 2**30)
    assert not any("peak_allocated" in name for log in found["reported"] for name in log)
    assert "vramprobe/predicted_allocated_gib" in found["history"][-1]


@pytest.mark.exhaustive
def test_a_trainer_on_an_emulated_gpu_is_measured_beside_its_prediction(tmp_path: Path) -> None:
    found = ran("trained", tmp_path, is_emulated=True)
    assert found["instrument"] == "emulated"
    first, *_, last = found["reported"]  # by the callback before it in the Trainer's list
    assert first["vramprobe/peak_allocated_gib"] > 0
    assert last["vramprobe/backward_allocated_gib"] <= last["vramprobe/peak_allocated_gib"]
    assert last["vramprobe/predicted_over_measured"] == pytest.approx(1, abs=0.03)
    assert last["vramprobe/at_peak/weights_gib"] > 0
    assert found["history"][-1].keys() >= {name for name in last if name.startswith("vramprobe/")}


@pytest.mark.exhaustive
def test_a_loop_on_an_emulated_gpu_has_its_phases_and_causes(tmp_path: Path) -> None:
    found = ran("watched", tmp_path, is_emulated=True)
    by_phase = {row["phase"]: row for row in found["rows"]}
    assert {"forward", "backward", "optimizer_step"} <= set(by_phase)
    assert max(row["allocated_bytes"] for row in found["rows"]) == found["peak"]
    num_params = 2 * 1024 * 4096 + 4096 + 1024
    assert found["causes"]["weights"] == 4 * num_params
    assert found["causes"]["optimizer_state"] >= 8 * num_params
    assert "fits: RTX-4090" in found["headline"]
    assert "<table>" in found["html"]
    assert found["outcome"] == "ok"
    assert found["second"] > found["peak"]


@pytest.mark.exhaustive
def test_an_out_of_memory_error_is_explained_and_raised_and_nothing_is_lost(tmp_path: Path) -> None:
    found = ran("ran_out", tmp_path, is_emulated=True)
    assert found["outcome"] == "oom"
    assert "256.00 GiB requested" in found["notes"][0]
    assert {row["phase"] for row in found["steps"]} >= {"forward", "backward", "optimizer_step"}
    assert found["other"] == "'theirs'"


def test_a_trace_or_gpu_that_is_not_known_is_refused() -> None:
    with pytest.raises(SpecError, match="trace"), vramprobe.watch(trace="some"):
        pass
    with pytest.raises(Exception, match="RTX-40900"), vramprobe.watch(gpus="RTX-40900"):
        pass
