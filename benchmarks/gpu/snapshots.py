"""The allocator's replay held against whole cells: ``python benchmarks/gpu/snapshots.py FILE.json`` (a GPU's job).

Each cell is set up and trained for two steps in a process of its own under torch's memory history; the replay of that
history is compared with the segments that torch took (vramprobe/simulate/against_snapshot.py). The file gets one object
a cell: reserved peaks of both, the largest gap, and where the two first parted. The snapshots themselves are large and
are not kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vramprobe.measure.launcher import allocator_settings, worker_environment
from vramprobe.simulate.against_snapshot import Comparison
from vramprobe.spec import CellSpec, resolve

_COMMON = {"model": "llama-3.2-1b", "batch_size": 1, "seq_len": 2048, "timing_steps": 0, "device": "cuda"}
CELLS: tuple[dict[str, Any], ...] = (
    {"method": "full", "gradient_checkpointing": True},
    {"method": "full", "gradient_checkpointing": True, "alloc_conf": "expandable_segments:True"},
    {"method": "lora"},
    {"method": "qlora", "gradient_checkpointing": True},
    {"method": "qlora", "alloc_conf": "max_split_size_mb:128"},
)
_SECONDS, _MAX_HISTORY = 120.0, 4_000_000


def specs() -> list[CellSpec]:
    """The cells."""
    return [resolve(**(_COMMON | options)) for options in CELLS]


def described(spec: CellSpec, found: Comparison) -> dict[str, Any]:
    """One object of the file."""
    first = None if found.first is None else {"position": found.first.position, "what": found.first.what}
    numbers = {name: value for name, value in asdict(found).items() if name != "first"}
    return {
        "cell_id": spec.cell_id,
        "alloc_conf": spec.alloc_conf,
        **numbers,
        "peak_error": found.peak_error,
        "first_divergence": first,
    }


def _watch(spec: CellSpec) -> dict[str, Any]:
    """Run the cell here, under the history."""
    import torch

    from vramprobe.measure.worker import load_libraries
    from vramprobe.simulate.against_snapshot import compare
    from vramprobe.simulate.snapshot import read_snapshot
    from vramprobe.workload.training import NOBODY, set_up, train_step

    load_libraries(spec)
    torch.zeros(1, device="cuda")
    torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=_MAX_HISTORY)
    work = set_up(spec, NOBODY)
    for step in (1, 2):
        train_step(work, NOBODY, step)
    torch.cuda.synchronize()
    return described(spec, compare(read_snapshot(torch.cuda.memory._snapshot())))


def _asked(spec: CellSpec, number: int) -> dict[str, Any]:
    """The same from a process of its own; what went wrong, where it did."""
    environment = worker_environment() | allocator_settings(spec.alloc_conf)
    command = [sys.executable, __file__, "--cell", str(number)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return {"cell_id": spec.cell_id, "error": f"it did not end within {_SECONDS:.0f} s"}
    if done.returncode:
        return {"cell_id": spec.cell_id, "error": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[1] == "--cell":
        print(json.dumps(_watch(specs()[int(sys.argv[2])])))
        return
    if sys.argv[2:] == ["cpu"]:
        print("snapshots: only a GPU's allocator has a history; nothing written")
        return
    found: list[dict[str, Any]] = []
    for number, spec in enumerate(specs()):
        found.append(one := _asked(spec, number))
        told = one.get("error") or f"reserved peak off by {100 * one['peak_error']:.2f} %"
        print(one["cell_id"], told, sep=" · ", flush=True)
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(any("error" in one for one in found))


if __name__ == "__main__":
    main()
