"""The recipe engine: a cell → its Prediction from a recording on the emulated GPU, for any model that runs.

In: a CellSpec, the GPU, a fit for what lies beyond the allocator. Out: a Prediction: the recorded log, extended to the
cell's own depth, played through torch's caching allocator. Never imports torch; recording happens in other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from vramprobe import catalog
from vramprobe.allocator.config import parse_alloc_conf
from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.emulate.installation import NotEmulatable
from vramprobe.emulate.toolchain import BuildError, NoCompiler
from vramprobe.errors import SpecError, VramprobeError
from vramprobe.log.micro_steps import NoSecond
from vramprobe.log.shapes import Shape
from vramprobe.model.card_fit import CardFit
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.recipe_replay import COMPILED_RATIOS, RESERVED_RATIOS, Replay, replay_recipe, with_retries
from vramprobe.predict.uncertainty import interval_around, with_fit
from vramprobe.recipe.book import find_recipe, kept_recipe, recorded_as
from vramprobe.recipe.launches import Launches
from vramprobe.recipe.recipe import Recipe, shape_of
from vramprobe.recipe.recorder import USUAL, Surroundings, measured_gpu
from vramprobe.recipe.shipped import Shipped, labels_of, shipped_recipe
from vramprobe.rules.cell import not_quantized
from vramprobe.rules.not_sharded import reasons_not_run
from vramprobe.spec import CellSpec
from vramprobe.terms.cell.parameters import require_adapters

#: The card whose kernels a cell meets where none is named, as in the arithmetic.
DEFAULT_CARD = "A100-80GB-SXM"

#: Why nothing is recorded on this machine.
CANNOT_EMULATE = (NotEmulatable, NoCompiler, BuildError)
#: What is recorded to answer for others: the first at several depths.
_COUNTS = {"batch_size": (8, 2, 3, 5), "seq_len": (1024, 1536, 2560, 4096)}

#: Micro-steps that are recorded for a step's time: more are like the second.
MOST_COUNTED = 2


class NoRecipe(SpecError):
    """A cell that is not recorded: only what one process does on an NVIDIA GPU is."""


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
    if (shipped := _counted_shipped(spec, gpu)) is not None:
        launches = shipped.recipe.launches_at(shape_of(spec))
        return _predicted(_replay_shipped(shipped, spec), spec, None, gpu), _launches_of(launches, spec)
    recipe = find_recipe(spec, _card(gpu), say, counted=True)
    return _predicted(_replay(recipe, spec), spec, None, gpu), _launches_of(recipe.launches, spec)


def launches_at_hand(spec: CellSpec, *, gpu: catalog.Gpu) -> Launches | None:
    """Return the launches of :func:`predict_and_count` where nothing need be recorded for them; else None."""
    try:
        require_recordable(spec, gpu)
        if (shipped := _counted_shipped(spec, gpu)) is not None:
            return shipped.recipe.launches_at(shape_of(spec))
        kept = kept_recipe(spec, _card(gpu), lambda words: None)
    except (NoRecipe, *CANNOT_EMULATE):
        return None
    return None if kept is None else kept.launches


def _counted_shipped(spec: CellSpec, gpu: catalog.Gpu) -> Shipped | None:
    """The shipped recipe of the cell that was recorded around its shape, if it knows what a step launches there."""
    shipped = shipped_recipe(recorded_as(spec), _card(gpu))
    if shipped is None or shipped.recipe.launch_rules is None or not shipped.covers(shape_of(spec)):
        return None
    return shipped


def _launches_of(launches: Launches | None, spec: CellSpec) -> Launches:
    if launches is None:
        raise VramprobeError(f"{spec.cell_id}: what a step launches does not repeat from layer to layer: no step time")
    return launches


def replay_of(
    spec: CellSpec,
    *,
    gpu: catalog.Gpu | None = None,
    say: Callable[[str], None] = lambda words: None,
    where: Surroundings = USUAL,
) -> Replay:
    """The cell's recipe, recorded now if it is not at hand, through the allocator; raises as :func:`predict`."""
    require_recordable(spec, gpu)
    card = measured_gpu() if where.measured else _card(gpu)
    try:
        return _replay(find_recipe(spec, card, say, where=where), spec)
    except CANNOT_EMULATE as error:
        if where != USUAL:
            raise
        shipped = shipped_recipe(recorded_as(spec), card)
        if shipped is None:
            raise type(error)(f"{error} {_what_ships(spec)}") from None
    return _replay_shipped(shipped, spec)


def replay_at_hand(spec: CellSpec, *, gpu: catalog.Gpu | None = None) -> Replay | None:
    """The cell's recipe from the cache, or one that ships and was recorded around its shape; None without either.

    Several micro-steps also from a recipe of one, where a later micro-step follows from it.
    """
    try:
        require_recordable(spec, gpu)
    except NoRecipe:
        return None
    own = _at_hand(spec, gpu)
    if own is not None or not _is_composed(spec):
        return own
    with suppress(NoSecond):
        return _at_hand(spec, gpu, of=spec.model_copy(update={"grad_accum": 1}))
    return None


def _at_hand(spec: CellSpec, gpu: catalog.Gpu | None, of: CellSpec | None = None) -> Replay | None:
    """The replay of ``spec`` by its own recipe at hand, or by that ``of`` the same cell with one micro-step."""
    recorded, card = of or spec, _card(gpu)
    try:
        kept = kept_recipe(recorded, card, lambda words: None)
    except CANNOT_EMULATE:
        kept = None
    if kept is not None:
        return _replay(kept, spec, accumulates=of is not None)
    shipped = shipped_recipe(recorded_as(recorded), card)
    if shipped is None or not shipped.covers(shape_of(spec)):
        return None
    return _replay_shipped(shipped, spec, accumulates=of is not None)


