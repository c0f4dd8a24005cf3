"""Recorded: a cell on one GPU → the recipe of its step: memory by the allocator's replay, and what it launches.

In: a CellSpec of one GPU, and the GPU. Out: a RecordedStep: of this shape from what is at hand, else by the nearest
recipe that ships, else recorded now, of several micro-batch sizes at once where these are open. Cards from Ampere on
share an A100's recipes, with their own workspaces; an older one has its own. No torch.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from vramprobe.catalog import Gpu
from vramprobe.log.micro_steps import NoSecond
from vramprobe.log.shapes import Shape
from vramprobe.predict import at_hand
from vramprobe.predict.recipe_replay import Replay
from vramprobe.predict.recorded import recipe_over
from vramprobe.recipe import book
from vramprobe.recipe.recipe import Recipe, shape_of
from vramprobe.recipe.shipped import shipped_recipe
from vramprobe.spec import CellSpec
from vramprobe.speed.counted import Count
from vramprobe.speed.raw_count import count_of
from vramprobe.speed.scaled import Estimate, Exchanged, estimate, whole_step

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A step of ``spec`` by a recipe at ``shape`` (its own for None); ``accumulates``: its second micro-step is
    composed."""

    spec: CellSpec
    recipe: Recipe
    shape: Shape | None
    accumulates: bool
    count: Count
    notes: tuple[str, ...] = ()

    def replay(self, gpu: Gpu) -> Replay:
        """Return its replay with the workspaces of ``gpu``."""
        recorded_on, _ = self.recipe.workspace_bytes or (at_hand.recorded_card(gpu).blas_workspace_bytes, 0)
        own = at_hand.card_of(gpu).blas_workspace_bytes
        is_as_asked = (recorded_on, own) == (self.recipe.workspace_bytes or (own, own))
        recipe = self.recipe if is_as_asked else replace(self.recipe, workspace_bytes=(recorded_on, own))
        found = at_hand.replayed(recipe, self.spec, self.shape, accumulates=self.accumulates)
        return replace(found, notes=(*found.notes, *self.notes))

    def shared(self) -> Exchanged:
        """Return what ranks exchange of it: weights as they are stored, in 16 bit where autocast computes in it."""
        facts, owned = self.recipe.facts, self.recipe.owned_bytes
        packed = facts["quantised_weights_bytes"]
        others = owned["weights_bytes"] - packed
        if self.spec.autocast != "none":
            adapters = 0 if self.spec.method == "full" else facts["num_trainable_params"]
            others = 2 * (facts["num_params"] - facts["num_quantised_params"] + adapters)
        return Exchanged(packed + others, owned["gradients_bytes"])


def find_step(spec: CellSpec, gpu: Gpu, *, near: bool = True) -> RecordedStep | None:
    """Return a cell's step by a recipe of its shape that was kept or ships, else, if ``near``, by the nearest that
    ships and knows its launches; None without one."""
    at_hand.require_recordable(spec, gpu)
    for recorded, accumulates in at_hand.cells_that_answer(spec):
        shipped = shipped_recipe(book.recorded_as(recorded), at_hand.recorded_card(gpu))
        is_exact = shipped is not None and shipped.covers(shape_of(spec))
        kept = None if is_exact else at_hand.kept_for(recorded, gpu)
        if kept is not None and (found := _own_step(spec, kept, accumulates)) is not None:
            return found
        if shipped is not None and (near or is_exact):  # none that ships makes gradients in forward: a second follows
            shape = None if len(shipped.shapes) == 1 else shape_of(spec)
            if (found := _step(spec, shipped.recipe, shape, accumulates, shipped.notes(shape_of(spec)))) is not None:
                return found
    return None


def estimated_at_hand(spec: CellSpec, gpu: Gpu, *, near: bool) -> Estimate | None:
    """Return the speed of a cell's step on its GPUs by a recipe at hand, as :func:`find_step`; None without one.

    Raises NoRecipe for what is not recorded, SpecError for a card whose peak is not known.
    """
    step = find_step(one_gpu(spec), gpu, near=near)
    return None if step is None else estimated(spec, step, gpu)


def one_gpu(spec: CellSpec) -> CellSpec:
    """Return the cell of one of its GPUs, with at most the micro-steps that are recorded."""
    few = {"grad_accum": min(spec.grad_accum, book.MOST_MICRO_STEPS), "num_gpus": 1, "sharding": None}
    return spec.model_copy(update=few)


def estimated(spec: CellSpec, step: RecordedStep, gpu: Gpu) -> Estimate:
    """Return the speed of a cell on its GPUs by the ``step`` of :func:`one_gpu`. Raises SpecError as time_of."""
    whole = whole_step(spec, step.count, step.spec.grad_accum, step.shared())
    return estimate(spec, whole, gpu)


def record_step(spec: CellSpec, gpu: Gpu, say: Say, *, over_rows: bool) -> RecordedStep:
    """Return a cell's step by a recipe that is recorded now or was before; ``over_rows``: by one of several numbers of
    rows. Raises as predict/recorded.py's predict, and VramprobeError where launches do not follow."""
    card = at_hand.recorded_card(gpu)
    if over_rows:
        recipe, accumulates = recipe_over(spec, "batch_size", card, say)
        if (found := _step(spec, recipe, shape_of(spec), accumulates)) is not None:
            return found
    else:
        for recorded, accumulates in reversed(at_hand.cells_that_answer(spec)):
            recipe = book.find_recipe(recorded, card, say)
            if (found := _own_step(spec, recipe, accumulates)) is not None:
                return found
    raise at_hand.NotAtHand(f"{spec.cell_id}: what a step launches does not repeat from layer to layer: no step time")


def _own_step(spec: CellSpec, recipe: Recipe, accumulates: bool) -> RecordedStep | None:
    """Return the step by a recipe of its own shape; None, too, where a second micro-step does not follow."""
    with suppress(NoSecond):
        if accumulates:
            recipe.deep(accumulates=True)
        return _step(spec, recipe, None, accumulates)
    return None


def _step(
    spec: CellSpec, recipe: Recipe, shape: Shape | None, accumulates: bool, notes: tuple[str, ...] = ()
) -> RecordedStep | None:
    """Return the step by a recipe; None where its launches do not follow from it."""
    launches = recipe.launches_at(shape, accumulates=accumulates)
    if launches is None:
        return None
    of = {"spec": spec, "recipe": recipe, "shape": shape, "accumulates": accumulates}
    return RecordedStep(**of, count=count_of(launches), notes=notes)
