"""Logs of a cell at each shape of its batches, from as few recordings as will do.

In: a cell on one GPU, the shapes of its batches. Out: what gives the Log at any of them, and notes on where that is
near: from a recipe that ships where it covers the shapes, else from recordings at a few of their lengths. No torch.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from vramprobe import catalog
from vramprobe.lengths.batches import Shape
from vramprobe.log.log import Log
from vramprobe.predict.at_hand import CANNOT_EMULATE, card_of, require_recordable
from vramprobe.recipe.book import find_recipe, kept_recipe, recorded_as
from vramprobe.recipe.recipe import NotOneBranch, Recipe, at_shape, shape_of
from vramprobe.recipe.shipped import shipped_recipe
from vramprobe.spec import CellSpec

#: Lengths that are recorded for batches of as many rows: for one recipe of all, or where each needs its own.
_LENGTHS, _LENGTHS_APART = 6, 4

Say = Callable[[str], None]


def logs_over(
    spec: CellSpec, shapes: Collection[Shape], gpu: catalog.Gpu | None, say: Say
) -> tuple[Callable[[Shape], Log], list[str]]:
    """Return what gives the log of ``spec`` at each of ``shapes``, and notes on where it is near and not exact.

    ``say`` hears what a recording does. Raises NoRecipe for a cell that is not recorded, CannotRecord for one that does
    not run.
    """
    require_recordable(spec, gpu)
    by_rows: dict[int, Callable[[int], Recipe]] = {}
    notes: list[str] = []
    for rows in sorted({shape.num_rows for shape in shapes}):
        lengths = sorted({shape.seq_len for shape in shapes if shape.num_rows == rows})
        by_rows[rows], said = _recipes(spec, rows, lengths, card_of(gpu), say)
        notes += said

    def log_at(shape: Shape) -> Log:
        return by_rows[shape.num_rows](shape.seq_len).deep(shape_of(at_shape(spec, shape))).log

    return log_at, notes


def _recipes(
    spec: CellSpec, rows: int, lengths: Sequence[int], card: catalog.Gpu, say: Say
) -> tuple[Callable[[int], Recipe], list[str]]:
    """Return what gives the recipe for batches of so many rows by their length, and notes."""
    longest = at_shape(spec, (rows, lengths[-1]))
    shipped = shipped_recipe(recorded_as(longest), card)
    outside = [] if shipped is None else [one for one in (lengths[0], lengths[-1]) if not shipped.covers((rows, one))]
    if shipped is not None and not outside:
        return lambda length: shipped.recipe, []
    try:
        return _recorded(spec, rows, lengths, card, say)
    except CANNOT_EMULATE:
        if shipped is None:
            raise
        return lambda length: shipped.recipe, ["steps are those of " + "; ".join(shipped.notes((rows, outside[0])))]


def _recorded(
    spec: CellSpec, rows: int, lengths: Sequence[int], card: catalog.Gpu, say: Say
) -> tuple[Callable[[int], Recipe], list[str]]:
    """One recipe of a few lengths; where the events differ from one to the next, recipes of single lengths, and each
    batch is taken as the next longer of them."""
    others, apart = _spread(lengths, _LENGTHS), _spread(lengths, _LENGTHS_APART)
    own = at_shape(spec, (rows, others.pop(len(others) // 2)))
    of_all = {"shapes": [(rows, one) for one in others], "near": bool(others)}
    alone = [at_shape(spec, (rows, one)) for one in apart]
    is_kept_apart = kept_recipe(own, card, say, **of_all) is None and all(kept_recipe(one, card, say) for one in alone)
    with suppress(NotOneBranch):
        if not is_kept_apart:
            found = find_recipe(own, card, say, **of_all)
            return lambda length: found, []
    recipes = [find_recipe(one, card, say) for one in alone]
    note = (
        f"what a step requests changes from length to length: those of {', '.join(map(str, apart))} tokens are "
        "recorded, and each batch is replayed as the next longer of them"
    )
    return lambda length: recipes[bisect_left(apart, length)], [note] if len(lengths) > len(apart) else []


def _spread(lengths: Sequence[int], count: int) -> list[int]:
    """So many of the lengths, in order, as evenly apart as they go, with the first and the last."""
    if len(lengths) <= count:
        return list(lengths)
    first, last = lengths[0], lengths[-1]
    wanted = [first + (last - first) * number / (count - 1) for number in range(count)]
    return sorted({min(lengths, key=lambda length: abs(length - one)) for one in wanted})
