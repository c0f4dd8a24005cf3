"""The real allocator's history of an emulated training: sums to the byte, and a replay that reserves what torch did."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from emulated import require_emulation
from grids import grid
from profile_factory import write_launcher

from vramprobe.emulate.enter import entrance
from vramprobe.profile.analyse import analyse
from vramprobe.profile.analyzed_rank import see
from vramprobe.profile.run_files import read_run
from vramprobe.units import MIB

SCRIPT = Path(__file__).parent / "emulated_training.py"


@pytest.mark.parametrize("alloc_conf", grid(["", "expandable_segments:True"], ""))
def test_a_real_history_closes(alloc_conf: str, tmp_path: Path) -> None:
    require_emulation()
    way = entrance("RTX-4090")
    environment = way.environment | {"PYTORCH_CUDA_ALLOC_CONF": alloc_conf, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [str(way.python), str(SCRIPT), str(tmp_path)], env=environment, capture_output=True, text=True
        )
    finally:
        shutil.rmtree(way.machine, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    write_launcher(tmp_path)
    raw = read_run(tmp_path).ranks[0]
    assert raw.history is not None
    seen = see(raw)
    assert seen is not None
    spans = seen.spans
    assert len(spans) == len(raw.phases) == 13
    assert all(span.closes for span in spans)
    record = analyse(tmp_path, gpus=["RTX-4090", "A10"])
    (rank,) = record.ranks
    assert record.warnings == []
    assert rank.repeats is True
    at_peak = rank.at_peak
    assert at_peak is not None
    assert at_peak.total_bytes == rank.peak.requested_bytes
    assert (at_peak.weights_bytes, at_peak.gradients_bytes) == (4 * 4 * MIB, 4 * 4 * MIB)
    assert at_peak.optimizer_state_bytes == 2 * 4 * 4 * MIB
    assert rank.at_peak_of == "optimizer_step of step 1"
    assert rank.largest[0].parameter is None
    weights = next(one for one in rank.largest if one.cause == "weights")
    assert (weights.parameter, weights.num_blocks, weights.function) == ("*.weight", 4, "load")
    assert weights.line.startswith("emulated_training.py:")
    for verdict in record.cards:
        assert (verdict.verdict, verdict.reserved_bytes) == ("fits", rank.peak.reserved_bytes)
