"""The torch at hand, read from its files: version, CUDA, cuDNN, NCCL; or why no GPU can be emulated under it.

In: an interpreter (default: this one). Out: a frozen Installation, or NotEmulatable with what was found, what is
needed and what to do. Never imports torch, changes nothing.
"""

import ast
import json
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vramprobe.errors import MissingDependency

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 3)
CUDA_MAJORS = (12, 13)
SETUP_COMMAND = "vramprobe emulate setup"
_QUESTION = (
    "import json, platform, site, sys; print(json.dumps("
    "{'path': sys.path, 'version': sys.version_info[:2], 'system': platform.system(), 'machine': platform.machine()}))"
)


class NotEmulatable(MissingDependency):
    """This machine or this installation cannot have an emulated GPU; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Installation:
    """A CUDA build of torch and where its neighbours lie. Versions are as NVIDIA's own functions write them."""

    python: Path
    site_packages: tuple[Path, ...]  # every folder that packages are imported from, torch's own first
    torch_version: str  # 2.13.0+cu130
    cuda: tuple[int, int]  # (13, 0)
    cudnn: tuple[int, int, int] | None  # None: its metadata does not say
    nccl: tuple[int, int, int] | None

    @property
    def cuda_version(self) -> int:
        """As cudaRuntimeGetVersion: 13000 for 13.0, 12010 for 12.1."""
        return self.cuda[0] * 1000 + self.cuda[1] * 10

    @property
    def cudnn_version(self) -> int:
        """As cudnnGetVersion: 92000 for 9.20.0, 8907 for 8.9.7; the first of 9 where it is not known."""
        major, minor, patch = self.cudnn or (9, 1, 0)
        return major * (10000 if major >= 9 else 1000) + minor * 100 + patch

    @property
    def nccl_version(self) -> int:
        """As ncclGetVersion: 22907 for 2.29.7; the first that torch 2.3 was built with where it is not known."""
        major, minor, patch = self.nccl or (2, 20, 5)
        return major * 10000 + minor * 100 + patch


def find_installation(python: str | Path | None = None) -> Installation:
    """The torch that ``python`` (default: this interpreter) would import. Raises NotEmulatable."""
    if python is None or Path(python) == Path(sys.executable):
        python, folders = sys.executable, list(sys.path)
        found = {"version": sys.version_info[:2], "system": platform.system(), "machine": platform.machine()}
    else:
        found = _ask(Path(python))
        folders = found["path"]
    require_platform(found["system"], found["machine"])
    version = tuple(found["version"])
    if version < OLDEST_PYTHON:
        raise NotEmulatable(
            f"{python} is Python {_dotted(version)}: an emulated GPU needs Python {_dotted(OLDEST_PYTHON)} or newer. "
            "Name another interpreter, or make the environment again with one."
        )
    return installation_in([Path(folder) for folder in folders if folder], Path(python))


def installation_in(folders: list[Path], python: Path) -> Installation:
    """The first torch in ``folders`` (as on sys.path). Raises NotEmulatable when it is none, a CPU build or too old."""
    site = next((folder for folder in folders if (folder / "torch" / "version.py").is_file()), None)
    if site is None:
        raise NotEmulatable(f"{python} has no torch: an emulated GPU needs a CUDA build of it. {_what_to_do()}")
    facts = _assignments(site / "torch" / "version.py")
    torch = str(facts.get("__version__"))
    if (numbers := _numbers(torch))[:2] < OLDEST_TORCH:
        raise NotEmulatable(
            f"{site / 'torch'} is torch {torch}, too old for an emulated GPU: "
            f"{_dotted(OLDEST_TORCH)} or newer is needed. {_what_to_do()}"
        )
    if not facts.get("cuda"):
        kind = "a ROCm build" if facts.get("hip") else "a build without CUDA"
        raise NotEmulatable(
            f"torch {torch} in {site} is {kind}: an emulated GPU needs a CUDA build. {_what_to_do(numbers)}"
        )
    cuda = _numbers(str(facts["cuda"]))[:2]
    if cuda[0] not in CUDA_MAJORS:
        raise NotEmulatable(
            f"torch {torch} in {site} is built for CUDA {facts['cuda']}: "
            f"an emulated GPU needs CUDA {' or '.join(map(str, CUDA_MAJORS))}. {_what_to_do()}"
        )
    metadata = _metadata(site)
    return Installation(
        python=python,
        site_packages=(site, *dict.fromkeys(f for f in folders if f != site and _holds_packages(f))),
        torch_version=torch,
        cuda=(cuda[0], cuda[1]),
        cudnn=_required_version(metadata, "cudnn"),
        nccl=_required_version(metadata, "nccl"),
    )


def require_platform(system: str | None = None, machine: str | None = None) -> None:
    """Raises NotEmulatable unless this is Linux on x86-64, which the driver and torch's CUDA builds are made for."""
    system, machine = system or platform.system(), machine or platform.machine()
    if system != "Linux" or machine.lower() not in ("x86_64", "amd64"):
        name = {"Darwin": "macOS"}.get(system, system)
        raise NotEmulatable(
            f"this is {name} on {machine}: a GPU can be emulated on Linux x86-64 alone. "
            "Use such a machine (a container or a virtual one will do), or --device cpu here."
        )


def _ask(python: Path) -> dict:
    """Ask an interpreter about itself. PYTHONPATH is its own: what holds here holds in the run."""
    try:
        run = subprocess.run([python, "-c", _QUESTION], capture_output=True, text=True, check=True, timeout=60)
    except FileNotFoundError:
        raise NotEmulatable(f"there is no interpreter at {python}: give the path of a python.") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise NotEmulatable(f"{python} does not run as a Python interpreter: {error}") from None
    return json.loads(run.stdout.splitlines()[-1])


def _what_to_do(numbers: tuple[int, ...] = ()) -> str:
    torch = f" --torch {_dotted(numbers)}" if numbers else ""
    return f"`{SETUP_COMMAND}{torch}` sets up a CUDA build in an environment of its own."


def _holds_packages(folder: Path) -> bool:
    return folder.name in ("site-packages", "dist-packages") and folder.is_dir()


@cache  # of a file that stays while this process runs
def _assignments(path: Path) -> dict[str, object]:
    """The literals that a module assigns to names; the module is read, never run."""
    values: dict[str, object] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(value, ast.Constant):
            values |= {target.id: value.value for target in targets if isinstance(target, ast.Name)}
    return values


def _metadata(site: Path) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted(site.glob("torch-*.dist-info/METADATA"))[:1])


def _required_version(metadata: str, library: str) -> tuple[int, int, int] | None:
    """The version of ``nvidia-<library>-cuNN`` that torch asks for; None where it names none (conda, own builds)."""
    found = re.search(rf"^Requires-Dist: nvidia-{library}-cu\d+\s*\(?==\s*(\d+)\.(\d+)\.(\d+)", metadata, re.M)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version: (2, 13, 0) of 2.13.0a0+git12."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else (0,)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
