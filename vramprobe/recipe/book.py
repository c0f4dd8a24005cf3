"""Recipes that were recorded before, and recording of those that were not.

In: a CellSpec and an NVIDIA GPU. Out: its Recipe, from the user's cache or recorded now on the emulated GPU, and then
kept. A recipe is found by the cell, the GPU's kind and the stack that recorded it. No torch.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

from vramprobe.catalog import Gpu
from vramprobe.emulate.build import cache_errors, cache_folder, emulator_version
from vramprobe.emulate.enter import Entrance, entrance, installation_to_use
from vramprobe.errors import StoreError, VramprobeError
from vramprobe.recipe.recipe import FORMAT, Recipe, unpack
from vramprobe.records.whole_file import replacing
from vramprobe.spec import CellSpec

#: Of the card that a recording runs on, so that nothing ends it: what a card holds is the replay's question.
_ROOMY_BYTES = 1 << 40  # the most that an emulated card may have


class CannotRecord(VramprobeError):
    """No recipe is at hand and none can be recorded; the message says why, and what to do."""


def find_recipe(
    spec: CellSpec, gpu: Gpu, say: Callable[[str], None] = lambda words: None, *, folder: Path | None = None
) -> Recipe:
    """Return the cell's recipe on ``gpu``, recorded now if it is not in the cache; ``say`` hears of the progress.

    ``folder``: the cache; the user's by default.

    Raises CannotRecord, NotEmulatable where no GPU can be emulated here.
    """
    spec = recorded_as(spec)
    path = (folder or cache_folder() / "recipes") / f"{_key(spec, gpu)}.recipe"
    if path.exists():
        try:
            return unpack(path.read_bytes(), str(path))
        except StoreError as damaged:
            say(f"{damaged}; recording it again")
    packed = record_packed(spec, gpu, say)
    with cache_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_bytes(packed)
    return unpack(packed, str(path))


def recorded_as(spec: CellSpec) -> CellSpec:
    """The cell as it is recorded: what decides no allocation left at its default."""
    return spec.model_copy(update={"weights": "random", "limit_vram": None, "alloc_conf": None, "timing_steps": 1})


def _key(spec: CellSpec, gpu: Gpu) -> str:
    """What decides a recording: the cell, the kind of GPU, the libraries that run it, the emulator."""
    python = installation_to_use()
    ready = Path(python.python).parent.parent / "vramprobe-ready.json"
    stack = ready.read_text() if ready.is_file() else python.torch_version
    words = [FORMAT, spec.model_dump(mode="json"), gpu.short_name, stack, emulator_version()]
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:24]


def record_packed(spec: CellSpec, gpu: Gpu, say: Callable[[str], None], *, whole: bool = False) -> bytes:
    """Return the packed recipe, recorded in a process that sees the emulated GPU; ``whole``: without extension."""
    way = entrance(gpu.short_name, say=say, total_bytes=_ROOMY_BYTES)
    try:
        with tempfile.TemporaryDirectory(prefix="vramprobe-recipe-") as folder:
            return _recorded_in(way, Path(folder), spec, say, ["whole"] * whole)
    finally:
        rmtree(way.machine, ignore_errors=True)


def _recorded_in(way: Entrance, folder: Path, spec: CellSpec, say: Callable[[str], None], more: list[str]) -> bytes:
    request, out, log = folder / "spec.json", folder / "recipe", folder / "log"
    request.write_text(spec.model_dump_json())
    words = [str(way.python), "-m", "vramprobe.recipe.recording", str(request), str(out), *more]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            words, env=way.environment, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, text=True
        ) as process,
    ):
        try:
            failure = None
            for line in process.stdout:
                answer = json.loads(line)
                failure = answer.get("error", failure)
                if "say" in answer:
                    say(answer["say"])
            process.wait()
        except BaseException:
            process.kill()
            raise
    if out.exists():
        return out.read_bytes()
    last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
    raise CannotRecord(failure or f"the recording's process ended with {process.returncode}: {last[0][:300]}")
