"""Recipes that ship with the package, or were merged from others' files, for machines that cannot record any.

In: a CellSpec and an NVIDIA GPU. Out: the Shipped recipe that answers it, and why that is near and not exact where the
cell's shape lies beside those that were recorded. Reads data/recipes.zip, which tools/book.py writes, and the user's
own recipes.zip (sharing.py). No torch.
"""

import hashlib
import json
import re
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from vramprobe.catalog import Gpu, find_gpu
from vramprobe.catalog.own import cache_folder
from vramprobe.catalog.shipped import data_file
from vramprobe.errors import StoreError
from vramprobe.log.shapes import Shape, has_ranks
from vramprobe.recipe.packed import FORMAT, unpack
from vramprobe.recipe.recipe import Origin, Recipe, recorded_words
from vramprobe.records.whole_file import replacing
from vramprobe.spec import CellSpec

BOOK = "recipes.zip"
#: The card whose recipes answer, with a card's own cuBLAS workspaces, for all from Ampere on (docs/recipes.md).
LIKE_ALL, _LEAST_CAPABILITY = "A100-80GB-SXM", (8, 0)
#: What decides no allocation, or is open in a shipped recipe.
_OPEN = {"model", "batch_size", "seq_len"}
#: Those that are open, too, where several ranks were recorded; ``lora_alpha`` follows the rank where it is not given.
_OF_RANK = {"lora_r", "lora_alpha"}
_NAME = re.compile(r"(?P<key>\w{24}) (?P<shapes>\d+x\d+(?:x\d+)?(?:,\d+x\d+(?:x\d+)?)*) (?P<label>\S+)\.recipe")


@dataclass(frozen=True)
class Shipped:
    """A recipe for any rows and length, and the ``shapes`` that it was recorded at; of one shape, for that alone.

    A recipe of one row answers for one row alone: those of several take other branches.
    """

    recipe: Recipe
    shapes: tuple[Shape, ...]
    is_merged: bool = False
    recorded_on: str = ""  # a card with other workspaces than the one that is answered for

    def notes(self, shape: Shape) -> tuple[str, ...]:
        """Return what an answer at ``shape`` rests on, and why it is near and not exact where that lies outside."""
        first, last = min(self.shapes), max(self.shapes)
        where = f"{first[0]} x {first[1]:,} to {last[0]} x {last[1]:,} tokens"
        comes = "that was merged here" if self.is_merged else "that ships with vramprobe"
        ships = f"a recipe {comes}, of {where}; --engine recipe records this very cell"
        return (
            ships,
            *([of_another_card(self.recorded_on)] if self.recorded_on else []),
            *([] if self.covers(shape) else [f"{shape[0]} x {shape[1]:,} tokens lie outside: near, not exact"]),
        )

    def covers(self, shape: Shape) -> bool:
        """Return True if ``shape`` lies among those that were recorded."""
        return _distance(self.shapes, shape) == 0


def of_another_card(name: str) -> str:
    """Say that an answer rests on a recording on the card ``name``, whose workspaces differ."""
    return f"recorded on {name}, with this GPU's cuBLAS workspaces in place of its own (docs/recipes.md)"


def shipped_recipe(spec: CellSpec, gpu: Gpu, book: Path | None = None) -> Shipped | None:
    """Return the shipped recipe that is nearest to the shape of ``spec``, as it is recorded; None without one.

    ``book``: the file to read; by default the user's own and the package's. Raises StoreError for a damaged entry.
    """
    cards, shape, words = _cards(gpu), (spec.batch_size, spec.seq_len), recorded_words(spec)
    keys = {key: place for place, card in enumerate(cards) for key in entry_keys(words, card)}
    found = [
        (_distance(shapes, shape), place, shapes, path, name)
        for path in (books() if book is None else [book])
        for names in [_names_by_key(path)]
        for key, place in keys.items()
        for name in names.get(key, ())
        if _answers(shapes := shapes_of(name), shape)
    ]
    if not found:
        return None
    _, place, shapes, path, name = min(found, key=lambda one: one[:3])
    recipe = _read_recipe(path, path.stat().st_mtime_ns, name)
    card, is_merged = find_gpu(cards[place]), path == own_book()
    if card.blas_workspace_bytes == gpu.blas_workspace_bytes:
        return Shipped(recipe, shapes, is_merged)
    own = replace(recipe, workspace_bytes=(card.blas_workspace_bytes, gpu.blas_workspace_bytes))
    return Shipped(own, shapes, is_merged, card.name)


def _cards(gpu: Gpu) -> list[str]:
    """Return the cards whose recipes answer for ``gpu``, the nearest first."""
    return list(dict.fromkeys([gpu.short_name, *([LIKE_ALL] if answers_for(gpu) else [])]))


def answers_for(gpu: Gpu) -> bool:
    """Return True if the recipes that ship answer for ``gpu``: its kernels ask for what an A100's do."""
    return (gpu.capability or (0, 0)) >= _LEAST_CAPABILITY


def own_book() -> Path:
    """The user's file of recipes that were merged."""
    return cache_folder() / BOOK


def books() -> list[Path]:
    """The user's own file of recipes, which goes first where both answer alike, and the package's."""
    return [own_book(), data_file(BOOK)]


