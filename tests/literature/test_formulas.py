"""Every formula against its figure worked out by hand on tiny numbers, and every one complete: source, recipe, gaps."""

import contextlib
import re
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from factories import TINY_LLAMA_PARAMS, make_spec

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.architecture.expressions import ExpressionError, evaluate
from vramprobe.catalog.shipped import csv_rows
from vramprobe.literature import calibrate
from vramprobe.literature.formulas import CONSTANTS, FORMULAS, IN_ALL, MISSABLE, SAVED, Facts, facts_of
from vramprobe.optimizers import OPTIMIZERS
from vramprobe.records.whole import read_whole
from vramprobe.resolve import resolve

ROOT = Path(__file__).parents[2]
HAND = tomllib.loads(Path(__file__).with_name("figures.toml").read_text())
BY_NAME = {formula.name: formula for formula in FORMULAS}
MIXED = {"recipe": "mixed"}
FP32 = {"recipe": "fp32"}
CHECKPOINTED = {"gradient_checkpointing": True}
LORA = {"method": "lora"}
QLORA = {"method": "qlora"}


def facts(**words: Any) -> Facts:
    """1,000 parameters, batch 2 × 16 tokens, L = 2, h = 4, f = 16, a = 2 heads with 1 of keys, V = 10, a gated MLP.

    By hand: s·b·h·L = 32·4·2 = 256, and b·s²·a·L = 2·256·2·2 = 2,048 attention scores.
    """
    spec = make_spec(**words)
    params = {"num_params": 1000, "num_linear_params": 900, "num_head_params": 40, "num_output_params": 40}
    params |= {"num_trained": 1000 if spec.method == "full" else 50, "largest_module_params": 64}
    params |= {"num_quantised": 900 if spec.method == "qlora" else 0}
    sizes = {"num_layers": 2, "num_tokens": spec.num_tokens, "hidden": 4, "mlp": 16, "num_heads": 2, "num_kv_heads": 1}
    sizes |= {"head_size": 2, "vocab": 10}
    kinds = {"activation": "silu", "is_gated": True, "norms_have_bias": False}
    optimizer = OPTIMIZERS[spec.optim]
    made_by = {"optimizer_class": optimizer.made_by, "optimizer_bits": optimizer.state}
    return Facts(spec, params | sizes | kinds | made_by)


def of_size(found: Facts, num_params: int) -> Facts:
    return Facts(found.spec, found.numbers | {"num_params": num_params})


@pytest.mark.parametrize("row", HAND["figures"], ids=lambda row: f"{row['formula']}-{row.get('cell', '')}")
def test_figures_by_hand(row: dict[str, Any]) -> None:
    answer = BY_NAME[row["formula"]].apply(facts(**row.get("cell", {})))
    assert not isinstance(answer, str), answer
    assert answer.allocated_bytes == evaluate(row["bytes"])
    assert answer.total_bytes == sum(answer.terms.values())


@pytest.mark.parametrize(
    ("name", "words", "size_billion", "expected_gb"),
    [
        ("llama-factory-table", {}, 10.5, 90),  # pure_bf16: half-way from 60 to 120
        ("llama-factory-table", MIXED, 70, 1200),
        ("llama-factory-table", QLORA, 7, 6),
        ("unsloth-table", QLORA, 7.5, 5.5),
        ("unsloth-table", LORA, 405, 950),
    ],
)
def test_tables_by_hand(name: str, words: dict[str, Any], size_billion: float, expected_gb: float) -> None:
    answer = BY_NAME[name].apply(of_size(facts(**words), round(size_billion * 10**9)))
    assert answer.terms == {IN_ALL: round(expected_gb * 10**9)}


def test_a_table_says_nothing_outside_its_sizes() -> None:
    assert BY_NAME["unsloth-table"].apply(facts(**LORA)) == "for 3 to 405 billion parameters"


def test_overhead_is_counted_but_is_no_allocated_memory() -> None:
    answer = BY_NAME["gpu_poor"].apply(facts())
    assert answer.terms["context"] == 650 * 2**20
    assert answer.total_bytes - answer.allocated_bytes == 650 * 2**20


def test_ranks_of_a_sharded_job() -> None:
    """ZeRO's Figure 1 and DeepSpeed's estimators, 1,000 parameters on 4 GPUs."""

    def of(name: str, sharding: str) -> int:
        return BY_NAME[name].apply(facts(device="cuda", num_gpus=4, sharding=sharding)).total_bytes

    assert [of("zero-paper", f"zero{stage}") for stage in (1, 2, 3)] == [7000, 5500, 4000]
    assert of("zero-paper", "ddp") == 16000
    assert of("deepspeed-zero2", "zero2") == 2000 + 18000 // 4
    assert of("deepspeed-zero3", "zero3") == 18000 // 4 + 256


@pytest.mark.parametrize(
    ("column", "wrong", "said"),
    [
        ("terms", "weights = 2 * parameters", "unknown 'parameters'"),
        ("constants", "weights = 2 *", "no expression"),
        ("refuses", "exit()", "has no function 'exit'"),
        ("terms", "weights = num_params / (num_layers - 2)", "division by zero"),
    ],
)
def test_an_error_names_the_row(column: str, wrong: str, said: str) -> None:
    with pytest.raises(ExpressionError, match=rf"formulas\.csv, formula '8-bytes', .*{said}"):
        replace(BY_NAME["8-bytes"], **{column: wrong}).apply(facts())


