"""Cells: the defaults that a method's users expect, every impossible combination with its reason, and identity."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from factories import TINY_LLAMA, make_spec
from pydantic import ValidationError

from vramprobe import catalog, spec
from vramprobe.choices import RECIPES, KbitPrep, Method, Optim, Quant
from vramprobe.errors import SpecError, UnknownName
from vramprobe.resolve import option_names, resolve
from vramprobe.rules import cell as of_cell
from vramprobe.rules import not_sharded as of_ranks
from vramprobe.rules.cell import lora_target_names
from vramprobe.spec import CellSpec

_CELLS = tomllib.loads((Path(__file__).parent / "data" / "cells.toml").read_text(encoding="utf-8"))
_BASES: dict[str, dict[str, Any]] = _CELLS["bases"]
RANKS = _BASES["RANKS"]


def _given(cell: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value == "null" else value for name, value in cell.items()}


#: What cannot be → the start of the reason, and a wrong value → what the message says of it.
IMPOSSIBLE, WRONG_VALUES = (
    [(_BASES.get(row.get("base"), {}) | _given(row["cell"]), row["reason"]) for row in _CELLS[kind]]
    for kind in ("impossible", "wrong_values")
)


def ids(cases: list[tuple[dict[str, Any], str]]) -> list[str]:
    return [", ".join(f"{key}={value}" for key, value in words.items()) for words, _ in cases]


@pytest.mark.parametrize(("words", "reason"), IMPOSSIBLE, ids=ids(IMPOSSIBLE))
def test_what_cannot_be_is_refused_with_the_reason(words: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        make_spec(**words)
    assert str(caught.value).startswith(reason)


def test_ddp_runs_a_fused_loss_as_each_rank_has_the_whole_head() -> None:
    assert make_spec(**RANKS | {"sharding": "ddp"}, fused_linear_cross_entropy=True).num_gpus == 2


def test_fsdp_runs_ligers_loss_as_its_root_has_gathered_the_head() -> None:
    """Emulated: rank 0 of 2 steps at 4, 5, 6 layers, event for event as extended at 7."""
    asked = _BASES["RANKS"] | {"fused_linear_cross_entropy": True}
    assert make_spec(**asked).fused_linear_cross_entropy
    with pytest.raises(SpecError, match="reads the head's weight"):
        make_spec(**_BASES["SHARED"] | {"fused_linear_cross_entropy": True})


@pytest.mark.parametrize(("words", "complaint"), WRONG_VALUES, ids=ids(WRONG_VALUES))
def test_a_wrong_value_is_refused_with_what_is_allowed(words: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SpecError, match=".*".join(map(re.escape, complaint.split("…")))):
        make_spec(**words)


def test_every_rule_of_the_spec_is_in_this_list(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = (of_cell._method_rules, of_cell._precision_rules, of_cell._device_rules, of_ranks._run_rules)
    judges = [judge for name, judge in vars(of_ranks).items() if name.startswith("cannot_")]
    judges.remove(of_ranks.cannot_shard)  # the first reason of three of them
    seen: set[tuple[str, int]] = set()
    num_rules = 0

    def watch(cell: CellSpec) -> list[str]:
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


def test_every_quantisation_and_preparation_can_be_chosen() -> None:
    for quant in set(get_args(Quant)) - {"none"}:
        for kbit_prep in get_args(KbitPrep):
            cell = make_spec(method="qlora", quant=quant, kbit_prep=kbit_prep)
            assert (cell.quant, cell.kbit_prep) == (quant, kbit_prep)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_its_knobs(recipe: str) -> None:
    knobs = RECIPES[recipe]
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
    for optim in get_args(Optim):
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
    assert "architecture" not in option_names()
    assert {"model", "recipe", "lora_r", "gradient_checkpointing"} <= set(option_names())
    full = make_spec(device="cuda")
    words = {name: getattr(full, name) for name in option_names() if name != "recipe"}
    assert resolve(**words) == full


def test_the_depth_cut_is_part_of_the_architecture() -> None:
    cell = make_spec(num_layers=1)
    assert cell.architecture == TINY_LLAMA | {"num_hidden_layers": 1}
    assert cell.model_label == "tiny-llama@1layers"


# Identity


def test_ids_are_readable() -> None:
    assert make_spec().cell_id == "tiny-llama_full_bf16_adamw-fused_b2s16"
    words = {"method": "qlora", "quant": "nf4-single", "kbit_prep": "trl", "lora_r": 8, "lora_targets": "q_v"}
    words |= {"dora": True, "optim": "adamw_bnb_8bit", "grad_accum": 4, "attn": "eager", "num_layers": 1}
    cell = make_spec(**words, gradient_checkpointing=True, padding=True, torch_compile=True)
    expected = (
        "tiny-llama@1layers_qlora-nf4-single-trl-r8-q_proj+v_proj-dora_bf16+bf16_adamw_bnb_8bit_b2s16_ga4_ckpt_eager"
        "_padded_compiled"
    )
    assert cell.cell_id == expected
    assert make_spec(model="meta-llama/Llama-3.2-1B").cell_id.startswith("llama-3.2-1b_full_")
    assert not re.search(r"[\s/]", cell.cell_id)  # it names files


#: Another valid value for each field of a CUDA LoRA cell.
OTHER_VALUES: dict[str, Any] = _CELLS["other_values"] | {"architecture": TINY_LLAMA | {"hidden_size": 128}}


def test_the_fingerprint_changes_with_every_field() -> None:
    assert set(OTHER_VALUES) == set(CellSpec.model_fields) - {"model"}
    base = make_spec(method="lora", device="cuda")
    fingerprints = {base.fingerprint}
    for field, value in OTHER_VALUES.items():
        assert getattr(base, field) != value
        fingerprints.add(base.model_copy(update={field: value}).fingerprint)  # unchecked: only the identity matters
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
    fingerprint = resolve(**words).fingerprint
    assert fingerprint == "3ea8d747d9f4f9cd"
    code = f"from vramprobe.resolve import resolve; print(resolve(**{words!r}).fingerprint)"
    for seed in ("1", "2"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, env={"PYTHONHASHSEED": seed})
        assert done.stdout.decode().strip() == fingerprint, done.stderr


def test_a_cell_survives_json() -> None:
    for words in ({}, {"method": "lora", "lora_targets": "q_proj,v_proj"}, {"method": "qlora", "dora": True}):
        cell = make_spec(**words)
        again = CellSpec.model_validate_json(cell.model_dump_json())
        assert again == cell
        assert again.fingerprint == cell.fingerprint


def test_a_cell_is_frozen_and_takes_no_unknown_field() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        make_spec().seq_len = 3
    with pytest.raises(ValidationError, match="Extra inputs"):
        CellSpec(**make_spec().model_dump(), colour="red")


def test_every_catalog_model_resolves_for_every_method() -> None:
    for entry in catalog.list_models():
        for method in get_args(Method):
            assert make_spec(model=entry.name, method=method).architecture == entry.config


ADAPTERS = {"lora_r": 16, "lora_alpha": 32.0, "lora_dropout": 0.0, "lora_targets": "all-linear", "lora_dtype": "fp32"}
PLAIN = {"quant": "none", "kbit_prep": "none", "dtype": "bf16"}


@pytest.mark.parametrize(
    ("words", "filled"),
    [
        ({"method": "full"}, PLAIN | {"autocast": "none"} | dict.fromkeys(ADAPTERS)),
        ({"method": "full", "optim": None, "dtype": "fp32"}, {"optim": "adamw_torch_fused", "dtype": "fp32"}),
        ({"method": "full"}, {"weights": "random", "attn": "sdpa", "steps": 3}),
        ({"method": "lora"}, PLAIN | {"autocast": "bf16"} | ADAPTERS),
        ({"method": "qlora"}, {"quant": "nf4", "kbit_prep": "peft", "dtype": "bf16", "autocast": "bf16"} | ADAPTERS),
        ({"method": "qlora", "lora_r": 8}, {"lora_alpha": 16.0, "lora_r": 8}),
        ({"method": "qlora", "kbit_prep": "trl"}, {"kbit_prep": "trl", "lora_dtype": "bf16"}),
        ({"method": "qlora", "kbit_prep": "trl", "lora_dtype": "fp32"}, {"lora_dtype": "fp32"}),
        ({"method": "full", "model": "bloomz-560m"}, {"attn": "eager"}),  # transformers has no sdpa for it
    ],
)
def test_what_is_left_out_gets_what_the_methods_users_expect(words: dict, filled: dict) -> None:
    found = make_spec(**words)
    assert {name: getattr(found, name) for name in filled} == filled