def _names(book: Path) -> list[str]:
    """Names of a book's entries. Raises StoreError for a file that is no book."""
    if not book.is_file():
        return []
    return [name for name in _opened(book, book.stat().st_mtime_ns).namelist() if _NAME.fullmatch(name)]


@lru_cache(maxsize=2)
def _opened(book: Path, mtime_ns: int) -> zipfile.ZipFile:
    """The book as it was written then; its list of entries is long, and read once. Raises StoreError."""
    try:
        return zipfile.ZipFile(book)
    except zipfile.BadZipFile as error:
        raise StoreError(f"{book} is no file of recipes ({error}): vramprobe recipes export writes one") from error


def _names_by_key(book: Path) -> Mapping[str, Sequence[str]]:
    """Names of a book's entries by their keys."""
    return _read_names(book, book.stat().st_mtime_ns) if book.is_file() else {}


@cache
def _read_names(book: Path, mtime_ns: int) -> Mapping[str, Sequence[str]]:
    """Names by key of the book as it was written then."""
    found: dict[str, list[str]] = {}
    for name in _opened(book, mtime_ns).namelist():
        found.setdefault(name.partition(" ")[0], []).append(name)
    return found


@lru_cache(maxsize=8)
def _read_recipe(book: Path, mtime_ns: int, name: str) -> Recipe:
    """One entry of the book as it was written then; the last few are asked again at other shapes."""
    return unpack(_opened(book, mtime_ns).read(name), f"{book}: {name}")


def entry_keys(spec: CellSpec | Mapping[str, Any], card: str) -> tuple[str, str]:
    """Return the keys of entries that answer a cell: those of any rank, then those of its own."""
    return entry_key(spec, card, any_rank=True), entry_key(spec, card)


def entry_key(spec: CellSpec | Mapping[str, Any], card: str, *, any_rank: bool = False) -> str:
    """24 hexadecimal digits that cells share which differ in rows and length alone, or in the adapters' rank too;
    ``spec`` or its words."""
    cell = spec if isinstance(spec, Mapping) else recorded_words(spec)
    is_open = _OPEN | (_OF_RANK if any_rank else set())
    words = [FORMAT, {name: value for name, value in cell.items() if name not in is_open}, card]
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:24]


def entry_name(spec: CellSpec, card: str, shapes: Collection[Shape]) -> str:
    """Return an entry's file name: its key, the recorded shapes, and words for people."""
    return name_of(Origin(label=spec.cell_id, card=card, shapes=tuple(shapes), cell=recorded_words(spec)))


def name_of(origin: Origin) -> str:
    """Return the name under which a recipe of this origin is an entry of a book."""
    recorded = ",".join("x".join(map(str, shape)) for shape in sorted(origin.shapes))
    label, any_rank = re.sub(r"_b\d+s\d+", "", origin.label), has_ranks(origin.shapes)
    if any_rank:
        label = re.sub(r"-r\d+-", "-any-rank-", label)
    return f"{entry_key(origin.cell, origin.card, any_rank=any_rank)} {recorded} {label}.recipe"


def labels_of(model: str, book: Path | None = None) -> list[str]:
    """Return what is at hand of a model, as the cells' names without rows and length."""
    found = [label_of(name) for path in (books() if book is None else [book]) for name in _names(path)]
    return sorted({label for label in found if is_of(label, model)})


def is_of(label: str, model: str) -> bool:
    """Return True if a cell of this name is the model's."""
    return label.startswith(f"{model}_")


def label_of(name: str) -> str:
    """Return an entry's cell, without rows and length."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return match["label"]


def write_book(entries: Mapping[str, bytes], book: Path) -> None:
    """Write packed recipes by their names; the same entries give the same bytes."""
    with replacing(book) as part, zipfile.ZipFile(part, "w") as file:
        for name, packed in sorted(entries.items()):
            file.writestr(zipfile.ZipInfo(name), packed)


def read_book(book: Path) -> dict[str, bytes]:
    """Return the packed recipes of a book by their names; none where there is no such file. Raises StoreError."""
    names = _names(book)
    if not names:
        return {}
    with zipfile.ZipFile(book) as file:
        return {name: file.read(name) for name in names}


def shapes_of(name: str) -> tuple[Shape, ...]:
    """Return the rows and lengths, or also the ranks, that an entry was recorded at."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return tuple(tuple(map(int, part.split("x"))) for part in match["shapes"].split(","))


def _answers(shapes: Collection[Shape], shape: Shape) -> bool:
    """Tell if a recipe of these shapes says anything of ``shape``: one row or several, and its own length or any."""
    if len(shapes) == 1:
        return shape in shapes
    lengths = {one for _, one, *_ in shapes}
    return is_of_one_row(shapes) == (shape[0] == 1) and (len(lengths) > 1 or shape[1] in lengths)


def is_of_one_row(shapes: Collection[Shape]) -> bool:
    """Return True if one row alone was recorded, whose branches are others than those of several."""
    return all(rows == 1 for rows, *_ in shapes)


def _distance(shapes: Collection[Shape], shape: Shape) -> float:
    """Return how far ``shape`` lies outside rows, lengths and tokens of ``shapes``, as factors; 0 inside."""
    far = 0.0
    for count in (lambda one: one[0], lambda one: one[1], lambda one: one[0] * one[1]):
        low, high = min(map(count, shapes)), max(map(count, shapes))
        far += max(low / count(shape), count(shape) / high, 1.0) - 1.0
    return far
