"""TRL's preference trainers: run by their own code on an emulated GPU, counted, and refused where they are not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from emulated import swept
from factories import make_spec
from grids import exhaustive

from vramprobe import api
from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.errors import MissingDependency, SpecError
from vramprobe.speed.work import work_of
from vramprobe.terms import moments
from vramprobe.terms.cell.parameters import tensors
from vramprobe.terms.replayed import replayed
from vramprobe.trainers import TRAINERS

OF_TRL = [name for name, row in TRAINERS.items() if row.trl]
DPO: dict[str, Any] = {"model": "llama-3.2-1b", "trainer": "dpo", "device": "cuda"}
#: Two layers of a small model with a large vocabulary.
SWEEP = """
name: trainers
defaults: {model: qwen2.5-0.5b, num_layers: 2, batch_size: 2, seq_len: 512, timing_steps: 0}
cells:
  - {trainer: TRAINER, method: full, recipe: mixed}
  - {trainer: TRAINER, method: qlora, gradient_checkpointing: true}
"""
RANKS = """
name: ranks
defaults: {model: qwen2.5-0.5b, num_layers: 2, batch_size: 2, seq_len: 256, timing_steps: 0, num_gpus: 2}
cells:
  - {trainer: dpo, method: full, recipe: mixed, sharding: [ddp, fsdp]}
  - {trainer: [kto, orpo], method: lora, sharding: fsdp}
  - {trainer: reward, method: full, sharding: ddp}
