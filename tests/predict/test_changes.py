"""Savings by another option: the same as predicting the other cell, the mildest first where several are needed."""

import json
import re
from typing import Any

import pytest
from command_line import flags
from factories import on_ranks
from predictions import some_prediction
from typer.testing import CliRunner

from vramprobe import api, catalog
from vramprobe.cli import display_changes
from vramprobe.cli.options import ANSWERED
from vramprobe.cli.verbs import app
from vramprobe.interop.arguments import OPTION_OF
from vramprobe.predict.at_hand import NotAtHand
from vramprobe.predict.changes import LEAST_SHARE, Change, candidates
from vramprobe.predict.prediction import Interval, Prediction
from vramprobe.predict.verdict import verdict
from vramprobe.recipe.recipe import CannotRecord
from vramprobe.recommend.step_cost import step_cost
from vramprobe.spec import CellSpec
from vramprobe.techniques.registry import known_changes, trl_switches
from vramprobe.units import GIB

LARGE = {"model": "llama-3.1-8b", "method": "lora", "batch_size": 4, "seq_len": 2048}
SMALL = {"model": "smollm2-135m", "method": "lora", "batch_size": 2, "seq_len": 512}


def needed_bytes(found: Prediction) -> int:
    """On which a verdict rests."""
    return (found.device_bytes or found.reserved_bytes or found.peak_allocated_bytes).value


def run(*words: str, columns: int = 80) -> str:
    done = CliRunner().invoke(app, ["predict", *words], env={"COLUMNS": str(columns)})
    assert done.exit_code in ANSWERED, done.output
    return done.output


@pytest.mark.parametrize("gpu", ["RTX-A6000", "L4", None])
@pytest.mark.parametrize("cell", [LARGE, SMALL, SMALL | {"method": "full"}])
def test_every_change_is_what_predict_says_of_the_other_cell(cell: dict[str, Any], gpu: str | None) -> None:
    now = needed_bytes(api.predict(gpu=gpu, records=False, **cell))
    found = api.changes(gpu=gpu, **cell)
    assert found
    tried = candidates(api.cell(device="cuda", **cell))
    for one in found:
        other = api.predict(gpu=gpu, records=False, **(cell | one.options))
        assert one.from_bytes == now
        assert one.to_bytes == needed_bytes(other)
        assert one.saved_bytes == now - one.to_bytes > LEAST_SHARE * now
        assert one.verdict == (verdict(other, catalog.find_gpu(gpu)).verdict if gpu else None)
    alone = [one for one in found if one.options in tried]
    assert [one.to_bytes for one in alone] == sorted(one.to_bytes for one in alone)
    assert len(found) - len(alone) <= 1


def test_several_changes_that_are_together_enough_come_first_and_each_is_needed() -> None:
    cell, gpu = LARGE | {"seq_len": 8192, "batch_size": 8}, "H100-SXM"
    first, *others = api.changes(gpu=gpu, **cell)
    assert first.verdict == "fits"
    assert len(first.options) > 1
    assert "fits" not in {one.verdict for one in others}
    for name in first.options:
        fewer = {other: value for other, value in first.options.items() if other != name}
        without = api.predict(gpu=gpu, records=False, **(cell | fewer))
        assert verdict(without, catalog.find_gpu(gpu)).verdict != "fits"


def test_what_costs_can_be_switched_off() -> None:
    costly = [*candidates(api.cell(device="cuda", **SMALL | {"dora": True, "lora_dropout": 0.1}))]
    assert {"dora": False} in costly
    assert {"lora_dropout": 0.0} in costly
    assert {"dora": False} not in candidates(api.cell(device="cuda", **SMALL))


def test_a_recipe_is_no_obstacle() -> None:
    words = {"model": "llama-3.2-1b", "method": "lora", "batch_size": 2, "seq_len": 1024, "recipe": "lora-usual"}
    assert {"gradient_checkpointing": True} in [one.options for one in api.changes(**words)]


def test_candidates_are_options_that_a_cell_has() -> None:
    for cell in (LARGE, SMALL, SMALL | {"method": "full"}):
        for one in candidates(on_ranks(api.cell(device="cuda", **cell), 2, "fsdp")):
            for name, value in one.items():
                if name not in ("num_gpus", "sharding"):
                    assert name in type(api.cell(device="cuda", **SMALL)).model_fields
                    assert isinstance(value, str | int | float | bool)


def test_every_technique_that_a_cell_has_not_is_tried_in_the_options_in_which_it_differs() -> None:
    found = candidates(api.cell(device="cuda", **LARGE | {"method": "qlora"}))
    assert {"quant": "nf4-single"} in found, "its method is qlora already"
    assert {"optim": "lion_8bit"} in found
    assert {"gradient_checkpointing": True} in found
    has_it = api.cell(device="cuda", gradient_checkpointing=True, **LARGE)
    assert {"gradient_checkpointing": True} not in candidates(has_it)
    known = [*known_changes(False), *known_changes(True)]
    assert all(any(one.items() <= change.items() for change in known) for one in found[2:11])


def cannot(*words: Any, **more: Any) -> Prediction:
    raise CannotRecord("not here")


def test_the_command_shows_changes_where_a_cell_does_not_fit_or_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramprobe.predict.recorded.predict", cannot)
    shown = run(*flags(LARGE), "--gpu", "RTX-4090")
    assert "what other options would save, each line by itself (" in shown
    assert "--gradient-checkpointing" in shown
    told = json.loads(run(*flags(LARGE), "--gpu", "RTX-4090", "--json"))["changes"]
    assert [Change(**one) for one in told] == api.changes(gpu="RTX-4090", **LARGE)
    assert "what other options" not in run(*flags(SMALL), "--gpu", "H200")
    assert "changes" not in json.loads(run(*flags(SMALL), "--gpu", "H200", "--json"))
    asked = run(*flags(SMALL), "--gpu", "H200", "--changes")
    assert "fits" in asked.split("what other options")[1]
    assert "--gradient-checkpointing" in run(*flags(SMALL), "--changes").split("what other options")[1]


