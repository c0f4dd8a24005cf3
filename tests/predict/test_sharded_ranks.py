"""One rank of several against the real thing: torch's FSDP and DDP as rank 0 of a fake process group, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HELD = ("weights", "gradients", "optimizer_state")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """What benchmarks/ranks/sharding.py observes of its quick cells; a process of its own, for its process groups."""
    command = [sys.executable, str(ROOT / "benchmarks" / "ranks" / "sharding.py"), "--quick"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("[{")))


def test_shards_gradients_and_state_are_those_of_torch_to_the_byte(rows: list[dict[str, Any]]) -> None:
    """Over 2, 3, 4 and 8 ranks, padding of uneven shards included; packed 4-bit weights with their scales too."""
    held = [row for row in rows if row["number"] in HELD]
    assert {row["num_gpus"] for row in held} == {2, 3, 4, 8}
    assert [row for row in held if row["difference_bytes"]] == []


def test_peaks_are_torchs_but_for_what_one_rank_alone_differs_in(rows: list[dict[str, Any]]) -> None:
    """Gathering, prefetching and reducing to the byte: left are the loss's padded labels (528 B) and the mesh."""
    peaks = [row for row in rows if row["number"] not in HELD]
    assert len(peaks) == 3 * 10
    # bitsandbytes makes its code books once a process, 1.3 KB that belong to no model
    limits = [2000 if row["method"].startswith("QLoRA") else 700 for row in peaks]
    assert [row for row, limit in zip(peaks, limits, strict=True) if not 0 <= -row["difference_bytes"] <= limit] == []