"""
PARAMS_OF_TWO_LAYERS = 128_256 * 2048 + 2048 + 2 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192 + 2 * 2048)


@exhaustive
@pytest.mark.parametrize("trainer", OF_TRL)
def test_arithmetic_is_what_trl_allocates_on_an_emulated_gpu(trainer: str, tmp_path: Path) -> None:
    records = swept(tmp_path, SWEEP.replace("TRAINER", trainer), cards="RTX-4090")
    assert [record.outcome.kind for record in records] == ["ok", "ok"]
    for record in records:
        words = record.spec.model_dump(exclude={"architecture"}, exclude_none=True, exclude_defaults=True)
        found = api.predict(gpu="RTX-4090", **words)
        assert found.peak_allocated_bytes.value == pytest.approx(record.peak.allocated_bytes, rel=0.002)
        assert found.reserved_bytes.value == pytest.approx(record.peak.reserved_bytes, rel=0.02)


@exhaustive
def test_on_two_gpus_trl_divides_and_copies_the_models_as_counted(tmp_path: Path) -> None:
    """Each rank is run: a reference is whole beside DDP, and one unit under FSDP2; all have nearly the same."""
    records = swept(tmp_path, RANKS, cards="H100-SXM x2")
    assert [record.outcome.kind for record in records] == ["ok"] * 5
    for record in records:
        for rank in record.ranks:  # blocks that are not split differ with what each rank has loaded
            assert rank.peak.allocated_bytes == pytest.approx(record.peak.allocated_bytes, rel=0.001)
        words = record.spec.model_dump(exclude={"architecture"}, exclude_none=True, exclude_defaults=True)
        found = api.predict(gpu="H100-SXM", **words)
        assert found.peak_allocated_bytes.value == pytest.approx(record.peak.allocated_bytes, rel=0.002)
        assert found.reserved_bytes.value == pytest.approx(record.peak.reserved_bytes, rel=0.05)


def test_a_second_model_is_not_offloaded() -> None:
    asked = {"num_gpus": 2, "sharding": "fsdp", "offload": "params", "method": "full"}
    with pytest.raises(SpecError, match=r"has a reference model, .* use method lora, whose reference is the model"):
        make_spec(**DPO | asked)
    make_spec(**DPO | asked | {"method": "lora"})


@pytest.mark.parametrize(("method", "num_models"), [("full", 2), ("lora", 1)])
def test_full_training_holds_a_second_model_and_adapters_none(method: str, num_models: int) -> None:
    cell = make_spec(method=method, num_layers=2, **DPO)
    of_sft = cell.model_copy(update={"trainer": "sft"})
    weights, alone = moments(cell)[0].terms["weights"], moments(of_sft)[0].terms["weights"]
    assert weights == num_models * alone
    if method == "full":
        rotary = 2 * 4 * 32
        assert weights == 2 * (2 * PARAMS_OF_TWO_LAYERS + rotary)


def test_a_batch_of_pairs_has_twice_the_rows_and_two_masks() -> None:
    cell = make_spec(method="lora", batch_size=3, seq_len=64, **DPO)
    assert cell.num_tokens == 2 * 3 * 64
    assert moments(cell)[0].terms["batch"] == 3 * 8 * 2 * 3 * 64


def test_the_reference_runs_while_the_graph_of_the_trained_model_stands_and_keeps_nothing() -> None:
    """At its last norm it holds a few hidden states more, however deep it is; backward finds none of them."""
    cell = make_spec(method="lora", batch_size=1, seq_len=512, num_layers=4, **DPO)
    found = {(one.phase, one.label): one.terms for one in moments(cell)}
    kept = found["forward", "loss"]["saved_activations"]
    for place in ("embedding", "first layer", "a middle layer", "last layer", "loss"):
        assert found["forward", f"reference: {place}"]["saved_activations"] == kept
    deeper = cell.model_copy(update={"num_layers": 8, "architecture": cell.architecture | {"num_hidden_layers": 8}})
    more = {(one.phase, one.label): one.terms for one in moments(deeper)}
    last = "forward", "reference: last layer"
    assert more[last]["temporaries"] == found[last]["temporaries"]
    alone = cell.model_copy(update={"trainer": "sft", "loss": "chunked_nll", "batch_size": 2})
    without = {(one.phase, one.label): one.terms for one in moments(alone)}
    assert found["backward", "last layer"] == without["backward", "last layer"] | {"batch": 3 * 8 * 1024}


def test_of_kto_other_completions_are_scored_before_a_graph_stands() -> None:
    cell = make_spec(method="lora", batch_size=2, seq_len=512, num_layers=4, **DPO | {"trainer": "kto"})
    found = {(one.phase, one.label): one.terms for one in moments(cell)}
    assert cell.num_tokens == 2 * 512
    assert found["forward", "first layer"]["batch"] == 6 * 8 * 2 * 512
    assert "saved_activations" not in found["forward", "KL: last layer"]
    after = found["forward", "loss"]["saved_activations"]
    assert found["forward", "reference KL: last layer"]["saved_activations"] == after
    deeper = cell.model_copy(update={"num_layers": 8, "architecture": cell.architecture | {"num_hidden_layers": 8}})
    more = next(one for one in moments(deeper) if one.label == "KL: last layer")
    weights = [found["forward", "KL: last layer"], more.terms]
    assert [one["temporaries"] for one in weights] == [weights[0]["temporaries"]] * 2


def test_orpo_has_all_logits_in_fp32_and_no_reference() -> None:
    """At its peak the chosen rows' log-softmax, the logits of all rows, and their gradient."""
    cell = make_spec(method="lora", batch_size=3, seq_len=512, **DPO | {"trainer": "orpo"})
    found = {(one.phase, one.label): one.terms for one in moments(cell)}
    assert not any("reference" in label for _, label in found)
    logits = 4 * 2 * 3 * 512 * 128_256
    assert found["backward", "loss"]["logits"] == pytest.approx(2.5 * logits, rel=0.001)


def test_a_reward_model_scores_rows_by_a_head_of_one_output_that_is_trained() -> None:
    """Each of its rows has one number; peft trains a copy of the head."""
    cell = make_spec(method="full", batch_size=2, seq_len=512, num_layers=2, **DPO | {"trainer": "reward"})
    arch = architecture(cell.architecture)
    assert arch.num_params == PARAMS_OF_TWO_LAYERS + 2048
    found = {(one.phase, one.label): one.terms for one in moments(cell)}
    assert found["backward", "loss"]["logits"] < 2**20
    adapted = make_spec(method="lora", batch_size=2, seq_len=512, num_layers=2, **DPO | {"trainer": "reward"})
    copies = [tensor for tensor in tensors(adapted, arch) if tensor.trained and "lora_" not in tensor.name]
    assert [(copy.name, copy.numel) for copy in copies] == [("score.modules_to_save", 2048)]


