"""The field's other programs: ``python benchmarks/frameworks/programs.py FOLDER [--only PROGRAM ...]``.

FOLDER has what each command is started from: ``venv`` (torch 2.13.0 without NVIDIA's packages, torchvision,
ultralytics, timm, diffusers, lerobot, wandb, rustbpe, tiktoken), clones of ``examples`` (pytorch/examples), ``timm``,
``diffusers``, ``nanochat`` and ``openfold``, ``classification`` (torchvision 0.14.1's references), and the data that
programs_inputs.py makes. Each runs under ``vramprobe profile --emulate GPU --empty-weights``, some minutes. Written:
programs.csv and .md; ``--only`` runs these alone and keeps the others' rows; ``--check`` compares page and csv.
Emulated: nothing was measured here.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import journal
from benchmarks.tables import as_csv, as_markdown, filled, read_csv, write_or_check

TABLE = Path(__file__).resolve().with_suffix(".csv")
PRINTED = "0.719, 0.715, 0.692 G by epoch (another release, command not known)"
_LEROBOT = (
    "lerobot-train --policy.type={0} --dataset.repo_id=local/{1} --dataset.root={1} --batch_size={2} "
    "--policy.push_to_hub=false --output_dir=out/{0}{2} --steps=100000 --num_workers=2"
)
_UNET = (
    "python diffusers/examples/unconditional_image_generation/train_unconditional.py --train_data_dir images/train "
    "--resolution 64 --train_batch_size 16 --num_epochs 1 --ddpm_num_inference_steps 5 --output_dir out/unet"
)
_NANOCHAT = "bash -c 'cd nanochat && NANOCHAT_BASE_DIR=cache python -m scripts.{}'"


class Run(NamedTuple):
    """A command from FOLDER, and what others published of it."""

    program: str
    gpu: str
    command: str
    published: str = ""


_TIMM = "python timm/train.py --data-dir images --model resnet50 --num-classes 2 -b 64 --amp -j 2 --epochs 1"
_TORCHVISION = "python classification/train.py --data-path images8 --model resnet50 -b 32 -j 2 --epochs 1"
_PI05 = _LEROBOT + " --policy.dtype=bfloat16 --policy.gradient_checkpointing=true"
RUNS = (
    Run("YOLO11n, detect", "T4", "yolo train model=yolo11n.pt data=coco8.yaml epochs=3 imgsz=640", PRINTED),
    Run("YOLO11n, segment", "T4", "yolo train model=yolo11n-seg.pt data=coco8-seg.yaml epochs=3 imgsz=640"),
    Run("ResNet-50, fp32", "A100-80GB", "python examples/imagenet/main.py -a resnet50 -b 64 -j 2 --epochs 1 images"),
    Run("ResNet-50, timm, fp16 autocast", "A100-80GB", _TIMM),
    Run("ResNet-50, torchvision's reference", "A100-80GB", _TORCHVISION),
    Run("LSTM, word language model", "T4", "python examples/word_language_model/main.py --accel --data wikitext-2"),
    Run("U-Net, diffusers", "A100-80GB", _UNET),
    Run("LeRobot ACT, batch 1", "H100-SXM", _LEROBOT.format("act", "aloha", 1), "1.03 GB"),
    Run("LeRobot ACT, batch 8", "H100-SXM", _LEROBOT.format("act", "aloha", 8), "2 to 6 GB"),
    Run("LeRobot diffusion policy", "H100-SXM", _LEROBOT.format("diffusion", "pusht", 64), "0.167 s a step"),
    Run(
        "LeRobot SmolVLA, batch 1", "H100-SXM", _LEROBOT.format("smolvla", "base", 1), "1.99 GB (its base, in bfloat16)"
    ),
    Run("LeRobot SmolVLA, batch 32", "H100-SXM", _LEROBOT.format("smolvla", "base", 32), "0.312 s a step"),
    Run("LeRobot pi0.5, batch 8", "H100-SXM", _PI05.format("pi05", "base", 8)),
    Run("OpenFold's Evoformer", "A100-80GB", "python {runs}/evoformer.py openfold"),
    Run(
        "nanochat, pretraining",
        "H100-SXM",
        _NANOCHAT.format("base_train --depth=4 --eval-every=-1 --core-metric-every=-1"),
    ),
)


def run(one: Run, folder: Path) -> dict[str, str]:
    """One row."""
    command = one.command.replace("{runs}", str(TABLE.parent / "runs"))
    began = time.monotonic()
    path = f"{folder / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    options = ["--emulate", one.gpu, "--empty-weights"]
    record = journal.profiled(options, shlex.split(command), cwd=folder, environment={"PATH": path})
    highest = max(record["ranks"], key=lambda rank: rank["peak"]["allocated_bytes"])
    step = record["step_time"]
    return {
        "program": one.program,
        "gpu": one.gpu,
        "command": one.command,
        "ended": record["outcome"]["kind"],
        "steps": str(highest["num_steps"]),
        "phase": highest["peak"]["phase"],
        "allocated_bytes": str(highest["peak"]["allocated_bytes"]),
        "reserved_bytes": str(highest["peak"]["reserved_bytes"]),
        "step_seconds": f"{step['seconds']:.4f}" if step else "",
        "host_bytes": str((record["host"] or {}).get("peak_bytes", "")),
        "seconds": f"{time.monotonic() - began:.0f}",
        "published": one.published,
    }


def page(rows: list[dict[str, str]]) -> str:
    """The page of these rows."""

    def mib(row: dict[str, str], name: str) -> str:
        return f"{int(row[name]) / 2**20:,.0f}" if row[name] else "–"

    lines = [
        [
            row["program"],
            row["gpu"],
            row["steps"],
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
    columns = [
        "program",
        "GPU",
        "steps",
        "peak in",
        "allocated, MiB",
        "reserved, MiB",
        "step, ms",
        "host, MiB",
        "took, s",
    ]
    table = as_markdown([*columns, "published"], "llrlrrrrrl", lines)
    commands = [f"- {row['program']}: `{row['command']}`" for row in rows]
    return filled(TABLE.with_suffix(".md"), table=table, commands=commands)


def main() -> None:
    check = "--check" in sys.argv
    rows = read_csv(TABLE)
    if not check:
        folder, only = Path(sys.argv[1]).resolve(), sys.argv[3:]
        kept = {row["program"]: row for row in rows} if only else {}
        kept |= {one.program: run(one, folder) for one in RUNS if not only or one.program in only}
        rows = [kept[one.program] for one in RUNS if one.program in kept]
    made = {TABLE: as_csv(rows), TABLE.with_suffix(".md"): page(rows)}
    write_or_check(made, "frameworks/programs.py FOLDER", check=check)


if __name__ == "__main__":
    main()
