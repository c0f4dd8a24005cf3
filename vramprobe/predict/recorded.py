"""The recipe engine: a cell → its Prediction from a recording on the emulated GPU, for any model that runs.

In: a CellSpec, the GPU, a fit for what lies beyond the allocator. Out: a Prediction: the recorded log, extended to the
cell's own depth, played through torch's caching allocator. Never imports torch; recording happens in other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

from vramprobe import catalog
from vramprobe.allocator.config import parse_alloc_conf
from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.bounds.floor import require_above_floor
from vramprobe.errors import VramprobeError
from vramprobe.log.micro_steps import NoSecond
from vramprobe.model.card_fit import CardFit
from vramprobe.predict.at_hand import (
    CANNOT_EMULATE,
    card_of,
    cells_that_answer,
    counted_shipped,
    is_composed,
    replay_shipped_near,
    replayed,
    replayed_shipped,
    require_launches,
    require_recordable,
    shipped_launches,
)
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.recipe_replay import COMPILED_RATIOS, RESERVED_RATIOS, Replay, with_retries
from vramprobe.predict.uncertainty import interval_around, with_fit
from vramprobe.recipe.book import find_recipe, kept_recipe
from vramprobe.recipe.launches import Launches
from vramprobe.recipe.recipe import Recipe, shape_of
from vramprobe.recipe.recorder import USUAL, Surroundings, measured_gpu
from vramprobe.recipe.shipped import labels_of
from vramprobe.spec import CellSpec

#: What is recorded to answer for others: the first at several depths.
_COUNTS = {"batch_size": (8, 2, 3, 5), "seq_len": (1024, 1536, 2560, 4096)}


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


def predict_and_count(
    spec: CellSpec, *, gpu: catalog.Gpu, say: Callable[[str], None] = lambda words: None
) -> tuple[Prediction, Launches]:
    """The peaks, and what a step launches (recipe/launches.py); raises as :func:`predict`.

    From a recipe that ships where one was recorded around the shape, else from one that is recorded now.
    """
    require_recordable(spec, gpu)
    for recorded, accumulates in cells_that_answer(spec):
        with suppress(NoSecond):
            if (shipped := counted_shipped(recorded, gpu)) is not None:
                launches = shipped_launches(shipped, spec, accumulates=accumulates)
                replay = replayed_shipped(shipped, spec, accumulates=accumulates)
                return _predicted(replay, spec, None, gpu), require_launches(launches, spec)
    for recorded, accumulates in reversed(cells_that_answer(spec)):
        with suppress(NoSecond):
            recipe = find_recipe(recorded, card_of(gpu), say, counted=True)
            replay = replayed(recipe, spec, accumulates=accumulates)
            launches = recipe.launches_at(accumulates=accumulates)
            return _predicted(replay, spec, None, gpu), require_launches(launches, spec)
    raise AssertionError("a cell's own recipe composes nothing")


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
        if (shipped := replay_shipped_near(spec, gpu=card)) is None:
            raise type(error)(f"{error} {_what_ships(spec)}") from None
        return shipped


def _recorded(spec: CellSpec, card: catalog.Gpu, say: Callable[[str], None], where: Surroundings) -> Replay:
    """The replay of a recipe that is recorded now if it is not in the cache; of several micro-steps, of one."""
    if is_composed(spec) and kept_recipe(spec, card, say, where=where) is None:
        one = find_recipe(spec.model_copy(update={"grad_accum": 1}), card, say, where=where)
        with suppress(NoSecond):
            return replayed(one, spec, accumulates=True)
    return replayed(find_recipe(spec, card, say, where=where), spec)


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
    recipe, accumulates = _recipe_over(spec, question, gpu, say)
    return _over(recipe, model, gpu, accumulates=accumulates)


def over_rows(
    spec: CellSpec, *, gpu: catalog.Gpu, say: Callable[[str], None] = lambda words: None
) -> tuple[int, Callable[[CellSpec], tuple[Prediction, Launches]]]:
    """Return the most rows that were recorded, and what gives peaks and launches of any number from two on; raises as
    :func:`over_shapes` and :func:`predict_and_count`."""
    most, fewest, *_ = _COUNTS["batch_size"]
    recorded, accumulates = cells_that_answer(spec)[-1]
    shipped = counted_shipped(recorded.model_copy(update={"batch_size": fewest}), gpu)
    if shipped is not None and shipped.recipe.launch_rules is not None:
        recipe, most = shipped.recipe, max(rows for rows, *_ in shipped.shapes)
    else:
        recipe, accumulates = _recipe_over(spec, "batch_size", gpu, say, counted=True)
    predicted = _over(recipe, None, gpu, accumulates=accumulates)

    def both(one: CellSpec) -> tuple[Prediction, Launches]:
        launches = recipe.launches_at(shape_of(one), accumulates=accumulates)
        return predicted(one), require_launches(launches, one)

    return most, both


def _recipe_over(
    spec: CellSpec, question: str, gpu: catalog.Gpu, say: Callable[[str], None], *, counted: bool = False
) -> tuple[Recipe, bool]:
    """The recipe of a few shapes that answers for ``spec``, and whether a second micro-step is then composed."""
    require_recordable(spec, gpu)
    for recorded, accumulates in reversed(cells_that_answer(spec)):
        with suppress(NoSecond):
            recipe = _recorded_over(recorded, question, gpu, say, counted=counted)
            recipe.deep(accumulates=accumulates)
            return recipe, accumulates
    raise AssertionError("a cell's own recipe composes nothing")


def _recorded_over(
    spec: CellSpec, question: str, gpu: catalog.Gpu, say: Callable[[str], None], *, counted: bool
) -> Recipe:
    counts = _COUNTS[question]
    if question == "seq_len" and (most := spec.learned_positions) is not None:
        counts = tuple(min(count, most * count // counts[-1]) for count in counts)
    cells = [spec.model_copy(update={question: count}) for count in counts]
    shapes = [(one.batch_size, one.seq_len) for one in cells]
    return find_recipe(cells[0], card_of(gpu), say, shapes=shapes[1:], counted=counted)


def _over(
    recipe: Recipe, model: CardFit | None, gpu: catalog.Gpu, *, accumulates: bool
) -> Callable[[CellSpec], Prediction]:
    return lambda one: _predicted(replayed(recipe, one, shape_of(one), accumulates=accumulates), one, model, gpu)


def predict_replay(
    replay: Replay, spec: CellSpec, *, gpu: catalog.Gpu | None = None, model: CardFit | None = None
) -> Prediction:
    """The Prediction of a replayed recipe: corrected by ``model``, with retries on ``gpu``, and reasons."""
    found = _predicted(replay, spec, model, gpu)
    found = found.model_copy(update={"warnings": [*found.warnings, *_reasons(spec, found)]})
    return found if gpu is None else with_retries(found, replay.log, parse_alloc_conf(spec.alloc_conf or ""), gpu)


def _reasons(spec: CellSpec, found: Prediction) -> list[str]:
    """Return why the answer is as large as it is, of a model whose tensors are known by arithmetic."""
    from vramprobe.architecture import UnsupportedArchitecture
    from vramprobe.predict.reasons import reasons

    try:
        return reasons(spec, found.terms)
    except UnsupportedArchitecture:
        return []


def _predicted(replay: Replay, spec: CellSpec, model: CardFit | None, gpu: catalog.Gpu | None) -> Prediction:
    require_above_floor(spec, replay.peak.allocated_bytes, replay.num_params)
    found = replay.prediction(spec.cell_id, [*_of_rank(spec), replay.provenance, *replay.notes])
    loads = (
        replay.peak.load_allocated_bytes if spec.num_gpus > 1 else 0
    )  # weights that are whole before they are divided
    reserved = max(loads, (found.reserved_bytes or found.peak_allocated_bytes).value)
    ratios = COMPILED_RATIOS if spec.torch_compile else RESERVED_RATIOS
    found = found.model_copy(update={"reserved_bytes": interval_around(reserved, ratios)})
    if model is not None and not model.is_emulated:
        found = with_fit(found, spec, model, gpu, num_params=replay.num_params)
    ranks = {"num_gpus": spec.num_gpus, "sharding": spec.sharding}
    return found.model_copy(update=ranks | _on_host(spec, found))


def _on_host(spec: CellSpec, found: Prediction) -> dict[str, Any]:
    """Host memory of a rank that offloads, by arithmetic; nothing where a family has none."""
    if spec.offload == "none":
        return {}
    from vramprobe.predict import host_memory

    try:
        return {
            "host_bytes": host_memory.of_rank_bytes(spec),
            "warnings": [*found.warnings, host_memory.in_words(spec)],
        }
    except UnsupportedArchitecture:
        return {}


def _of_rank(spec: CellSpec) -> list[str]:
    if spec.num_gpus == 1:
        return []
    return [f"rank {spec.only_rank or 0} of {spec.num_gpus} under {spec.sharding}, emulated alone, not measured"]


def _what_ships(spec: CellSpec) -> str:
    """The recipes that ship of the cell's model, for an error."""
    labels = labels_of(spec.model)
    if not labels:
        return f"No recipe of {spec.model} ships either"
    ships = "these recipes ship, for cards like an A100, for any batch and length, where a name says so for any rank"
    return f"Of {spec.model} {ships}: {', '.join(labels)}"
