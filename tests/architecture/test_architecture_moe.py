"""The inventories of mixtures of experts, what of them is refused, and where peft's LoRA reaches."""

from typing import Any

import pytest
from mixtures import FAMILIES, moe_cell

from vramprobe.architecture import RunFails, architecture
from vramprobe.bounds.tensors import Tensor, lora_targets, tensors
from vramprobe.errors import SpecError, VramprobeError


def prepared(family: str, **words: Any) -> dict[str, Tensor]:
    """The tensors of a tiny model by name, layers left out of it."""
    spec = moe_cell(family, **words)
    made = tensors(spec, architecture(spec.architecture))
    return {tensor.name.removeprefix("model.layers.{layer}."): tensor for tensor in made}


def test_a_tiny_mixtral_by_hand() -> None:
    arch = architecture(FAMILIES["mixtral"])
    # embedding and head; per layer q, o, k, v, the router, 8 experts of 3 × 64 × 176, two norms; the last norm
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 8 * 64 + 8 * 3 * 64 * 176 + 2 * 64
    assert arch.num_params == 2 * 32 * 64 + 3 * layer + 64
    assert [linear.name.rpartition(".")[2] for linear in arch.linears] == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_dense_and_sparse_layers_are_counted_apart() -> None:
    copies = {tensor.name.rpartition("mlp.")[2]: tensor.num_copies for tensor in prepared("deepseek_v2").values()}
    assert copies["gate_proj.weight"] == 1
    assert copies["experts.gate_up_proj"] == copies["shared_experts.up_proj.weight"] == copies["gate.weight"] == 2
    assert copies["model.layers.{layer}.self_attn.o_proj.weight"] == 3


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("mixtral", {"num_local_experts": 0}, "num_local_experts 0; it must be a whole number of 1 or more"),
        ("mixtral", {"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads 2 and num_attention_heads 4"),
        ("llama4_text", {"moe_layers": [0, 3]}, r"moe_layers \[0, 3\]; it must be a list of layers from 0 to 2"),
        ("llama4_text", {"no_rope_layers": [1, 0]}, r"no_rope_layers \[1, 0\]; it must be a list of 3 numbers"),
        ("llama4_text", {"layer_types": ["full_attention"] * 3}, "layer_types other than chunked_attention where"),
    ],
)
def test_what_is_not_covered_says_so(family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(VramprobeError, match=message):
        architecture(FAMILIES[family] | options)


def test_layers_of_llama_4_are_of_three_kinds() -> None:
    arch = architecture(FAMILIES["llama4_text"] | {"num_hidden_layers": 9, "interleave_moe_layer_step": 2})
    assert arch.dense_layers == (0, 2, 4, 6, 8)
    assert arch.sliding_layers == (True, False) * 4 + (True,)  # every second one turns no heads
    named = architecture(FAMILIES["llama4_text"] | {"moe_layers": [2], "no_rope_layers": [0, 1, 1]})
    assert (named.dense_layers, named.sliding_layers) == ((0, 1), (False, True, True))


def test_an_adapter_on_the_router_of_llama_4_is_refused_by_every_engine() -> None:
    from vramprobe.predict import questions

    for targets in ("all-linear", "q_proj,router"):
        words = {"model": "llama-4-scout", "method": "lora", "lora_targets": targets, "batch_size": 1, "seq_len": 64}
        with pytest.raises(RunFails, match="name the targets, such as q_proj,k_proj,v_proj,o_proj"):
            questions.predict(gpu="B300", num_layers=1, **words)


def test_a_window_of_mixtral_is_a_limit_and_one_of_gpt_oss_is_none() -> None:
    assert architecture(FAMILIES["mixtral"] | {"sliding_window": 32}).sliding_window == 32
    assert architecture(FAMILIES["gpt_oss"]).sliding_window is None


def test_4_bit_reaches_linear_layers_alone() -> None:
    for family in FAMILIES:
        quantised = {name for name, tensor in prepared(family, method="qlora").items() if tensor.quantised}
        assert not [name for name in quantised if ".experts." in name or ".gate." in name or ".router." in name]
        assert "self_attn.o_proj.weight" in quantised


def test_adapters_of_experts_have_a_rank_for_each_expert() -> None:
    made = prepared("qwen3_moe", method="lora", lora_r=4)
    assert made["mlp.experts.gate_up_proj.lora_A"].shape == (2 * 4 * 16, 64)  # twice: gate and up
    assert made["mlp.experts.gate_up_proj.lora_B"].shape == (80, 2 * 4 * 16)
    assert made["mlp.experts.down_proj.lora_A"].shape == (4 * 16, 40)
    assert made["mlp.gate.weight.lora_B"].shape == (16, 4)


@pytest.mark.parametrize(
    ("family", "targets", "reached"),
    [
        ("mixtral", "q_proj,w2", {"q_proj", "down_proj"}),
        ("mixtral", "w1,w3", {"gate_up_proj"}),
        ("qwen3_moe", "gate_proj,up_proj,down_proj", {"gate_up_proj", "down_proj"}),
        ("deepseek_v2", "down_proj", {"down_proj"}),
        ("gpt_oss", "all-linear", {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_targets_are_those_of_the_linear_layers_that_experts_once_were(
    family: str, targets: str, reached: set[str]
) -> None:
    spec = moe_cell(family, method="lora", lora_targets=targets)
    found = lora_targets(spec, architecture(spec.architecture))
    assert {name.rpartition(".")[2] for name in found} == reached
    assert not [name for name in found if "shared_experts" in name]


@pytest.mark.parametrize(
    ("targets", "dropout", "message"),
    [
        ("gate_proj", 0.0, "gate_proj: peft reaches the experts' gate_up_proj by gate_proj and up_proj together"),
        ("q_proj,w1", 0.0, "lora_targets w1: no such linear layer; this model has down_proj, gate, gate_proj"),
        ("all-linear", 0.1, "lora_dropout 0.1: peft has no dropout on the adapter of a weight"),
    ],
)
def test_what_peft_would_refuse_is_refused(targets: str, dropout: float, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        prepared("qwen3_moe", method="lora", lora_targets=targets, lora_dropout=dropout)
