"""What another option would save: the same as predicting the other cell, the mildest first where several are needed."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from factories import on_ranks
from typer.testing import CliRunner

from vramprobe import api, catalog
from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.cli.options import ANSWERED
from vramprobe.cli.verbs import app
from vramprobe.interop.arguments import OPTION_OF
from vramprobe.predict.changes import LEAST_SHARE, Change, candidates
from vramprobe.predict.predict import predict as by_arithmetic
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.verdict import verdict
from vramprobe.spec import CellSpec
from vramprobe.speed.step import estimate
from vramprobe.techniques.registry import known_changes, trl_switches

LARGE = {"model": "llama-3.1-70b", "method": "qlora", "batch_size": 1, "seq_len": 2048}
SMALL = {"model": "gpt2", "method": "lora", "batch_size": 2, "seq_len": 512}


def words_of(cell: dict[str, Any]) -> list[str]:
    """The cell on the command line."""
    return [
        word
        for name, value in cell.items()
        for word in ([f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)]))
    ]


def needed_bytes(found: Prediction) -> int:
    """On which a verdict rests."""
    return (found.device_bytes or found.reserved_bytes or found.peak_allocated_bytes).value


def run(*words: str, columns: int = 80) -> str:
    done = CliRunner().invoke(app, ["predict", *words], env={"COLUMNS": str(columns)})
    assert done.exit_code in ANSWERED, done.output
    return done.output


@pytest.mark.parametrize("gpu", ["RTX-A6000", "T4", None])
@pytest.mark.parametrize("cell", [LARGE, SMALL | {"dora": True, "lora_dropout": 0.1}, SMALL | {"method": "full"}])
def test_every_change_is_what_predict_says_of_the_other_cell(cell: dict[str, Any], gpu: str | None) -> None:
    now = needed_bytes(api.predict(gpu=gpu, **cell))
    found = api.changes(gpu=gpu, **cell)
    assert found
    tried = candidates(api.cell(device="cuda", **cell))
    for one in found:
        other = api.predict(gpu=gpu, **(cell | one.options))
        assert one.from_bytes == now
        assert one.to_bytes == needed_bytes(other)
        assert one.saved_bytes == now - one.to_bytes > LEAST_SHARE * now
        assert one.verdict == (verdict(other, catalog.find_gpu(gpu)).verdict if gpu else None)
    alone = [one for one in found if one.options in tried]
    assert [one.to_bytes for one in alone] == sorted(one.to_bytes for one in alone)
    assert len(found) - len(alone) <= 1


@pytest.mark.parametrize(
    ("cell", "gpu"),
    [
        (LARGE, "RTX-A6000"),
        ({"model": "llama-3.1-8b", "method": "lora", "batch_size": 4, "seq_len": 32768}, "H100-SXM"),
    ],
)
def test_several_changes_that_are_together_enough_come_first_and_each_is_needed(cell: dict[str, Any], gpu: str) -> None:
    first, *others = api.changes(gpu=gpu, **cell)
    assert first.verdict == "fits"
    assert len(first.options) > 1
    assert "fits" not in {one.verdict for one in others}
    for name in first.options:
        fewer = {other: value for other, value in first.options.items() if other != name}
        without = api.predict(gpu=gpu, **(cell | fewer))
        assert verdict(without, catalog.find_gpu(gpu)).verdict != "fits"


def test_what_costs_can_be_switched_off() -> None:
    costly = SMALL | {"dora": True, "lora_dropout": 0.1}
    found = [one.options for one in api.changes(**costly)]
    assert {"dora": False} in found
    assert {"lora_dropout": 0.0} in found
    assert {"dora": False} not in [one.options for one in api.changes(**SMALL)]


def test_a_recipe_is_no_obstacle_and_what_is_impossible_no_advice() -> None:
    found = [one.options for one in api.changes(model="gpt2", method="full", recipe="mixed", batch_size=1, seq_len=512)]
    assert {"dtype": "bf16"} in found
    t4 = [one.options for one in api.changes(gpu="T4", attn="eager", **LARGE)]
    assert {"attn": "flash_attention_2"} not in t4  # Turing has none
    assert {"fused_linear_cross_entropy": True} not in found  # nor has Liger for GPT-2


def test_candidates_are_options_that_a_cell_has() -> None:
    for cell in (LARGE, SMALL, SMALL | {"method": "full"}):
        for one in candidates(on_ranks(api.cell(device="cuda", **cell), 2, "fsdp")):
            for name, value in one.items():
                if name not in ("num_gpus", "sharding"):
                    assert name in type(api.cell(device="cuda", **SMALL)).model_fields
                    assert isinstance(value, str | int | float | bool)


def test_every_technique_that_a_cell_has_not_is_tried_in_the_options_in_which_it_differs() -> None:
    found = candidates(api.cell(device="cuda", **LARGE))
    assert {"quant": "nf4-single"} in found, "its method is qlora already"
    assert {"optim": "lion_8bit"} in found
    assert {"gradient_checkpointing": True} in found
    assert {"gradient_checkpointing": True} not in candidates(
        api.cell(device="cuda", gradient_checkpointing=True, **LARGE)
    )
    known = [*known_changes(False), *known_changes(True)]
    assert all(any(one.items() <= change.items() for change in known) for one in found[2:11])


def test_the_command_shows_changes_where_a_cell_does_not_fit_or_when_asked() -> None:
    shown = run(*words_of(LARGE), "--gpu", "RTX-A6000")
    assert "what other options would save, each line by itself (" in shown
    assert "--gradient-checkpointing" in shown
    told = json.loads(run(*words_of(LARGE), "--gpu", "RTX-A6000", "--json"))["changes"]
    assert [Change(**one) for one in told] == api.changes(gpu="RTX-A6000", **LARGE)
    assert "what other options" not in run(*words_of(SMALL), "--gpu", "H200")
    assert "changes" not in json.loads(run(*words_of(SMALL), "--gpu", "H200", "--json"))
    asked = run(*words_of(SMALL), "--gpu", "H200", "--changes")
    assert "fits" in asked.split("what other options")[1]
    assert "--gradient-checkpointing" in run(*words_of(SMALL), "--changes").split("what other options")[1]


@pytest.mark.parametrize("columns", [80, 40])
def test_a_change_is_not_broken_within_a_word(columns: int) -> None:
    shown = run(*words_of(LARGE), "--gpu", "RTX-A6000", columns=columns).splitlines()
    start = next(number for number, line in enumerate(shown) if line.startswith("what other"))
    end = next(number for number, line in enumerate(shown) if line.startswith("How many"))
    lines = shown[start + 1 : end]
    assert max(map(len, lines)) <= columns
    flags = " ".join(word for line in lines for word in line.split())
    assert "--gradient-checkpointing" in flags


def test_a_cell_that_is_recorded_gets_its_changes_from_recordings_on_one_gpu(monkeypatch) -> None:
    recorded = []

    def by_recording(spec: CellSpec, *, gpu, model, say, where) -> Prediction:
        recorded.append(spec)
        return by_arithmetic(spec, model, gpu=gpu, replays=True, retries=True)

    monkeypatch.setattr("vramprobe.predict.recorded.predict", by_recording)
    said: list[str] = []
    found = api.changes(gpu="T4", engine="recipe", say=said.append, **LARGE)
    assert said[0] == f"trying gradient_checkpointing True, 1 of {len({*said})}"
    assert any(line.endswith("{0} of {0}".format(len({*said}))) for line in said)
    expected = {str(one.options) for one in api.changes(gpu="T4", **LARGE) if len(one.options) == 1}
    assert {str(one.options) for one in found if len(one.options) == 1} == expected
    assert len(recorded) > len(found) > 5
    assert {one.num_gpus for one in recorded} == {1}


def test_what_would_take_a_recording_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a family without arithmetic, where nothing was recorded: rows and length follow from recipes."""
    monkeypatch.setattr("vramprobe.predict.at_hand.kept_recipe", lambda *words, **more: None)
    monkeypatch.setattr("vramprobe.predict.recorded.find_recipe", None)
    cell = {"model": "qwen3.5-9b", "method": "lora", "gradient_checkpointing": True, "batch_size": 4, "seq_len": 2048}
    left_out: list[dict[str, Any]] = []
    found = api.changes(gpu="RTX-5090", left_out=left_out, **cell)
    assert {"seq_len": 1024} in [one.options for one in found]
    assert {"optim": "adafactor"} in left_out
    assert {"attn": "sdpa"} not in left_out, "it has that"
    shown = run(*words_of(cell), "--gpu", "RTX-5090")
    assert f"{len(left_out)} other options would each take a recording: --changes makes them" in shown