@pytest.mark.parametrize("columns", [80, 40])
def test_a_change_is_not_broken_within_a_word(columns: int) -> None:
    shown = run(*flags(LARGE), "--gpu", "RTX-4090", columns=columns).splitlines()
    start = next(number for number, line in enumerate(shown) if line.startswith("what other"))
    end = next(number for number, line in enumerate(shown) if line.startswith("How many"))
    lines = shown[start + 1 : end]
    assert max(map(len, lines)) <= columns
    assert "--gradient-checkpointing" in " ".join(lines).split()


def test_changes_that_are_asked_to_be_recorded_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[CellSpec] = []

    def by_recording(spec: CellSpec, *, gpu, model, say, where) -> Prediction:
        asked.append(spec)
        size = GIB * spec.batch_size
        return some_prediction(reserved_bytes=Interval(value=size, low=size, high=size))

    monkeypatch.setattr("vramprobe.predict.recorded.predict", by_recording)
    said: list[str] = []
    found = api.changes(gpu="T4", engine="recipe", say=said.append, **LARGE)
    assert said[0] == f"trying gradient_checkpointing True, 1 of {len({*said})}"
    assert any(line.endswith("{0} of {0}".format(len({*said}))) for line in said)
    assert [one.options for one in found] == [{"batch_size": 2}]
    assert len(asked) == len({*said}) + 1


@pytest.mark.usefixtures("shipped_alone")
def test_what_would_take_a_recording_is_left_out_and_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows and length follow from recipes that ship, where nothing was recorded here."""
    monkeypatch.setattr("vramprobe.predict.recorded.find_recipe", None)
    cell = {"model": "qwen3.5-9b", "method": "lora", "gradient_checkpointing": True, "batch_size": 4, "seq_len": 2048}
    left_out: list[dict[str, Any]] = []
    found = api.changes(gpu="RTX-5090", left_out=left_out, **cell)
    assert {"seq_len": 1024} in [one.options for one in found]
    assert {"optim": "adafactor"} in left_out
    assert {"attn": "sdpa"} not in left_out, "it has that"
    shown = run(*flags(cell), "--gpu", "RTX-5090")
    display_changes.print_changes([], num_left_out=len(left_out))
    assert "that was tried" not in capsys.readouterr().out, "most were not"
    assert f"{len(left_out)} other options would each take a recording: --changes makes them" in shown


def test_a_change_says_how_much_longer_a_token_takes_and_what_trl_calls_it() -> None:
    """By the estimate of both cells; half the rows are half the tokens of a step."""
    cell, gpu = LARGE | {"model": "llama-3.1-8b", "batch_size": 4}, "RTX-4090"
    found = {tuple(one.options): one for one in api.changes(gpu=gpu, **cell)}

    def token_seconds(**options: Any) -> float:
        step = step_cost(api.cell(device="cuda", **cell | options), catalog.find_gpu(gpu))
        return 1 / step.tokens_per_second.value

    for name, value in (("gradient_checkpointing", True), ("batch_size", 2), ("seq_len", 1024)):
        share = found[name,].slower_share
        assert share == pytest.approx(token_seconds(**{name: value}) / token_seconds() - 1)
    assert 0.2 < found["gradient_checkpointing",].slower_share < 0.5, "one forward more beside three"
    assert {name: found[name,].trl for name in ("batch_size", "seq_len")} == {
        "batch_size": "--per_device_train_batch_size 2",
        "seq_len": "--max_length 1024",
    }
    assert {one.slower_share for one in api.changes(**cell)} == {None}
    assert {one.slower_share for one in api.changes(gpu="24GiB", **cell)} == {None}
    shown = run(*flags(cell), "--gpu", gpu, columns=110)
    assert "each line by itself (%: how much longer a token takes, predicted):" in shown
    assert re.search(r"less +--batch-size 2 \(TRL --per_device_train_batch_size 2\)\n", shown)
    assert re.search(r"less +\+\d\d%  --gradient-checkpointing\n", shown), "TRL reads it so, too"


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("full", {"method": "qlora", "quant": "nf4"}, "--use_peft --load_in_4bit --use_bnb_nested_quant"),
        ("lora", {"method": "qlora", "quant": "int8"}, "--use_peft --load_in_8bit"),
        ("qlora", {"quant": "nf4-single"}, "--load_in_4bit"),
        ("full", {"dtype": "bf16", "autocast": "bf16"}, "--dtype bfloat16 --bf16"),
        ("lora", {"dora": False}, ""),
        ("lora", {"seq_len": 64, "loop": "trainer"}, ""),
    ],
)
def test_trl_has_words_for_all_of_a_change_or_none_are_said(method: str, options: dict[str, Any], said: str) -> None:
    assert trl_switches(options, method) == said


def test_trl_s_words_for_training_arguments_are_fields_that_interop_reads_so() -> None:
    fields = {option: field for field, option in OPTION_OF.items() if not field.startswith("max_seq")}
    for name in ("batch_size", "seq_len", "optim"):
        assert trl_switches({name: 2}, "lora") == f"--{fields[name]} 2"


def test_what_has_no_recipe_gets_no_changes_unasked() -> None:
    with pytest.raises(NotAtHand):
        api.changes(gpu="T4", padding=True, **SMALL)
    done = CliRunner().invoke(app, ["predict", *flags(SMALL), "--changes", "--max-batch", "--gpu", "T4"])
    assert done.exit_code == 2
