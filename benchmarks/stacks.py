"""Sets of libraries by date, pinned: ``python benchmarks/stacks.py NAME ...`` makes one an environment of its own.

benchmarks/stacks/NAME.in says what is asked for and of which day; NAME.txt, which ``--resolve`` writes by uv, holds
every package with its version, but no CUDA library and no flash-attn, which has no wheel. ``fms-*`` are those of
published runs (reproduce.py), ``hf-*`` Hugging Face's libraries of a day. Without a name it lists them. uv keeps each
wheel once for all: the first stack is a download of 1 GB and a minute, one more with the same torch half of that; each
is 3.3 GB on disk, of which those with the same torch share 2 GB (hard links, where ``--home`` and uv's cache are on one
file system). ``--remove NAME`` takes one away.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from vramprobe.emulate.build import cache_folder

PINS = Path(__file__).with_suffix("")
HOME_VARIABLE = "VRAMPROBE_STACKS"
#: The interpreter that wheels of every stack exist for.
PYTHON = "3.11"
PLATFORM = "x86_64-manylinux_2_28"
_MARK = "vramprobe-stack.txt"
_EMULATED = re.compile(r"(nvidia-(?!ml-py)|cuda-|flash-attn)")


def stacks() -> dict[str, Path]:
    """The file of each stack, by name."""
    return {path.stem: path for path in sorted(PINS.glob("*.txt"))}


def pins(name: str) -> dict[str, str]:
    """The packages of a stack, and their versions."""
    lines = stacks()[name].read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def home() -> Path:
    """Where the environments are: what VRAMPROBE_STACKS names, or a folder in the user's cache."""
    return Path(os.environ.get(HOME_VARIABLE) or cache_folder() / "stacks")


def resolve(name: str, *, uv: str = "uv") -> None:
    """Write a stack's pins: what its .in asks for, all else the newest of its day, without what is emulated."""
    asked = (PINS / f"{name}.in").read_text().splitlines()
    wanted = [line for line in asked if not line.startswith("#")]
    with tempfile.TemporaryDirectory() as folder:
        overrides = Path(folder, "overrides.txt")  # the published runs had packages that did not ask for each other
        overrides.write_text("\n".join(line for line in wanted if re.search("[<=>]", line)))
        day, *others = asked[0].strip("# ").split()  # 2024-10-25 package=2025-01-10
        days = ["--exclude-newer", day, *(word for other in others for word in ("--exclude-newer-package", other))]
        here = ["--python-version", PYTHON, "--python-platform", PLATFORM, "--no-header", "--no-annotate", "--quiet"]
        command = [uv, "pip", "compile", *here, *days, "--override", overrides, PINS / f"{name}.in"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if not _EMULATED.match(line)]
    (PINS / f"{name}.txt").write_text("\n".join([f"# python benchmarks/stacks.py --resolve {name}", *lines, ""]))


def python_of(name: str, *, uv: str = "uv") -> Path:
    """The interpreter of a stack; made where it is not there, made anew where its pins have changed."""
    folder = home() / name
    python, mark = folder / "bin" / "python", folder / _MARK
    if mark.is_file() and mark.read_text() == fingerprint(name):
        return python
    print(f"making {folder}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([uv, "venv", "--quiet", "--python", PYTHON, folder], check=True)
    # Compiled once: a published run's process imports some 5,000 modules, which is half of its time otherwise.
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--compile-bytecode", "--python", python]
    subprocess.run([*install, "--requirements", stacks()[name]], check=True)
    mark.write_text(fingerprint(name))
    return python


def fingerprint(name: str) -> str:
    """What the pins of a stack are, in short."""
    told = "\n".join(f"{package}=={version}" for package, version in pins(name).items())
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(stacks()))
    parser.add_argument("--home", type=Path, help=f"the environments' folder (or {HOME_VARIABLE})")
    parser.add_argument("--uv", default="uv", help="uv's command")
    parser.add_argument("--resolve", action="store_true", help="write their pins anew instead")
    parser.add_argument("--remove", action="store_true", help="take them away instead")
    given = parser.parse_args()
    if given.home:
        os.environ[HOME_VARIABLE] = str(given.home)
    known = sorted(path.stem for path in PINS.glob("*.in"))
    unknown = [name for name in given.names if name not in known]
    if unknown:
        parser.error(f"no stack {', '.join(unknown)}: there are {', '.join(known)}")
    for name in given.names:
        if given.resolve:
            resolve(name, uv=given.uv)
        elif given.remove:
            shutil.rmtree(home() / name, ignore_errors=True)
        else:
            print(python_of(name, uv=given.uv))
    if not given.names:
        for name in stacks():
            told = pins(name)
            words = [
                f"{package} {told[package]}" for package in ("torch", "transformers", "peft", "trl") if package in told
            ]
            print(f"{name:24}{'ready' if (home() / name / _MARK).is_file() else 'not set up':12}{', '.join(words)}")


if __name__ == "__main__":
    main()
