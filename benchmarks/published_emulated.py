"""Published runs on an emulated GPU, by their own libraries: ``python benchmarks/published_emulated.py`` writes the table.

Rows of vramprobe/data/published.csv by fms-acceleration whose code is open to us (no fused kernels of its own) run again
under the very versions of torch, transformers, trl, peft, accelerate and bitsandbytes that they name, on an emulated
A100-80GB-SXM or two, on empty checkpoints. What is printed is the peak that the published benchmark prints. Nothing is
tuned to a row. The environment is set up once by

    vramprobe emulate setup --torch 2.4.1 $(sed -n '/^#/!s/^/--package /p' benchmarks/published_emulated/packages.txt)

``--line 22`` runs one row (its line of published.csv) and writes nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vramprobe import catalog
from vramprobe.emulate.enter import Entrance, entrance_for_command
from vramprobe.emulate.environment import find_environment
from vramprobe.emulate.machine import read_events
from vramprobe.literature.published import PublishedRow, list_published

TORCH = "2.4.1"
CARD = "A100-80GB-SXM"
HERE = Path(__file__).with_suffix("")
TABLE = Path(__file__).with_suffix(".csv")
CHECKPOINTS = Path(__file__).parents[1] / "out" / "published_emulated"
#: fms-acceleration's words for a run without its fused kernels → how sft.py starts a QLoRA.
CONFIGS = {"none": None, "baseline-peft-bnb": "qlora-kbit", "accelerated-peft-bnb": "qlora-nokbit"}
MODELS = {
    "mistralai/Mistral-7B-v0.1": "mistral-7b-v0.1",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "NousResearch/Llama-2-70b-hf": "llama-2-70b",
}
Row = dict[str, Any]


def rows() -> list[PublishedRow]:
    """The rows that can be run, in file order."""
    return [
        row for row in list_published()
        if row.source == "fms-acceleration benchmark refs" and row.metric == "max_allocated"
        and row.versions.get("torch") == (2, 4, 1) and row.versions.get("transformers") == (4, 48, 1)
        and row.framework_config in CONFIGS and row.model in MODELS
    ]  # fmt: skip


def words(row: PublishedRow, checkpoint: Path) -> list[str]:
    """What sft.py is told for a row."""
    mode = CONFIGS[row.framework_config or ""] if row.method == "qlora" else row.method
    assert mode is not None
    told = [mode, str(row.batch_size), str(row.seq_len), str(checkpoint)]
    if "bf16 AMP" in (row.dtype or ""):
        told.append("amp=bf16")
    if row.method == "qlora" and row.num_gpus != 1:
        told.append("storage=1")
    return told


def run(row: PublishedRow) -> Row:
    """A row's run on an emulated machine: its peaks in bytes, and what its processes' values report."""
    python = find_environment(TORCH)
    if python is None:
        sys.exit(f"there is no environment for torch {TORCH}; it is set up as the head of {__file__} says")
    way = entrance_for_command(python, f"{CARD} x{row.num_gpus}")
    try:
        environment = way.environment | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment["OMP_NUM_THREADS"] = "1"
        environment["PYTHONPATH"] += f":{HERE}"  # flash_attn
        command = [str(python), str(HERE / "sft.py")]
        if row.num_gpus != 1:
            command = [str(python), "-m", "accelerate.commands.launch", "--config_file", str(HERE / "fsdp1.yaml")]
            command += ["--num_processes", str(row.num_gpus), "--main_process_port", "0", str(HERE / "sft.py")]
        start = time.monotonic()
        done = subprocess.run(
            [*command, *words(row, checkpoint(row.model, way))], env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        seconds = time.monotonic() - start
        if done.returncode:
            events = [f"{event.kind} {event.name} {event.detail}" for event in read_events(way.machine)]
            sys.exit("\n".join([done.stdout[-2000:], done.stderr[-6000:], *events]))
        reports = [json.loads(path.read_text()) for path in way.machine.glob("values-*.json")]
        said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{\"peak_bytes")))
        return said | {"seconds": seconds, "reports": [one for one in reports if one["cards"]]}
    finally:
        shutil.rmtree(way.machine, ignore_errors=True)


def checkpoint(model: str, way: Entrance) -> Path:
    """An empty checkpoint of a model, made once."""
    slug = MODELS[model]
    folder = CHECKPOINTS / slug
    if not (folder / "config.json").is_file():
        with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
            json.dump(dict(catalog.find_model(slug).config), config)
            config.flush()
            command = [way.python, HERE / "sparse_checkpoint.py", config.name, folder]
            subprocess.run(command, env=way.environment, check=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--line", type=int, action="append", help="a line of published.csv; writes no table")
    given = parser.parse_args()
    for row in rows():
        if given.line and row.line not in given.line:
            continue
        found = run(row)
        print(row.line, row.model, row.method, row.framework_config, row.batch_size, row.num_gpus, found)
        print(f"  {found['peak_bytes']:,} of {row.memory_bytes:,}: {found['peak_bytes'] / row.memory_bytes - 1:+.4%}", flush=True)


if __name__ == "__main__":
    main()
