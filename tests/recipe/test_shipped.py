"""The book that ships: which entry answers a shape, what it says of it, and who reads it where nothing is recorded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import vramprobe
from emulated import recorded_recipe
from grids import exhaustive

from vramprobe import api, catalog
from vramprobe.catalog.shipped import data_file
from vramprobe.cli.recipes import _shapes as shown_shapes
from vramprobe.emulate.installation import NotEmulatable
from vramprobe.errors import StoreError
from vramprobe.log.log import Log, PhaseMark
from vramprobe.log.shapes import Shape
from vramprobe.predict import at_hand, recorded
from vramprobe.recipe import book as kept_recipes
from vramprobe.recipe import sharing, shipped
from vramprobe.recipe.book import find_recipe, recorded_as
from vramprobe.recipe.packed import pack, unpack
from vramprobe.recipe.recipe import NotOneBranch, Recipe, recipe_of, rules_over, shape_of
from vramprobe.recipe.recorder import Surroundings
from vramprobe.recipe.shipped import entry_name, labels_of, read_book, shipped_recipe, write_book
from vramprobe.spec import CellSpec
from vramprobe.sweep.definition import load_sweep
from vramprobe.units import MIB

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS_BYTES = 100 * MIB
TOKEN_BYTES = 4096
SEVERAL, ONE = ((2, 512), (3, 1024), (5, 2048), (8, 8192)), ((1, 1024), (1, 1536), (1, 2560), (1, 8192))


def log_at(rows: int, length: int, rank: int = 0) -> Log:
    """Weights, and in each of two steps a block of so many bytes for each token."""
    batch = rows * length * (TOKEN_BYTES + rank)
    return Log(
        size_bytes=np.array([WEIGHTS_BYTES, batch, -batch, batch, -batch]),
        blocks=np.array([1, 2, 2, 3, 3]),
        causes=np.array([0, 5, 5, 5, 5], dtype=np.int8),
        marks=(
            PhaseMark("load", None, None, range(1)),
            PhaseMark("forward", 1, 1, range(1, 3)),
            PhaseMark("forward", 2, 1, range(3, 5)),
        ),
    )


def recipe(shapes: tuple[Shape, ...]) -> Recipe:
    logs = {shape: log_at(*shape) for shape in shapes}
    first = logs[shapes[0]]
    own = recipe_of([first], None, [4], [{}], [{}])
    made = Recipe(marks=first.marks, depths=(4,), stack={"torch": "2.13.0"}, **own)
    return replace(made, rules=rules_over(logs, made.growths, None, 0))


def cell(batch_size: int, seq_len: int, **words: Any) -> CellSpec:
    asked = {"model": "exaone-4.0-32b", "method": "lora"} | words
    return recorded_as(api.cell(device="cuda", batch_size=batch_size, seq_len=seq_len, **asked))


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "recipes.zip"
    entries = [(SEVERAL, recipe(SEVERAL)), (ONE, recipe(ONE)), (((1, 512),), recipe(((1, 512),)))]
    write_book({entry_name(cell(1, 8), "A100-80GB-SXM", shapes): pack(made) for shapes, made in entries}, path)
    return path


def test_an_entry_answers_the_shapes_of_its_branch(book: Path) -> None:
    gpu = catalog.find_gpu("RTX-4090")
    for shape, shapes in (
        ((4, 2048), SEVERAL), ((2, 16384), SEVERAL), ((1, 4096), ONE), ((1, 512), ((1, 512),)), ((1, 600), ONE),
    ):  # fmt: skip
        found = shipped_recipe(cell(*shape), gpu, book)
        assert found.shapes == shapes
        peak = max(phase.allocated_peak_bytes for phase in found.recipe.deep(shape).phases)
        assert peak == WEIGHTS_BYTES + shape[0] * shape[1] * TOKEN_BYTES
        is_outside = shape in ((2, 16384), (1, 600))
        assert any("near, not exact" in note for note in found.notes(shape)) == is_outside


def test_an_entry_of_several_ranks_answers_for_any(tmp_path: Path) -> None:
    """A byte of each token and unit of rank is the adapters'; a cell with quantized weights is another."""
    shapes = (*((*shape, 16) for shape in SEVERAL), (*SEVERAL[0], 64), (*SEVERAL[0], 32))
    path = tmp_path / "recipes.zip"
    write_book({entry_name(cell(1, 8), "A100-80GB-SXM", shapes): pack(recipe(shapes))}, path)
    gpu = catalog.find_gpu("RTX-4090")
    for rank in (8, 16, 256):
        found = shipped_recipe(cell(4, 2048, lora_r=rank), gpu, path)
        peak = max(phase.allocated_peak_bytes for phase in found.recipe.deep((4, 2048, rank)).phases)
        assert peak == WEIGHTS_BYTES + 4 * 2048 * (TOKEN_BYTES + rank)
        assert not any("near, not exact" in note for note in found.notes((4, 2048, rank)))
    assert shipped_recipe(cell(4, 2048, method="qlora"), gpu, path) is None
    assert labels_of("exaone-4.0-32b", path) == ["exaone-4.0-32b_lora-any-rank-all_bf16+bf16_adamw-fused"]
    assert shown_shapes(shapes) == "2 x 512, 3 x 1,024, 5 x 2,048, 8 x 8,192; rank 16, 32, 64"


