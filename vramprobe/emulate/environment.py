"""A CUDA build of torch in an environment of its own in the user's cache, without any package of NVIDIA's.

In: a torch version (default: the package's pin). Out: the environment's interpreter. vramprobe itself is not installed
there: who starts that interpreter puts vramprobe on PYTHONPATH. Uses pip as it is configured; of two processes that
begin at once one works and the other waits; what was cut off is taken up where it was whole.
"""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from vramprobe.catalog.own import CACHE_VARIABLE, cache_folder
from vramprobe.catalog.shipped import data_file
from vramprobe.emulate.installation import OLDEST_TORCH, installation_in, require_platform
from vramprobe.emulate.version import cache_errors, locked
from vramprobe.errors import MissingDependency, VramprobeError
from vramprobe.records.whole_file import replacing

NEEDED_BYTES = 6_000_000_000  # 2.8 GB stay; the rest is pip's download, its cache and its unpacking
PINS = "emulated_environment.txt"
#: A command that makes an interpreter with older libraries, each beside what its release needs.
OTHER_VERSIONS = (
    "vramprobe emulate setup --torch 2.6.0 --package transformers==4.50.3 --package tokenizers==0.21.1 "
    "--package huggingface_hub==0.30.1 --package peft==0.15.1 --package requests --package urllib3 --package certifi "
    "--package charset-normalizer"
)
#: The file of an environment that is whole: what it was made of, as JSON.
READY = "vramprobe-ready.json"
_TORCH_IS_IN = "vramprobe-torch.txt"
_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet", "--no-deps", "--no-compile")


class SetupError(VramprobeError):
    """The environment could not be set up; the message holds pip's own words."""


def find_environment(torch: str | None = None) -> Path | None:
    """The interpreter of an environment that is ready, or None: torch's pinned version, or the one named."""
    folder = _folder(torch or pinned_torch())
    python = folder / "bin" / "python"
    return python if (folder / READY).is_file() and python.exists() else None


def set_up_environment(
    torch: str | None = None, packages: Sequence[str] = (), say: Callable[[str], None] | None = None
) -> Path:
    """Make the environment and return its interpreter; about a minute and a download of 530 MB for torch alone.

    ``packages`` are requirements that replace the pins of the same name, or come beside them (``trl==0.13.0``).
    ``say`` gets a line for each step. Raises NotEmulatable, MissingDependency or SetupError.
    """
    require_platform()
    say = say or (lambda line: None)
    torch = torch or pinned_torch()
    folder = _folder(torch)
    _check_torch(torch)
    wanted = {"torch": torch, "packages": _requirements(packages), "python": list(sys.version_info[:2])}
    if _state(folder) == wanted:
        return folder / "bin" / "python"
    with cache_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent / f"{folder.name}.lock", say):
            if _state(folder) != wanted:  # not made meanwhile by the process that was waited for
                _check_room(folder)
                _make(folder, wanted, say)
    return folder / "bin" / "python"


def remove_environment(torch: str | None = None) -> bool:
    """Remove an environment (default: the pinned torch's); whether there was one."""
    folder = _folder(torch or pinned_torch())
    there = folder.is_dir()
    if there:
        with cache_errors(folder.parent), locked(folder.parent / f"{folder.name}.lock", lambda line: None):
            shutil.rmtree(folder)
    return there


def list_environments() -> list[str]:
    """The versions of torch that have an environment which is ready."""
    home = cache_folder() / "environments"
    return sorted(path.parent.name.removeprefix("torch-") for path in home.glob(f"torch-*/{READY}"))


@cache
def pinned_torch() -> str:
    """The version of torch that the package's pins name."""
    return next(line for line in _pins() if line.startswith("torch===")).removeprefix("torch===")


