"""Data that programs.py's commands read: ``FOLDER/venv/bin/python programs_inputs.py FOLDER``, on an emulated GPU.

In: FOLDER with a clone of nanochat. Out, each where it is missing: ``images`` (train and val, two classes of 160 and 64
pictures) and ``images8`` (8), ``wikitext-2`` (three files with a vocabulary of 33,278), the LeRobot data sets ``aloha``
(one camera of 480 × 640, 14 joints), ``pusht`` (96 × 96, 2) and ``base`` (three cameras of 256 × 256, 6 joints),
``nanochat/cache`` (two shards of text, its own tokenizer of them). Pictures are gray, numbers count, words are random.
"""

from __future__ import annotations

import os
import random
import string
import subprocess
import sys
from pathlib import Path

import numpy as np

#: Of a LeRobot data set: its cameras' pictures, the length of its state and of its action.
EPISODES = {
    "aloha": ({"top": (480, 640)}, 14, 14),
    "pusht": ({"": (96, 96)}, 2, 2),
    "base": ({"camera1": (256, 256), "camera2": (256, 256), "camera3": (256, 256)}, 6, 6),
}
_NUM_FRAMES = 100


def images(folder: Path, num_train: int, num_val: int) -> None:
    """Two classes of gray JPEGs."""
    from PIL import Image

    for split, number in (("train", num_train), ("val", num_val)):
        for kind in ("cat", "dog"):
            (folder / split / kind).mkdir(parents=True)
            for at in range(number // 2):
                Image.new("RGB", (500, 375), (at % 256,) * 3).save(folder / split / kind / f"{at}.jpg")


def words(folder: Path) -> None:
    """Three files of text with WikiText-2's vocabulary."""
    folder.mkdir()
    every = [f"w{number}" for number in range(33_278 - 1)]
    lines = [" ".join(every[at : at + 80]) for at in range(0, len(every), 80)]
    (folder / "train.txt").write_text("\n".join(lines * 4) + "\n")
    for name in ("valid", "test"):
        (folder / f"{name}.txt").write_text("\n".join(lines[:40]) + "\n")


def episodes(folder: Path, name: str) -> None:
    """One episode of zeros."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    cameras, num_state, num_action = EPISODES[name]

    def numbers(length: int) -> dict:
        return {"dtype": "float32", "shape": (length,), "names": [f"joint{at}" for at in range(length)]}

    pictures = {
        f"observation.images.{camera}" if camera else "observation.image": {
            "dtype": "image",
            "shape": (*size, 3),
            "names": ["height", "width", "channels"],
        }
        for camera, size in cameras.items()
    }
    features = pictures | {"observation.state": numbers(num_state), "action": numbers(num_action)}
    data = LeRobotDataset.create(f"local/{name}", fps=50, features=features, root=folder / name, use_videos=False)
    frame = {key: np.zeros(one["shape"], np.uint8 if key in pictures else np.float32) for key, one in features.items()}
    for at in range(_NUM_FRAMES):
        moved = {key: value + np.float32(at / _NUM_FRAMES) for key, value in frame.items() if key not in pictures}
        data.add_frame(frame | moved | {"task": "pick up the cube"})
    data.save_episode()
    data.finalize()


def text(folder: Path) -> None:
    """nanochat's two shards, and its own tokenizer of them."""
    import pyarrow
    from pyarrow import parquet

    shards = folder / "cache" / "base_data_climbmix"
    shards.mkdir(parents=True)
    made = random.Random(0)
    every = ["".join(made.choices(string.ascii_lowercase, k=made.randint(3, 9))) for _ in range(40_000)]
    rows = [" ".join(made.choices(every, k=600)) for _ in range(4_000)]
    for number in range(2):
        name = shards / f"shard_{number:05d}.parquet"
        parquet.write_table(pyarrow.table({"text": rows}), name, row_group_size=100)
    command = [sys.executable, "-m", "scripts.tok_train", "--max-chars=20000000"]
    subprocess.run(command, cwd=folder, env=os.environ | {"NANOCHAT_BASE_DIR": str(folder / "cache")}, check=True)


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    made = {
        "images": lambda: images(folder / "images", 160, 64),
        "images8": lambda: images(folder / "images8", 8, 8),
        "wikitext-2": lambda: words(folder / "wikitext-2"),
        "nanochat/cache": lambda: text(folder / "nanochat"),
    }
    made |= {name: lambda name=name: episodes(folder, name) for name in EPISODES}
    for name, make in made.items():
        if not (folder / name).exists():
            make()


if __name__ == "__main__":
    main()
