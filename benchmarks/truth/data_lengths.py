"""The largest batch of rows of real lengths, found without training on all: data_lengths.md.

``python benchmarks/truth/data_lengths.py --run`` keeps two profiles of data_lengths_train.py on an emulated H100 in
data_lengths.jsonl, some minutes on two cores: one asks the run's own loader and trains on a dozen batches, one trains
on all 157 (``--whole``). Alone it writes the page from there; ``--check`` says whether it is what the profiles give.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from vramprobe.records.profile import ProfileRecord, read_profiles
from vramprobe.units import format_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_markdown, write_or_check

ROOT = Path(__file__).resolve().parents[2]
JOURNAL = Path(__file__).with_suffix(".jsonl")
PAGE = Path(__file__).with_suffix(".md")
TRAIN = ("python", "benchmarks/truth/data_lengths_train.py", "small", "20000", "128", "16384")


def run() -> None:
    """Both profiles anew."""
    JOURNAL.unlink(missing_ok=True)
    for options in ((), ("--whole",)):
        command = [sys.executable, "-m", "vramprobe", "profile", "--emulate", "H100-SXM", "--trace", "none"]
        command += ["--no-speed", *options, "--save", str(JOURNAL), "--json", "--", *TRAIN]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def difference(chosen: ProfileRecord, whole: ProfileRecord) -> float:
    """The peak on the batch that the loader named, over the highest of all steps, less 1."""
    batches, peak = chosen.ranks[0].batches, whole.ranks[0].peak
    assert batches is not None
    assert peak is not None
    return batches.peaks[-1].allocated_bytes / peak.allocated_bytes - 1


def markdown(chosen: ProfileRecord, whole: ProfileRecord) -> str:
    """The page."""
    (one,), (all_steps,) = chosen.ranks, whole.ranks
    batches, peak = one.batches, all_steps.peak
    assert batches is not None
    assert peak is not None
    error = max(abs(held.error) for held in batches.held_out)
    rows = [
        ("asked its loader", one.num_steps + batches.num_run, format_bytes(batches.peaks[-1].allocated_bytes)),
        ("every step of an epoch", all_steps.num_steps, format_bytes(peak.allocated_bytes)),
    ]
    quantiles = [(p.name, p.num_rows, f"{p.width:,}", format_bytes(p.allocated_bytes), p.source) for p in batches.peaks]
    lines = [
        "# The largest batch of rows of real lengths, without training on all",
        "",
        f"**Result:** the batch that the run's own loader named has a peak within "
        f"{100 * abs(difference(chosen, whole)):.2f} % of the highest of "
        f"all {all_steps.num_steps:,} steps of the epoch (emulated against emulated).",
        "",
        "```",
        "python benchmarks/truth/data_lengths.py --run",
        "```",
        "",
        "20,000 rows, their lengths drawn from the histogram that ships (`azure-chat`, [where it comes "
        "from](../../docs/lengths.md#the-histogram-that-ships)); a Llama of two layers, transformers' `Trainer`, 128 "
        "rows a batch, padded, on an emulated H100.",
        "",
        *as_markdown(("profile", "steps on batches", "highest peak"), "lrr", rows),
        "",
        f"The loader made {batches.num_batches:,} batches of {batches.num_shapes:,} shapes; {batches.num_run} were "
        f"run. From the others, {len(batches.held_out)} held-out ones were predicted within {100 * error:.2f} %.",
        "",
        *as_markdown(("batch", "rows", "length", "allocated", "source"), "lrrrl", quantiles),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    if asked.run:
        run()
    write_or_check({PAGE: markdown(*read_profiles(JOURNAL))}, "truth/data_lengths.py", check=asked.check)


if __name__ == "__main__":
    main()