def _is_composed(spec: CellSpec) -> bool:
    """Return True if a step of several micro-steps follows from one of one (log/micro_steps.py): a function that takes
    a step frees what it returns at its end, and a compiled model plans blocks over the whole step."""
    has_one_order = spec.loop != "step-function" and not spec.torch_compile
    return spec.grad_accum > 1 and spec.num_gpus == 1 and has_one_order


def _replay_shipped(shipped: Shipped, spec: CellSpec, *, accumulates: bool = False) -> Replay:
    shape = shape_of(spec)
    replay = _replay(shipped.recipe, spec, shape, accumulates=accumulates)
    return replace(replay, notes=(*replay.notes, *shipped.notes(shape)))


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
    return _over(_recipe_over(spec, question, gpu, say), model, gpu)


def over_rows(
    spec: CellSpec, *, gpu: catalog.Gpu, say: Callable[[str], None] = lambda words: None
) -> tuple[int, Callable[[CellSpec], tuple[Prediction, Launches]]]:
    """Return the most rows that were recorded, and what gives peaks and launches of any number from two on; raises as
    :func:`over_shapes` and :func:`predict_and_count`."""
    most, fewest, *_ = _COUNTS["batch_size"]
    shipped = _counted_shipped(spec.model_copy(update={"batch_size": fewest}), gpu)
    if shipped is not None:
        recipe, most = shipped.recipe, max(rows for rows, *_ in shipped.shapes)
    else:
        recipe = _recipe_over(spec, "batch_size", gpu, say, counted=True)
    predicted = _over(recipe, None, gpu)

    def both(one: CellSpec) -> tuple[Prediction, Launches]:
        return predicted(one), _launches_of(recipe.launches_at(shape_of(one)), one)

    return most, both


def _recipe_over(
    spec: CellSpec, question: str, gpu: catalog.Gpu, say: Callable[[str], None], *, counted: bool = False
) -> Recipe:
    require_recordable(spec, gpu)
    counts = _COUNTS[question]
    if question == "seq_len" and (most := spec.learned_positions) is not None:
        counts = tuple(min(count, most * count // counts[-1]) for count in counts)
    cells = [spec.model_copy(update={question: count}) for count in counts]
    shapes = [(one.batch_size, one.seq_len) for one in cells]
    return find_recipe(cells[0], _card(gpu), say, shapes=shapes[1:], counted=counted)


def _over(recipe: Recipe, model: CardFit | None, gpu: catalog.Gpu) -> Callable[[CellSpec], Prediction]:
    return lambda one: _predicted(_replay(recipe, one, shape_of(one)), one, model, gpu)


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


def _card(gpu: catalog.Gpu | None) -> catalog.Gpu:
    """The GPU whose kernels are recorded; an amount of memory has none of its own."""
    return catalog.find_gpu(DEFAULT_CARD) if gpu is None or gpu.is_size else gpu


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
        cards = f"{_card(gpu).short_name} x{spec.num_gpus}"
        raise NoRecipe(
            f"a recipe is of one rank, and {spec.sharding} has one process for all GPUs; it is run instead: "
            f"vramprobe measure with these options and --emulate '{cards}', or your own command: vramprobe profile "
            f"--emulate '{cards}' --empty-weights -- COMMAND"
        )
    if _card(gpu).vendor != "NVIDIA":
        raise NoRecipe(f"{gpu.name} is made by {gpu.vendor}, and what is emulated is CUDA; name an NVIDIA GPU")


def _replay(recipe: Recipe, spec: CellSpec, shape: Shape | None = None, *, accumulates: bool = False) -> Replay:
    """The replay of ``spec``; with ``accumulates`` from a recipe of one micro-step. Raises NoSecond."""
    config = parse_alloc_conf(spec.alloc_conf or "")
    replay = replay_recipe(recipe, spec.cell_id, config, shape, stack=recipe.stack, accumulates=accumulates)
    provenance, *notes = notes_of(recipe, spec)
    said = ("its later micro-steps follow from one that was recorded",) if accumulates else ()
    return replace(replay, provenance=provenance, notes=(*replay.notes, *said, *notes))


def notes_of(recipe: Recipe, spec: CellSpec) -> list[str]:
    """Say how a recipe was recorded, and what else to know of its model."""
    counted = [recipe.facts.get(name) for name in ("num_quantised_params", "num_params")]
    notes = not_quantized(spec.quant, spec.kbit_prep, spec.dtype, *counted) if None not in counted else []
    return [_provenance(recipe), *notes]


def _of_rank(spec: CellSpec) -> list[str]:
    if spec.num_gpus == 1:
        return []
    return [f"rank {spec.only_rank or 0} of {spec.num_gpus} under {spec.sharding}, emulated alone, not measured"]


def _provenance(recipe: Recipe) -> str:
    measured_on = recipe.stack.get("gpu")
    how = f"measured on this machine's {measured_on}" if measured_on else "recorded on the emulated GPU"
    if recipe.checked is None:
        return f"{how}, whole: {recipe.depths[0]} layers, in this stack"
    layers = ", ".join(map(str, recipe.depths[:3]))
    return f"{how} at {layers} layers and extended; event for event at {recipe.checked}, too"


def _what_ships(spec: CellSpec) -> str:
    """The recipes that ship of the cell's model, for an error."""
    labels = labels_of(spec.model)
    if not labels:
        return f"No recipe of {spec.model} ships either"
    ships = "these recipes ship, for cards like an A100, for any batch and length, where a name says so for any rank"
    return f"Of {spec.model} {ships}: {', '.join(labels)}"
