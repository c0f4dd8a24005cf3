"""Hold the arithmetic of a rank against others' measurements: ``python benchmarks/ranks/published_ranks.py``.

The rows of published.csv that ran under FSDP on cells of ours, all LoRA or QLoRA with checkpointing on two A100s under
FSDP1 (accelerate 0.29 to 1.0). Ours is FSDP2 by accelerate's units, then with the root as one unit as FSDP1 has it.
Last: the first layer's moment of that, with the versions' named differences (literature/differences.py) and what would
explain the figures: every layer's input and all their gradients but two kept to the end of backward. That was inferred
from these rows, not read in code, and torch 2.13's FSDP1 does not do it; it is in no prediction. Written:
benchmarks/ranks/published_ranks.md; ``--check`` writes nothing and fails where it is stale.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from vramprobe.literature.differences import differences_of
from vramprobe.literature.published import NoCell, PublishedRow, cell_of, list_published
from vramprobe.spec import CellSpec
from vramprobe.terms.sharding.ranks import rank_moments

OUT = Path(__file__).resolve().with_suffix(".md")
HEAD = """# One rank of FSDP beside what others measured

Errors are arithmetic less measured, of the measured. Rebuild: `python benchmarks/ranks/published_ranks.py`.

| row | run | ranks | torch | measured, GB | FSDP2 | root as one unit | with what was kept | left, MB |
| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |
"""


def kept_bytes(row: PublishedRow, spec: CellSpec) -> int:
    """The backward of the first layer, run last, where no earlier layer's input or its gradient was let go."""
    found = {(one.phase, one.label): one for one in rank_moments(spec, row.num_gpus, "fsdp", all_buffers=True)}
    first = found["backward", "first layer"]
    num_layers = spec.architecture["num_hidden_layers"]
    residual = 2 * spec.num_tokens * spec.architecture["hidden_size"]
    inputs = num_layers * residual - first.terms["checkpoint_store"]
    versions = sum(one.num_bytes(spec) for one in differences_of(row, spec) if "layers" in one.moments)
    return first.total_bytes + inputs + (num_layers - 2) * residual + versions


def table() -> str:
    """One line a row."""
    lines = []
    for row in list_published():
        if row.num_gpus == 1 or row.sharding != "FSDP full shard" or row.memory_bytes is None:
            continue
        alone = dataclasses.replace(row, num_gpus=1, sharding="none")
        spec = cell_of(alone)
        if isinstance(spec, NoCell):
            continue
        apart, in_one = (
            max(one.total_bytes for one in rank_moments(spec, row.num_gpus, "fsdp", all_buffers=yes))
            for yes in (False, True)
        )
        kept, measured = kept_bytes(dataclasses.replace(alone, num_gpus=row.num_gpus), spec), row.memory_bytes
        errors = [f"{100 * (size / measured - 1):+.2f} %" for size in (apart, in_one, kept)]
        run = f"{spec.model} {spec.method} {spec.quant}, {spec.dtype}, {spec.batch_size} × {spec.seq_len}"
        torch = ".".join(map(str, row.versions["torch"]))
        shown = [run, row.num_gpus, torch, f"{measured / 1e9:.3f}", *errors, f"{(measured - kept) / 1e6:+.1f}"]
        lines.append(f"| {row.line} | {' | '.join(map(str, shown))} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    made = table()
    if "--check" in sys.argv:
        sys.exit(None if OUT.read_text() == made else "stale; rebuild it: python benchmarks/ranks/published_ranks.py")
    OUT.write_text(made)
