"""Recordings beside the runs by transformers' Trainer under transformers 4: ``python benchmarks/versions/recorded.py``.

Each run of versions.csv is a cell that ``vramprobe predict --python`` records with the interpreter of the run's stack
(benchmarks/frameworks/stacks.py; needs uv). It writes recorded.csv, a row for each, and says what is off; a row that is
there is not recorded again (``--again``: all are). ``--stack NAME`` takes these stacks alone.
"""

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.frameworks import stacks
from benchmarks.tables import as_csv, read_csv
from benchmarks.versions.runs import CARD
from vramprobe.catalog import find_gpu
from vramprobe.predict import recorded
from vramprobe.recipe.recorder import Surroundings
from vramprobe.resolve import resolve
from vramprobe.spec import CellSpec

TABLE, RUNS = Path(__file__).with_suffix(".csv"), Path(__file__).with_name("versions.csv")
_BATCH_SIZE, _SEQ_LEN = 4, 1024  # train.py has the same
#: Packages that a recording needs beside those of a stack.
NEEDED = ("pydantic", "nvidia-ml-py")


def python_of(stack: str) -> Path:
    """The stack's interpreter, with what a recording needs."""
    python = stacks.python_of(stack)
    subprocess.run(["uv", "pip", "install", "--quiet", "--python", python, *NEEDED], check=True)
    return python


def cell_of(row: dict[str, str]) -> CellSpec:
    """A run as a cell: its releases' defaults, by their names here."""
    release, peft = ([int(part) for part in row[name].split(".")[:2]] for name in ("transformers", "peft"))
    words = {"optim": "adamw_torch" if release < [4, 54] else "adamw_torch_fused", "dtype": "bf16"}
    if row["method"] == "lora":
        words["lora_dtype"] = "bf16" if peft < [0, 12] else "fp32"
    elif row["method"] == "qlora":
        words |= {"lora_dtype": "fp32", "kbit_prep": "peft", "gradient_checkpointing": True}
    depth = {"num_layers": int(row["num_layers"])} if row["num_layers"] else {}
    named = {"model": row["model"], "method": row["method"], "batch_size": _BATCH_SIZE, "seq_len": _SEQ_LEN}
    return resolve(device="cuda", loop="trainer", **named, **words, **depth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stack", action="append", help="only these stacks")
    parser.add_argument("--again", action="store_true", help="record what is in recorded.csv, too")
    given = parser.parse_args()
    kept = {(row["run"], row["stack"]): row for row in read_csv(TABLE)} if TABLE.exists() and not given.again else {}
    for row in read_csv(RUNS):
        is_asked = row["trainer"] == "trainer" and row["transformers"].startswith("4.") and row["outcome"] == "ok"
        if not is_asked or (given.stack and row["stack"] not in given.stack) or (row["run"], row["stack"]) in kept:
            continue
        found = recorded.predict(cell_of(row), gpu=find_gpu(CARD), where=Surroundings(python=python_of(row["stack"])))
        size, told = found.peak_allocated_bytes.value, int(row["step_bytes"] or row["peak_bytes"])
        words = {"run": row["run"], "stack": row["stack"], "transformers": row["transformers"], "run_bytes": told}
        words |= {"recorded_bytes": size, "percent": f"{100 * (size / told - 1):.4f}"}
        kept[row["run"], row["stack"]] = words
        print(*words.values(), flush=True)
        TABLE.write_text(as_csv(kept.values()))
    worst = max(kept.values(), key=lambda row: abs(float(row["percent"])))
    print(f"{len(kept)} runs, {worst['percent']} % at most: {worst['run']}, {worst['stack']}")


if __name__ == "__main__":
    main()