def test_a_size_that_no_rank_explains_is_another_branch() -> None:
    shapes = (*((*shape, 16) for shape in SEVERAL), (*SEVERAL[0], 64))
    logs = {shape: log_at(*shape) for shape in shapes}
    odd = logs[shapes[-1]]
    logs[shapes[-1]] = replace(odd, size_bytes=odd.size_bytes + 5 * np.sign(odd.size_bytes))
    growths = recipe_of([logs[shapes[0]]], None, [4], [{}], [{}])["growths"]
    with pytest.raises(NotOneBranch, match="neither shape nor rank"):
        rules_over(logs, growths, None, 0)


def test_nothing_answers_for_another_cell_or_card(book: Path) -> None:
    assert shipped_recipe(cell(4, 2048, lora_r=8), catalog.find_gpu("RTX-4090"), book) is None
    assert shipped_recipe(cell(4, 2048), catalog.find_gpu("T4"), book) is None
    assert shipped_recipe(cell(4, 2048), catalog.find_gpu("RTX-4090"), book.with_name("none.zip")) is None
    assert labels_of("exaone-4.0-32b", book) == ["exaone-4.0-32b_lora-r16-all_bf16+bf16_adamw-fused"]
    assert labels_of("exaone-4.0", book) == []


def test_one_row_and_several_do_not_answer_for_each_other(book: Path) -> None:
    entries = {name: packed for name, packed in read_book(book).items() if " 2x512," in name}
    write_book(entries, book)
    assert len(entries) == 1
    assert shipped_recipe(cell(1, 2048), catalog.find_gpu("A10"), book) is None
    assert shipped_recipe(cell(3, 2048), catalog.find_gpu("A10"), book) is not None


def test_a_book_is_the_same_bytes_again_and_damage_is_one_line(book: Path) -> None:
    entries, before = read_book(book), book.read_bytes()
    write_book(dict(reversed(entries.items())), book)
    assert book.read_bytes() == before
    write_book(dict.fromkeys(entries, b"none"), book)
    with pytest.raises(StoreError, match="is no recipe of this vramprobe"):
        shipped_recipe(cell(4, 2048), catalog.find_gpu("A10"), book)


