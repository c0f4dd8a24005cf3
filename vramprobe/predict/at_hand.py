"""Recipes at hand, recorded here before or shipped: a cell → its Replay, without recording.

In: a CellSpec, the GPU. Out: a Replay, or None where nothing is at hand. A step of several micro-steps is
composed of one, a card from Ampere on answered for by an A100's recipe. Never imports torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache

from vramprobe import catalog
from vramprobe.allocator.config import parse_alloc_conf
from vramprobe.bounds.tensors import require_adapters
from vramprobe.emulate.installation import NotEmulatable
from vramprobe.emulate.toolchain import BuildError, NoCompiler
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.log.micro_steps import NoSecond
from vramprobe.log.shapes import Shape
from vramprobe.predict.recipe_replay import Replay, replay_recipe
from vramprobe.recipe.book import kept_recipe, recorded_as, repeats_micro_steps
from vramprobe.recipe.recipe import Recipe, shape_of
from vramprobe.recipe.shipped import LIKE_ALL, Shipped, answers_for, of_another_card, shipped_recipe
from vramprobe.rules.cell import not_quantized
from vramprobe.rules.not_sharded import reasons_not_run
from vramprobe.spec import CellSpec

#: The card whose kernels a cell meets where none is named.
DEFAULT_CARD = LIKE_ALL
#: Why nothing is recorded on this machine.
CANNOT_EMULATE = (NotEmulatable, NoCompiler, BuildError)
#: True while only recipes that ship answer.
_SHIPPED_ALONE: ContextVar[bool] = ContextVar("_SHIPPED_ALONE", default=False)


class NotAtHand(VramprobeError):
    """A cell that would have to be recorded, where nothing is recorded."""


class NoRecipe(SpecError):
    """A cell that is not recorded: only what one process does on an NVIDIA GPU is."""


@contextmanager
def shipped_alone() -> Iterator[None]:
    """Answer by the recipes that ship: what is published is the same on every machine, whatever was recorded there."""
    token = _SHIPPED_ALONE.set(True)
    try:
        yield
    finally:
        _SHIPPED_ALONE.reset(token)


def is_shipped_alone() -> bool:
    """Return True within :func:`shipped_alone`."""
    return _SHIPPED_ALONE.get()


def replay_at_hand(spec: CellSpec, *, gpu: catalog.Gpu | None = None, near: bool = False) -> Replay | None:
    """The cell's recipe from the cache, or one that ships and was recorded around its shape, else, if ``near``, the
    nearest that ships, whose notes say so; None without any.

    Several micro-steps also from a recipe of one, where a later micro-step follows from it.
    """
    try:
        require_recordable(spec, gpu)
    except NoRecipe:
        return None
    others = []
    for recorded, accumulates in cells_that_answer(spec):
        kept = kept_for(recorded, gpu)
        shipped = shipped_recipe(recorded_as(recorded), card_of(gpu)) if kept is None or near else None
        with suppress(NoSecond):
            if kept is not None:
                return _replayed_kept(kept, spec, gpu, accumulates=accumulates)
            if shipped is not None and shipped.covers(shape_of(spec)):
                return replayed_shipped(shipped, spec, accumulates=accumulates)
        others += [(shipped, accumulates)] if near and shipped is not None else []
    for shipped, accumulates in others:
        with suppress(NoSecond):
            return replayed_shipped(shipped, spec, accumulates=accumulates)
    return None


def replay_shipped_near(spec: CellSpec, *, gpu: catalog.Gpu | None) -> Replay:
    """The nearest recipe that ships, also where it was not recorded around the cell's shape. Raises NoRecipe."""
    require_recordable(spec, gpu)
    for recorded, accumulates in cells_that_answer(spec):
        shipped = shipped_recipe(recorded_as(recorded), card_of(gpu))
        if shipped is not None:
            with suppress(NoSecond):
                return replayed_shipped(shipped, spec, accumulates=accumulates)
    raise NoRecipe(f"no recipe of {spec.cell_id} ships")


def _replayed_kept(kept: Recipe, spec: CellSpec, gpu: catalog.Gpu | None, *, accumulates: bool) -> Replay:
    """Return the replay of ``spec`` by a recipe of the cache. Raises NoSecond."""
    found = replayed(kept, spec, accumulates=accumulates)
    is_other = kept.workspace_bytes is not None and len({*kept.workspace_bytes}) > 1
    other = (of_another_card(recorded_card(gpu).name),) if is_other else ()
    return replace(found, notes=(*found.notes, *other))


