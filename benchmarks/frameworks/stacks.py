"""Pinned sets of libraries by date: ``python benchmarks/frameworks/stacks.py NAME ...`` makes each an environment.

benchmarks/frameworks/stacks/NAME.in says what is asked for and of which day; NAME.txt, which ``--resolve`` writes by
uv, holds every package with its version, but no CUDA library and no flash-attn, which has no wheel. ``fms-*`` are those
of published runs (reproduce.py), ``hf-*`` Hugging Face's libraries of a day. Without a name it lists them. uv keeps
each wheel once for all: the first stack is a download of 1 GB and a minute, one more with the same torch half of that;
each is 3.3 GB on disk, of which those with the same torch share 2 GB (hard links, where ``--home`` and uv's cache are
on one file system). ``--remove NAME`` takes one away.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from vramprobe.catalog.own import cache_folder

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
    return pins_of(stacks()[name])


def pins_of(path: Path) -> dict[str, str]:
    """The packages of a file of pins, and their versions."""
    lines = path.read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def home() -> Path:
    """Return the folder of the environments: what VRAMPROBE_STACKS names, or a folder in the user's cache."""
    return Path(os.environ.get(HOME_VARIABLE) or cache_folder() / "stacks")


def resolve(name: str, *, uv: str = "uv") -> None:
    """Write a stack's pins: what its .in asks for, all else the newest of its day, without what is emulated."""
    first, *wanted = (PINS / f"{name}.in").read_text().splitlines()
    wanted = [line for line in wanted if not line.startswith("#")]
    day, *others = first.strip("# ").split()  # 2024-10-25, and package=2025-01-10 for those of another day
    limits = ["--exclude-newer", day, *(word for other in others for word in ("--exclude-newer-package", other))]
    with tempfile.TemporaryDirectory() as folder:
        asked, overrides, found = (Path(folder, file) for file in ("asked.in", "overrides.txt", "found.txt"))
        asked.write_text("\n".join(wanted))
        # one with a bound is taken whatever others ask for: the published runs had packages that did not
        overrides.write_text("\n".join(line for line in wanted if re.search("[<=>]", line)))
        here = ["--python-version", PYTHON, "--python-platform", PLATFORM, "--no-header", "--no-annotate", "--quiet"]
        command = [uv, "pip", "compile", *here, *limits, "--override", overrides, "--output-file", found, asked]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        lines = [line for line in found.read_text().splitlines() if not _EMULATED.match(line)]
    head = f"# python benchmarks/frameworks/stacks.py --resolve {name}"
    (PINS / f"{name}.txt").write_text("\n".join([head, *lines, ""]))


def python_of(name: str, *, uv: str = "uv") -> Path:
    """The interpreter of a stack; made where it is not there, made anew where its pins have changed."""
    # Compiled once: a published run's process imports some 5,000 modules, which is half of its time otherwise.
    return environment(home() / name, pins(name), is_compiled=True, uv=uv)


def environment(folder: Path, told: dict[str, str], *, is_compiled: bool = False, uv: str = "uv") -> Path:
    """The interpreter of an environment with these packages alone; made, or changed, where it has others."""
    python, mark = folder / "bin" / "python", folder / _MARK
    if mark.is_file() and mark.read_text() == fingerprint_of(told):
        return python
    print(f"making {folder}", file=sys.stderr, flush=True)
    if mark.is_file():
        mark.unlink()  # it is whole until here, and half if this is killed
    else:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([uv, "venv", "--quiet", "--python", PYTHON, folder], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as asked:
        asked.writelines(f"{package}=={version}\n" for package, version in told.items())
        asked.flush()
        install = [uv, "pip", "sync", "--quiet", *(["--compile-bytecode"] if is_compiled else [])]
        subprocess.run([*install, "--python", python, asked.name], check=True)
    mark.write_text(fingerprint_of(told))
    return python


def fingerprint(name: str) -> str:
    """Return a short hash of the pins of a stack."""
    return fingerprint_of(pins(name))


def fingerprint_of(told: dict[str, str]) -> str:
    """Return a short hash of these packages."""
    lines = "\n".join(f"{package}=={version}" for package, version in told.items())
    return hashlib.sha256(lines.encode()).hexdigest()[:12]


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
