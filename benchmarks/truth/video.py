"""Vision-language models fine-tuned on videos by emulated GPUs, without weights and data.

``python benchmarks/truth/video.py``, with a ``python`` first on PATH that has torchvision, num2words, transformers,
peft, datasets and a CUDA build of torch. Each command of RUNS is profiled (``vramprobe profile --emulate GPU
--empty-weights --steps-only``), a minute or two each; their script is in video/. Written: video.csv and .md; rows
that are there are kept. ``--check`` makes the page anew from the csv. Emulated: nothing was measured on a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, filled, read_csv, write_or_check
from benchmarks.truth.speech import in_gib, peak_of, profiled
from vramprobe import api

FOLDER = Path(__file__).resolve().parent
TABLE = FOLDER / "video.csv"
GPU = "A100-80GB-SXM"
#: (model, batch size, frames × width × height).
RUNS = [
    ("Qwen/Qwen2.5-VL-3B-Instruct", 1, "16x640x480"),
    ("Qwen/Qwen3-VL-2B-Instruct", 1, "16x640x480"),
    ("Qwen/Qwen3-VL-2B-Instruct", 1, "64x1280x720"),
    ("HuggingFaceTB/SmolVLM2-500M-Video-Instruct", 2, "16x640x480"),
]
#: The same as images, for ``predict``: two frames each, as large as the processor makes them; a row's other tokens.
AS_IMAGES = {
    RUNS[0]: {"images": 8, "image_size": "640x480", "seq_len": 119},
    RUNS[1]: {"images": 8, "image_size": "640x480", "seq_len": 183},
    RUNS[2]: {"images": 32, "image_size": "832x448", "seq_len": 382},
}
LORA = {"method": "lora", "lora_r": 16, "lora_targets": ("q_proj", "k_proj", "v_proj", "o_proj")}


def run(model: str, batch: int, size: str) -> dict[str, str]:
    """One row."""
    record = profiled(GPU, FOLDER / "video" / "vlm.py", model, batch, "--video-size", size)
    [counted] = [one["by"] for one in record["replaced"] if one["kind"] == "video tokens"]
    tokens = counted.split()[0].replace(",", "")
    row = {"model": model, "batch_size": str(batch), "video": size, "tokens": tokens} | peak_of(record)
    return row | {"predicted_bytes": predicted(model, batch, size)}


def predicted(model: str, batch: int, size: str) -> str:
    """By arithmetic, as images; nothing for a video that cannot be given so."""
    images = AS_IMAGES.get((model, batch, size))
    if images is None:
        return ""
    step = {"autocast": "bf16", "gradient_checkpointing": True, "device": "cuda", "gpu": GPU}
    return str(api.predict(model=model, batch_size=batch, **LORA, **step, **images).peak_allocated_bytes.value)


def page(rows: list[dict[str, str]]) -> str:
    """The page of these rows."""
    lines = []
    for row in rows:
        shown = [row["model"], row["batch_size"], row["video"], f"{int(row['tokens']):,}", row["ended"], row["phase"]]
        of = int(row["allocated_bytes"])
        off = f"{100 * (int(row['predicted_bytes']) / of - 1):+.3f} %" if row["predicted_bytes"] else ""
        lines.append([*shown, *in_gib(row), off])
    head = ["model", "batch", "video", "tokens of a video", "ended", "peak in", "allocated, GiB", "reserved, GiB"]
    table = as_markdown([*head, "predicted as images"], "lrlrllrrr", lines)
    return filled(FOLDER / "video.md", gpu=GPU, table=table)


def main() -> None:
    if "--check" not in sys.argv:
        for one in RUNS:
            rows = read_csv(TABLE) if TABLE.exists() else []
            if all((row["model"], row["video"]) != (one[0], one[2]) for row in rows):
                TABLE.write_text(as_csv([*rows, run(*one)]))
    check, rows = "--check" in sys.argv, read_csv(TABLE)
    made = {TABLE: as_csv(rows), TABLE.with_suffix(".md"): page(rows)}
    write_or_check(made, "truth/video.py", check=check)


if __name__ == "__main__":
    main()
