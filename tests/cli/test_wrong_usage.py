"""A mistake in the command line's words: one line and exit code 2, with the word that was meant."""

import dataclasses
import re
from collections.abc import Iterable

import pytest
from command_line import vramprobe
from typer.main import get_command

from vramprobe.cli.verbs import app
from vramprobe.cli.wrong_usage import _NONE, FOREIGN, _instead, in_one_line
from vramprobe.interop.arguments import FIELDS

VERBS = get_command(app).commands
CELL = ("--model", "gpt2", "--method", "lora")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("predict", *CELL, "--batch-size", "abc"), "--batch-size: 'abc' given; Input should be a valid integer"),
        (("predict", *CELL, "--batch-size=1.5"), "--batch-size: '1.5' given; "),
        (("predict", *CELL), "for example: vramprobe predict --model llama-3.1-8b"),
        (("predict", "--method", "lora"), "Missing --model, --batch-size, --seq-len; or ask for one: --largest-model"),
        (("predict", "--max-batch", "--method", "lora"), "Missing --model, --seq-len, --gpu; or --from RUN"),
        (("recommend", "--method", "lora"), "Missing --model, --seq-len, --tokens; or ask how many tokens"),
        (("predict", *CELL, "--world-size", "8"), "predict has no option --world-size: here it is --num-gpus"),
        (("predict", *CELL, "--lora_r_dropout", "8"), "nearest: --lora-dropout"),
        (("predict", *CELL, "--per_device_train_batch_size", "3"), "here it is --batch-size"),
        (("predict", *CELL, "--modules-to-save", "lm_head"), "vramprobe profile --emulate GPU --empty-weights"),
        (("predict", *CELL, "--use-reentrant", "false"), "keep each layer's input; drop it, or run the script: "),
        (("predict", *CELL, "--padding-free"), "rows are predicted side by side, as long as seq_len; drop it, or run"),
        (("predict", *CELL, "--bf16_full_eval"), "evaluation is not predicted; drop it, or run the script"),
        (("recommend", *CELL, "--max-memory", "20GiB"), "it splits a model between GPUs and the host, which is not"),
        (("predict", *CELL, "--lora_modules_to_save", "x"), "it trains copies of whole modules, which is not"),
        (("predict", *CELL, "--save-steps", "3"), "it changes no memory of a step: drop it"),
        (("predict", *CELL, "--frobnicate"), "a script runs with all of its own: vramprobe profile --emulate GPU"),
        (("predict", *CELL, "--use-liger-kernel"), "here it is --fused-linear-cross-entropy"),
        (("predict", *CELL, "--stack", "transformers-4.48"), "--python PATH; `vramprobe emulate setup --torch 2.6.0"),
        (("predict", *CELL, "--weights", "random"), "has no option --weights: it changes how a cell is measured"),
        (("predict", *CELL, "--serve"), "an engine that serves a model is vramprobe serve"),
        (("predict", "--model"), "'--model' requires an argument"),
        (("predicct",), "Did you mean 'predict'?"),
        (("serve", "--model", "gpt2", "--gpu", "T4", "--seq-len", "512"), "here it is --max-model-len"),
        (("serve", "--model", "gpt2", "--gpu", "T4", "--engine", "sglang"), "it predicts vLLM alone"),
        (("grpo", *CELL, "--gpu", "T4", "--sharding", "zero3"), "grpo has no option --sharding: it predicts one GPU"),
        (("explain", "--gpu", "T4"), "explain has no option --gpu: predict and serve have it"),
        (("diff", "a", "b", "--frobnicate"), "`vramprobe diff --help` lists its options"),
    ],
    ids=lambda one: " ".join(one[-2:]) if isinstance(one, tuple) else "",
)
def test_one_line_says_what_was_given_and_what_to_do(words: tuple[str, ...], said: str) -> None:
    done = vramprobe(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("vramprobe: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", [name for name, one in VERBS.items() if any(each.required for each in one.params)])
def test_all_that_is_missing_is_named_at_once(verb: str) -> None:
    with pytest.raises(Exception, match="issing") as caught:
        VERBS[verb].main([], standalone_mode=False)
    said = in_one_line(caught.value, [verb], VERBS).split(", for example")[0].split(";")[0]
    needed = [one for one in VERBS[verb].params if one.required]
    assert sorted(said.removeprefix("Missing ").split(", ")) == sorted(
        one.name.upper() if one.param_type_name == "argument" else f"--{one.name.replace('_', '-')}" for one in needed
    )


def answers(fields: Iterable[str]) -> dict[str, str]:
    """Return the answer of predict to each field, typed as an option that it does not have."""
    own = {one.name for one in VERBS["predict"].params}
    asked = [field for field in fields if not field.startswith("_") and field not in own]
    return {field: _instead("predict", f"--{field}", (), VERBS) for field in asked}


def test_each_field_of_a_configuration_has_an_option_or_a_reason() -> None:
    tables = [FIELDS[part] for part in ("files", "arguments", "adapters")]
    fields = [name for one in tables for key in ("harmless", "read") for name in one.get(key, "").split()]
    fields += [name for one in tables for key in ("option_of", "named", "refused") for name in one.get(key, {})]
    for framework in ("axolotl", "llamafactory"):
        fields += [*FIELDS[framework]["arguments"], *FIELDS[framework]["adapter"]]
    assert [field for field, said in answers(fields).items() if "lists its options" in said] == []


@pytest.mark.parametrize(
    ("module", "kind"), [("transformers", "TrainingArguments"), ("peft", "LoraConfig"), ("trl", "SFTConfig")]
)
def test_each_field_of_the_installed_library_has_an_option_or_a_reason(module: str, kind: str) -> None:
    fields = [one.name for one in dataclasses.fields(getattr(pytest.importorskip(module), kind))]
    assert len(fields) > 20
    assert [field for field, said in answers(fields).items() if "lists its options" in said] == []


def test_no_words_at_all_show_the_verbs() -> None:
    done = vramprobe()
    assert done.returncode == 2
    assert "Usage: vramprobe VERB" in done.stdout + done.stderr


def test_a_foreign_word_leads_to_an_option_that_predict_has() -> None:
    own = {one.name for one in VERBS["predict"].params}
    assert set(FOREIGN.values()) <= own
    assert not any(re.sub("[^a-z0-9]", "", name) in FOREIGN for name in own)
    for verb, name in _NONE:
        assert name not in {one.name for one in VERBS[verb].params}
