"""Published runs on an emulated GPU, by their own libraries: ``python benchmarks/published_emulated.py``.

Rows of vramprobe/data/published.csv by fms-acceleration, all but those with fused kernels of its own, run again under
the very versions of torch, transformers, trl, peft, accelerate and bitsandbytes that they name, on an emulated
A100-80GB-SXM or two, on empty checkpoints. What is compared is what HF's TrainerMemoryTracker prints, there and here.
Nothing is tuned to a row, and neither figure is a prediction. The first start sets up an environment of 2.8 GB for each
set of versions under out/published_emulated; rows that the CSV has are kept; ``--line 22`` runs these lines of
published.csv anew, ``--check`` runs none.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vramprobe import catalog
from vramprobe.emulate.build import CACHE_VARIABLE, emulator_version
from vramprobe.emulate.enter import Entrance, entrance_for_command
from vramprobe.emulate.environment import set_up_environment
from vramprobe.emulate.machine import read_events
from vramprobe.literature.published import PublishedRow, list_published
from vramprobe.units import MIB

TORCH = "2.4.1"
CARD = "A100-80GB-SXM"
HERE = Path(__file__).with_suffix("")
TABLE = Path(__file__).with_suffix(".csv")
OUT = Path(__file__).parents[1] / "out" / "published_emulated"
#: fms-acceleration's words for a run without its fused kernels → how sft.py starts a QLoRA.
CONFIGS = {"none": None, "baseline-peft-bnb": "qlora-kbit", "accelerated-peft-bnb": "qlora-nokbit"}
#: What a row calls its model, and the catalog's entry of the same architecture.
MODELS = {
    "mistralai/Mistral-7B-v0.1": "mistral-7b-v0.1",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "NousResearch/Llama-2-70b-hf": "llama-2-70b",
}
_REMARKS = [
    "Dense models: nothing that was not computed could change a shape (the one line that branches on such a value is",
    "Trainer's check of the loss for NaN). Mixtral: how many tokens went to each expert on the real GPU is not known,",
    "and here each expert gets the same. Its peak depends on that: with every token sent to the same two experts,",
    "line 26 reads +5.72 %. That its differences are this and nothing else is not shown. What nvidia-smi saw beyond",
    "the emulated reserved memory holds the context, NCCL's buffers and what the real run reserved otherwise: 157 MiB",
    "on line 90 to 8.9 GB on line 24, which is unexplained.",
]
Row = dict[str, Any]


def rows() -> list[PublishedRow]:
    """The rows that can be run, in file order."""
    return [
        row for row in list_published()
        if row.source == "fms-acceleration benchmark refs" and row.metric == "max_allocated"
        and row.versions.get("torch") == (2, 4, 1) and _packages(row).is_file()
        and row.framework_config in CONFIGS and row.model in MODELS
    ]  # fmt: skip


def run(row: PublishedRow) -> Row:
    """A row's run on an emulated machine: peaks in bytes, beside what was published."""
    packages = [line for line in _packages(row).read_text().splitlines() if not line.startswith("#")]
    os.environ[CACHE_VARIABLE] = str(OUT / _packages(row).stem)
    python = set_up_environment(TORCH, packages, _say)
    way = entrance_for_command(python, f"{CARD} x{row.num_gpus}", say=_say)
    try:
        command = [str(HERE / "sft.py"), *_words(row, checkpoint(row.model, way))]
        if row.num_gpus != 1:
            launch = ["-m", "accelerate.commands.launch", "--config_file", str(HERE / "fsdp1.yaml")]
            command = [*launch, f"--num_processes={row.num_gpus}", f"--main_process_port={_free_port()}", *command]
        started = time.monotonic()
        said = _started(way, command)
        seconds = time.monotonic() - started
        ranks = sorted(_ranks(way.machine), key=lambda one: int(one["rank"] or 0))
    finally:
        shutil.rmtree(way.machine, ignore_errors=True)
    steering = sorted({read["line"] for one in ranks for read in one["reads"] if read["could_have_steered"]})
    assert row.memory_bytes is not None
    return {
        "line": row.line, "url_or_path": row.url_or_path, "model": row.model, "method": row.method,
        "framework_config": row.framework_config, "batch_size": row.batch_size, "seq_len": row.seq_len,
        "num_gpus": row.num_gpus,
        "transformers": ".".join(map(str, row.versions["transformers"])),
        "measured_bytes": row.memory_bytes, "emulated_bytes": said["peak_bytes"],
        "emulated_less_measured_percent": f"{100 * (said['peak_bytes'] / row.memory_bytes - 1):.4f}",
        "settled_measured_bytes": row.settled_bytes, "settled_emulated_bytes": said["after_bytes"],
        "reserved_emulated_bytes": said["reserved_bytes"],
        "rank_peak_bytes": " ".join(str(card["allocated_peak_bytes"]) for one in ranks for card in one["cards"]),
        "num_steering_reads": max(one["num_reads_that_could_have_steered"] for one in ranks),
        "steering_lines": " ".join(steering), "seconds": round(seconds), "emulator_version": emulator_version(),
    }  # fmt: skip


