"""Recipes that were recorded before, and recording of those that were not.

In: a CellSpec, an NVIDIA GPU, Surroundings. Out: its Recipe, from the user's cache or recorded now (recorder.py), and
then kept. A recipe is found by the cell, the GPU, the libraries that it was recorded with and the emulator. No torch.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vramprobe.catalog import Gpu, is_slug
from vramprobe.catalog.own import cache_folder
from vramprobe.emulate.version import cache_errors
from vramprobe.errors import StoreError
from vramprobe.log.shapes import Shape
from vramprobe.recipe.likeness import as_in_catalog
from vramprobe.recipe.packed import FORMAT, pack, unpack
from vramprobe.recipe.recipe import Origin, Recipe, recorded_words, shape_of
from vramprobe.recipe.recorder import USUAL, Say, Surroundings, record_packed
from vramprobe.records.whole_file import replacing
from vramprobe.rules.sharding import with_group_size
from vramprobe.spec import CellSpec

#: Of a step that is recorded, where they repeat.
MOST_MICRO_STEPS = 2


def find_recipe(
    spec: CellSpec,
    gpu: Gpu,
    say: Say = lambda words: None,
    *,
    shapes: Sequence[Shape] = (),
    folder: Path | None = None,
    near: bool = False,
    whole: bool | None = None,
    where: Surroundings = USUAL,
) -> Recipe:
    """Return the cell's recipe on ``gpu``, recorded now if it is not in the cache; ``say`` hears of the progress.

    ``shapes``: further rows and lengths, or ranks too, so that the recipe answers for others. ``folder``: the cache;
    the user's by default. ``near``: shapes in other branches than the cell's own do no harm; the recipe says nothing
    exact of them. ``whole``: Request's. ``where``: the libraries, and an emulated GPU or this machine's own. Raises
    CannotRecord, NotEmulatable where no GPU can be emulated here.
    """
    spec = recorded_as(spec)
    path = _path(spec, gpu, shapes, folder, where, near=near)
    kept = _read(path, say)
    if kept is not None and kept.origin is not None:
        return kept
    own = shape_of(spec)[: len(shapes[0]) if shapes else 2]
    known = {own, *(() if near else shapes)}
    origin = Origin(label=spec.cell_id, card=gpu.short_name, shapes=tuple(sorted(known)), cell=recorded_words(spec))
    if kept is None:
        kept = unpack(record_packed(spec, gpu, say, shapes=shapes, whole=whole, near=near, where=where), str(path))
    recipe = replace(kept, origin=origin)
    with cache_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_bytes(pack(recipe))
    return recipe


def kept_recipe(
    spec: CellSpec,
    gpu: Gpu,
    say: Say,
    *,
    shapes: Sequence[Shape] = (),
    folder: Path | None = None,
    near: bool = False,
    where: Surroundings = USUAL,
) -> Recipe | None:
    """Return the cell's recipe from the cache; None where it was not recorded. Raises NotEmulatable."""
    if not (folder or _folder()).is_dir():
        return None
    return _read(_path(recorded_as(spec), gpu, shapes, folder, where, near=near), say)


def _read(path: Path, say: Say) -> Recipe | None:
    if not path.exists():
        return None
    try:
        return unpack(path.read_bytes(), str(path))
    except StoreError as damaged:
        say(f"{damaged}; recording it again")
        return None


def recorded_as(spec: CellSpec) -> CellSpec:
    """The cell as it is recorded: what decides no allocation is left at its default, a model of the catalog's shape has
    the catalog's configuration; of ranks the first runs alone, unless another is asked for; where micro-steps repeat,
    two of them."""
    if not is_slug(spec.model):
        config = as_in_catalog(spec.architecture, learns_positions=spec.learned_positions is not None)
        spec = spec.model_copy(update={"architecture": config})
    whole = {"weights": "random", "limit_vram": None, "alloc_conf": None, "timing_steps": 1}
    alone = {"grad_accum": min(spec.grad_accum, MOST_MICRO_STEPS)} if repeats_micro_steps(spec) else {}
    rank = {"only_rank": spec.only_rank or 0} if spec.is_sharded else {}
    return with_group_size(spec).model_copy(update=whole | alone | rank)


def repeats_micro_steps(spec: CellSpec) -> bool:
    """Return True if each micro-step of a step after the first is like the second: not under sharding, not in a
    function that takes a step and frees what it returns at its end, not of a compiled model, which plans blocks over
    the whole step."""
    return not spec.is_sharded and spec.loop != "step-function" and not spec.torch_compile


def _folder() -> Path:
    return cache_folder() / "recipes"


def _path(
    spec: CellSpec, gpu: Gpu, shapes: Sequence[Shape], folder: Path | None, where: Surroundings, *, near: bool = False
) -> Path:
    """The file of a recording; its name is a hash of the cell but its model's name, the GPU, the libraries that run it,
    and the emulator."""
    words = [
        FORMAT,
        recorded_words(spec, {"model"}),
        gpu.short_name,
        list(shapes),
        *(["near"] if near else []),
        *where.key(),
    ]
    key = hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:24]
    return (folder or _folder()) / f"{key}.recipe"
