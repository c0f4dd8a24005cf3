"""Published figures: each row is a cell or has one reason, bytes are what the source meant, differences are sourced."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from grids import exhaustive

from vramprobe import catalog
from vramprobe.literature.differences import (
    DIFFERENCES,
    MOMENTS,
    Moments,
    differences_of,
    moments_of,
    with_differences,
)
from vramprobe.literature.published import NoCell, PublishedRow, Reason, cell_of, list_published
from vramprobe.simulate.run import simulate
from vramprobe.spec import CellSpec, resolve
from vramprobe.workload import adapter

# peft asks by the old name; transformers warns.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ROOT = Path(__file__).parents[2]
#: Two layers, 4 query heads and 2 key and value heads of 16, MLP of 96, 32 positions.
TINY = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-5,
}
QLORA = {
    "method": "qlora",
    "lora_r": 4,
    "lora_dropout": 0.1,
    "lora_targets": "q_proj,k_proj,v_proj,o_proj",
    "gradient_checkpointing": True,
}


def row_of(line: int) -> PublishedRow:
    return next(row for row in list_published() if row.line == line)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tiny") / "config.json"
    path.write_text(json.dumps(TINY))

    def make(**words: Any) -> CellSpec:
        return resolve(**({"model": str(path), "device": "cpu", "batch_size": 2, "seq_len": 16} | words))

    return make


# Rows


def test_every_row_is_a_cell_or_has_one_reason() -> None:
    found = [(row, cell_of(row)) for row in list_published()]
    counts = Counter(cell.reason if isinstance(cell, NoCell) else "a cell" for _, cell in found)
    assert counts == {
        "metric not stated": 188,
        "device tier": 248,
        "not one GPU": 176,
        "own model code": 59,
        "another method": 96,
        "another quantisation": 29,
        "fused kernels": 35,
        "lengths vary": 11,
        "architecture not in the catalog": 46,
        "conditions not stated": 2,
        "experts built otherwise": 4,
        "a cell": 5,
    }
    assert sum(counts.values()) == 899
    assert set(counts) - {"a cell"} == set(get_args(Reason))


@pytest.mark.parametrize(
    ("line", "cell_id", "lora_dtype"),
    [
        (22, "mistral-7b-v0.1_qlora-nf4-trl-r16-q_proj+k_proj+v_proj+o_proj_bf16+bf16_adamw_b8s4096_ckpt", "fp32"),
        (140, "mistral-7b-v0.1_full_fp16_adamw_b8s4096_ckpt", None),
        (148, "mistral-7b-v0.1_qlora-nf4-peft-r16-q_proj+k_proj+v_proj+o_proj_fp16+fp16_adamw_b4s4096_ckpt", "fp32"),
        (156, "mistral-7b-v0.1_qlora-nf4-none-r16-q_proj+k_proj+v_proj+o_proj_fp16+fp16_adamw_b8s4096_ckpt", "fp32"),
    ],
)
def test_a_rows_cell_is_what_was_run(line: int, cell_id: str, lora_dtype: str | None) -> None:
    spec = cell_of(row_of(line))
    assert isinstance(spec, CellSpec)
    assert (spec.cell_id, spec.lora_dtype) == (f"{cell_id}_flash_attention_2", lora_dtype)
    assert cell_of(row_of(line), device="cpu").cell_id == cell_id


@pytest.mark.parametrize(
    ("line", "metric", "memory_bytes"),
    [
        (2, "max_allocated", 15193274880),  # raw bytes in the notes beat 14.150 GiB
        (3, "nvidia-smi", 18102 * 2**20),  # raw MiB
    ],
)
def test_raw_numbers_are_taken_to_the_byte(line: int, metric: str, memory_bytes: int) -> None:
    assert (row_of(line).metric, row_of(line).memory_bytes) == (metric, memory_bytes)


def test_gb_gib_and_unknown_units_are_kept_apart() -> None:
    def first(source: str) -> PublishedRow:
        return next(row for row in list_published() if row.source.startswith(source))

    assert first("litgpt config_hub").memory_bytes == 17_430_000_000  # 17.43 GB, printed as bytes / 1e9
    assert first("ms-swift Benchmark.md (2024-01").memory_bytes == round(23.85 * 2**30)
    assert first("Qwen2.5 examples").memory_bytes is None  # 42.18 "GB"


def test_same_architecture_means_the_same_parameters() -> None:
    for row in list_published():
        cell = cell_of(row)
        if isinstance(cell, CellSpec):
            assert catalog.find_model(cell.model).n_params == row.n_params


def test_a_run_that_pins_no_versions_had_the_days_newest() -> None:
    assert row_of(148).versions["bitsandbytes"] == (0, 43, 1)
    assert row_of(22).versions["transformers"] == (4, 48, 1)


# Differences


def test_each_difference_has_a_source_and_is_met_by_a_row() -> None:
    met = {
        one.name
        for row in list_published()
        if isinstance(cell := cell_of(row), CellSpec)
        for one in differences_of(row, cell)
    }
    assert met == {one.name for one in DIFFERENCES}
    for one in DIFFERENCES:
        assert re.search(r"\d+\.\d+\.\d+ \w+\.py:\d+|\w+/\w+\.py:\d+", one.source), one.name
        assert set(one.moments) <= set(MOMENTS)


@pytest.mark.parametrize(
    ("name", "words", "num_bytes"),
    [
        # 2 layers × (cos + sin) × 32 positions × 16 × 2 B
        ("rotary tables in every layer", {}, 2 * 2 * 32 * 16 * 2),
        ("attention mask in the batch", {}, 32 * 8),
        # 12 B − 10 B for 32 tokens × 1000, and 2 × 4 B less for the token that each of 2 samples loses
        ("shifted copy of the logits", {}, 2 * 32 * 1000 - 2 * 4 * 2 * 1000),
        ("shifted copy of the logits, 16-bit logits kept", {}, 4 * 32 * 1000 - 2 * 4 * 2 * 1000),
        ("reentrant checkpointing", {"kbit_prep": "none"}, 32 * 64 * 2),
        ("reentrant checkpointing", {"kbit_prep": "peft"}, 32 * 64 * 4),
        # keys and values: 32 tokens × (64 − 32) wide × 2 B
        ("key and value heads repeated for flash attention", {}, 2 * 32 * 32 * 2),
        # 16-bit residual: one input of q, k, v, one of gate and up, one of down; fp32 residual: five casts and down's
        ("inputs of 4-bit products kept", {"kbit_prep": "none"}, 32 * 2 * (2 * 64 + 96)),
        ("inputs of 4-bit products kept", {"kbit_prep": "peft"}, 32 * 2 * (5 * 64 + 96)),
        # 16-bit residual, no dropout: the adapters of q, k and v keep their input themselves
        ("inputs of 4-bit products kept", {"kbit_prep": "none", "lora_dropout": 0.0}, 32 * 2 * (64 + 96)),
        ("outputs converted to fp32", {}, 0),
        ("gradient clipping", {}, 0),
    ],
)
def test_a_differences_bytes_by_hand(tiny: Any, name: str, words: dict[str, str], num_bytes: int) -> None:
    difference = next(one for one in DIFFERENCES if one.name == name)
    assert difference.num_bytes(tiny(**QLORA | words)) == num_bytes


@contextmanager
def reentrant() -> Any:
    enable = adapter._enable_checkpointing

    def as_peft_does(model: Any) -> None:
        model.enable_input_require_grads()
        enable(model)

    with (
        patch.dict(adapter._CHECKPOINTING, {"use_reentrant": True}),
        patch.object(adapter, "_enable_checkpointing", as_peft_does),
    ):
        yield


@contextmanager
def inputs_kept() -> Any:
    from bitsandbytes.autograd._functions import MatMul4Bit

    forward = MatMul4Bit.forward

    def keeping(ctx: Any, A: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        ctx.kept = A
        return forward(ctx, A, *rest, **options)

    with reentrant(), patch.object(MatMul4Bit, "forward", staticmethod(keeping)):
        yield


@contextmanager
def loss_of_4_48() -> Any:
    from transformers.loss import loss_utils

    def loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **options: Any) -> torch.Tensor:
        logits = logits.float()
        shifted, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        return torch.nn.functional.cross_entropy(shifted.view(-1, vocab_size), labels.view(-1))

    with patch.dict(loss_utils.LOSS_MAPPING, {"ForCausalLM": loss}):
        yield


@pytest.mark.parametrize(
    ("before", "after", "name", "kbit_prep", "dropout"),
    [
        pytest.param(None, reentrant, "reentrant checkpointing", "peft", 0.1, marks=exhaustive),
        (None, reentrant, "reentrant checkpointing", "none", 0.1),
        pytest.param(reentrant, inputs_kept, "inputs of 4-bit products kept", "peft", 0.1, marks=exhaustive),
        (reentrant, inputs_kept, "inputs of 4-bit products kept", "none", 0.1),
        pytest.param(reentrant, inputs_kept, "inputs of 4-bit products kept", "none", 0.0, marks=exhaustive),
        (None, loss_of_4_48, "shifted copy of the logits, 16-bit logits kept", "none", 0.1),
    ],
)
def test_a_difference_is_what_the_simulation_gains_when_it_does_the_same(
    tiny: Any, before: Any, after: Any, name: str, kbit_prep: str, dropout: float
) -> None:
    words = {"kbit_prep": kbit_prep, "lora_dropout": dropout, "batch_size": 4, "seq_len": 512}
    spec = tiny(**QLORA | words, device="cuda", attn="flash_attention_2")  # the CPU's peft casts where CUDA's does not
    difference = next(one for one in DIFFERENCES if one.name == name)

    def moments(world: Any) -> Moments:
        if world is None:
            return moments_of(simulate(spec, depth="full").log, spec)
        with world():
            return moments_of(simulate(spec, depth="full").log, spec)

    gained = {moment: getattr(moments(after), moment) - getattr(moments(before), moment) for moment in MOMENTS}
    for moment in difference.moments:
        assert gained[moment] == pytest.approx(difference.num_bytes(spec), rel=0.005)


def test_a_difference_under_a_higher_moment_costs_nothing(tiny: Any) -> None:
    bare = Moments(forward=500_000, loss=400_000, layers=300_000, optimizer_step=200_000)
    difference = next(one for one in DIFFERENCES if one.name == "reentrant checkpointing")
    raised = with_differences(bare, tiny(**QLORA), [difference])
    assert (raised.layers, raised.peak_bytes) == (300_000 + difference.num_bytes(tiny(**QLORA)), 500_000)


# The table


def test_the_committed_table_is_of_the_rows_that_are_cells() -> None:
    spec = importlib.util.spec_from_file_location("published_table", ROOT / "benchmarks" / "truth" / "published.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = list(csv.DictReader(module.TABLE.read_text().splitlines()))
    cells = {row.line: cell for row in list_published() if isinstance(cell := cell_of(row), CellSpec)}
    assert {int(row["line"]): row["cell"] for row in rows} == {line: cell.cell_id for line, cell in cells.items()}
    for row in rows:
        assert int(row["measured_bytes"]) == row_of(int(row["line"])).memory_bytes
