"""Kept runs, run again: ``python benchmarks/truth/oracles_again.py 20`` runs 20 cells of tests/oracles, drawn by seed.

Each runs whole on the emulated GPU that it is kept for (``--kind losses``: of this kind alone; ranks of ZeRO need
DeepSpeed in the emulated environment). A line each: the bytes that it takes now, and those kept where they differ. The
exit code is 1 where any differs. Nothing is measured on a GPU, and nothing written.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.oracles import oracles
from tests.oracles.oracles import Oracle, Run
from vramprobe.emulate.enter import entrance

#: Allocated and reserved bytes; null where it ran out of memory, or where only a verdict was kept.
Sizes = tuple[int | None, int | None]


def drawn(number: int, kinds: Sequence[str]) -> list[Oracle]:
    """Emulated runs of cells, by GPU."""
    kept = [
        oracle
        for oracle in oracles.cells()
        if oracle.run is not None and oracle.run.instrument == "emulated" and not oracle.is_a_command
        if not kinds or oracle.kind in kinds
    ]
    return sorted(random.Random(0).sample(kept, min(number, len(kept))), key=lambda oracle: oracle.gpu or "")


def ran(gpu: str, cells: Sequence[Oracle]) -> Iterator[tuple[str, Sizes]]:
    """(outcome, bytes) of each, one after the other on one emulated GPU."""
    way = entrance(gpu, say=print)
    try:
        words = [str(way.python), __file__, "--here"]
        with subprocess.Popen(words, env=way.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for oracle in cells:
                process.stdin.write(json.dumps(oracle.cell).encode() + b"\n")
                process.stdin.flush()
                outcome, *sizes = json.loads(process.stdout.readline())
                yield outcome, tuple(sizes)
    finally:
        shutil.rmtree(way.machine, ignore_errors=True)


def run_here() -> None:
    """Run the cells of stdin in this process's environment, which sees the emulated GPU."""
    from vramprobe.spec import CellSpec
    from vramprobe.sweep import runner

    for line in sys.stdin:
        with tempfile.NamedTemporaryFile(prefix="vramprobe-", suffix=".log") as log:
            record = runner.measure(CellSpec.model_validate_json(line), log=Path(log.name))
        peak = record.peak if record.outcome.kind == "ok" else None
        print(
            json.dumps([record.outcome.kind, peak and peak.allocated_bytes, peak and peak.reserved_bytes]), flush=True
        )


def differences(run: Run, outcome: str, sizes: Sizes) -> list[str]:
    """What is otherwise than it was kept, each with what was kept."""
    found = [] if outcome == run.outcome else [f"{outcome}, kept: {run.outcome}"]
    for tier, now, kept in zip(
        ("allocated", "reserved"), sizes, (run.allocated_bytes, run.reserved_bytes), strict=True
    ):
        if None not in (now, kept) and now != kept:
            found.append(f"{tier} {now:,}, kept: {kept:,}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, nargs="?", default=20)
    parser.add_argument("--kind", action="append", default=[])
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.here:
        run_here()
        return
    num_differing = 0
    for gpu, group in groupby(drawn(words.number, words.kind), key=lambda oracle: oracle.gpu or ""):
        cells = list(group)
        for oracle, (outcome, sizes) in zip(cells, ran(gpu, cells), strict=True):
            assert oracle.run is not None
            found = differences(oracle.run, outcome, sizes)
            num_differing += bool(found)
            print(gpu, oracle.spec.cell_id, "; ".join(found) or f"{outcome}, as kept", flush=True)
    sys.exit(f"{num_differing} differ" if num_differing else 0)


if __name__ == "__main__":
    main()
