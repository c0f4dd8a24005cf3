"""Recipes that go from one machine to another: listed, written to a file, and merged from one.

In: the user's cache of recordings, a file that another machine wrote. Out: a book of recipes (shipped.py), which
answers where nothing can be recorded. A recipe holds a cell, a card, library versions, sizes and the order of
events: nothing of the machine or the person. Records nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vramprobe.catalog.libraries import in_words
from vramprobe.catalog.own import cache_folder
from vramprobe.emulate.version import cache_errors
from vramprobe.errors import StoreError
from vramprobe.log.shapes import Shape
from vramprobe.recipe.packed import unpack
from vramprobe.recipe.recipe import Recipe
from vramprobe.recipe.shipped import books, is_of, label_of, name_of, own_book, read_book, shapes_of, write_book


@dataclass(frozen=True, kw_only=True)
class KeptRecipe:
    """A recipe at hand: its cell without rows and length, the shapes it was recorded at, what with, and its bytes."""

    label: str
    shapes: tuple[Shape, ...]
    libraries: str
    source: Literal["recorded", "merged", "ships"]
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Recipes that went into ``file``, by their cells; how many were new there, how many could not be named."""

    file: Path
    labels: Sequence[str]
    num_new: int
    num_unnamed: int = 0


def list_recipes(model: str | None = None) -> list[KeptRecipe]:
    """Return the recipes at hand, of one ``model`` or of all: recorded here, merged, and those that ship."""
    found = [
        _kept(recipe, recipe.origin.label, recipe.origin.shapes, "recorded", path.stat().st_size)
        for path, recipe in _recorded()
        if recipe.origin is not None and _wanted(recipe.origin.label, model)
    ]
    for book in books():
        found += [
            _kept(
                unpack(packed, f"{book}: {name}"),
                label_of(name),
                shapes_of(name),
                "merged" if book == own_book() else "ships",
                len(packed),
            )
            for name, packed in read_book(book).items()
            if _wanted(label_of(name), model)  # before it is unpacked, which takes 10 ms
        ]
    return found


def export_recipes(out: str | Path, model: str | None = None) -> Shared:
    """Write what was recorded or merged here to a new file ``out``, of one ``model`` or of all.

    Raises StoreError for a file that is there, and where there is nothing to write.
    """
    out = Path(out)
    if out.exists():
        raise StoreError(f"{out} is there; name a new file")
    entries, num_unnamed = dict(read_book(own_book())), 0
    for path, recipe in _recorded():
        if recipe.origin is None:
            num_unnamed += 1
        elif _wanted(recipe.origin.label, model):
            entries[name_of(recipe.origin)] = path.read_bytes()
    entries = {name: entry for name, entry in entries.items() if _wanted(label_of(name), model)}
    if not entries:
        of = f" of {model}" if model else ""
        raise StoreError(f"no recipe{of} was recorded here; vramprobe predict --engine recipe records one")
    write_book(entries, out)
    labels = sorted({label_of(name) for name in entries})
    return Shared(file=out, labels=labels, num_new=len(entries), num_unnamed=num_unnamed)


def merge_recipes(file: str | Path) -> Shared:
    """Add the recipes of a file that :func:`export_recipes` wrote to the user's own; raises StoreError for no such."""
    file = Path(file)
    given = read_book(file)
    if not given:
        raise StoreError(f"{file} holds no recipes; give a file that vramprobe recipes export wrote")
    if file.resolve() == own_book().resolve():
        raise StoreError(f"{file} is what recipes are merged into; give another machine's file")
    for name, packed in given.items():
        recipe = unpack(packed, f"{file}: {name}")
        if recipe.origin is None or name_of(recipe.origin) != name:
            raise StoreError(f"{file}: {name} is not of the cell that it names; nothing was merged")
    own, book = read_book(own_book()), own_book()
    with cache_errors(book.parent):
        book.parent.mkdir(parents=True, exist_ok=True)
        write_book(own | given, book)
    return Shared(file=book, labels=sorted({label_of(name) for name in given}), num_new=len(given.keys() - own.keys()))


def _wanted(label: str, model: str | None) -> bool:
    return model is None or is_of(label, model)


def _recorded() -> Iterator[tuple[Path, Recipe]]:
    """Each recipe of the cache with its file; those of another format or damaged are passed over."""
    for path in sorted((cache_folder() / "recipes").glob("*.recipe")):
        try:
            yield path, unpack(path.read_bytes(), str(path))
        except StoreError:
            continue


def _kept(
    recipe: Recipe,
    label: str,
    shapes: tuple[Shape, ...],
    source: Literal["recorded", "merged", "ships"],
    num_bytes: int,
) -> KeptRecipe:
    return KeptRecipe(label=label, shapes=shapes, libraries=in_words(recipe.stack), source=source, num_bytes=num_bytes)
