"""Cells: the defaults that a method's users expect, every impossible combination with its reason, and identity."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from factories import TINY_LLAMA, TINY_LLAMA_PATH, make_spec
from pydantic import ValidationError

from vramprobe import catalog, spec
from vramprobe.errors import SpecError, UnknownName
from vramprobe.predict.shares import near
from vramprobe.rules import cell as of_cell
from vramprobe.rules import not_sharded as of_ranks
from vramprobe.rules.cell import lora_target_names

LONG = {"model": "gpt2", "seq_len": 1025}
RANKS = {"device": "cuda", "num_gpus": 2, "sharding": "fsdp"}
CARDS = RANKS | {"sharding": "device-map"}
PARTS = RANKS | {"sharding": "tp"}
SHARED = RANKS | {"num_gpus": 4, "cp_size": 2, "dtype": "bf16"}
GROUPS = RANKS | {"num_gpus": 8, "sharding": "fsdp1-hybrid", "shard_size": 4}
#: What cannot be → the start of the reason.
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"method": "qlora", "quant": "none"}, "method qlora trains adapters on a quantized base"),
    ({"method": "full", "quant": "nf4"}, "quant nf4 needs method qlora"),
    ({"method": "lora", "quant": "int8"}, "quant int8 needs method qlora"),
    ({"method": "lora", "kbit_prep": "peft"}, "kbit_prep peft prepares a quantized model"),
    ({"method": "full", "kbit_prep": "trl"}, "kbit_prep trl prepares a quantized model"),
    ({"method": "qlora", "quant": "int8", "dora": True}, "peft's DoRA cannot start from an int8 base"),
    ({"lora_r": 8}, "LoRA options"),
    ({"lora_alpha": 8.0}, "LoRA options"),
    ({"lora_dropout": 0.0}, "LoRA options"),
    ({"lora_targets": "q_v"}, "LoRA options"),
    ({"lora_dtype": "fp32"}, "LoRA options"),
    ({"dora": True}, "LoRA options"),
    ({"recipe": "lora-usual"}, "LoRA options"),
    (
        {"method": "lora", "lora_targets": "q_proj,lm_head", "fused_linear_cross_entropy": True},
        "fused_linear_cross_entropy reads the head's own weight and passes its adapter by",
    ),
    ({"model": "gpt2", "fused_linear_cross_entropy": True}, "liger-kernel has no fused_linear_cross_entropy for gpt2"),
    ({"method": "lora", "lora_r": 0}, "lora_r must be at least 1, 0 given"),
    ({"method": "lora", "lora_dropout": 1.0}, "lora_dropout must be in [0, 1), 1.0 given"),
    ({"method": "lora", "lora_dropout": -0.1}, "lora_dropout must be in [0, 1), -0.1 given"),
    ({"dtype": "fp16", "autocast": "fp16"}, "--autocast fp16 needs fp32 trained weights"),
    (
        {"method": "lora", "dtype": "fp16", "autocast": "fp16", "lora_dtype": "fp16"},
        "--autocast fp16 needs fp32 trained",
    ),
    ({"dtype": "fp16", "autocast": "bf16"}, "--dtype fp16 under --autocast bf16 mixes"),
    ({"dtype": "bf16", "autocast": "fp16"}, "--dtype bf16 under --autocast fp16 mixes"),
    ({"method": "lora", "lora_dtype": "fp16", "autocast": "none"}, "fp16 adapters on bf16 weights mix"),
    ({"device": "cuda", "attn": "flash_attention_2", "recipe": "fp32"}, "flash_attention_2 has no fp32 kernel"),
    ({"optim": "paged_adamw_8bit"}, "paged_adamw_8bit pages its state between GPU and host"),
    ({"optim": "paged_adamw"}, "paged_adamw_32bit pages its state"),
    ({"attn": "flash_attention_2"}, "flash_attention_2 needs device cuda"),
    ({"alloc_conf": "expandable_segments:True"}, "alloc_conf sets the CUDA caching allocator"),
    ({"limit_vram": "24GiB"}, "limit_vram holds a part of a GPU's memory"),
    ({"trust_remote_code": True}, "trust_remote_code runs a checkpoint's own code"),
    ({"num_layers": 1, "weights": "pretrained"}, "a depth cut (num_layers) keeps no checkpoint's weights"),
    ({"sharding": "fsdp"}, "sharding fsdp is for several GPUs; set num_gpus to 2 or more"),
    ({"only_rank": 0}, "only_rank 0 is for several GPUs"),
    (RANKS | {"sharding": None}, "num_gpus 2 needs a sharding, which says how the ranks share the model: ddp, zero1"),
    (RANKS | {"num_gpus": 961}, "num_gpus 961: at most 960 ranks can be run"),
    (RANKS | {"only_rank": 2}, "only_rank 2 given; 2 ranks are numbered from 0 to 1"),
    (RANKS | {"only_rank": -1}, "only_rank -1 given; 2 ranks are numbered from 0 to 1"),
    (RANKS | {"device": "cpu"}, "num_gpus 2 needs device cuda: NVIDIA GPUs that are visible here, or emulated ones"),
    (RANKS | {"weights": "pretrained"}, "several GPUs are given random weights alone"),
    ({"shard_size": 2}, "shard_size 2 is for several GPUs; set num_gpus to 2 or more"),
    (
        RANKS | {"shard_size": 2},
        "shard_size 2: fsdp makes all ranks one group; use sharding fsdp-hybrid or fsdp1-hybrid",
    ),
    (
        GROUPS | {"shard_size": 3},
        "num_gpus 8 under fsdp1-hybrid is no multiple of shard_size 3, the ranks of one group",
    ),
    (GROUPS | {"shard_size": 1}, "shard_size 1: a group of fsdp1-hybrid has at least 2 ranks, which share the model"),
    (GROUPS | {"shard_size": None}, "shard_size 8 under fsdp1-hybrid makes all 8 ranks one group"),
    (GROUPS | {"sharding": "fsdp-hybrid", "optim": "adafactor"}, "fsdp-hybrid hands the optimizer DTensors"),
    (GROUPS | {"method": "qlora"}, "kbit_prep peft raises norms to fp32, which fsdp1-hybrid does not"),
    ({"cp_size": 2}, "cp_size 2 is for several GPUs; set num_gpus to 2 or more"),
    (RANKS | {"cp_rotation": "alltoall"}, "cp_rotation alltoall is for ranks that share each sequence; set cp_size to"),
    (SHARED | {"sharding": "ddp"}, "cp_size 2 under ddp: accelerate splits sequences beside FSDP2 alone; use sharding"),
    (SHARED | {"sharding": "fsdp1"}, "cp_size 2 under fsdp1: accelerate splits sequences beside FSDP2 alone"),
    (SHARED | {"sharding": "zero3"}, "cp_size 2 under zero3: accelerate splits sequences beside FSDP2 alone"),
    (SHARED | {"cp_size": 3}, "cp_size 3: num_gpus 4 is no multiple of it, the ranks that share each sequence"),
    (
        SHARED | {"sharding": "fsdp-hybrid", "shard_size": 2},
        "cp_size 2 under fsdp-hybrid is all of shard_size 2, and accelerate wants two batches in a group at least",
    ),
    (SHARED | {"attn": "eager"}, "attn eager with cp_size 2: torch's ring attention stands in for sdpa's alone"),
    (SHARED | {"padding": True}, "padding with cp_size 2: accelerate drops the mask, and padding would be attended to"),
    (SHARED | {"seq_len": 30}, "seq_len 30 with cp_size 2: each rank takes a part from the front and one from the"),
    (SHARED | {"model": "gpt2"}, "cp_size 2: accelerate takes the mask, which ring attention has no place for, from"),
    (SHARED | {"model": "gemma-3-1b"}, "cp_size 2: gemma-3-1b has a sliding window of 512, whose mask accelerate"),
    (SHARED | {"model": "lfm2-1.2b"}, "cp_size 2: lfm2-1.2b has layers of conv, whose mask accelerate would drop"),
    (SHARED | {"dtype": "fp32", "autocast": "none"}, "dtype fp32 without autocast, with cp_size 2: sdpa has no fused"),
    (PARTS | {"num_gpus": 4}, "num_gpus 4 under tp: num_key_value_heads 2 cannot"),
    (PARTS | {"num_gpus": 3}, "num_gpus 3 under tp: num_attention_heads 4 and num_key_value_heads 2 cannot"),
    (
        PARTS | {"method": "qlora", "kbit_prep": "none"},
        "quant nf4 under tp: transformers makes DTensors of the",
    ),
    (PARTS | {"method": "lora"}, "lora_targets all-linear under tp: the adapter of a layer that is divided by its"),
    (PARTS | {"method": "lora", "lora_targets": "q_proj,o_proj"}, "lora_targets q_proj,o_proj under tp: the adapter"),
    (PARTS | {"method": "lora", "lora_targets": "q_v", "dora": True}, "dora under tp: peft adds a whole B(A(x)) to a"),
    (PARTS | {"optim": "adafactor"}, "tp hands the optimizer DTensors, which adafactor does not take"),
    (PARTS | {"offload": "params"}, "offload params under tp: a rank keeps its part of every layer on its GPU"),
    (CARDS | {"num_gpus": 1}, "sharding device-map is for several GPUs; set num_gpus to 2 or more"),
    (CARDS | {"num_gpus": 3}, "num_gpus 3 under device-map: the model has 2 layers, and no layer is divided"),
    (CARDS | {"only_rank": 0}, "only_rank 0 given; sharding device-map has no ranks: one process for all GPUs"),
    (CARDS | {"dtype": "fp16"}, "fp16 on several GPUs is trained under a gradient scaler"),
    (RANKS | {"torch_compile": True}, "torch_compile is not run on several GPUs"),
    (
        RANKS | {"fused_linear_cross_entropy": True},
        "fused_linear_cross_entropy reads the head's weight past the module that would gather it, and is not run under",
    ),
    (RANKS | {"dtype": "fp16"}, "fp16 on several GPUs is trained under a gradient scaler"),
    (RANKS | {"optim": "adafactor"}, "fsdp hands the optimizer DTensors, which adafactor does not take"),
    (RANKS | {"method": "qlora", "quant": "int8"}, "quant int8 under fsdp: FSDP takes away what bitsandbytes keeps"),
    (RANKS | {"method": "qlora", "sharding": "fsdp1"}, "kbit_prep peft raises norms to fp32, which fsdp1 does not"),
    ({"offload": "params"}, "offload params is for several GPUs; set num_gpus to 2 or more, or leave it out"),
    (RANKS | {"sharding": "ddp", "offload": "params"}, "offload params under ddp: DistributedDataParallel keeps all"),
    (RANKS | {"sharding": "device-map", "offload": "params"}, "offload params under device-map: what no GPU can hold"),
    (RANKS | {"offload": "optimizer"}, "offload optimizer under fsdp: FSDP keeps parameters, gradients and state"),
    (
        RANKS | {"sharding": "zero2", "offload": "params"},
        "offload params under zero2: DeepSpeed keeps parameters on the host under zero3 alone",
    ),
    (
        RANKS | {"sharding": "zero3", "offload": "optimizer", "optim": "sgd"},
        "offload optimizer under zero3: DeepSpeed's CPUAdam steps on the host, and sgd is not that",
    ),
    (
        RANKS | {"sharding": "fsdp1-shard-grad-op", "method": "qlora", "kbit_prep": "none"},
        "quant nf4 under fsdp1-shard-grad-op: torch ends it in the first backward",
    ),
    (
        RANKS | {"sharding": "fsdp1", "offload": "params", "optim": "paged_adamw_8bit"},
        "offload params under fsdp1: paged_adamw_8bit pages between GPU and host",
    ),
    (LONG, "seq_len 1025 is longer than the 1024 learned positions of gpt2"),
    ({"model": "opt-125m", "seq_len": 2049}, "seq_len 2049 is longer than the 2048 learned positions of opt-125m"),
]

#: A wrong value → what the message says of it.
WRONG_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"method": "finetune"}, "method: 'finetune' given; allowed: 'full', 'lora' or 'qlora'"),
    ({"method": "qlora", "quant": "int4"}, "quant: 'int4' given"),
    ({"dtype": "fp31"}, "dtype: 'fp31' given; allowed: 'bf16', 'fp32' or 'fp16'"),
    ({"autocast": "off"}, "autocast: 'off' given"),
    ({"optim": "adamww"}, "optim: 'adamww' given; allowed: 'adamw_torch'"),
    ({"attn": "flash"}, "attn: 'flash' given"),
    ({"device": "tpu"}, "device: 'tpu' given"),
    ({"weights": "mine"}, "weights: 'mine' given"),
    ({"batch_size": 0}, "batch_size: 0 given; must be at least 1"),
    ({"seq_len": -1}, "seq_len: -1 given; must be at least 1"),
    ({"grad_accum": 0}, "grad_accum: 0 given; must be at least 1"),
    ({"steps": 2}, "steps: 2 given; must be at least 3: the first step creates the optimizer's state"),
    ({"timing_steps": -1}, "timing_steps: -1 given; must be 0"),
    ({"batch_size": 1.5}, "batch_size: 1.5 given"),
    ({"method": "lora", "lora_targets": " , "}, "names no module"),
    ({"recipe": "amp"}, "unknown recipe 'amp'; allowed: all-bf16, mixed, fp32, lora-usual"),
    ({"recipe": "mixed", "dtype": "bf16"}, "recipe 'mixed' means dtype=fp32, but dtype=bf16 was given"),
    ({"num_layers": 3}, "num_layers 3 is not possible: this model has 2 layers"),
    ({"batchsize": 3}, "unknown option 'batchsize'; allowed: alloc_conf"),
    ({"architecture": {}}, "unknown option 'architecture'"),
]


def ids(cases: list[tuple[dict[str, Any], str]]) -> list[str]:
    return [", ".join(f"{key}={value}" for key, value in words.items()) for words, _ in cases]


@pytest.mark.parametrize(("words", "reason"), IMPOSSIBLE, ids=ids(IMPOSSIBLE))
def test_what_cannot_be_is_refused_with_the_reason(words: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        make_spec(**words)
    assert str(caught.value).startswith(reason)


def test_ddp_runs_and_composes_a_fused_loss_as_each_rank_has_the_whole_head() -> None:
    spec = make_spec(**RANKS | {"sharding": "ddp"}, fused_linear_cross_entropy=True)
    assert near(spec).num_gpus == 2


@pytest.mark.parametrize(("words", "complaint"), WRONG_VALUES, ids=ids(WRONG_VALUES))
def test_a_wrong_value_is_refused_with_what_is_allowed(words: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SpecError, match=re.escape(complaint)):
        make_spec(**words)


def test_every_rule_of_the_spec_is_in_this_list(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = (of_cell._method_rules, of_cell._precision_rules, of_cell._device_rules, of_ranks._run_rules)
    judges = [judge for name, judge in vars(of_ranks).items() if name.startswith("cannot_")]
    judges.remove(of_ranks.cannot_shard)  # the first reason of three of them
    seen: set[tuple[str, int]] = set()
    num_rules = 0

    def watch(cell: spec.CellSpec) -> list[str]:
        nonlocal num_rules
        rules = {(group.__name__, index): broken for group in groups for index, (broken, _) in enumerate(group(cell))}
        rules |= {(judge.__name__, 0): judge(cell) is not None for judge in judges}
        num_rules = len(rules)
        seen.update(key for key, broken in rules.items() if broken)
        return []

    monkeypatch.setattr(spec, "reasons_against", watch)
    monkeypatch.setattr(spec, "reasons_not_run", lambda cell: [])
    for words, _ in IMPOSSIBLE:
        make_spec(**words)
    assert len(seen) == num_rules > 30
    assert len(judges) == 7


def test_all_reasons_are_given_at_once() -> None:
    with pytest.raises(SpecError, match=r"needs method qlora.*LoRA options.*needs device cuda"):
        make_spec(quant="nf4", lora_r=3, attn="flash_attention_2")


def test_an_unknown_model_keeps_its_kind() -> None:
    with pytest.raises(UnknownName, match="Nearest: gpt2"):
        make_spec(model="gtp2")


# Defaults, recipes, aliases


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("full", ("none", "none", "bf16", "none", None, None, None, None, None)),
        ("lora", ("none", "none", "bf16", "bf16", 16, 32.0, 0.0, "all-linear", "fp32")),
        ("qlora", ("nf4", "peft", "bf16", "bf16", 16, 32.0, 0.0, "all-linear", "fp32")),
    ],
)
def test_defaults_are_what_a_methods_users_expect(method: str, expected: tuple[object, ...]) -> None:
    cell = make_spec(method=method)
    assert (
        cell.quant,
        cell.kbit_prep,
        cell.dtype,
        cell.autocast,
        cell.lora_r,
        cell.lora_alpha,
        cell.lora_dropout,
        cell.lora_targets,
        cell.lora_dtype,
    ) == expected
    assert (cell.optim, cell.weights, cell.attn, cell.steps) == ("adamw_torch_fused", "random", "sdpa", 3)


def test_every_quantisation_and_preparation_can_be_chosen() -> None:
    for quant in set(get_args(spec.Quant)) - {"none"}:
        for kbit_prep in get_args(spec.KbitPrep):
            cell = make_spec(method="qlora", quant=quant, kbit_prep=kbit_prep)
            assert (cell.quant, cell.kbit_prep) == (quant, kbit_prep)


@pytest.mark.parametrize("recipe", spec.RECIPES)
def test_a_recipe_is_its_knobs(recipe: str) -> None:
    knobs = spec.RECIPES[recipe]
    assert make_spec(method="lora", recipe=recipe) == make_spec(method="lora", **knobs)
    assert make_spec(method="lora", recipe=recipe, **knobs) == make_spec(method="lora", **knobs)


def test_a_machine_s_eight_cards_make_a_group_unless_told() -> None:
    hybrid = {"device": "cuda", "num_gpus": 16, "sharding": "fsdp-hybrid"}
    assert make_spec(**hybrid) == make_spec(**hybrid, shard_size=8)
    assert make_spec(**hybrid, shard_size=4).cell_id.endswith("_fsdp-hybrid4-x16")
    assert make_spec(**RANKS).shard_size is None


def test_aliases_are_one_optimizer() -> None:
    assert make_spec(optim="adamw_8bit") == make_spec(optim="adamw_bnb_8bit")
    assert make_spec(optim="paged_adamw", device="cuda") == make_spec(optim="paged_adamw_32bit", device="cuda")


def test_every_optimizer_is_possible_somewhere() -> None:
    for optim in get_args(spec.Optim):
        assert make_spec(optim=optim, device="cuda").optim == optim


def test_targets_are_text_or_a_list() -> None:
    named = make_spec(method="lora", lora_targets=" q_proj, v_proj,")
    assert named.lora_targets == ("q_proj", "v_proj")
    assert named == make_spec(method="lora", lora_targets=["q_proj", "v_proj"])
    assert lora_target_names(named) == ["q_proj", "v_proj"]
    assert lora_target_names(make_spec(method="lora")) is None
    assert lora_target_names(make_spec(method="lora", lora_targets="q_v")) == ["q_proj", "v_proj"]
    assert lora_target_names(make_spec(method="lora", lora_targets="q_v", model="gpt2")) == ["c_attn"]
    assert lora_target_names(make_spec()) == []


def test_option_names_are_what_resolve_takes() -> None:
    assert "architecture" not in spec.option_names()
    assert {"model", "recipe", "lora_r", "gradient_checkpointing"} <= set(spec.option_names())
    full = make_spec(device="cuda")
    words = {name: getattr(full, name) for name in spec.option_names() if name != "recipe"}
    assert spec.resolve(**words) == full


def test_the_depth_cut_is_part_of_the_architecture() -> None:
    cell = make_spec(num_layers=1)
    assert cell.architecture == TINY_LLAMA | {"num_hidden_layers": 1}
    assert cell.model_label == "tiny-llama@1layers"


# Identity


def test_ids_are_readable() -> None:
    assert make_spec().cell_id == "tiny-llama_full_bf16_adamw-fused_b2s16"
    cell = make_spec(
        method="qlora",
        quant="nf4-single",
        kbit_prep="trl",
        lora_r=8,
        lora_targets="q_v",
        dora=True,
        optim="adamw_bnb_8bit",
        grad_accum=4,
        gradient_checkpointing=True,
        attn="eager",
        padding=True,
        torch_compile=True,
        num_layers=1,
    )
    expected = (
        "tiny-llama@1layers_qlora-nf4-single-trl-r8-q_proj+v_proj-dora_bf16+bf16_adamw_bnb_8bit_b2s16_ga4_ckpt_eager"
        "_padded_compiled"
    )
    assert cell.cell_id == expected
    assert make_spec(model="meta-llama/Llama-3.2-1B").cell_id.startswith("llama-3.2-1b_full_")
    assert not re.search(r"[\s/]", cell.cell_id)  # it names files


#: Another valid value for each field of a CUDA LoRA cell.
OTHER_VALUES: dict[str, Any] = {
    "architecture": TINY_LLAMA | {"hidden_size": 128},
    "num_layers": 1,
    "images": 1,
    "image_size": "640x480",
    "freeze_vision": True,
    "weights": "pretrained",
    "trust_remote_code": True,
    "method": "qlora",
    "quant": "fp4",
    "kbit_prep": "trl",
    "dtype": "fp32",
    "autocast": "none",
    "lora_r": 4,
    "lora_alpha": 1.0,
    "lora_dropout": 0.1,
    "lora_targets": "q_v",
    "lora_dtype": "bf16",
    "dora": True,
    "optim": "sgd",
    "batch_size": 3,
    "seq_len": 17,
    "grad_accum": 2,
    "gradient_checkpointing": True,
    "attn": "eager",
    "padding": True,
    "torch_compile": True,
    "fused_linear_cross_entropy": True,
    "loss": "chunked_nll",
    "trainer": "dpo",
    "loop": "accelerate",
    "num_gpus": 2,
    "sharding": "fsdp",
    "shard_size": 2,
    "cp_size": 2,
    "cp_rotation": "alltoall",
    "offload": "params",
    "only_rank": 0,
    "device": "cpu",
    "alloc_conf": "expandable_segments:True",
    "limit_vram": "24GiB",
    "steps": 4,
    "timing_steps": 0,
    "seed": 1,
}


def test_the_fingerprint_changes_with_every_field() -> None:
    assert set(OTHER_VALUES) == set(spec.CellSpec.model_fields) - {"model"}
    base = make_spec(method="lora", device="cuda")
    fingerprints = {base.fingerprint}
    for field, value in OTHER_VALUES.items():
        assert getattr(base, field) != value
        fingerprints.add(
            base.model_copy(update={field: value}).fingerprint
        )  # unchecked: only the identity matters here
    assert len(fingerprints) == 1 + len(OTHER_VALUES)


@pytest.mark.parametrize(
    ("given", "canonical", "num_bytes"),
    [
        ("24GiB", "24GiB", 24 * 2**30),
        ("24576 MiB", "24GiB", 24 * 2**30),
        ("RTX-4090", "24564MiB", 24564 * 2**20),
        ("80GB", "78125000KiB", 80 * 10**9),
    ],
)
def test_a_limit_is_an_amount_or_a_gpu(given: str, canonical: str, num_bytes: int) -> None:
    cell = make_spec(device="cuda", limit_vram=given)
    assert (cell.limit_vram, cell.limit_vram_bytes) == (canonical, num_bytes)
    assert cell.cell_id.endswith(f"_on{canonical}")


def test_a_limit_that_is_neither_says_what_is_allowed() -> None:
    with pytest.raises(SpecError, match=r"limit_vram: 'lots' given.*24GiB, nor a GPU"):
        make_spec(device="cuda", limit_vram="lots")


def test_the_models_name_counts_only_with_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(reversed(TINY_LLAMA.items()))))  # the order does not count
    here, there = make_spec(), make_spec(model=str(tmp_path))
    assert here.model != there.model
    assert here.fingerprint == there.fingerprint
    pretrained = {"weights": "pretrained"}
    assert make_spec(**pretrained).fingerprint != make_spec(model=str(tmp_path), **pretrained).fingerprint


def test_the_fingerprint_is_the_same_in_every_process_and_release() -> None:
    # A catalog model: its fingerprint may not depend on where this checkout lies. If this changes on purpose, every
    # stored record becomes a stranger to its sweep: raise _VERSION_OF_IDENTITY and say so in the changelog.
    words = {"model": "gpt2", "method": "lora", "device": "cpu", "batch_size": 1, "seq_len": 64}
    fingerprint = spec.resolve(**words).fingerprint
    assert fingerprint == "3ea8d747d9f4f9cd"
    code = f"from vramprobe.spec import resolve; print(resolve(**{words!r}).fingerprint)"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        assert done.stdout.strip() == fingerprint


def test_a_cell_survives_json() -> None:
    for words in ({}, {"method": "lora", "lora_targets": "q_proj,v_proj"}, {"method": "qlora", "dora": True}):
        cell = make_spec(**words)
        again = spec.CellSpec.model_validate_json(cell.model_dump_json())
        assert again == cell
        assert again.fingerprint == cell.fingerprint


def test_a_cell_is_frozen_and_takes_no_unknown_field() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        make_spec().seq_len = 3
    with pytest.raises(ValidationError, match="Extra inputs"):
        spec.CellSpec(**make_spec().model_dump(), colour="red")


def test_every_catalog_model_resolves_for_every_method() -> None:
    for entry in catalog.list_models():
        for method in get_args(spec.Method):
            assert make_spec(model=entry.name, method=method).architecture == entry.config


def test_the_tiny_model_is_found_by_its_folder() -> None:
    assert make_spec().model == str(TINY_LLAMA_PATH)


@pytest.mark.parametrize(
    ("words", "filled"),
    [
        ({"method": "full"}, {"quant": "none", "kbit_prep": "none", "autocast": "none", "attn": "sdpa"}),
        (
            {"method": "lora"},
            {
                "quant": "none",
                "kbit_prep": "none",
                "autocast": "bf16",
                "lora_r": 16,
                "lora_alpha": 32.0,
                "lora_dropout": 0.0,
                "lora_targets": "all-linear",
                "lora_dtype": "fp32",
            },
        ),
        ({"method": "qlora", "lora_r": 8}, {"quant": "nf4", "kbit_prep": "peft", "lora_alpha": 16.0, "lora_r": 8}),
        ({"method": "qlora", "kbit_prep": "trl"}, {"kbit_prep": "trl", "lora_dtype": "bf16"}),
        ({"method": "qlora", "kbit_prep": "trl", "lora_dtype": "fp32"}, {"lora_dtype": "fp32"}),
        ({"method": "full", "optim": None, "dtype": "fp32"}, {"optim": "adamw_torch_fused", "dtype": "fp32"}),
    ],
)
def test_what_is_left_out_gets_what_the_methods_users_expect(words: dict, filled: dict) -> None:
    found = spec.with_defaults(words, "llama")
    assert {name: found[name] for name in filled} == filled
    assert set(found) == set(spec.with_defaults(words | filled, "llama"))
    assert spec.with_defaults(words, "bloom")["attn"] == "eager"  # transformers has no sdpa for it