def test_a_change_says_how_much_longer_a_token_takes_and_what_trl_calls_it() -> None:
    """By the estimate of both cells; half the rows are half the tokens of a step."""
    cell, gpu = LARGE | {"model": "llama-3.1-8b", "batch_size": 4}, "RTX-4090"
    found = {tuple(one.options): one for one in api.changes(gpu=gpu, **cell)}

    def token_seconds(**options: Any) -> float:
        return 1 / estimate(api.cell(device="cuda", **cell | options), catalog.find_gpu(gpu)).tokens_per_second.value

    for name, value in (("gradient_checkpointing", True), ("batch_size", 2), ("seq_len", 1024), ("kbit_prep", "none")):
        share = found[name,].slower_share
        assert share == pytest.approx(token_seconds(**{name: value}) / token_seconds() - 1)
    assert 0.25 < found["gradient_checkpointing",].slower_share < 0.5, "one forward more beside three"
    assert {name: found[name,].trl for name in ("batch_size", "seq_len", "lora_targets", "kbit_prep", "method")} == {
        "batch_size": "--per_device_train_batch_size 2",
        "seq_len": "--max_length 1024",
        "lora_targets": "--lora_target_modules q_proj v_proj",
        "kbit_prep": "",
        "method": "",  # to leave the quantization out is no switch
    }
    assert {one.slower_share for one in api.changes(**cell)} == {None}
    assert {one.slower_share for one in api.changes(gpu="24GiB", **cell)} == {None}
    shown = run(*words_of(cell), "--gpu", gpu, columns=110)
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


def test_what_has_no_arithmetic_gets_no_changes_by_it() -> None:
    with pytest.raises(UnsupportedArchitecture):
        api.changes(gpu="T4", padding=True, **SMALL)
    done = CliRunner().invoke(app, ["predict", *words_of(SMALL), "--changes", "--max-batch", "--gpu", "T4"])
    assert done.exit_code == 2
