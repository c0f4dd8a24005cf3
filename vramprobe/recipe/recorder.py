"""Processes that record cells, and where they run: on the emulated GPU, under one's own libraries, on a real GPU.

In: a cell as it is recorded, a GPU, Surroundings. Out: a packed recipe (recording.py makes it in the other process).
A process goes on with the next cell, and ends with this one. No torch.
"""

import atexit
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import rmtree
from typing import Any

from vramprobe.catalog import Gpu, gpu_seen
from vramprobe.emulate.enter import MOST_BYTES, entrance
from vramprobe.emulate.environment import READY, find_environment
from vramprobe.emulate.installation import NotEmulatable, find_installation
from vramprobe.emulate.version import emulator_version
from vramprobe.errors import SpecError
from vramprobe.log.shapes import Shape
from vramprobe.recipe.recipe import CannotRecord, NotOneBranch, TooLarge
from vramprobe.spec import CellSpec

Say = Callable[[str], None]
_ENDING_SECONDS = 10.0
#: The oldest that the workload was run with.
_LEAST_TRANSFORMERS = "4.42"
#: Modules that a recording imports beside a training environment's own → their packages.
_BESIDE = {"numpy": "numpy", "psutil": "psutil", "pydantic": "pydantic", "pynvml": "nvidia-ml-py"}
#: Libraries whose versions tell one recording from another.
_LIBRARIES = (
    "torch", "transformers", "peft", "bitsandbytes", "accelerate", "trl", "liger-kernel", "deepspeed", "triton",
)  # fmt: skip