def _make(folder: Path, wanted: dict, say: Callable[[str], None]) -> None:
    """Torch first, then all else; each step leaves its mark, so that only what was cut off is done again."""
    from vramprobe.emulate.values.hook import PTH_LINE  # not where a recipe at hand answers

    python = folder / "bin" / "python"
    torch_is_in = folder / _TORCH_IS_IN
    (folder / READY).unlink(missing_ok=True)
    held = torch_is_in.read_text() if torch_is_in.is_file() and python.exists() else ""
    if held != f"{wanted['torch']} {sys.version_info[:2]}":
        shutil.rmtree(folder, ignore_errors=True)
        say(f"1/3 making an environment in {folder}")
        _run([sys.executable, "-m", "venv", str(folder)], "python -m venv", _without_venv)
        say(f"2/3 installing torch {wanted['torch']} without NVIDIA's packages (a download of 0.5 to 0.9 GB)")
        # === takes exactly this build: == would be content with a CPU build at hand, which calls itself 2.13.0+cpu
        _run([str(python), *_PIP, f"torch==={wanted['torch']}"], f"pip install torch==={wanted['torch']}")
        installation_in([_site(folder)], python)  # says so if pip's index has a CPU build under that version
        torch_is_in.write_text(f"{wanted['torch']} {sys.version_info[:2]}")
    packages = [*wanted["packages"], *_triton(folder, wanted["packages"])]
    say(f"3/3 installing {len(packages)} packages")
    again = ["--force-reinstall"] if held else []
    _run([str(python), *_PIP, *again, *packages], "pip install")
    (_site(folder) / "vramprobe.pth").write_text(PTH_LINE)
    with replacing(folder / READY) as part:
        part.write_text(json.dumps(wanted))
    say(f"ready: {python}")


def _folder(torch: str) -> Path:
    """Return the environment's folder. Raises SetupError for what is no version, such as a path."""
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?([.+\w]*)?", torch):
        raise SetupError(f"{torch!r} is no version of torch: give one such as {pinned_torch()}.")
    return cache_folder() / "environments" / f"torch-{torch}"


def _site(folder: Path) -> Path:
    return next(folder.glob("lib/python3*/site-packages"))


def _state(folder: Path) -> dict | None:
    """Return what the environment was made of, if it is whole."""
    try:
        return json.loads((folder / READY).read_text()) if (folder / "bin" / "python").exists() else None
    except (OSError, ValueError):
        return None


def _pins() -> list[str]:
    lines = data_file(PINS).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _requirements(packages: Sequence[str]) -> list[str]:
    """The pins, with those of the same name replaced."""
    replaced = {_name(requirement) for requirement in packages}
    kept = [pin for pin in _pins() if _name(pin) not in replaced | {"torch"}]
    return [*kept, *packages]


def _triton(folder: Path, packages: Sequence[str]) -> list[str]:
    """The Triton that torch was built with, by torch's own metadata, unless one is asked for."""
    metadata = next(_site(folder).glob("torch-*.dist-info/METADATA")).read_text(encoding="utf-8")
    found = re.search(r"^Requires-Dist: triton\s*\(?(==[\d.]+)", metadata, re.M)
    asked = any(_name(requirement) == "triton" for requirement in packages)
    return [f"triton{found[1]}"] if found and not asked else []


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\s=<>!~\[;@]", requirement)[0]).lower()


def _check_torch(torch: str) -> None:
    """Raise SetupError for a version that has no CUDA build for this."""
    if tuple(map(int, torch.split(".")[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise SetupError(f"torch {torch} is too old for an emulated GPU: give {oldest} or newer, or {pinned_torch()}.")


def _check_room(folder: Path) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES and not (folder / _TORCH_IS_IN).is_file():
        raise SetupError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, and a CUDA build of torch with its neighbours needs about "
            f"{NEEDED_BYTES / 1e9:.0f} GB while it is set up (2.8 GB after): make room, or set {CACHE_VARIABLE} to a "
            "folder elsewhere."
        )


def _run(command: list[str], what: str, explain: Callable[[str], str] | None = None) -> None:
    """Run one step. Raises SetupError with its own last words."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "LD_PRELOAD")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        return
    words = done.stderr + done.stdout
    if os.strerror(errno.ENOSPC) in words:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if explain is not None and (advice := explain(words)):
        raise MissingDependency(advice)
    errors = [line for line in words.splitlines() if line.startswith("ERROR")] or words.strip().splitlines()[-1:]
    raise SetupError(f"{what} failed ({done.returncode}): {' '.join(errors)[:500]}")


def _without_venv(words: str) -> str:
    if "ensurepip" not in words:
        return ""
    return f"{sys.executable} cannot make environments: it lacks ensurepip (on Debian: apt-get install python3-venv)."
