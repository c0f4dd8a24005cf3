"""Record the book of recipes that ships: ``python tools/book.py [SWEEP.yaml]`` (default: configs/book.yaml).

Each cell that the book does not answer yet (``--again``: each) is recorded on an emulated A100 at a few
lengths, for one row or for several as its batch_size says, so that the recipe answers for any. What is recorded stays
in the user's cache, and what failed in book-failures.json there: the command goes on where it ended. ``--seconds N``
ends it after the cell in which they are over. At the end it puts all that the cache has into
vramprobe/data/recipes.zip, beside what is there. ``--check`` records nothing and says what the book lacks.
"""

import argparse
import functools
import json
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from vramprobe.catalog import Gpu, find_gpu
from vramprobe.catalog.own import cache_folder
from vramprobe.catalog.shipped import data_file
from vramprobe.errors import StoreError
from vramprobe.log.shapes import Shape
from vramprobe.optimizers import OPTIMIZERS
from vramprobe.recipe.book import find_recipe, kept_recipe, recorded_as
from vramprobe.recipe.packed import pack, unpack
from vramprobe.recipe.recipe import CannotRecord, at_shape
from vramprobe.recipe.shipped import (
    BOOK,
    LIKE_ALL,
    entry_keys,
    entry_name,
    is_of_one_row,
    read_book,
    shapes_of,
    shipped_recipe,
    write_book,
)
from vramprobe.spec import CellSpec
from vramprobe.sweep.definition import load_sweep

ROOT = Path(__file__).resolve().parents[1]
#: What is tried, in turn: the events must be the same at all shapes of a row. Several rows, then one. The first has as
#: many tokens as no model is wide: else products of two kinds have the same shapes, and their launches are one.
_SEVERAL = (((5, 2048), (2, 512), (3, 1024), (8, 8192)), ((5, 4096), (2, 2048), (3, 1536), (8, 8192)))
_ONE = (((1, 2624), (1, 1024), (1, 1536), (1, 8192)), ((1, 4672), (1, 4096), (1, 6144), (1, 8192)))
#: The ranks that are recorded beside the cell's own.
OTHER_RANKS = (64, 8)
#: Where the events depend on the length: some lengths, each for any number of rows.
_LENGTHS = (1024, 2048, 4096)


def attempts(spec: CellSpec) -> Iterator[list[tuple[Shape, ...]]]:
    """Shapes to record, those that answer the most first; the first list that is recorded whole ends it. A model of
    few positions has all lengths shorter by the same factor. Adapters are recorded at other ranks, too.
    """
    one_row, longest = spec.batch_size == 1, _ONE[0][-1][1]
    positions = min(spec.learned_positions or longest, longest)
    lengths = [length for length in _LENGTHS if length <= positions]
    of_any_length = [
        tuple((rows, length * positions // longest) for rows, length in shapes)
        for shapes in (_ONE if one_row else _SEVERAL)
    ]
    if has_open_rank(spec):
        for shapes in of_any_length:
            at_ranks = ((*shapes[0], rank) for rank in OTHER_RANKS)
            yield [(*((*shape, spec.lora_r) for shape in shapes), *at_ranks)]
    for shapes in of_any_length:
        yield [shapes]
    yield [((1, length),) if one_row else tuple((rows, length) for rows in (5, 2, 3)) for length in lengths]


def has_open_rank(spec: CellSpec) -> bool:
    """Return True if sizes follow from the rank; 8-bit optimizers keep tensors of few elements in 32 bits."""
    return spec.lora_r not in (None, *OTHER_RANKS) and OPTIMIZERS[spec.optim].state != "8bit"


def recorded(spec: CellSpec, gpu: Gpu, shapes: tuple[Shape, ...], *, records: bool) -> tuple[str, bytes] | None:
    """An entry's name and bytes; None where it is not at hand and none is recorded. Raises CannotRecord."""
    first, *others = shapes
    find = functools.partial(find_recipe, whole=False) if records else kept_recipe  # an extended one is smaller
    recipe = find(recorded_as(at_shape(spec, first)), gpu, lambda words: None, shapes=others)
    return recipe and (entry_name(recorded_as(spec), gpu.short_name, shapes), pack(replace(recipe, origin=None)))


def entries(spec: CellSpec, gpu: Gpu, failures: dict[str, str], *, records: bool) -> Iterator[tuple[str, bytes]]:
    """The entries of one cell; what cannot be recorded is in ``failures`` afterwards."""
    for shapes_of_entries in attempts(spec):
        found = []
        for shapes in shapes_of_entries:
            name = entry_name(recorded_as(spec), gpu.short_name, shapes)
            if name in failures:
                continue
            try:
                found.append(recorded(spec, gpu, shapes, records=records))
            except CannotRecord as error:
                failures[name] = str(error)
        if any(found):
            yield from filter(None, found)
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep", nargs="?", type=Path, default=ROOT / "configs" / "book.yaml")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--again", action="store_true")
    given = parser.parse_args()
    cells, book = load_sweep(given.sweep, device="cuda").cells, data_file(BOOK)
    card = find_gpu(LIKE_ALL)
    if not given.check:
        open_cells = cells if given.again else [cell for cell in cells if _is_missing(cell, card, book)]
        _record(open_cells, card, book, given.seconds)
    found = read_book(book)
    missing = [cell.cell_id for cell in cells if _is_missing(cell, card, book)]
    print(f"{book}: {len(found)} entries, {sum(map(len, found.values())):,} bytes")
    print(
        f"it answers {len(cells) - len(missing)} of {len(cells)} cells of {given.sweep.name}; not:",
        *missing,
        sep="\n  ",
    )


def _record(cells: Sequence[CellSpec], gpu: Gpu, book: Path, most_seconds: float) -> None:
    """Record what is missing while there is time, and add all that the cache has to the book."""
    log, start = cache_folder() / "book-failures.json", time.monotonic()
    failures = json.loads(log.read_text()) if log.is_file() else {}
    found = {name: packed for name, packed in read_book(book).items() if _is_read(name, packed)}
    for number, cell in enumerate(cells, 1):
        began = time.monotonic()
        new = dict(entries(cell, gpu, failures, records=began - start < most_seconds))
        found = {name: packed for name, packed in found.items() if not _is_replaced(name, cell, gpu, new)} | new
        if (seconds := time.monotonic() - began) > 1:
            print(f"{number} of {len(cells)}: {cell.cell_id}: {len(new)} entries, {seconds:.0f} s", flush=True)
            log.write_text(json.dumps(failures, indent=1))
    write_book(found, book)


def _is_replaced(name: str, cell: CellSpec, gpu: Gpu, new: Collection[str]) -> bool:
    """Return True if ``new``, of ``cell``, has the same with as many rows, at other shapes or for any rank."""
    is_of_cell = name.split()[0] in entry_keys(recorded_as(cell), gpu.short_name)
    return is_of_cell and any(is_of_one_row(shapes_of(name)) == is_of_one_row(shapes_of(one)) for one in new)


def _is_missing(cell: CellSpec, card: Gpu, book: Path) -> bool:
    return shipped_recipe(recorded_as(cell), card, book) is None


def _is_read(name: str, packed: bytes) -> bool:
    """Tell whether an entry is of this vramprobe's format."""
    try:
        unpack(packed, name)
    except StoreError:
        return False
    return True


if __name__ == "__main__":
    main()
