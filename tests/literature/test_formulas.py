"""Every formula against its figure worked out by hand on tiny numbers, and every one complete: source, recipe, gaps."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import TINY_LLAMA_PARAMS, make_spec

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.catalog.shipped import csv_rows
from vramprobe.literature import calibrate
from vramprobe.literature.expressions import ExpressionError
from vramprobe.literature.formulas import CONSTANTS, FORMULAS, IN_ALL, MISSABLE, SAVED, Facts, facts_of
from vramprobe.optimizers import OPTIMIZERS
from vramprobe.records.whole import read_whole
from vramprobe.spec import resolve

ROOT = Path(__file__).parents[2]
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
    numbers = {
        "num_params": 1000,
        "num_trained": 1000 if spec.method == "full" else 50,
        "num_linear_params": 900,
        "num_quantised": 900 if spec.method == "qlora" else 0,
        "num_head_params": 40,
        "num_output_params": 40,
        "largest_module_params": 64,
        "num_layers": 2,
        "num_tokens": spec.num_tokens,
        "hidden": 4,
        "mlp": 16,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_size": 2,
        "vocab": 10,
        "activation": "silu",
        "is_gated": True,
        "norms_have_bias": False,
        "optimizer_class": OPTIMIZERS[spec.optim].made_by,
        "optimizer_bits": OPTIMIZERS[spec.optim].state,
    }
    return Facts(spec, numbers)


def of_size(found: Facts, num_params: int) -> Facts:
    return Facts(found.spec, found.numbers | {"num_params": num_params})


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("8-bytes", {}, 8000),
        ("12-bytes", {}, 12000),
        ("16-bytes", {}, 16000),
        ("16-bytes-fp32", FP32, 16000),
        ("18-bytes", MIXED, 18000),
        ("18-bytes-megatron", {}, 18000),
        ("4x-weights", {}, 8000),
        ("4x-weights", FP32, 16000),
        ("weights-plus-4x", {}, 10000),
        ("huggingface-anatomy", MIXED, 18000),
        ("huggingface-anatomy", FP32, 16000),
        ("huggingface-anatomy", MIXED | {"optim": "adamw_8bit"}, 12000),  # 4 + 2 + 4 + 2
        ("guide-lyceum", {}, 16000),
        ("guide-lyceum", LORA, 2000 + 50 * (2 + 2 + 12)),
        ("guide-lyceum", QLORA, 500 + 50 * (2 + 2 + 12)),
        ("guide-spheron", {}, 12000),
        ("guide-spheron", QLORA, 500 + 50 * (2 + 2 + 8)),
        ("korthikanti", {}, 34 * 256 + 5 * 2048),
        ("korthikanti-selective", {}, 34 * 256),
        ("korthikanti-full", CHECKPOINTED, 2 * 256),
        ("zero-paper", {}, 16000),
        ("zero-paper-activations", {}, 24 * 256),
        ("qlora-paper", QLORA, 516),  # 1000 · (4 + 8/64 + 32/16384) / 8 = 515.87
        ("qlora-paper", QLORA | {"quant": "nf4-single"}, 562),  # 4.5 bits: 562.5, to even
        ("deepspeed-zero2", {}, 20000),
        ("deepspeed-zero3", {}, 18000 + 4 * 64),
        ("accelerate", {}, 8 * 960),  # without the head of 40
        ("accelerate", FP32, 16 * 960),
        # n = 2·10·4 + 4·16 + 8·4·2 + 2·4 + 2·1.5·2·16 + 3·2·4·16 = 696
        ("eleuther-cookbook", {}, 18 * 696 + 34 * 256 + 5 * 2048),
        ("eleuther-cookbook", FP32, 20 * 696 + 34 * 256 + 5 * 2048),
        ("eleuther-cookbook", CHECKPOINTED, 18 * 696 + 34 * 256),
        ("transformer-math", {}, 16000 + 34 * 256 + 5 * 2048),
        ("transformer-math", FP32, 16000 + 34 * 256 + 5 * 2048),  # 4 + 4 + 8
        ("transformer-math", {"optim": "adamw_8bit"}, 10000 + 34 * 256 + 5 * 2048),
        ("transformer-math", CHECKPOINTED, 16000 + 2 * 256),
        ("transformer-math-selective", {}, 16000 + 34 * 256),
        # n = 2·(2·4·(16·1.5 + 1) + 2·16·1.5) + 4 + 2·40 = 580; 1.05·(8704 + 32·(8 + 4)) = 9542.4, 1.05·2·32·14 = 940.8
        ("megatron", {}, 18 * 580 + 9542 + 941),
        # 18 + 4·16/4 = 34 per width; 4·32·(4 + 10) = 1792
        ("megatron-sp", {}, 18 * 580 + 34 * 256 + 32 * 12 + 1792),
        # n = 80 + 2·(64 + 192) = 592. Activations of a layer: 2·16·4·8 + 256·2·8 = 5120, 2·16·(4·2 + 16·6) = 3328,
        # 16·8 + 2·16·4·6 = 896, so 2·2·9344 = 37376 in all.
        ("gpu_poor", {}, 8 * 592 + 37376),
        ("gpu_poor", {"optim": "sgd"}, 4 * 592 + 37376),
        ("gpu_poor", CHECKPOINTED, 8 * 592 + 5606),
        ("gpu_poor", LORA, 2 * 592 + 2 * 8 * 4 * 2 * 4 * 6 + 37376),
        # 0.5·592 − 2·592/64 + 0.06·1184 = 348.54; adapters 2·8·4·0.5·4·3 = 384; extra 0.75·(15·4 + 6·16)·2·50·2 = 23400
        ("gpu_poor", QLORA, 349 + 384 + 23400 + 37376),
        # int8: 592 + 71.04; adapters 2·8·4·2·4·3 = 1536; extra 0.75·1.25·312·50·2 = 29250
        ("gpu_poor", QLORA | {"quant": "int8"}, 663 + 1536 + 29250 + 37376),
        # Layer 32·(2·(3·4 + 4) + 4) + 32·(2·(4 + 32) + 4) + 2·2·128 = 4096; 8·320 of outputs
        ("vram-calculator", {}, 18000 + 2 * 4096 + 5 * 2048 + 8 * 320),
        # n = 4·26 + 2·(12·16 + 13·4) + 8 = 600; layer 32·(4·11 + 8 + 16·2·4 + 4 + 16) = 6400; ends 32·4·5 = 640
        ("ultrascale", {}, 16 * 600 + 2 * 6400 + 5 * 2048 + 640 + 4 * 320),
        ("ultrascale", CHECKPOINTED, 16 * 600 + 2 * 256 + 640 + 4 * 320),
        ("llama-factory-rule", {}, 8000),
        ("llama-factory-rule", MIXED, 18000),
        ("llama-factory-rule", LORA, 2000),
        ("llama-factory-rule", QLORA, 500),
        ("llama-factory-rule", QLORA | {"quant": "int8"}, 1000),
    ],
)
def test_figures_by_hand(name: str, words: dict[str, Any], expected: int) -> None:
    answer = BY_NAME[name].apply(facts(**words))
    assert not isinstance(answer, str), answer
    assert answer.allocated_bytes == expected
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


@pytest.mark.parametrize(
    ("name", "words", "why"),
    [
        ("8-bytes", LORA, "for full fine-tuning only"),
        ("16-bytes", {"optim": "sgd"}, "for AdamW with 32-bit state, not sgd"),
        ("guide-lyceum", QLORA | {"quant": "int8"}, "has no figure for 8 bits"),
        ("korthikanti", CHECKPOINTED, "for training without recomputation"),
        ("korthikanti-full", {}, "for recomputation of whole layers"),
        ("qlora-paper", LORA, "for 4-bit weights"),
        ("accelerate", LORA, "for full fine-tuning with Adam only"),
        ("megatron", CHECKPOINTED, "its report knows no recomputation of whole layers"),
        ("gpu_poor", {"optim": "adafactor"}, "has no figure for adafactor"),
        ("vram-calculator", CHECKPOINTED, "knows no recomputation"),
        ("unsloth-table", {}, "for LoRA in 16 bits and QLoRA in 4"),
    ],
)
def test_a_formula_says_why_it_does_not_apply(name: str, words: dict[str, Any], why: str) -> None:
    assert BY_NAME[name].apply(facts(**words)) == why


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


def answers(name: str) -> list[Any]:
    found = [BY_NAME[name].apply(cell) for cell in CELLS]
    return [answer for answer in found if not isinstance(answer, str)]


def test_names_are_different() -> None:
    assert len(BY_NAME) == len(FORMULAS)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_formula_is_complete(name: str) -> None:
    formula = BY_NAME[name]
    assert re.search(r"github:[\w./-]+ [\w./]+|https://|arXiv:\d{4}\.\d{5}|claims\.csv \w\d-\d\d|hf:", formula.source)
    assert formula.says
    assert formula.recipe
    assert set(formula.missing) <= set(MISSABLE)
    assert formula.predicts == ("saved" if set(formula.counts) <= set(SAVED) else "peak")


@pytest.mark.parametrize("row", csv_rows("formula_names.csv"), ids=lambda row: row["name"])
def test_every_name_that_is_a_row_is_used(row: dict[str, str]) -> None:
    lines = " ".join(f"{formula.refuses} {formula.terms} {formula.constants}" for formula in FORMULAS)
    lines += Path(calibrate.__file__).read_text() + " ".join(
        other["expression"] for other in csv_rows("formula_names.csv")
    )
    assert re.search(rf"\b{row['name']}\b", lines)
    assert row["means"]


@pytest.mark.parametrize("name", BY_NAME)
def test_a_formula_counts_what_it_says_and_misses_the_rest(name: str) -> None:
    formula, found = BY_NAME[name], answers(name)
    counted = {cause for answer in found for cause in answer.terms}
    assert counted == set(formula.counts)
    assert counted.isdisjoint(formula.missing)
    if IN_ALL not in counted:
        assert counted | set(formula.missing) == set(MISSABLE)


@pytest.mark.parametrize("name", BY_NAME)
def test_bytes_are_whole_and_constants_are_known(name: str) -> None:
    for answer in answers(name):
        assert all(type(size) is int and size > 0 for size in answer.terms.values())
        assert set(answer.constants) <= set(CONSTANTS)


@pytest.mark.parametrize("constant", CONSTANTS)
def test_every_constant_is_some_formulas(constant: str) -> None:
    assert any(constant in answer.constants for name in BY_NAME for answer in answers(name))
