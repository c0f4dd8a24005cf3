"""The recipe engine: a cell → its Prediction from a recording on the emulated GPU, for any model that runs.

In: a CellSpec, the GPU, a fit for what lies beyond the allocator. Out: a Prediction: the recorded log, extended to the
cell's own depth, played through torch's caching allocator. Never imports torch; recording happens in other processes.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from vramprobe import catalog
from vramprobe.allocator.config import parse_alloc_conf
from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.bounds.floor import require_above_floor
from vramprobe.errors import VramprobeError
from vramprobe.log.micro_steps import NoSecond
from vramprobe.model.card_fit import CardFit
from vramprobe.predict.at_hand import (
    CANNOT_EMULATE,
    DEFAULT_CARD,
    NoRecipe,
    card_of,
    cells_that_answer,
    is_composed,
    replay_shipped_near,
    replayed,
    require_recordable,
)
from vramprobe.predict.host_memory import in_words, of_rank_bytes, require_room
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.recipe_replay import COMPILED_RATIOS, RESERVED_RATIOS, Replay, with_retries
from vramprobe.predict.uncertainty import interval_around, with_fit
from vramprobe.recipe.book import find_recipe, kept_recipe
from vramprobe.recipe.recipe import NotOneBranch, Recipe, TooLarge, shape_of
from vramprobe.recipe.recorder import USUAL, Surroundings, measured_gpu
from vramprobe.recipe.shipped import labels_of
from vramprobe.spec import CellSpec

#: What is recorded to answer for others: the first at several depths.
_COUNTS = {"batch_size": (8, 2, 3, 5), "seq_len": (1024, 1536, 2560, 4096)}
#: What is recorded to answer for a cell larger than a recording's GPU where those are in two branches.
_LARGER_COUNTS = {"batch_size": ((32, 8, 12, 20), (31, 20, 24, 28)), "seq_len": ((4096, 6144, 10240, 16384),)}


def predict(
    spec: CellSpec,
    *,
    gpu: catalog.Gpu | None = None,
    model: CardFit | None = None,
    say: Callable[[str], None] = lambda words: None,
    where: Surroundings = USUAL,
) -> Prediction:
    """The peaks of ``spec`` from its recipe, recorded now if it is not at hand; ``say`` hears of the progress.

    ``model``: a fit of measured records; one of emulated records says nothing that a recording does not. ``where``: the
    libraries to record with, and an emulated GPU or this machine's own. Raises NotEmulatable where no GPU can be
    emulated here, CannotRecord for a cell that does not run, NoRecipe for one that is not recorded at all.
    """
    return predict_replay(replay_of(spec, gpu=gpu, say=say, where=where), spec, gpu=gpu, model=model)


def replay_of(
    spec: CellSpec,
    *,
    gpu: catalog.Gpu | None = None,
    say: Callable[[str], None] = lambda words: None,
    where: Surroundings = USUAL,
) -> Replay:
    """The cell's recipe, recorded now if it is not at hand, through the allocator; raises as :func:`predict`."""
    require_recordable(spec, gpu)
    card = measured_gpu() if where.measured else card_of(gpu)
    try:
        return _recorded(spec, card, say, where)
    except CANNOT_EMULATE as error:
        if where != USUAL:
            raise
        try:
            return replay_shipped_near(spec, gpu=card)
        except NoRecipe:
            raise type(error)(f"{error} {_what_ships(spec)}") from None


def _recorded(spec: CellSpec, card: catalog.Gpu, say: Callable[[str], None], where: Surroundings) -> Replay:
    """The replay of a recipe that is recorded now if it is not in the cache; of several micro-steps, of one."""
    if is_composed(spec) and kept_recipe(spec, card, say, where=where) is None:
        one = find_recipe(spec.model_copy(update={"grad_accum": 1}), card, say, where=where)
        with suppress(NoSecond):
            return replayed(one, spec, accumulates=True)
    if kept_recipe(spec, card, say, where=where) is None:
        require_room(spec)
    try:
        return replayed(find_recipe(spec, card, say, where=where), spec)
    except TooLarge:
        question = next((name for name, counts in _COUNTS.items() if getattr(spec, name) > max(counts)), None)
        if question is None or where != USUAL:
            raise
    return _replay_beyond(spec, question, (_COUNTS[question], *_LARGER_COUNTS[question]), card, say)


def _replay_beyond(
    spec: CellSpec, question: str, choices: Sequence[tuple[int, ...]], card: catalog.Gpu, say: Callable[[str], None]
) -> Replay:
    """The replay of a cell larger than a recording's GPU, from smaller values of ``question``, near and not exact: from
    the first of ``choices`` that lies in one branch. Raises NotOneBranch.
    """
    counts, *others = choices
    try:
        recipe, accumulates = recipe_over(spec, question, card, say, counts=counts)
    except NotOneBranch:
        if not others:
            raise
        return _replay_beyond(spec, question, others, card, say)
    found = replayed(recipe, spec, shape_of(spec), accumulates=accumulates)
    values = ", ".join(f"{count:,}" for count in sorted(counts))
    larger = f"more than a recording's GPU holds: recorded at {question} {values} and extended; near, not exact"
    return replace(found, notes=(*found.notes, larger))


def predict_many(
    specs: Sequence[CellSpec],
    stop: Callable[[], bool] = lambda: False,
    *,
    gpu: catalog.Gpu | None = None,
    model: CardFit | None = None,
) -> list[Prediction | str]:
    """One for each spec, in order; text where there is none, and why.

    ``stop`` is asked before each; once it says yes, the rest is not predicted.
    """
    found: list[Prediction | str] = []
    for spec in specs:
        if stop():
            break
        try:
            found.append(predict(spec, gpu=gpu, model=model))
        except VramprobeError as error:
            found.append(str(error))
    return [*found, *["not recorded: stopped before its turn"] * (len(specs) - len(found))]


