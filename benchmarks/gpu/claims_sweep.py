"""Rebuild configs/sweeps/h200-claims.yaml: ``python benchmarks/gpu/claims_sweep.py`` (``--check`` changes nothing).

Claims that are about the memory of one card, in their own conditions, as data/claim_rules.csv fills them in:
of each its most usual cell, then those that take least and most, then the others, as many as the card holds and the
time allows. Cells that the other stages measure are left to them: ``vramprobe claims --results`` reads all folders.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from vramprobe import catalog
from vramprobe.catalog import Claim
from vramprobe.literature.claims.cells import Cells, Options
from vramprobe.literature.claims.rules import cells_of
from vramprobe.predict.verdict import CONTEXT_ALLOWANCE_BYTES
from vramprobe.spec import CellSpec
from vramprobe.sweep.definition import load_sweep
from vramprobe.sweep.duration import account_seconds
from vramprobe.sweep.plan import START_SECONDS

ROOT = Path(__file__).resolve().parents[2]
SWEEPS = ROOT / "configs" / "sweeps"
TARGET = SWEEPS / "h200-claims.yaml"
OTHERS = ("h200-calibration", "h200-held-out", "h200-speed")
CARD = "H200"
#: Planned for all cells together: less than a stage's nine minutes, since 5 % are measured twice.
MAX_SECONDS = 8.0 * 60
#: As in the sweep's own defaults: what the cells are read for is memory, and claims do not look at this.
TIMING_STEPS = 0
HEAD = """\
# Stage 5 of benchmarks/gpu: published claims about one card's memory, in their own conditions. Made by
# benchmarks/gpu/claims_sweep.py from data/claims.csv; each line names the claims that it is measured for.
# planned: vramprobe plan h200-claims --gpu H200 --engine formula
name: h200-claims
description: The cells of published claims that one H200 holds.

defaults:
  timing_steps: 0

cells:
"""


def is_about_one_card(claim: Claim) -> bool:
    """Whether a record of one GPU can say something of the claim."""
    return claim.quantity in ("peak", "min VRAM", "fits") and (claim.num_gpus or 1) == 1


def cells_that_fit(claim: Claim, cells: Cells, room_bytes: int) -> list[Options]:
    """The claim's usual cells that the card holds: the most usual, the least and the most, then the others."""
    found = [(options, cells.peak(options)) for options in cells_of(claim)]
    found = [(one, peak.source.value) for one, peak in found if peak.source.value <= room_bytes]
    if not found:
        return []
    by_size = sorted(found, key=lambda pair: pair[1])
    ordered = [found[0], by_size[0], by_size[-1], *found]
    return [one for one, _ in ordered]


def chosen() -> Iterator[tuple[CellSpec, Options, list[str]]]:
    """The cells with the claims they stand for, round by round over the claims, until the time is full."""
    gpu, cells = catalog.find_gpu(CARD), Cells()
    assert gpu.total_bytes is not None
    room_bytes = gpu.total_bytes - CONTEXT_ALLOWANCE_BYTES
    measured = {identity(spec) for name in OTHERS for spec in load_sweep(SWEEPS / f"{name}.yaml", device="cuda").cells}
    claims = [claim for claim in catalog.list_claims() if is_about_one_card(claim)]
    by_claim = {claim.id: cells_that_fit(claim, cells, room_bytes) for claim in claims}
    of_cell: dict[str, list[str]] = {}
    for name, several in by_claim.items():
        for one in several:
            names = of_cell.setdefault(identity(cells.spec(one)), [])
            names += [name] if name not in names else []
    seconds = START_SECONDS
    for round_of_claims in zip_longest(*by_claim.values()):
        for one in round_of_claims:
            if one is None or (known := identity(spec := cells.spec(one))) in measured:
                continue
            spec = spec.model_copy(update={"timing_steps": TIMING_STEPS})
            cost = account_seconds(spec, spec.num_params, gpu)
            if seconds + cost <= MAX_SECONDS:
                measured.add(known)
                seconds += cost
                yield spec, one, of_cell[known]


def identity(spec: CellSpec) -> str:
    """What decides the memory of a cell: whether its steps are timed does not."""
    return spec.model_copy(update={"timing_steps": 0}).fingerprint


def content() -> str:
    """The sweep file, small weights before large ones; without the plan's figures (tools/planned.py)."""
    lines = [HEAD]
    for _, one, names in sorted(chosen(), key=lambda each: each[0].num_params):
        words = {**one, "hold_out": True}
        text = ", ".join(
            f"{key}: {str(value).lower() if isinstance(value, bool) else value}" for key, value in words.items()
        )
        lines.append(f"  - {{{text}}}  # {', '.join(names)}\n")
    return "".join(lines)


def without_plan(text: str) -> str:
    """The file's text less the lines that planned.py adds."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#   "))


def main() -> None:
    fresh = content()
    stale = not TARGET.exists() or without_plan(TARGET.read_text()) != fresh
    if "--check" in sys.argv:
        sys.exit(f"stale: {TARGET.name}; rebuild it: python benchmarks/gpu/claims_sweep.py" if stale else 0)
    if stale:
        TARGET.write_text(fresh)


if __name__ == "__main__":
    main()
