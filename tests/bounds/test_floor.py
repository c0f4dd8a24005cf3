"""The floor under answers: below every recipe of the book and every emulated run, and near those that take no more."""

from dataclasses import replace
from pathlib import Path

import pytest
from grids import exhaustive

from tests.oracles import oracles
from vramprobe import api, catalog
from vramprobe.bounds.floor import BelowFloor, floor_bytes
from vramprobe.catalog.shipped import data_file
from vramprobe.predict import at_hand, recorded
from vramprobe.recipe.book import recorded_as
from vramprobe.recipe.packed import unpack
from vramprobe.recipe.recipe import at_shape
from vramprobe.recipe.shipped import BOOK, LIKE_ALL, entry_keys, read_book, shapes_of
from vramprobe.sweep.definition import load_sweep

ROOT = Path(__file__).resolve().parents[2]


def of_the_book(every: int) -> list[float]:
    """Peaks of steady steps as parts of the floor, at the smallest and the largest shape of every so many recipes."""
    cells = {
        key: cell
        for cell in load_sweep(ROOT / "configs" / "book.yaml", device="cuda").cells
        for key in entry_keys(recorded_as(cell), LIKE_ALL)
    }
    found = []
    for name, packed in sorted(read_book(data_file(BOOK)).items())[::every]:
        recipe, shapes = unpack(packed, name), shapes_of(name)
        for shape in (min(shapes), max(shapes)):
            spec = at_shape(cells[name.split()[0]], shape)
            peak = max(phase.allocated_peak_bytes for phase in recipe.deep(shape).phases if phase.step == 2)
            found.append(peak / floor_bytes(spec, recipe.facts["num_params"]))
    return found


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=exhaustive)])
def test_no_recipe_of_the_book_lies_below_the_floor(every: int) -> None:
    found = of_the_book(every)
    assert len(found) >= 1300 // every
    assert min(found) >= 1
    assert min(found) < 1.01  # of a full fine-tuning with recomputed layers: the floor is no formality


def test_no_emulated_run_lies_below_the_floor() -> None:
    found = {
        one.spec.cell_id: one.run.allocated_bytes / least
        for one in oracles.cells()
        if one.run is not None and one.run.allocated_bytes
        if "layers_" not in one.spec.cell_id  # of a cut model no count is known but of its own tensors
        if (least := floor_bytes(one.spec, catalog.num_params(one.spec.model, one.spec.architecture)))
    }
    assert len(found) >= 500
    assert min(found.values()) >= 1, min(found, key=lambda name: found[name])


def test_an_answer_below_the_floor_is_refused() -> None:
    one = api.cell(model="smollm2-135m", method="lora", device="cuda", batch_size=2, seq_len=512)
    replay = at_hand.replay_at_hand(one)
    assert recorded.predict_replay(replay, one).peak_allocated_bytes.value > floor_bytes(one)
    low = replace(replay, peak=replay.peak.model_copy(update={"allocated_bytes": floor_bytes(one) - 1}))
    with pytest.raises(BelowFloor, match="less than its own tensors take"):
        recorded.predict_replay(low, one)


def test_what_is_not_known_has_no_floor() -> None:
    full = {"model": "gemma-4-31b", "method": "full", "device": "cuda", "batch_size": 1, "seq_len": 512}
    one = api.cell(**full)
    assert (floor_bytes(one), floor_bytes(one, 4_000_000_000)) == (0, 16_000_000_000)
    rank = one.model_copy(update={"num_gpus": 4, "sharding": "fsdp"})
    assert floor_bytes(rank, 4_000_000_000) == 4_000_000_000
    assert floor_bytes(rank.model_copy(update={"offload": "params"}), 4_000_000_000) == 0