#: The errors of a recording (recording.py) that are told apart here, by their names.
_KINDS = {kind.__name__: kind for kind in (NotOneBranch, TooLarge)}


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The libraries that a cell is recorded with, and the GPU that it sees.

    ``python``: an interpreter whose libraries they are; by default those that ``vramprobe emulate setup`` installed.
    ``measured``: this machine's own GPU, under this interpreter; else an emulated one.
    """

    python: Path | None = None
    measured: bool = False

    def key(self) -> list[str]:
        """Words that are others for other libraries, another emulator or another kind of GPU."""
        if self.measured:
            return [_versions(tuple(sys.path)), "measured"]
        if self.python is not None:
            found = find_installation(self.python)
            versions = _versions(tuple(map(str, found.site_packages)))
            _require_transformers(json.loads(versions).get("transformers"), self.python)
            return [versions, _emulator()]
        python, version = _usual_python(tuple(sys.path))
        ready = python.parent.parent / READY
        return [ready.read_text() if ready.is_file() else version, _emulator()]


@cache
def _usual_python(folders: tuple[str, ...]) -> tuple[Path, str]:
    """The interpreter that records by default, with its torch's version where that is ours; ``folders``: sys.path.
    Looked for once, when it is found. Raises NotEmulatable."""
    try:
        used = find_installation()
    except NotEmulatable:
        found = find_environment()  # whose interpreter need not be asked: its folder says what it holds
        if found is None:
            raise
        return found, ""
    return Path(used.python), used.torch_version


#: What is set up, and an emulated GPU.
USUAL = Surroundings()


def measured_gpu() -> Gpu:
    """Return the catalog's row of this machine's first visible GPU. Raises SpecError where there is none."""
    from vramprobe.measure import nvml

    seen = nvml.first_visible_gpu()
    if seen is None:
        raise SpecError(
            "engine measured records on this machine's own GPU, and NVML shows none; leave it out, and the recording "
            "is made on an emulated one"
        )
    _, name = seen
    found = gpu_seen(name)
    if found is None:
        raise SpecError(f"engine measured: this machine's {name} is not in the catalog (vramprobe gpus)")
    return found


def record_packed(
    spec: CellSpec,
    gpu: Gpu,
    say: Say,
    *,
    shapes: Sequence[Shape] = (),
    whole: bool | None = None,
    near: bool = False,
    where: Surroundings = USUAL,
) -> bytes:
    """Return the packed recipe, recorded in a process of its own; ``whole`` and ``near`` are Request's.

    Raises CannotRecord, NotOneBranch, and NotEmulatable where no GPU can be emulated.
    """
    from vramprobe.measure.ranks import cards_of_a_machine

    num_cards = cards_of_a_machine(spec) or 1
    cards = gpu.short_name if num_cards == 1 else f"{gpu.short_name} x{num_cards}"
    known = _RECORDERS.get((cards, where))
    if known is not None and known.has_ended():
        known.close()
    if (cards, where) not in _RECORDERS:
        _RECORDERS[cards, where] = _Recorder(cards, where, say)
    return _RECORDERS[cards, where].record(spec, say, tuple(shapes), whole=whole, near=near)


class _Recorder:
    """A process that sees a machine with ``cards`` and records cell after cell; it ends with this one."""

    def __init__(self, cards: str, where: Surroundings, say: Say) -> None:
        self._key = (cards, where)
        self._machine, python, environment = _entered(cards, where, say)
        self._python = python
        self._folder = Path(tempfile.mkdtemp(prefix="vramprobe-recipe-"))
        self._log = self._folder / "log"
        with self._log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", "vramprobe.recipe.recording"],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def record(self, spec: CellSpec, say: Say, shapes: tuple[Shape, ...], *, whole: bool | None, near: bool) -> bytes:
        """Return the packed recipe. Raises CannotRecord; whatever ends this early ends the process."""
        from vramprobe.recipe.recording import Request

        out = self._folder / "recipe"
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended: its last words say why
                self._requests.write(Request(spec, out, shapes, whole, near).to_json_line())
                self._requests.flush()
            for line in self._answers:
                answer = json.loads(line)
                if "error" in answer:
                    raise _KINDS.get(answer["kind"], CannotRecord)(answer["error"])
                if "done" in answer:
                    return out.read_bytes()
                say(answer["say"])
        except CannotRecord:
            raise
        except BaseException:
            self._process.terminate()  # which would finish the cell first
            self.close()
            raise
        last = self._log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        status = self.close()
        raise CannotRecord(_ended_with(status, last[0], self._python))

    def has_ended(self) -> bool:
        """Return True if the process is gone, as one that was killed between two cells."""
        return self._process.poll() is not None

    def close(self) -> int:
        """End the process and take away what it left; its exit status."""
        _RECORDERS.pop(self._key, None)
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()  # on which it ends, and its fork server with it
        try:
            status = self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._answers.close()
        for folder in filter(None, (self._machine, self._folder)):
            rmtree(folder, ignore_errors=True)
        return status


def _entered(cards: str, where: Surroundings, say: Say) -> tuple[Path | None, Path, dict[str, str]]:
    """(the emulated machine's folder, None for this one's own GPU; interpreter; environment) of a recording process."""
    if where.measured:
        from vramprobe.measure.launcher import worker_environment

        return None, Path(sys.executable), worker_environment()
    way = entrance(cards, say=say, total_bytes=MOST_BYTES, python=where.python)
    return way.machine, way.python, way.environment


def _ended_with(status: int, last: str, python: Path) -> str:
    """Describe a recording's process that ended by itself: its status and its last words."""
    if last.startswith("ModuleNotFoundError: No module named "):
        name = last.split("'")[1].split(".")[0]
        missing = " ".join(_BESIDE.values()) if name in _BESIDE else name
        return f"{python} has no {name}, which a recording needs: {python} -m pip install {missing}"
    return f"the recording's process ended with {status}: {last[:300]}"


def _require_transformers(version: str | None, python: Path) -> None:
    """Raise SpecError for an interpreter whose transformers the workload does not run with."""
    if version is None:
        raise SpecError(f"{python} has no transformers: name the interpreter that your training runs with")
    from packaging.version import Version

    if Version(version) < Version(_LEAST_TRANSFORMERS):
        raise SpecError(
            f"{python} has transformers {version}; a recording needs {_LEAST_TRANSFORMERS} or newer; with an older "
            "one profile your own command: vramprobe profile --emulate GPU -- COMMAND"
        )


@cache
def _emulator() -> str:
    """The emulator's version, of sources that stay while this process runs."""
    return emulator_version()


@cache
def _versions(folders: tuple[str, ...]) -> str:
    """Libraries and their versions in these folders, as JSON."""
    from importlib.metadata import distributions

    found: dict[str, Any] = {}
    for one in distributions(path=list(folders)):
        name = (one.metadata["Name"] or "").lower().replace("_", "-")
        if name in _LIBRARIES:
            found.setdefault(name, one.version)
    return json.dumps(found, sort_keys=True)


#: The recording processes of this one, by their machine's cards and surroundings: the libraries are loaded once.
_RECORDERS: dict[tuple[str, Surroundings], _Recorder] = {}


@atexit.register
def close_recorders() -> None:
    """End all recording processes of this one."""
    for recorder in list(_RECORDERS.values()):
        recorder.close()
