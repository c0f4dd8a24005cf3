"""Published runs repeated: every row has a run or a reason, the journal survives, the committed table is its own."""

import csv
import statistics
from pathlib import Path
from typing import Any

import pytest
from scripts import script

from benchmarks.truth.published_rows import list_published
from vramprobe import catalog

FOLDER = Path(__file__).parents[2] / "benchmarks" / "truth"
#: What Trainer printed at the end of line 22's run, and the figures that were published for it.
SAID = (
    "100%|##########| 2/2 [00:05<00:00]\r{'train_runtime': 5.26, 'train_loss': 0.0, 'init_mem_gpu_alloc_delta': 0, "
    "'init_mem_gpu_peaked_delta': 0, 'train_mem_gpu_alloc_delta': 118359552, "
    "'train_mem_gpu_peaked_delta': 32695223808, 'before_init_mem_gpu': 4189062656, 'epoch': 0.5}\n"
)


def test_every_published_row_has_a_run_with_its_stack_or_a_reason() -> None:
    rows, stacks = script("truth.reproduction.rows"), script("frameworks.stacks")
    for row in list_published():
        recipe = rows.recipe_of(row)
        if isinstance(recipe, rows.NotRun):
            assert recipe.reason, row.line
            continue
        pinned = stacks.pins(recipe.stack)
        named = {name: ".".join(map(str, version)) for name, version in row.versions.items() if name in pinned}
        if row.url_or_path.startswith("github:foundation-model-stack/fms-acceleration@00febdc"):
            for name in ("transformers", "accelerate"):  # by the day in published.py, by its packages' bounds here
                del named[name]
        assert {name: pinned[name] for name in named} == named, row.line
        assert rows.tokenizer_of(recipe.tokenizer)["num_tokens"] <= rows.config_of(recipe.model)["vocab_size"]
        assert recipe.num_data_rows >= row.batch_size * row.num_gpus * rows.NUM_STEPS
        assert recipe.words[recipe.words.index("--per_device_train_batch_size") + 1] == str(row.batch_size)


def test_no_stack_has_anything_of_nvidias_and_each_has_what_a_run_imports() -> None:
    stacks = script("frameworks.stacks")
    for name in stacks.stacks():
        pinned = stacks.pins(name)
        assert not [package for package in pinned if stacks._EMULATED.match(package)], name
        lines = (stacks.PINS / f"{name}.in").read_text().splitlines()
        asked = dict(line.split("==") for line in lines if "==" in line)
        assert {package: pinned[package] for package in asked} == asked, name
        assert {"torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes", "setuptools"} <= pinned.keys()


def test_the_models_that_the_catalog_lacks_are_those_of_the_folder() -> None:
    rows = script("truth.reproduction.rows")
    own = {path.stem for path in (rows.HERE / "models").glob("*.json")}
    asked = {model for model, _ in rows._MODELS.values()}
    assert asked - own <= {entry.name for entry in catalog.list_models()}
    assert own <= asked - {entry.name for entry in catalog.list_models()}


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    journal, path = script("journal"), tmp_path / "journal.jsonl"
    first, second = ({"line": line, "fingerprint": "f", "outcome": "ok"} for line in (1, 2))
    journal.append(path, first)
    with path.open("ab") as file:
        file.write(b'{"line": 9, "fingerp')  # the disk was full
    journal.append(path, second)
    assert journal.read(path) == [first, second]
    assert journal.read(tmp_path / "none.jsonl") == []


def test_the_last_attempt_counts_and_an_error_does_not_hide_what_was_known(tmp_path: Path) -> None:
    journal = script("journal")
    entries = [{"line": 1, "fingerprint": "f", "outcome": outcome} for outcome in ("ok", "error")]
    assert journal.latest(entries, "line")[1]["outcome"] == "ok"
    twice = [entry | {"seconds": seconds} for entry in (entries[1], entries[0]) for seconds in (1, 2)]
    assert journal.latest(twice[:2], "line", "fingerprint") == {(1, "f"): twice[1]}
    assert journal.latest(twice, "line", "fingerprint") == {(1, "f"): twice[3]}


