"""Speech models fine-tuned on emulated GPUs, without weights and data: ``python benchmarks/truth/speech.py``.

Each command of RUNS is profiled (``vramprobe profile --emulate GPU --empty-weights --steps-only``), a minute or two
each; its script is in speech/. Written: speech.csv and .md. ``--check`` makes the page anew from the csv. Emulated:
nothing was measured on a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, read_csv, write_or_check

FOLDER = Path(__file__).resolve().parent
TABLE = FOLDER / "speech.csv"
#: (GPU, script, model, batch size, seconds of sound).
RUNS = [
    ("T4", "whisper.py", "openai/whisper-small", 16, 30),
    ("A100-80GB-SXM", "whisper.py", "openai/whisper-large-v3", 16, 30),
    ("A100-80GB-SXM", "qwen_audio.py", "Qwen/Qwen2-Audio-7B-Instruct", 2, 30),
    ("A100-80GB-SXM", "qwen_audio.py", "Qwen/Qwen2-Audio-7B-Instruct", 2, 5),
]
HEAD = """# Speech models by emulated profile

Fine-tuning of Whisper (Hugging Face's blog post, without its metric: full, fp16 autocast, checkpoints) and of
Qwen2-Audio (LoRA in bf16, checkpoints) on emulated GPUs, with empty weights and silent rows. Nothing was measured on
a GPU. Whisper's feature extractor pads every sound to 30 seconds, so that shorter ones need as much; Qwen2-Audio's
language model reads 25 tokens a second. The blog post trains whisper-small at a batch of 16 on a T4 of 16 GB.

Rebuild: `python benchmarks/truth/speech.py`.

"""


def run(gpu: str, script: str, model: str, batch: int, seconds: int) -> dict[str, str]:
    """One row."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "profile.jsonl"
        words = ["profile", "--emulate", gpu, "--empty-weights", "--steps-only", "--seq-len", "100"]
        words += ["--audio-seconds", str(seconds), "--save", str(saved), "--"]
        command = [sys.executable, "-m", "vramprobe", *words, "python", str(FOLDER / "speech" / script), model]
        subprocess.run([*command, str(batch)], check=False, cwd=folder, stdout=subprocess.DEVNULL)
        record = json.loads(saved.read_text().splitlines()[-1])
    [process] = record["ranks"]
    return {
        "gpu": gpu,
        "script": script,
        "model": model,
        "batch_size": str(batch),
        "seconds": str(seconds),
        "ended": f"ran {process['num_steps']} steps"
        if record["outcome"]["kind"] == "ok"
        else record["outcome"]["kind"],
        "phase": process["peak"]["phase"],
        "allocated_bytes": str(process["peak"]["allocated_bytes"]),
        "reserved_bytes": str(process["peak"]["reserved_bytes"]),
    }


def _ended(record: dict[str, Any], num_steps: int) -> str:
    kind = record["outcome"]["kind"]
    return f"ran {num_steps} steps" if kind == "ok" and num_steps else f"{kind} after {num_steps} steps"


def page(rows: list[dict[str, str]]) -> str:
    """The page of these rows."""
    lines = []
    for row in rows:
        sizes = [f"{int(row[name]) / 2**30:.2f}" for name in ("allocated_bytes", "reserved_bytes")]
        script = f"[{row['script']}](speech/{row['script']})"
        shown = [row["model"], script, row["batch_size"], row["seconds"], row["gpu"], row["ended"], row["phase"]]
        lines.append([*shown, *sizes])
    head = ["model", "script", "batch", "seconds", "GPU", "ended", "peak in", "allocated, GiB", "reserved, GiB"]
    return HEAD + "\n".join(as_markdown(head, "llrrlllrr", lines)) + "\n"


def main() -> None:
    check = "--check" in sys.argv
    rows = read_csv(TABLE) if check else [run(*one) for one in RUNS]
    made = {TABLE: as_csv(rows), TABLE.with_suffix(".md"): page(rows)}
    write_or_check(made, "truth/speech.py", check=check)


if __name__ == "__main__":
    main()