def checkpoint(model: str, way: Entrance) -> Path:
    """An empty checkpoint of a model, made once."""
    slug = MODELS[model]
    folder = OUT / slug
    if not (folder / "config.json").is_file():
        with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
            json.dump(catalog.find_model(slug).config, config)
            config.flush()
            command = [way.python, HERE / "sparse_checkpoint.py", config.name, folder]
            subprocess.run(command, env=way.environment, check=True)
    return folder


def _packages(row: PublishedRow) -> Path:
    """The requirements of the libraries that a row names."""
    return HERE / f"transformers-{'.'.join(map(str, row.versions.get('transformers', ())))}.txt"


def _words(row: PublishedRow, folder: Path) -> list[str]:
    """What sft.py is told for a row."""
    mode = CONFIGS[row.framework_config or ""] if row.method == "qlora" else row.method
    words = [str(mode), str(row.batch_size), str(row.seq_len), str(folder)]
    if "bf16 AMP" in (row.dtype or ""):
        words.append("amp=bf16")
    if row.method == "qlora" and row.num_gpus != 1:
        words.append("storage=1")
    return words


def _started(way: Entrance, command: list[str]) -> Row:
    """Run a command in there; what sft.py's rank 0 says. Exits with its last words where it fails."""
    environment = way.environment | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] += f":{HERE}"  # flash_attn
    done = subprocess.run([way.python, *command], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        events = [f"{event.kind} {event.name} {event.detail}" for event in read_events(way.machine)]
        sys.exit("\n".join([done.stdout[-2000:], done.stderr[-6000:], *events]))
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"peak_bytes"')))


def _ranks(machine: Path) -> list[Row]:
    """What the processes that used a card left (emulate/values/hook.py)."""
    found = [json.loads(path.read_text()) for path in machine.glob("values-*.json")]
    return [one for one in found if one["cards"]]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _write(found: list[Row]) -> None:
    found.sort(key=lambda row: int(row["line"]))
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    TABLE.with_suffix(".md").write_text(page(found))


def page(found: list[Row]) -> str:
    """The table as a page."""
    lines = [
        "# Published runs, emulated", "", *(__doc__ or "").split("\n\n", 1)[1].strip().splitlines(), "", *_REMARKS, "",
        "| line | run | transformers | GPUs | measured, bytes | emulated, bytes | difference "
        "| after training: measured | emulated | reserved, emulated | nvidia-smi, measured, less that, MiB |",
        "| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    device_bytes = {row.url_or_path: row.memory_bytes for row in list_published() if row.metric == "nvidia-smi"}
    for row in found:
        allocated = ("measured_bytes", "emulated_bytes", "settled_measured_bytes", "settled_emulated_bytes")
        measured, emulated, *settled = (f"{int(row[key]):,}" for key in allocated)
        reserved = int(row["reserved_emulated_bytes"])
        device = device_bytes.get(row["url_or_path"])
        run = f"{row['model'].split('/')[-1]} {row['method']}, {row['framework_config']}"
        cells = [
            row["line"], f"{run}, {row['batch_size']} × {row['seq_len']}", row["transformers"], row["num_gpus"],
            measured, emulated, f"{float(row['emulated_less_measured_percent']):+.4f} %", *settled, f"{reserved:,}",
            "" if device is None else f"{(device - reserved) / MIB:,.0f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--line", type=int, action="append", help="run these lines of published.csv anew")
    parser.add_argument("--check", action="store_true", help="say whether the page is what the CSV says")
    given = parser.parse_args()
    found: list[Row] = []
    if TABLE.is_file():
        with TABLE.open(newline="") as file:
            found = list(csv.DictReader(file))
    if given.check:
        sys.exit(
            None if TABLE.with_suffix(".md").read_text() == page(found) else "published_emulated.md is out of date"
        )
    for row in rows():
        done = [one for one in found if int(one["line"]) == row.line]
        if row.line not in given.line if given.line else done:
            continue
        one = run(row)
        _say(f"line {row.line}: {one['emulated_less_measured_percent']} % in {one['seconds']} s")
        found = [*(kept for kept in found if kept not in done), one]
        _write(found)


if __name__ == "__main__":
    main()