def test_an_interrupted_campaign_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reproduce, path, ran = script("truth.reproduce"), tmp_path / "journal.jsonl", []
    todo = reproduce.recipes()[:4]

    def run(recipe: Any, **_: Any) -> dict[str, Any]:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(recipe.line)
        told = {"line": recipe.line, "fingerprint": recipe.fingerprint, "outcome": "ok", "seconds": 1.0}
        return told | {"stack_fingerprint": reproduce.fingerprint(recipe.stack), "peak_bytes": 1, "settled_bytes": 1}

    monkeypatch.setattr(reproduce, "run", run)
    with pytest.raises(KeyboardInterrupt):
        reproduce.campaign(todo, path=path, uv="uv", limit_seconds=1)
    done = reproduce.latest(path)
    left = [one for one in todo if not reproduce._is_done(one, done, again=False)]
    assert [one.line for one in left] == [one.line for one in todo[2:]]


def test_a_rerun_takes_every_kind_in_turn_and_says_which_row_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    reproduce, path = script("truth.reproduce"), tmp_path / "journal.jsonl"
    todo = [one for one in reproduce.recipes() if one.host_bytes < reproduce.SPARE_BYTES]
    for seconds, one in enumerate(todo):
        told = {"line": one.line, "fingerprint": one.fingerprint, "outcome": "ok", "seconds": float(seconds)}
        told |= {"stack_fingerprint": reproduce.fingerprint(one.stack), "peak_bytes": 5, "settled_bytes": 4}
        reproduce.journal.append(path, told | {"rank_peak_bytes": [5] * one.num_ranks})
    kinds = {(one.stack, one.num_ranks) for one in todo}
    chosen = reproduce.sample(len(kinds), reproduce.current(path))
    assert {(one.stack, one.num_ranks) for one in chosen} == kinds

    def run(recipe: Any, **_: Any) -> dict[str, Any]:
        peak = 6 if recipe == chosen[1] else 5
        told = {"outcome": "ok", "seconds": 1.0, "peak_bytes": peak, "settled_bytes": 4}
        return told | {"rank_peak_bytes": [peak] * recipe.num_ranks}

    monkeypatch.setattr(reproduce, "run", run)
    assert reproduce.rerun(1, path, uv="uv", limit_seconds=1) is None
    told = reproduce.rerun(2, path, uv="uv", limit_seconds=1)
    assert told == f"lines {chosen[1].line} are not as the journal has them"
    assert "as it was" in capsys.readouterr().err


def test_a_change_of_what_is_run_or_of_its_packages_is_run_anew() -> None:
    reproduce = script("truth.reproduce")
    recipe = reproduce.recipes()[0]
    entry = {"line": recipe.line, "fingerprint": recipe.fingerprint, "outcome": "ok"}
    fresh = entry | {"stack_fingerprint": reproduce.fingerprint(recipe.stack)}
    key = ("line", "fingerprint", "stack_fingerprint")

    def is_done(*, again: bool, **other: str) -> bool:
        return reproduce._is_done(recipe, reproduce.journal.latest([fresh | other], *key), again=again)

    assert is_done(again=True)
    assert not is_done(again=True, fingerprint="another")
    assert not is_done(again=True, stack_fingerprint="another")
    assert not is_done(again=True, outcome="error")
    assert is_done(again=False, outcome="error")


def test_the_published_figures_are_what_trainer_printed() -> None:
    run = script("truth.reproduction.run")
    row = next(row for row in list_published() if row.line == 22)
    metrics = run.metrics_in(f"{{'loss': 1.0}}\n{SAID}ERROR: Could not consume arg: k_proj\n")
    assert run.published_figures(metrics) == (row.memory_bytes, row.settled_bytes)
    assert run.metrics_in("{'train_runtime': 1.0, 'train_loss': 0.0}") is None


def test_a_ranks_error_is_kept_before_the_launchers() -> None:
    run = script("truth.reproduction.run")
    said = 'Traceback (most recent call last):\n  File "a.py", line 1\n    x\nValueError: the rank\n\nmore\n'
    launcher = 'Traceback (most recent call last):\n  File "b.py", line 2\nChildFailedError: the launcher\n'
    first, second = run.errors_in(said + launcher)
    assert first.endswith("ValueError: the rank")
    assert second.endswith("ChildFailedError: the launcher")


def test_the_table_holds_every_published_row_and_how_near_they_came() -> None:
    with (FOLDER / "reproduce.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [int(row["line"]) for row in found] == [row.line for row in list_published()]
    assert all(bool(row["emulated_bytes"]) != bool(row["not_run"]) for row in found)
    errors = sorted(abs(float(row["difference_percent"])) for row in found if row["emulated_bytes"])
    assert statistics.median(errors) <= 0.01
    assert errors[-(-95 * len(errors) // 100) - 1] <= 0.5
    missed = [row for row in found if row["emulated_bytes"] and abs(float(row["difference_percent"])) > 0.5]
    assert all(row["cause"] for row in missed)
