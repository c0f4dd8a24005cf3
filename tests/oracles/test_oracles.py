"""The oracles: questions are answered as they were, runs have the origin that they name, the gate's page is current."""

import csv
import dataclasses
import json
import lzma
import random
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from emulated import require_emulation
from grids import exhaustive

from benchmarks.truth import recipes
from tests.oracles import freeze, oracles
from vramprobe.catalog import find_gpu
from vramprobe.choices import Loss, Optim, Quant, Sharding, Trainer
from vramprobe.errors import SpecError
from vramprobe.predict import recorded

ROOT = Path(__file__).parents[2]
MOST_BYTES = 1_500_000
#: Tables that only compared with arithmetic, last at commit 16bca3ca: their rows are kept here alone.
GONE = {"results/cpu/sizes/records.jsonl"} | {
    f"benchmarks/{name}.csv"
    for name in """
        ranks/device_map ranks/fewest_cards_runs ranks/ranks ranks/ranks_405b ranks/ranks_replayed truth/emulated
        truth/emulated_edges truth/llama4 truth/losses truth/vision
    """.split()  # noqa: SIM905
}


@pytest.fixture(scope="module")
def cells() -> list[oracles.Oracle]:
    return list(oracles.cells())


@cache
def journal(name: str) -> list[dict[str, Any]]:
    """The rows of a table or the records of a journal of the repository."""
    path = ROOT / name
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    text = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return [one for one in map(json.loads, text.splitlines()) if one.get("line") != "started"]


def kept(run: oracles.Run) -> list[dict[str, Any]]:
    """Return the rows of a run in the file that it names."""
    where = run.origin["where"].items()
    return [row for row in journal(run.origin["file"]) if all(str(row[name]) == value for name, value in where)]


def numbers(row: dict[str, Any]) -> set[str]:
    """The figures of a table's row or of a record's peak."""
    return {str(value) for value in {**row, **(row.get("peak") or {})}.values()}


def test_no_run_at_a_gpus_limit_that_fits_ran_out(cells: list[oracles.Oracle]) -> None:
    said = [(one.today.verdict, one.run.outcome) for one in cells if one.kind == "boundary" and one.run is not None]
    assert len(said) == 593
    assert ("fits", "oom") not in said


def test_each_run_is_in_the_file_that_it_names_with_these_figures(cells: list[oracles.Oracle]) -> None:
    runs = [one.run for one in cells if one.run is not None]
    assert len(runs) > 2000
    assert {run.origin["file"] for run in runs if not (ROOT / run.origin["file"]).exists()} == GONE
    for run in runs:
        if run.origin["file"] in GONE:
            continue
        found = kept(run)
        assert found, run.origin
        figures = {str(size) for size in (run.allocated_bytes, run.reserved_bytes, run.load_bytes) if size is not None}
        assert any(figures <= numbers(row) for row in found), run.origin


def test_a_figure_that_its_file_does_not_have_is_noticed(cells: list[oracles.Oracle]) -> None:
    run = next(one.run for one in cells if one.run is not None and one.run.allocated_bytes)
    assert not any(str(run.allocated_bytes + 1) in numbers(row) for row in kept(run))
    assert not kept(dataclasses.replace(run, origin=run.origin | {"where": dict.fromkeys(run.origin["where"], "no")}))


def test_each_cell_reads_back_with_every_option_and_is_there_once(cells: list[oracles.Oracle]) -> None:
    names = set(cells[0].spec.model_dump())
    for one in cells:
        assert set(one.cell) == names
        assert (one.gpu is None) == (one.cell["device"] == "cpu")
        assert one.spec.model_dump(mode="json") == one.cell
    assert len({(one.gpu, json.dumps(one.cell)) for one in cells}) == len(cells)


def test_every_sharding_trainer_loss_optimizer_and_format_is_among_them(cells: list[oracles.Oracle]) -> None:
    kinds = {"sharding": Sharding, "trainer": Trainer, "loss": Loss, "optim": Optim, "quant": Quant}
    for name, kind in kinds.items():
        frozen = {one.cell[name] for one in cells if one.today.engine == "formula"}
        assert set(get_args(kind)) - {"grpo"} <= frozen, "a step of GRPO is younger, and recorded alone"


@exhaustive
def test_a_draw_of_the_runs_on_one_gpu_is_recorded_as_it_was(cells: list[oracles.Oracle]) -> None:
    """Two runs of each kind, drawn by seed, repeat: allocated within 0.2 % of the run, reserved within 5 %."""
    require_emulation()
    chance, kinds = random.Random(0), {}
    for one in cells:
        is_of_one = one.spec.num_gpus == 1 and one.gpu is not None and not one.is_a_command
        is_of_one &= one.spec.loss != "cut_cross_entropy"  # whose library comes from no index
        if is_of_one and one.run is not None and one.run.outcome == "ok" and one.run.allocated_bytes:
            kinds.setdefault(one.kind, []).append(one)
    for kind, some in kinds.items():
        for one in chance.sample(some, min(2, len(some))):
            found = recorded.predict(one.spec, gpu=find_gpu(one.gpu))
            assert found.peak_allocated_bytes.value == pytest.approx(one.run.allocated_bytes, rel=0.002), one
            if one.run.reserved_bytes:
                assert found.reserved_bytes.value == pytest.approx(one.run.reserved_bytes, rel=0.05), (kind, one)


def test_a_part_of_the_questions_is_answered_as_it_was() -> None:
    quick = [one for one in oracles.questions() if one.ask == "serve"]
    assert len(quick) == 4
    assert freeze.changed_answers(quick[::3]) == []


@exhaustive
@pytest.mark.timeout(3600)
def test_all_questions_are_answered_as_they_were() -> None:
    assert freeze.changed_answers(oracles.questions()) == []


def test_the_files_are_small() -> None:
    assert sum(path.stat().st_size for path in (oracles.CELLS, oracles.QUESTIONS)) <= MOST_BYTES


def test_the_gates_page_is_what_the_rows_give(cells: list[oracles.Oracle]) -> None:
    assert recipes.PAGE.read_text() == recipes.page(cells)


def test_the_gate_counts_an_answer_by_its_bytes(cells: list[oracles.Oracle]) -> None:
    """An answer that is the run's own is equal in all; one byte more in none; one that is refused has no answer."""

    def own(one: oracles.Oracle) -> recipes.Sizes:
        return recipes.of_run(one)

    def more(one: oracles.Oracle) -> recipes.Sizes:
        allocated, reserved = recipes.of_run(one)
        return allocated and allocated + 1, reserved

    def none(one: oracles.Oracle) -> recipes.Sizes:
        raise SpecError("no")

    some = [one for one in cells if one.kind == "losses"]
    lines = [recipes.table(recipes.compared(some, answer, recipes.of_run))[-1] for answer in (own, more, none)]
    count = len(some)
    start = f"| **one GPU** | {count} | "
    assert lines[0].startswith(f"{start}{count} | {count} of {count} | 0.000 %, 0.000 %, 0.000 % | {count} of {count}")
    assert lines[1].startswith(f"{start}{count} | 0 of {count} | 0.000 %")
    assert lines[2] == f"{start}0 | – | – | – | – |"
    assert len(recipes.differing(recipes.compared(some, none, recipes.of_run))) == count