def over_shapes(
    spec: CellSpec,
    question: Literal["batch_size", "seq_len"],
    *,
    gpu: catalog.Gpu,
    model: CardFit | None = None,
    say: Callable[[str], None] = lambda words: None,
) -> Callable[[CellSpec], Prediction]:
    """Return what predicts ``spec`` with any other value of ``question``, from one recipe of a few batch shapes.

    Near, not exact: another value may be in another branch, so that its own recording decides. Raises as
    :func:`predict`, and CannotRecord where already the recorded shapes are in two branches.
    """
    recipe, accumulates = recipe_over(spec, question, gpu, say)
    return lambda one: _predicted(replayed(recipe, one, shape_of(one), accumulates=accumulates), one, model, gpu)


def recipe_over(
    spec: CellSpec,
    question: str,
    gpu: catalog.Gpu,
    say: Callable[[str], None],
    *,
    counts: tuple[int, ...] | None = None,
) -> tuple[Recipe, bool]:
    """The recipe of a few shapes that answers for ``spec``, and whether a second micro-step is then composed."""
    require_recordable(spec, gpu)
    for recorded, accumulates in reversed(cells_that_answer(spec)):
        with suppress(NoSecond):
            recipe = _recorded_over(recorded, question, counts or _COUNTS[question], gpu, say)
            recipe.deep(accumulates=accumulates)
            return recipe, accumulates
    raise AssertionError("a cell's own recipe composes nothing")


def _recorded_over(
    spec: CellSpec,
    question: str,
    counts: tuple[int, ...],
    gpu: catalog.Gpu,
    say: Callable[[str], None],
) -> Recipe:
    if question == "seq_len" and (most := spec.learned_positions) is not None:
        counts = tuple(min(count, most * count // counts[-1]) for count in counts)
    cells = [spec.model_copy(update={question: count}) for count in counts]
    shapes = [(one.batch_size, one.seq_len) for one in cells]
    return find_recipe(cells[0], card_of(gpu), say, shapes=shapes[1:])


def predict_replay(
    replay: Replay, spec: CellSpec, *, gpu: catalog.Gpu | None = None, model: CardFit | None = None
) -> Prediction:
    """The Prediction of a replayed recipe: corrected by ``model``, with retries on ``gpu``, and reasons."""
    found = _predicted(replay, spec, model, gpu)
    found = found.model_copy(update={"warnings": [*found.warnings, *_reasons(spec, found, gpu)]})
    return found if gpu is None else with_retries(found, replay.log, parse_alloc_conf(spec.alloc_conf or ""), gpu)


def _reasons(spec: CellSpec, found: Prediction, gpu: catalog.Gpu | None) -> list[str]:
    """Return why the answer is as large as it is, of a model whose tensors are known."""
    from vramprobe.predict.reasons import reasons, without_flash

    try:
        return [*reasons(spec, found.terms), *without_flash(spec, gpu)]
    except UnsupportedArchitecture:
        return []


def _predicted(replay: Replay, spec: CellSpec, model: CardFit | None, gpu: catalog.Gpu | None) -> Prediction:
    require_above_floor(spec, replay.peak.allocated_bytes, replay.num_params)
    found = replay.prediction(spec.cell_id, [*_of_rank(spec), replay.provenance, *_of_vendor(gpu), *replay.notes])
    # a rank's weights are whole before they are divided
    loads = replay.peak.load_allocated_bytes if spec.is_sharded else 0
    reserved = max(loads, (found.reserved_bytes or found.peak_allocated_bytes).value)
    ratios = COMPILED_RATIOS if spec.torch_compile else RESERVED_RATIOS
    found = found.model_copy(update={"reserved_bytes": interval_around(reserved, ratios)})
    if model is not None:
        found = with_fit(found, spec, model, gpu, num_params=replay.num_params)
    ranks = {"num_gpus": spec.num_gpus, "sharding": spec.sharding}
    return with_host(found.model_copy(update=ranks), spec)


def with_host(found: Prediction, spec: CellSpec) -> Prediction:
    """Return ``found`` with the host memory of a rank that offloads, by formulas, where the tensors are known."""
    if spec.offload == "none":
        return found
    with suppress(UnsupportedArchitecture):
        words = [*found.warnings, in_words(spec)]
        return found.model_copy(update={"host_bytes": of_rank_bytes(spec), "warnings": words})
    return found


def _of_rank(spec: CellSpec) -> list[str]:
    if not spec.is_sharded:
        return []
    return [f"rank {spec.only_rank or 0} of {spec.num_gpus} under {spec.sharding}, emulated alone, not measured"]


def _of_vendor(gpu: catalog.Gpu | None) -> list[str]:
    if gpu is None or gpu.is_size or gpu.vendor == "NVIDIA":
        return []
    return [f"recorded as on {DEFAULT_CARD}: what the kernels of {gpu.vendor} ask for beside it was not checked"]


def _what_ships(spec: CellSpec) -> str:
    """The recipes that ship of the cell's model, for an error."""
    labels = labels_of(spec.model)
    if not labels:
        return f"No recipe of {spec.model} ships either"
    ships = "these recipes ship, for cards like an A100, for any batch and length, where a name says so for any rank"
    return f"Of {spec.model} {ships}: {', '.join(labels)}"