@pytest.mark.parametrize(("words", "dtype"), [({}, "float16"), (MIXED, "float16"), (FP32, "float32")])
def test_accelerate_is_what_accelerate_says(words: dict[str, Any], dtype: str) -> None:
    """The library itself as the reference: the command prints the largest of its figures."""
    estimate = pytest.importorskip("accelerate.commands.estimate")
    cell = facts(**words)
    size = 4 * (cell["num_params"] - cell["num_head_params"])  # AutoModel in fp32
    figures = estimate.estimate_training_usage(size, dtype)
    assert BY_NAME["accelerate"].apply(cell).total_bytes == max(figures.values())


@pytest.mark.parametrize("row", HAND["refusals"], ids=lambda row: row["formula"])
def test_a_formula_says_why_it_does_not_apply(row: dict[str, Any]) -> None:
    assert BY_NAME[row["formula"]].apply(facts(**row.get("cell", {}))) == row["why"]


def test_facts_of_a_cell_by_hand() -> None:
    found = facts_of(make_spec(method="qlora", lora_r=2, lora_targets="q_proj"))
    assert found["num_params"] == TINY_LLAMA_PARAMS
    assert found["num_trained"] == 2 * 2 * (64 + 64)
    assert found["num_quantised"] == 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176)
    assert found["num_head_params"] == found["largest_module_params"] == 256 * 64
    assert (found["num_layers"], found["hidden"], found["mlp"], found["vocab"]) == (2, 64, 176, 256)
    assert (found["is_gated"], found["norms_have_bias"]) == (True, False)
    # Under bf16 autocast the fp32 adapters and the head, which peft's preparation raised to fp32, are copied.
    assert found["num_cast_params"] == found["num_trained"] + 256 * 64
    assert found["num_cast_head_params"] == 256 * 64


@pytest.mark.parametrize("model", ["gpt2", "pythia-70m", "opt-125m", "smollm2-135m"])
def test_facts_of_other_families(model: str) -> None:
    found = facts_of(resolve(model=model, method="full", device="cpu", batch_size=1, seq_len=8))
    is_llama = model == "smollm2-135m"
    assert found["hidden"] == found["num_heads"] * found["head_size"]
    assert found["mlp"] == (1536 if is_llama else 4 * found["hidden"])
    assert (found["is_gated"], found["norms_have_bias"]) == (is_llama, not is_llama)
    assert (found["num_head_params"] > 0) == (model == "pythia-70m")


def test_parameters_are_counted_as_on_the_models_that_ran() -> None:
    """Full, LoRA, DoRA and QLoRA, experts among them: counts are those of every record that ships."""
    records = [one for one in read_whole(ROOT / "results").records if one.facts is not None]
    assert {one.spec.model_type for one in records if one.spec.method != "full"} > {"qwen3_moe", "gpt_oss", "gpt2"}
    for one in records:
        with contextlib.suppress(UnsupportedArchitecture):
            found, seen = facts_of(one.spec), one.facts
            counted = tuple(found[name] for name in ("num_params", "num_trained", "num_quantised"))
            assert counted == (seen.num_params, seen.num_trainable_params, seen.num_quantised_params), one.cell_id


def test_a_model_without_arithmetic_is_refused() -> None:
    with pytest.raises(UnsupportedArchitecture, match="'t5'"):
        facts_of(resolve(model="t5-small", method="full", device="cpu", batch_size=1, seq_len=8))


# -- completeness ---------------------------------------------------------------------------------------------------

CELLS = [
    of_size(facts(**words, **precision, **more), size)
    for words in ({}, LORA, QLORA, QLORA | {"quant": "int8"}, QLORA | {"quant": "fp4"})
    for precision in ({}, *((MIXED, FP32) if not words else ()))
    for more in ({}, CHECKPOINTED, {"optim": "adamw_8bit"}, {"optim": "sgd"})
    for size in (1000, 8 * 10**9)
]


@cache
def answers(name: str) -> list[Any]:
    found = [BY_NAME[name].apply(cell) for cell in CELLS]
    return [answer for answer in found if not isinstance(answer, str)]


@pytest.mark.parametrize("name", BY_NAME)
def test_every_formula_is_complete_counts_what_it_says_and_misses_the_rest(name: str) -> None:
    """In whole bytes, of constants that are known; each has a name of its own."""
    assert len(BY_NAME) == len(FORMULAS)
    formula, found = BY_NAME[name], answers(name)
    assert re.search(r"github:[\w./-]+ [\w./]+|https://|arXiv:\d{4}\.\d{5}|claims\.csv \w\d-\d\d|hf:", formula.source)
    assert formula.says
    assert formula.recipe
    assert set(formula.missing) <= set(MISSABLE)
    assert formula.predicts == ("saved" if set(formula.counts) <= set(SAVED) else "peak")
    counted = {cause for answer in found for cause in answer.terms}
    assert counted == set(formula.counts)
    assert counted.isdisjoint(formula.missing)
    if IN_ALL not in counted:
        assert counted | set(formula.missing) == set(MISSABLE)
    for answer in found:
        assert all(type(size) is int and size > 0 for size in answer.terms.values())
        assert set(answer.constants) <= set(CONSTANTS)


def test_every_constant_and_every_name_that_is_a_row_is_some_formulas() -> None:
    assert {constant for name in BY_NAME for answer in answers(name) for constant in answer.constants} == set(CONSTANTS)
    rows = csv_rows("formula_names.csv")
    lines = " ".join(f"{formula.refuses} {formula.terms} {formula.constants}" for formula in FORMULAS)
    lines += Path(calibrate.__file__).read_text() + " ".join(row["expression"] for row in rows)
    assert [row["name"] for row in rows if not re.search(rf"\b{row['name']}\b", lines) or not row["means"]] == []