def test_where_nothing_is_recorded_the_book_answers(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_emulation(*words: Any, **options: Any) -> Any:
        raise NotEmulatable("this is macOS on arm64.")

    monkeypatch.setattr(recorded, "find_recipe", no_emulation)
    monkeypatch.setattr(shipped, "data_file", lambda name: book)
    words = {"model": "exaone-4.0-32b", "method": "lora", "seq_len": 2048}
    found = api.predict(gpu="RTX-4090", batch_size=4, **words)
    assert found.peak_allocated_bytes.value == WEIGHTS_BYTES + 4 * 2048 * TOKEN_BYTES
    assert any("a recipe that ships with vramprobe" in warning for warning in found.warnings)
    largest = api.max_batch_size(gpu="RTX-4090", **words)
    batch = largest.tight.value
    usable = largest.tight.verdict.usable_bytes
    assert WEIGHTS_BYTES + batch * 2048 * TOKEN_BYTES <= usable < WEIGHTS_BYTES + (batch + 1) * 2048 * TOKEN_BYTES
    said = r"^this is macOS on arm64\. Of exaone-4.0-32b these .* for any batch and length, .*: exaone-4"
    with pytest.raises(Exception, match=said):
        api.predict(gpu="RTX-4090", batch_size=4, dora=True, **words)
    write_book({name: packed for name, packed in read_book(book).items() if " 2x512," in name}, book)
    assert api.max_batch_size(gpu="RTX-4090", **words).tight == largest.tight
    with pytest.raises(Exception, match="No recipe of apertus-8b ships either"):
        api.predict(gpu="RTX-4090", batch_size=4, **words | {"model": "apertus-8b"})


def test_the_book_holds_what_its_cells_ask_and_no_more() -> None:
    """Every entry is read, and is of a cell of configs/book.yaml."""
    book = data_file(shipped.BOOK)
    cells = load_sweep(ROOT / "configs" / "book.yaml", device="cuda").cells
    keys = {key for one in cells for key in shipped.entry_keys(recorded_as(one), shipped.LIKE_ALL)}
    entries = read_book(book)
    assert entries
    assert book.stat().st_size < 12_000_000
    for name, packed in entries.items():
        assert name.split()[0] in keys, name
        assert unpack(packed, name).rules is not None or "," not in name.split()[1]


#: Cells of the book at shapes that were not recorded for it.
HELD_OUT = [("ernie-4.5-0.3b", (4, 2560)), ("ernie-4.5-0.3b", (1, 2000))]


@exhaustive
@pytest.mark.parametrize(("model", "shape"), HELD_OUT)
def test_a_shipped_recipe_is_the_whole_emulated_run(model: str, shape: tuple[int, int]) -> None:
    """Recorded whole here, and from the book: allocated and reserved memory are equal to the byte."""
    spec, card = cell(*shape, model=model, gradient_checkpointing=True), catalog.find_gpu("A100-80GB-SXM")
    entry = shipped_recipe(spec, card)
    whole = recorded_recipe(spec, card, whole=True)
    assert whole.checked is None
    made, seen = at_hand.replayed(entry.recipe, spec, shape_of(spec)), at_hand.replayed(whole, spec)
    assert made.peak == seen.peak
    assert made.phases == seen.phases


# -- from one machine to another ---------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache with exaone-4.0-32b at 4 x 2,048 on an H100 recorded, which no file that ships answers for."""
    monkeypatch.setenv("VRAMPROBE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(shipped, "data_file", lambda name: tmp_path / "none.zip")
    packed = pack(recipe(SEVERAL))
    monkeypatch.setattr(kept_recipes, "record_packed", lambda *words, **options: packed)
    monkeypatch.setattr(Surroundings, "key", lambda self: ["torch 2.13.0"])
    find_recipe(cell(4, 2048), catalog.find_gpu("H100-SXM"))
    return tmp_path / "cache"


def test_a_recording_answers_on_a_machine_that_cannot_emulate(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (listed,) = sharing.list_recipes("exaone-4.0-32b")
    assert (listed.source, listed.shapes) == ("recorded", ((4, 2048),))
    shared = sharing.export_recipes(tmp_path / "recipes.zip")
    assert (shared.num_new, shared.num_unnamed) == (1, 0)
    monkeypatch.setenv("VRAMPROBE_CACHE_DIR", str(tmp_path / "mac"))
    card = catalog.find_gpu("H100-SXM")
    assert shipped_recipe(cell(4, 2048), card) is None
    assert sharing.merge_recipes(tmp_path / "recipes.zip").num_new == 1
    assert sharing.merge_recipes(tmp_path / "recipes.zip").num_new == 0
    found = shipped_recipe(cell(4, 2048), card)
    assert "that was merged here" in found.notes((4, 2048))[0]
    assert shipped_recipe(cell(4, 4096), card) is None, "a recording of one shape answers for that alone"
    assert shipped_recipe(cell(4, 2048), catalog.find_gpu("A10")) is None
    assert [one.source for one in sharing.list_recipes()] == ["merged"]
    again = sharing.export_recipes(tmp_path / "again.zip", "exaone-4.0-32b")  # what was merged goes on
    assert (tmp_path / "again.zip").read_bytes() == (tmp_path / "recipes.zip").read_bytes()
    assert again.labels == shared.labels


def test_an_older_recording_names_its_cell_when_it_is_asked_for_again(cache: Path, tmp_path: Path) -> None:
    (file,) = (cache / "recipes").iterdir()
    named = file.read_bytes()
    file.write_bytes(pack(replace(unpack(named, "test"), origin=None)))
    with pytest.raises(StoreError, match="no recipe was recorded here"):
        sharing.export_recipes(tmp_path / "recipes.zip")
    find_recipe(cell(4, 2048), catalog.find_gpu("H100-SXM"))
    assert file.read_bytes() == named
    assert sharing.export_recipes(tmp_path / "recipes.zip").num_unnamed == 0


def test_a_file_that_is_no_book_is_merged_in_no_part(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "given.zip"
    file.write_text("no zip")
    with pytest.raises(StoreError, match="is no file of recipes"):
        sharing.merge_recipes(file)
    with pytest.raises(StoreError, match="holds no recipes"):
        sharing.merge_recipes(tmp_path / "missing.zip")
    file.unlink()
    sharing.export_recipes(file, "exaone-4.0-32b")
    with pytest.raises(StoreError, match="is there; name a new file"):
        sharing.export_recipes(file)
    with pytest.raises(StoreError, match="no recipe of gpt2 was recorded here"):
        sharing.export_recipes(tmp_path / "other.zip", "gpt2")
    ((name, packed),) = read_book(file).items()
    write_book({name: packed, f"{'0' * 24} {name.split(' ', 1)[1]}": packed}, file)
    with pytest.raises(StoreError, match="is not of the cell that it names; nothing was merged"):
        sharing.merge_recipes(file)
    write_book({name: packed[:-10]}, file)
    with pytest.raises(StoreError, match="is no recipe of this vramprobe"):
        sharing.merge_recipes(file)
    assert not shipped.own_book().exists()
    file.rename(shipped.own_book())
    with pytest.raises(StoreError, match="is what recipes are merged into"):
        sharing.merge_recipes(shipped.own_book())


def test_the_command_line_lists_exports_and_merges(cache: Path, tmp_path: Path) -> None:
    environment = {"VRAMPROBE_CACHE_DIR": str(cache)}
    out = tmp_path / "recipes.zip"
    assert "1 recipe of 1 cell" in vramprobe("recipes", "export", str(out), env=environment).stdout
    assert "1 cell, 1 new recipe" in vramprobe("recipes", "merge", str(out), env=environment).stdout
    listed = json.loads(vramprobe("recipes", "list", "--model", "exaone-4.0-32b", "--json", env=environment).stdout)
    assert sorted(one["source"] for one in listed)[:2] == ["merged", "recorded"]
