"""Programs that train no language model: ``python benchmarks/frameworks/no_text.py FOLDER``.

FOLDER has what each command is started from: ``venv`` (torch 2.13.0 without NVIDIA's packages, torchvision,
ultralytics, timm), ``examples`` (pytorch/examples), ``timm`` (its train.py) and ``images`` (train/ and val/, two
classes of 160 pictures). Each runs under ``vramprobe profile --emulate GPU --empty-weights``, a minute or two. Written:
no_text.csv and .md; ``--check`` makes the page anew from the csv. Emulated: nothing was measured here.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, as_markdown, read_csv, write_or_check

TABLE = Path(__file__).resolve().with_suffix(".csv")
PRINTED = "0.719, 0.715, 0.692 G by epoch (another release, command not known); 0.66, 0.689, 0.709 here"
#: (program, GPU, command from FOLDER, published)
RUNS = (
    ("YOLO11n, detect", "T4", "yolo train model=yolo11n.pt data=coco8.yaml epochs=3 imgsz=640", PRINTED),
    ("YOLO11n, segment", "T4", "yolo train model=yolo11n-seg.pt data=coco8-seg.yaml epochs=3 imgsz=640", ""),
    ("ResNet-50, fp32", "A100-80GB", "python examples/imagenet/main.py -a resnet50 -b 64 -j 2 --epochs 1 images", ""),
    (
        "ResNet-50, timm, fp16 autocast",
        "A100-80GB",
        "python timm/train.py --data-dir images --model resnet50 --num-classes 2 -b 64 --amp -j 2 --epochs 1",
        "",
    ),
)
HEAD = """# Programs that train no language model, on an emulated GPU

Each command as its users start it, unmodified, with the weights and data sets that `--empty-weights` makes where they
are missing. Peaks and the predicted step time are of the highest rank; *host* is what the program's CPU tensors and
pinned memory held at most; *took* is how long the emulation took, on two cores that others used, too. Emulated:
workspaces of cuDNN are counted as 0, so memory is a lower bound. The step time in fp32 is too long: it is predicted
without TF32, which cuDNN uses by default.

Rebuild: `python benchmarks/frameworks/no_text.py FOLDER`.

"""


def run(program: str, gpu: str, command: str, published: str, folder: Path) -> dict[str, str]:
    """One row."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        saved = Path(scratch) / "profile.jsonl"
        words = [
            sys.executable,
            "-m",
            "vramprobe",
            "profile",
            "--emulate",
            gpu,
            "--empty-weights",
            "--save",
            str(saved),
        ]
        path = f"{folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path}
        subprocess.run([*words, "--", *shlex.split(command)], cwd=folder, env=environment, check=False)
        record = json.loads(saved.read_text().splitlines()[-1])
    highest = max(record["ranks"], key=lambda rank: rank["peak"]["allocated_bytes"])
    step = record["step_time"]
    return {
        "program": program,
        "gpu": gpu,
        "command": command,
        "ended": record["outcome"]["kind"],
        "steps": str(highest["num_steps"]),
        "phase": highest["peak"]["phase"],
        "allocated_bytes": str(highest["peak"]["allocated_bytes"]),
        "reserved_bytes": str(highest["peak"]["reserved_bytes"]),
        "step_seconds": f"{step['seconds']:.4f}" if step else "",
        "host_bytes": str((record["host"] or {}).get("peak_bytes", "")),
        "seconds": f"{time.monotonic() - began:.0f}",
        "published": published,
    }


def page(rows: list[dict[str, str]]) -> str:
    """The page of these rows."""

    def mib(row: dict[str, str], name: str) -> str:
        return f"{int(row[name]) / 2**20:,.0f}" if row[name] else "–"

    lines = [
        [
            row["program"],
            row["gpu"],
            row["phase"],
            mib(row, "allocated_bytes"),
            mib(row, "reserved_bytes"),
            f"{float(row['step_seconds']) * 1e3:.1f}" if row["step_seconds"] else "–",
            mib(row, "host_bytes"),
            row["seconds"],
            row["published"] or "–",
        ]
        for row in rows
    ]
    columns = ["program", "GPU", "peak in", "allocated, MiB", "reserved, MiB", "step, ms", "host, MiB", "took, s"]
    table = as_markdown([*columns, "published"], "lllrrrrrl", lines)
    commands = [f"- {row['program']}: `{row['command']}`" for row in rows]
    return HEAD + "\n".join([*table, "", "Commands:", "", *commands]) + "\n"


def main() -> None:
    check = "--check" in sys.argv
    folder = Path(sys.argv[-1]).resolve()
    rows = read_csv(TABLE) if check else [run(*one, folder) for one in RUNS]
    made = {TABLE: as_csv(rows), TABLE.with_suffix(".md"): page(rows)}
    write_or_check(made, "frameworks/no_text.py FOLDER", check=check)


if __name__ == "__main__":
    main()
