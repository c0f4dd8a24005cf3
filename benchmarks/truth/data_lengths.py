"""The largest batch of rows of real lengths, found without training on all: data_lengths.md.

``python benchmarks/truth/data_lengths.py --run`` keeps profiles of data_lengths_train.py on an emulated H100 in
data_lengths.jsonl, and what each took in data_lengths.csv, some minutes on two cores. Three ask the run's own loader
and train on a dozen batches; one trains on all 782 (``--whole``). Alone it writes the page from there; ``--check``
says whether it is what the profiles give. ``--run NAME`` runs one anew.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from vramprobe.records.profile import ProfileRecord
from vramprobe.units import format_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import journal
from benchmarks.tables import as_csv, as_markdown, as_table, filled, read_csv, write_or_check

ROOT = Path(__file__).resolve().parents[2]
JOURNAL = Path(__file__).with_suffix(".jsonl")
PAGE = Path(__file__).with_suffix(".md")
SECONDS = Path(__file__).with_suffix(".csv")
WHOLE = "100,000 rows, every step"
TRAIN = ("python", "benchmarks/truth/data_lengths_train.py")
#: By name: options of profile; of data_lengths_train.py the model, the rows, the rows of a batch, the longest.
RUNS = {
    "100,000 rows": ((), ("small", "100000", "128", "16384")),
    WHOLE: (("--whole",), ("small", "100000", "128", "16384")),
    "1,000,000 rows": ((), ("small", "1000000", "128", "16384")),
    "100,000 rows, 8B": ((), ("8b", "100000", "2", "4096")),
}


def run(names: list[str]) -> None:
    """These profiles anew, and the seconds of each: the clock's, and the processors'."""
    seconds = {row["name"]: row for row in read_csv(SECONDS)}
    for name in names:
        options, words = RUNS[name]
        command = ["profile", "--emulate", "H100-SXM", "--trace", "none", "--no-speed", *options, "--json"]
        command += ["--save", str(JOURNAL), "--", *TRAIN, *words]
        start, before = time.monotonic(), os.times()
        subprocess.run([sys.executable, "-m", "vramprobe", *command], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        used = sum(os.times()[2:4]) - sum(before[2:4])
        seconds[name] = {"name": name, "elapsed": f"{time.monotonic() - start:.0f}", "processor": f"{used:.0f}"}
    SECONDS.write_text(as_csv([seconds[name] for name in RUNS if name in seconds]))


def profiles() -> dict[str, ProfileRecord]:
    """The last profile of each run, in their order: those that asked the loader have its batches."""

    def names(record: ProfileRecord) -> list[str]:
        is_whole = record.ranks[0].batches is None
        words = tuple(record.command[len(TRAIN) :])
        return [name for name, told in RUNS.items() if told == (("--whole",) if is_whole else (), words)]

    found = journal.latest_profiles(JOURNAL, names)
    return {name: found[name] for name in RUNS}


def difference(chosen: ProfileRecord, whole: ProfileRecord) -> float:
    """The peak on the batch that the loader named, over the highest of all steps, less 1."""
    batches, peak = chosen.ranks[0].batches, whole.ranks[0].peak
    assert batches is not None
    assert peak is not None
    return batches.peaks[-1].allocated_bytes / peak.allocated_bytes - 1


def largest(profile: ProfileRecord) -> str:
    """The largest batch of one that asked, the highest step of the other."""
    (rank,) = profile.ranks
    if rank.batches is not None:
        return format_bytes(rank.batches.peaks[-1].allocated_bytes)
    assert rank.peak is not None
    return format_bytes(rank.peak.allocated_bytes)


def profile_row(name: str, profile: ProfileRecord, seconds: dict[str, str]) -> dict[str, str]:
    """One line of the table."""
    (rank,) = profile.ranks
    batches = rank.batches
    return {
        "profile": name,
        "batches": f"{batches.num_batches:,}" if batches else "",
        "shapes": f"{batches.num_shapes:,}" if batches else "",
        "run": str(batches.num_run) if batches else "",
        "steps": f"{rank.num_steps + (batches.num_run if batches else 0):,}",
        "largest, allocated": largest(profile),
        "held out, %": f"{100 * max(abs(one.error) for one in batches.held_out):.2f}" if batches else "",
        "seconds": seconds["elapsed"],
        "of processor": seconds["processor"],
    }


def markdown(profiles: dict[str, ProfileRecord], seconds: dict[str, dict[str, str]]) -> str:
    """The page."""
    chosen, whole = profiles["100,000 rows"], profiles[WHOLE]
    batches = profiles["1,000,000 rows"].ranks[0].batches
    assert batches is not None
    rows = [profile_row(name, profile, seconds[name]) for name, profile in profiles.items()]
    quantiles = [(p.name, p.num_rows, f"{p.width:,}", format_bytes(p.allocated_bytes), p.source) for p in batches.peaks]
    return filled(
        PAGE,
        difference=f"{100 * abs(difference(chosen, whole)):.2f}",
        steps=f"{whole.ranks[0].num_steps:,}",
        table=as_table(rows, "lrrrrrrrr"),
        quantiles=as_markdown(("batch", "rows", "length", "allocated", "source"), "lrrrl", quantiles),
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", nargs="*", metavar="NAME", choices=list(RUNS))
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    if asked.run is not None:
        run(asked.run or list(RUNS))
    seconds = {row["name"]: row for row in read_csv(SECONDS)}
    write_or_check({PAGE: markdown(profiles(), seconds)}, "truth/data_lengths.py", check=asked.check)


if __name__ == "__main__":
    main()
