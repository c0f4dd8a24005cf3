"""Speech models fine-tuned on emulated GPUs, without weights and data: ``python benchmarks/truth/speech.py``.

Each command of RUNS is profiled (``vramprobe profile --emulate GPU --empty-weights --steps-only``), a minute or two
each; its script is in speech/. Written: speech.csv and .md. ``--check`` makes the page anew from the csv. Emulated:
nothing was measured on a GPU.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import journal
from benchmarks.tables import as_csv, as_markdown, filled, read_csv, write_or_check

FOLDER = Path(__file__).resolve().parent
TABLE = FOLDER / "speech.csv"
#: (GPU, script, model, batch size, seconds of sound).
RUNS = [
    ("T4", "whisper.py", "openai/whisper-small", 16, 30),
    ("A100-80GB-SXM", "whisper.py", "openai/whisper-large-v3", 16, 30),
    ("A100-80GB-SXM", "qwen_audio.py", "Qwen/Qwen2-Audio-7B-Instruct", 2, 30),
    ("A100-80GB-SXM", "qwen_audio.py", "Qwen/Qwen2-Audio-7B-Instruct", 2, 5),
]


def run(gpu: str, script: str, model: str, batch: int, seconds: int) -> dict[str, str]:
    """One row."""
    about = {"gpu": gpu, "script": script, "model": model, "batch_size": str(batch), "seconds": str(seconds)}
    path = FOLDER / "speech" / script
    return about | peak_of(profiled(gpu, path, model, batch, "--audio-seconds", str(seconds)))


def profiled(gpu: str, script: Path, model: str, batch: int, *options: str) -> dict[str, Any]:
    """The record of a script that trains ``model`` on rows of 100 tokens."""
    words = ["--emulate", gpu, "--empty-weights", "--steps-only", "--seq-len", "100", *options]
    with tempfile.TemporaryDirectory() as folder:
        return journal.profiled(words, ["python", str(script), model, str(batch)], cwd=folder, quiet=True)


def peak_of(record: dict[str, Any]) -> dict[str, str]:
    """How a run of one process ended, and its peak."""
    [process] = record["ranks"]
    kind = record["outcome"]["kind"]
    return {
        "ended": f"ran {process['num_steps']} steps" if kind == "ok" else kind,
        "phase": process["peak"]["phase"],
        "allocated_bytes": str(process["peak"]["allocated_bytes"]),
        "reserved_bytes": str(process["peak"]["reserved_bytes"]),
    }


def in_gib(row: dict[str, str]) -> list[str]:
    """Both peaks of a row, as a page shows them."""
    return [f"{int(row[name]) / 2**30:.2f}" for name in ("allocated_bytes", "reserved_bytes")]


def page(rows: list[dict[str, str]]) -> str:
    """The page of these rows."""
    lines = []
    for row in rows:
        script = f"[{row['script']}](speech/{row['script']})"
        shown = [row["model"], script, row["batch_size"], row["seconds"], row["gpu"], row["ended"], row["phase"]]
        lines.append([*shown, *in_gib(row)])
    head = ["model", "script", "batch", "seconds", "GPU", "ended", "peak in", "allocated, GiB", "reserved, GiB"]
    return filled(FOLDER / "speech.md", table=as_markdown(head, "llrrlllrr", lines))


def main() -> None:
    check = "--check" in sys.argv
    rows = read_csv(TABLE) if check else [run(*one) for one in RUNS]
    made = {TABLE: as_csv(rows), TABLE.with_suffix(".md"): page(rows)}
    write_or_check(made, "truth/speech.py", check=check)


if __name__ == "__main__":
    main()