def kept_for(spec: CellSpec, gpu: catalog.Gpu | None) -> Recipe | None:
    """Return the cell's recipe of the cache, by the card itself or by the one whose recipes answer for it, with the
    card's own workspaces; None without one, where nothing can be recorded, and in :func:`shipped_alone`."""
    if is_shipped_alone():
        return None
    card = card_of(gpu)
    with suppress(*CANNOT_EMULATE):
        for one in dict.fromkeys((card, recorded_card(card))):
            if (kept := kept_recipe(spec, one, lambda words: None)) is not None:
                return replace(kept, workspace_bytes=(one.blas_workspace_bytes, card.blas_workspace_bytes))
    return None


def cells_that_answer(spec: CellSpec) -> list[tuple[CellSpec, bool]]:
    """Return the cells whose recipes answer for ``spec``, and whether a second micro-step is then composed."""
    one = spec.model_copy(update={"grad_accum": 1})
    return [(spec, False), *([(one, True)] if is_composed(spec) else [])]


def is_composed(spec: CellSpec) -> bool:
    """Return True if the cell's step of several micro-steps follows from one of one (log/micro_steps.py)."""
    return spec.grad_accum > 1 and repeats_micro_steps(spec)


def replayed_shipped(shipped: Shipped, spec: CellSpec, *, accumulates: bool = False) -> Replay:
    """Return the replay of ``spec`` by a recipe that ships, with notes of what that rests on. Raises NoSecond."""
    shape = shape_of(spec)
    found = replayed(shipped.recipe, spec, shape, accumulates=accumulates)
    return replace(found, notes=(*found.notes, *shipped.notes(shape)))


def replayed(recipe: Recipe, spec: CellSpec, shape: Shape | None = None, *, accumulates: bool = False) -> Replay:
    """Return the replay of ``spec``; with ``accumulates`` from a recipe of one micro-step. Raises NoSecond."""
    found = _replayed(recipe, spec.alloc_conf or "", shape, accumulates)
    provenance, *notes = notes_of(recipe, spec)
    said = ("its later micro-steps follow from one that was recorded",) if accumulates else ()
    return replace(found, provenance=provenance, notes=(*found.notes, *said, *notes))


@lru_cache(maxsize=16)
def _replayed(recipe: Recipe, alloc_conf: str, shape: Shape | None, accumulates: bool) -> Replay:
    """The last few replays: a search asks for the same step on one GPU, and as what several divide."""
    config = parse_alloc_conf(alloc_conf)
    return replay_recipe(recipe, config, shape, stack=recipe.stack, accumulates=accumulates)


def card_of(gpu: catalog.Gpu | None) -> catalog.Gpu:
    """The GPU whose kernels are recorded: an amount of memory has none of its own, and what is emulated is CUDA."""
    return gpu if gpu is not None and not gpu.is_size and gpu.vendor == "NVIDIA" else catalog.find_gpu(DEFAULT_CARD)


def recorded_card(gpu: catalog.Gpu | None) -> catalog.Gpu:
    """Return the card whose recipes answer for ``gpu``."""
    card = card_of(gpu)
    return catalog.find_gpu(LIKE_ALL) if answers_for(card) else card


def require_recordable(spec: CellSpec, gpu: catalog.Gpu | None) -> None:
    """Raise NoRecipe for a cell that the recipe engine does not record, SpecError or RunFails for one that fails."""
    require_adapters(spec)
    if spec.device != "cuda":
        raise NoRecipe(
            "a recipe is recorded on an emulated GPU, and device cpu was given; drop it, or run the cell: "
            "vramprobe measure --device cpu"
        )
    recorded = spec if spec.is_spread else recorded_as(spec)
    if spec.sharding is not None and (reasons := reasons_not_run(recorded)):
        raise NoRecipe("; ".join(reasons))
    if spec.is_spread:
        cards = f"{card_of(gpu).short_name} x{spec.num_gpus}"
        raise NoRecipe(
            f"a recipe is of one rank, and {spec.sharding} has one process for all GPUs; it is run instead: "
            f"vramprobe measure with these options and --emulate '{cards}', or your own command: vramprobe profile "
            f"--emulate '{cards}' --empty-weights -- COMMAND"
        )


def notes_of(recipe: Recipe, spec: CellSpec) -> list[str]:
    """Say how a recipe was recorded, and what else to know of its model."""
    reached, total = recipe.facts.get("num_quantised_params"), recipe.facts.get("num_params")
    is_counted = reached is not None and total is not None
    notes = not_quantized(spec.quant, spec.kbit_prep, spec.dtype, reached, total) if is_counted else []
    return [_provenance(recipe), *notes]


def _provenance(recipe: Recipe) -> str:
    measured_on = recipe.stack.get("gpu")
    how = f"measured on this machine's {measured_on}" if measured_on else "recorded on the emulated GPU"
    if recipe.checked is None:
        return f"{how}, whole: {recipe.depths[0]} layers, in this stack"
    layers = ", ".join(map(str, recipe.depths[:3]))
    return f"{how} at {layers} layers and extended; event for event at {recipe.checked}, too"
