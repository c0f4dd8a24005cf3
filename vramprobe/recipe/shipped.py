"""Recipes that ship with the package, for machines that cannot record any.

In: a CellSpec and an NVIDIA GPU. Out: the Shipped recipe that answers it, and why that is near and not exact where the
cell's shape lies beside those that were recorded. Reads data/recipes.zip, which tools/book.py writes. No torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from vramprobe.catalog import Gpu
from vramprobe.catalog.shipped import data_file
from vramprobe.log.shapes import Shape
from vramprobe.recipe.recipe import FORMAT, Recipe, unpack
from vramprobe.records.whole_file import replacing
from vramprobe.spec import CellSpec

BOOK = "recipes.zip"
#: The card that is recorded for others whose logs were equal (docs/recipes.md), by compute capability.
CARD_OF_CAPABILITY = {"8.0": "A100-80GB-SXM", "8.6": "A100-80GB-SXM", "8.9": "A100-80GB-SXM"}
#: What decides no allocation, or is open in a shipped recipe.
_OPEN = {"model", "batch_size", "seq_len"}
_NAME = re.compile(r"(?P<key>\w{24}) (?P<shapes>\d+x\d+(?:,\d+x\d+)*) (?P<label>\S+)\.recipe")


@dataclass(frozen=True)
class Shipped:
    """A recipe for any rows and length, and the ``shapes`` that it was recorded at.

    A recipe of one row answers for one row alone: those of several take other branches.
    """

    recipe: Recipe
    shapes: tuple[Shape, ...]

    def notes(self, shape: Shape) -> tuple[str, ...]:
        """Return what an answer at ``shape`` rests on, and why it is near and not exact where that lies outside."""
        first, last = min(self.shapes), max(self.shapes)
        where = f"{first[0]} x {first[1]:,} to {last[0]} x {last[1]:,} tokens"
        ships = f"a recipe that ships with vramprobe, of {where}; vramprobe emulate setup records this very cell"
        outside = _distance(self.shapes, shape) > 0
        return (ships, *([f"{shape[0]} x {shape[1]:,} tokens lie outside: near, not exact"] if outside else []))


def shipped_recipe(spec: CellSpec, gpu: Gpu, book: Path | None = None) -> Shipped | None:
    """Return the shipped recipe that is nearest to the shape of ``spec``, as it is recorded; None without one.

    ``book``: the file to read; the package's own by default. Raises StoreError for a damaged entry.
    """
    card, book = CARD_OF_CAPABILITY.get(gpu.compute_capability), book or data_file(BOOK)
    if card is None or not book.is_file():
        return None
    key, shape = entry_key(spec, card), (spec.batch_size, spec.seq_len)
    with zipfile.ZipFile(book) as file:
        entries = [
            (_distance(shapes, shape), shapes, name)
            for name in file.namelist()
            if name.startswith(key) and _answers(shapes := _shapes(name), shape)
        ]
        if not entries:
            return None
        _, shapes, name = min(entries)
        return Shipped(unpack(file.read(name), f"{book}: {name}"), shapes)


def entry_key(spec: CellSpec, card: str) -> str:
    """24 hexadecimal digits that cells share which differ in rows and length alone."""
    words = [FORMAT, spec.model_dump(mode="json", exclude=_OPEN), card]
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:24]


def entry_name(spec: CellSpec, card: str, shapes: Collection[Shape]) -> str:
    """Return an entry's file name: its key, the recorded shapes, and words for people."""
    recorded = ",".join(f"{rows}x{length}" for rows, length in sorted(shapes))
    label = re.sub(r"_b\d+s\d+", "", spec.cell_id)
    return f"{entry_key(spec, card)} {recorded} {label}.recipe"


def labels_of(model: str, book: Path | None = None) -> list[str]:
    """Return what the book has of a model, as the cells' names without rows and length."""
    book = book or data_file(BOOK)
    if not book.is_file():
        return []
    with zipfile.ZipFile(book) as file:
        found = [match["label"] for name in file.namelist() if (match := _NAME.fullmatch(name))]
    return sorted({label for label in found if label.startswith(f"{model}_")})


def write_book(entries: Mapping[str, bytes], book: Path) -> None:
    """Write packed recipes by their names; the same entries give the same bytes."""
    with replacing(book) as part, zipfile.ZipFile(part, "w") as file:
        for name, packed in sorted(entries.items()):
            file.writestr(zipfile.ZipInfo(name), packed)


def read_book(book: Path) -> dict[str, bytes]:
    """Return the packed recipes of a book by their names; none where there is no such file."""
    if not book.is_file():
        return {}
    with zipfile.ZipFile(book) as file:
        return {name: file.read(name) for name in file.namelist()}


def _shapes(name: str) -> tuple[Shape, ...]:
    match = _NAME.fullmatch(name)
    assert match is not None, name
    pairs = (part.split("x") for part in match["shapes"].split(","))
    return tuple((int(rows), int(length)) for rows, length in pairs)


def _answers(shapes: Collection[Shape], shape: Shape) -> bool:
    """Tell if a recipe of these shapes says anything of ``shape``: one row or several, and its own length or any."""
    rows, lengths = {one for one, _ in shapes}, {one for _, one in shapes}
    return (max(rows) == 1) == (shape[0] == 1) and (len(lengths) > 1 or shape[1] in lengths)


def _distance(shapes: Collection[Shape], shape: Shape) -> float:
    """Return how far ``shape`` lies outside rows, lengths and tokens of ``shapes``, as factors; 0 inside."""
    far = 0.0
    for count in (lambda one: one[0], lambda one: one[1], lambda one: one[0] * one[1]):
        low, high = min(map(count, shapes)), max(map(count, shapes))
        far += max(low / count(shape), count(shape) / high, 1.0) - 1.0
    return far
