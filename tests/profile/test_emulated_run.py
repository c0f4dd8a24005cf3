"""The real allocator's history of an emulated training: sums to the byte, and a replay that reserves what torch did."""

from pathlib import Path

import pytest
from grids import grid
from run_command import profiled

from vramprobe.profile.analyse import analyse
from vramprobe.profile.analyzed_rank import see
from vramprobe.profile.run_files import read_run
from vramprobe.units import MIB

#: Four linear layers of 1024 × 1024 in fp32, Adam, three steps; a buffer that nobody holds.
SCRIPT = """
import os, torch
def load():
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)]
    return torch.nn.Sequential(*layers).cuda(), torch.zeros(512, 1024, device="cuda")
model, batch = load()
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
for step in range(3):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("alloc_conf", grid(["", "expandable_segments:True"], ""))
def test_a_real_history_closes(alloc_conf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", alloc_conf)
    assert profiled(tmp_path, SCRIPT).exit_status == 0
    (raw,) = read_run(tmp_path / "run").ranks
    spans = see(raw).spans
    assert len(spans) == len(raw.phases)
    assert all(span.closes for span in spans)
    record = analyse(tmp_path / "run", gpus=["RTX-4090", "A10"])
    (rank,) = record.ranks
    assert record.warnings == []
    assert rank.repeats is True
    at_peak = rank.at_peak
    assert at_peak.total_bytes == rank.peak.requested_bytes
    assert (at_peak.weights_bytes, at_peak.gradients_bytes) == (4 * 4 * MIB, 4 * 4 * MIB)
    assert at_peak.optimizer_state_bytes == 2 * 4 * 4 * MIB
    assert rank.at_peak_of.startswith("optimizer_step of step")
    weights = next(one for one in rank.largest if one.cause == "weights")
    assert (weights.parameter, weights.num_blocks, weights.function) == ("*.weight", 4, "load")
    assert weights.line.startswith("script.py:")
    for verdict in record.cards:
        assert (verdict.verdict, verdict.reserved_bytes) == ("fits", rank.peak.reserved_bytes)