def test_checkpoints_are_the_trained_models_alone() -> None:
    cell = make_spec(method="lora", batch_size=1, seq_len=512, gradient_checkpointing=True, **DPO)
    found = {(one.phase, one.label): one.terms for one in moments(cell)}
    assert found["forward", "reference: loss"]["checkpoint_store"] == found["forward", "loss"]["checkpoint_store"]
    assert "recomputed_layer" not in found["forward", "reference: last layer"]


def test_the_replay_has_both_models() -> None:
    cell = make_spec(method="full", batch_size=1, seq_len=256, num_layers=2, **DPO)
    alone = replayed(cell.model_copy(update={"trainer": "sft", "loss": "chunked_nll", "batch_size": 2}))
    both = replayed(cell)
    assert both.load_bytes - alone.load_bytes == pytest.approx(2 * PARAMS_OF_TWO_LAYERS, rel=0.01)
    assert both.reserved_bytes > alone.reserved_bytes + 1.9 * PARAMS_OF_TWO_LAYERS


def test_a_step_computes_a_forward_more() -> None:
    cell = make_spec(method="full", batch_size=1, seq_len=256, **DPO)
    alone = work_of(cell.model_copy(update={"trainer": "sft", "loss": "chunked_nll", "batch_size": 2}))
    assert work_of(cell).num_tokens == alone.num_tokens
    assert 4 / 3 - 0.05 < work_of(cell).product_flops / alone.product_flops < 4 / 3 + 0.05


@pytest.mark.parametrize("trainer", OF_TRL)
@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"trainer": "ppo"}, "trainer: 'ppo' given; allowed: 'sft'"),
        ({"loss": "chunked_nll"}, "has a head and loss of its own; leave loss out"),
        ({"method": "lora", "lora_dropout": 0.1}, "TRL switches every dropout off; leave lora_dropout out"),
        ({"device": "cpu"}, "is run on GPUs alone; it needs device cuda"),
        ({"fused_linear_cross_entropy": True}, "both replace the model's head and loss; use one of them"),
        ({"num_gpus": 2, "sharding": "tp"}, "is not run under tp; use sharding ddp, zero1, zero2, zero3, fsdp, "),
        ({"num_gpus": 4, "sharding": "fsdp", "cp_size": 2}, "is not run under cp_size 2; use sharding ddp, "),
    ],
    ids=["unknown", "loss", "dropout", "cpu", "liger", "tensor-parallel", "context-parallel"],
)
def test_what_cannot_be_is_refused_with_what_can(trainer: str, words: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        make_spec(**DPO | {"trainer": trainer} | words)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"model": "gpt2"}, "models with dropout"),
        ({"model": "mixtral-8x7b", "method": "lora"}, "mixtures, whose router adds to its loss"),
        ({"model": "mistral-7b-v0.1", "method": "lora", "seq_len": 4096}, "a mask beyond the sliding window"),
    ],
    ids=["dropout", "mixture", "window"],
)
def test_what_is_not_counted_is_said(words: dict[str, Any], why: str) -> None:
    asked = {"method": "full", "batch_size": 1, "seq_len": 128, "gpu": "RTX-4090", "engine": "formula"} | DPO | words
    with pytest.raises(UnsupportedArchitecture, match=f"no arithmetic for trainer dpo with {why}"):
        api.predict(**asked)


def test_without_trl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from vramprobe.workload.loss import load_trl

    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.setitem(sys.modules, "trl.trainer.utils", None)
    with pytest.raises(MissingDependency, match=r"trainer dpo is computed by trl 1\.16, .* Install vramprobe\[trl\]"):
        load_trl(make_spec(**DPO))


def test_a_cell_without_it_is_the_cell_that_it_was() -> None:
    cell = make_spec(model="llama-3.2-1b")
    assert cell.fingerprint == make_spec(model="llama-3.2-1b", trainer="sft").fingerprint
    assert make_spec(**DPO).cell_id.endswith("_dpo")
