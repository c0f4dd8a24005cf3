"""Words in any case and under their usual aliases: one table, for the command line, YAML and Python alike."""

from pathlib import Path

import pytest
from command_line import flags, vramprobe
from factories import make_spec
from typer.main import get_command

from vramprobe.choices import ALIASES, WORDS, meant
from vramprobe.cli.verbs import app
from vramprobe.errors import SpecError
from vramprobe.sweep.definition import load_sweep
from vramprobe.units import parse_length

EVERY = [(option, word) for option, words in WORDS.items() for word in words]


@pytest.mark.parametrize(("option", "word"), EVERY)
def test_a_word_is_meant_in_any_case_and_with_any_separator(option: str, word: str) -> None:
    for given in (word, word.upper(), word.title(), word.replace("-", "_"), word.replace("_", "-"), f" {word} "):
        assert meant(option, given) == word


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_no_word_itself_and_means_one(alias: str) -> None:
    word = ALIASES[alias]
    taking = [option for option, words in WORDS.items() if word in words]
    assert taking
    for option in taking:
        assert meant(option, alias.upper()) == word
        assert meant(option, alias) != alias


@pytest.mark.parametrize(
    ("option", "given", "word"),
    [
        ("dtype", "bfloat16", "bf16"), ("dtype", "float32", "fp32"), ("dtype", "torch.float16", "fp16"),
        ("sharding", "zero-3", "zero3"), ("sharding", "ZeRO_3", "zero3"), ("sharding", "fsdp2", "fsdp"),
        ("method", "LoRA", "lora"), ("method", "QLoRA", "qlora"), ("optim", "adam", "adamw_torch_fused"),
        ("optim", "AdamW8bit", "adamw_8bit"), ("attn", "flash-attention-2", "flash_attention_2"),
        ("recipe", "ALL_BF16", "all-bf16"), ("trainer", "GRPO", "grpo"), ("quant", "NF4", "nf4"),
        ("method", ["LoRA", "full"], ["lora", "full"]),
        ("dtype", "int4", "int4"), ("method", "dora", "dora"), ("model", "GPT2", "GPT2"), ("dtype", None, None),
    ],
)  # fmt: skip
def test_what_is_meant(option: str, given: object, word: object) -> None:
    assert meant(option, given) == word


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("2048", 2048), ("2k", 2048), ("32K", 32768), ("1M", 1048576), ("2_048", 2048), ("2,048", 2048), ("-1", -1)],
)
def test_a_length_is_in_steps_of_1024(text: str, tokens: int) -> None:
    assert parse_length(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "2kk", "2.5k", "2 048", "1G", "0x10", "zwei"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="2k, which is 2,048"):
        parse_length(text)


def test_python_yaml_and_the_command_line_understand_the_same(tmp_path: Path) -> None:
    words = {"method": "LoRA", "dtype": "bfloat16", "optim": "Adam", "seq_len": "1k", "attn": "Eager"}
    exact = {"method": "lora", "dtype": "bf16", "optim": "adamw_torch_fused", "seq_len": 1024, "attn": "eager"}
    model = "gemma-2-2b"  # whose recipes of eager attention ship
    plain = make_spec(model=model, **exact)
    assert make_spec(model=model, **words) == plain
    file = tmp_path / "sweep.yaml"
    file.write_text(f"cells: [{{model: {model}, batch_size: 1, {', '.join(f'{k}: {v}' for k, v in words.items())}}}]")
    (cell,) = load_sweep(file, device=plain.device).cells
    assert (cell.optim, cell.seq_len, cell.attn) == (plain.optim, plain.seq_len, plain.attn)
    asked = ["predict", f"--model={model}", "--batch-size=1", "--gpu=a100-80gb", "--json"]
    one, other = (vramprobe(*asked, *flags(each)).stdout for each in (words, exact))
    assert one == other
    assert '"peak_' in one


def test_every_verb_understands_words() -> None:
    verbs = get_command(app).commands
    mine = {name for name, verb in verbs.items() if any(one.name in WORDS for one in verb.params)}
    assert len(mine) >= 8
    assert {type(verbs[name]).__name__ for name in mine} == {"_Verb"}
