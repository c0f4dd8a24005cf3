"""One rank of several against the real thing: torch's FSDP and DDP as rank 0 of a fake process group, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
HELD = ("weights", "gradients", "optimizer_state")


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """What benchmarks/sharding.py observes of its few quick cells; in a process of its own, for its process groups."""
    command = [sys.executable, str(ROOT / "benchmarks" / "sharding.py"), "--quick"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("[{")))


def test_shards_gradients_and_state_are_those_of_torch_to_the_byte(rows: list[dict[str, Any]]) -> None:
    """Over 2, 3, 4 and 8 ranks, padding of uneven shards included; packed 4-bit weights with their scales too."""
    held = [row for row in rows if row["number"] in HELD]
    assert {row["num_gpus"] for row in held} == {2, 3, 4, 8}
    assert [row for row in held if row["difference_bytes"]] == []


def test_peaks_are_torchs_but_for_what_one_rank_alone_differs_in(rows: list[dict[str, Any]]) -> None:
    """Gathering, prefetching and reducing to the byte: what is left is padded labels, a mesh, an adapter's scalars."""
    full = [row for row in rows if row["number"] not in HELD and row["method"].startswith("full")]
    adapted = [row for row in rows if row["number"] not in HELD and "LoRA" in row["method"]]
    assert len(full) >= 15
    assert len(adapted) >= 6
    assert [row for row in full if not 0 <= -row["difference_bytes"] <= 700] == []
    assert [row for row in adapted if abs(row["difference_bytes"]) > 0.035 * row["observed_bytes"]] == []
