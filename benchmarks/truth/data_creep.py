"""Reserved memory over a run of varied batches, predicted from a profile of its first steps: data_creep.md.

``python benchmarks/truth/data_creep.py --run`` profiles data_creep_train.py on an emulated GPU, then runs all of its
steps there under each allocator setting (``--whole``), and keeps what both say of each step in data_creep.csv, some
minutes a run on two cores; ``--run NAME`` runs one anew. Alone it writes the page from there; ``--check`` says whether
it is what the CSV gives.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_table, filled, read_csv, write_or_check
from vramprobe.profile.analyzed_rank import see
from vramprobe.profile.data_fragmentation import courses_of, device_of
from vramprobe.profile.next_steps import ProfiledRun
from vramprobe.profile.run_files import read_run
from vramprobe.units import format_bytes

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".csv")
PAGE = Path(__file__).with_suffix(".md")
TRAIN = ("python", "benchmarks/truth/data_creep_train.py", "4000", "4", "4096")


class Case(NamedTuple):
    """A whole run; its prediction comes from a profile on the same card under the default settings."""

    card: str
    alloc_conf: str
    empty_cache_steps: int = 0
    num_steps: int = 200


CASES = {
    "RTX-4090": Case("RTX-4090", ""),
    "RTX-4090, expandable segments": Case("RTX-4090", "expandable_segments:True"),
    "RTX-4090, rounded sizes": Case("RTX-4090", "roundup_power2_divisions:8"),
    "RTX-4090, largest blocks not split": Case("RTX-4090", "max_split_size_mb:128"),
    "RTX-4090, cache collected": Case(
        "RTX-4090", "garbage_collection_threshold:0.8,per_process_memory_fraction:0.95", num_steps=100
    ),
    "RTX-4090, cache emptied each 10 steps": Case("RTX-4090", "", empty_cache_steps=10, num_steps=100),
    "H100": Case("H100-SXM", ""),
}
Row = dict[str, str]


def run(names: list[str]) -> None:
    """These cases anew; each is kept once it is there."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            case = CASES[name]
            profile = Path(folder) / case.card
            if not profile.exists():
                started(Case(case.card, ""), ["--folder", str(profile)], Path(folder) / "log")
            log = Path(folder) / "whole.log"
            start = time.monotonic()
            started(case, ["--whole", "--trace", "none"], log)
            seconds = time.monotonic() - start
            rows = beside(name, case, profile, log, seconds)
            kept = [row for row in (read_csv(TABLE) if TABLE.exists() else []) if row["name"] != name]
            TABLE.write_text(as_csv(sorted([*kept, *rows], key=lambda row: list(CASES).index(row["name"]))))


def started(case: Case, options: list[str], log: Path) -> None:
    """The training under a profile; a whole run may end without memory, in the step in which ``beside`` expects it."""
    command = [sys.executable, "-m", "vramprobe", "profile", "--emulate", case.card, "--no-speed", "--json", *options]
    subprocess.run(
        [*command, "--", *TRAIN, str(case.num_steps), str(log), str(case.empty_cache_steps)],
        check="--whole" not in options,
        cwd=ROOT,
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": case.alloc_conf, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )


def beside(name: str, case: Case, profile: Path, log: Path, seconds: float) -> list[Row]:
    """Each step after those that the profile has: reserved by the whole run, and predicted."""
    found = read_run(profile)
    (raw,) = found.ranks
    seen = see(raw)
    assert seen is not None
    start = time.monotonic()
    learnt = ProfiledRun(raw, seen)
    context_bytes = ((found.launcher or {}).get("emulator") or {}).get("context_bytes")
    steps = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    shapes = [(rows, width) for rows, width, _ in steps[learnt.first_step - 1 :]]
    device = device_of(raw, context_bytes)
    (course,) = courses_of(learnt, shapes, case.num_steps, device, [(case.alloc_conf, case.empty_cache_steps)])
    took = time.monotonic() - start
    return [
        {
            "name": name,
            "card": case.card,
            "alloc_conf": case.alloc_conf,
            "step": str(number),
            "rows": str(rows),
            "length": str(width),
            "emulated_bytes": str(emulated),
            "predicted_bytes": str(predicted),
            "retries": str(course.num_alloc_retries),
            "seconds": f"{took:.1f}",
            "whole_seconds": f"{seconds:.0f}",
        }
        for number, ((rows, width, emulated), predicted) in enumerate(
            zip(steps[learnt.first_step - 2 :], course.reserved_bytes, strict=True), learnt.first_step - 1
        )
    ]


def summary(name: str, rows: list[Row]) -> dict[str, str]:
    """One line of the table."""
    emulated = [int(row["emulated_bytes"]) for row in rows]
    predicted = [int(row["predicted_bytes"]) for row in rows]
    ran_out = int(rows[-1]["step"]) < CASES[name].num_steps
    off = [abs(one - other) for one, other in zip(emulated, predicted, strict=True)]
    cleared = "`torch.cuda.empty_cache()`" if CASES[name].empty_cache_steps else ""
    return {
        "run": name,
        "setting": cleared or rows[0]["alloc_conf"] or "default",
        "steps": f"{rows[0]['step']} to {rows[-1]['step']}" + (", then out of memory in both" if ran_out else ""),
        "first, emulated": format_bytes(emulated[0]),
        "last, emulated": format_bytes(emulated[-1]),
        "highest, emulated": format_bytes(max(emulated)),
        "highest, predicted": format_bytes(max(predicted)),
        "steps that differ": str(sum(map(bool, off))),
        "largest difference, %": f"{100 * max(one / size for one, size in zip(off, emulated, strict=True)):.2f}",
        "seconds to predict": rows[0]["seconds"],
        "seconds to run": rows[0]["whole_seconds"],
    }


def markdown(table: list[Row]) -> str:
    """The page."""
    by_name = {name: [row for row in table if row["name"] == name] for name in CASES}
    found = [summary(name, rows) for name, rows in by_name.items() if rows]
    num_steps = sum(len(rows) for rows in by_name.values())
    num_off = sum(int(row["steps that differ"]) for row in found)
    lines = as_table(found, "llr" + "r" * 8)
    return filled(PAGE, equal=f"{num_steps - num_off:,}", steps=f"{num_steps:,}", table=lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", nargs="*", metavar="NAME", choices=list(CASES))
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    if asked.run is not None:
        run(asked.run or list(CASES))
    write_or_check({PAGE: markdown(read_csv(TABLE))}, "truth/data_creep.py", check=asked.check)


if __name__ == "__main__":
    main()
