"""Recipes that were recorded before, and recording of those that were not.

In: a CellSpec and an NVIDIA GPU. Out: its Recipe, from the user's cache or recorded now on the emulated GPU, and then
kept. A recipe is found by the cell, the GPU, the stack that recorded it and the emulator. No torch.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import rmtree

from vramprobe.catalog import Gpu
from vramprobe.emulate.build import cache_errors, cache_folder, emulator_version
from vramprobe.emulate.enter import MOST_BYTES, entrance, installation_to_use
from vramprobe.emulate.environment import READY
from vramprobe.errors import StoreError, VramprobeError
from vramprobe.log.shapes import Shape
from vramprobe.recipe.recipe import FORMAT, Recipe, unpack
from vramprobe.records.whole_file import replacing
from vramprobe.rules.sharding import with_group_size
from vramprobe.spec import CellSpec

Say = Callable[[str], None]
_ENDING_SECONDS = 10.0


class CannotRecord(VramprobeError):
    """No recipe is at hand and none can be recorded; the message says why, and what to do."""


def find_recipe(
    spec: CellSpec,
    gpu: Gpu,
    say: Say = lambda words: None,
    *,
    shapes: Sequence[Shape] = (),
    folder: Path | None = None,
    counted: bool = False,
) -> Recipe:
    """Return the cell's recipe on ``gpu``, recorded now if it is not in the cache; ``say`` hears of the progress.

    ``shapes``: further rows and lengths, so that the recipe answers for others. ``folder``: the cache; the user's by
    default. ``counted``: a recipe from before launches were counted will not do. Raises CannotRecord, NotEmulatable
    where no GPU can be emulated here.
    """
    kept = kept_recipe(spec, gpu, say, shapes=shapes, folder=folder)
    if kept is not None and (kept.launches is not None or not counted):
        return kept
    spec = recorded_as(spec)
    packed, path = record_packed(spec, gpu, say, shapes=shapes), _path(spec, gpu, shapes, folder)
    with cache_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_bytes(packed)
    return unpack(packed, str(path))


def kept_recipe(
    spec: CellSpec, gpu: Gpu, say: Say, *, shapes: Sequence[Shape] = (), folder: Path | None = None
) -> Recipe | None:
    """Return the cell's recipe from the cache; None where it was not recorded. Raises NotEmulatable."""
    path = _path(recorded_as(spec), gpu, shapes, folder)
    if not path.exists():
        return None
    try:
        return unpack(path.read_bytes(), str(path))
    except StoreError as damaged:
        say(f"{damaged}; recording it again")
        return None


def recorded_as(spec: CellSpec) -> CellSpec:
    """The cell as it is recorded: what decides no allocation is left at its default; of ranks the first runs alone,
    unless another is asked for."""
    whole = {"weights": "random", "limit_vram": None, "alloc_conf": None, "timing_steps": 1}
    rank = {"only_rank": spec.only_rank or 0} if spec.num_gpus > 1 else {}
    return with_group_size(spec).model_copy(update=whole | rank)


def record_packed(spec: CellSpec, gpu: Gpu, say: Say, *, shapes: Sequence[Shape] = (), whole: bool = False) -> bytes:
    """Return the packed recipe, recorded in a process that sees the emulated GPU; ``whole``: without extension."""
    from vramprobe.measure.ranks import cards_of_a_machine

    num_cards = cards_of_a_machine(spec) or 1
    cards = gpu.short_name if num_cards == 1 else f"{gpu.short_name} x{num_cards}"
    known = _RECORDERS.get(cards)
    if known is not None and known.has_ended():
        known.close()
    if cards not in _RECORDERS:
        _RECORDERS[cards] = _Recorder(cards, say)
    return _RECORDERS[cards].record(spec, say, tuple(shapes), whole=whole)


def _path(spec: CellSpec, gpu: Gpu, shapes: Sequence[Shape], folder: Path | None) -> Path:
    return (folder or cache_folder() / "recipes") / f"{_key(spec, gpu, shapes)}.recipe"


def _key(spec: CellSpec, gpu: Gpu, shapes: Sequence[Shape]) -> str:
    """Return the key of a recording: a hash of the cell, the GPU, the libraries that run it, the emulator."""
    python = installation_to_use()
    ready = Path(python.python).parent.parent / READY
    stack = ready.read_text() if ready.is_file() else python.torch_version
    words = [FORMAT, spec.model_dump(mode="json"), gpu.short_name, list(shapes), stack, emulator_version()]
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:24]


class _Recorder:
    """A process that sees an emulated machine with ``cards`` and records cell after cell; it ends with this one."""

    def __init__(self, cards: str, say: Say) -> None:
        way = entrance(cards, say=say, total_bytes=MOST_BYTES)
        self._cards, self._machine, self._folder = (
            cards,
            way.machine,
            Path(tempfile.mkdtemp(prefix="vramprobe-recipe-")),
        )
        self._log = self._folder / "log"
        with self._log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(way.python), "-m", "vramprobe.recipe.recording"],
                env=way.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def record(self, spec: CellSpec, say: Say, shapes: tuple[Shape, ...], *, whole: bool) -> bytes:
        """Return the packed recipe. Raises CannotRecord; whatever ends this early ends the process."""
        from vramprobe.recipe.recording import Request

        out = self._folder / "recipe"
        try:
            self._process.stdin.write(Request(spec, out, shapes, whole).to_json_line())
            self._process.stdin.flush()
            for line in self._process.stdout:
                answer = json.loads(line)
                if "error" in answer:
                    raise CannotRecord(answer["error"])
                if "done" in answer:
                    return out.read_bytes()
                say(answer["say"])
        except CannotRecord:
            raise
        except BaseException:
            self.close()
            raise
        last = self._log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        status = self.close()
        raise CannotRecord(f"the recording's process ended with {status}: {last[0][:300]}")

    def has_ended(self) -> bool:
        """Return True if the process is gone, as one that was killed between two cells."""
        return self._process.poll() is not None

    def close(self) -> int:
        """End the process and take away what it left; its exit status."""
        _RECORDERS.pop(self._cards, None)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # on which it ends, and its fork server with it
        try:
            status = self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._process.stdout.close()
        for folder in (self._machine, self._folder):
            rmtree(folder, ignore_errors=True)
        return status


#: The recording processes of this one, by their machine's cards: the libraries are loaded once.
_RECORDERS: dict[str, _Recorder] = {}


@atexit.register
def close_recorders() -> None:
    """End all recording processes of this one."""
    for recorder in list(_RECORDERS.values()):
        recorder.close()
