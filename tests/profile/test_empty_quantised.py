"""Empty checkpoints that are quantised already: known shapes, bitsandbytes as reference, names that say so."""

import json
from pathlib import Path
from typing import Any

import pytest
from empty_package import replaced, repositories

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
GROUP = {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}, "input_activations": {"dynamic": False}}
NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
}
#: What a layer of 256 inputs and 512 outputs keeps in place of ``up_proj.weight``, as AutoAWQ, GPTQModel,
#: compressed-tensors and the checkpoints of DeepSeek-V3 and Qwen3-FP8 have it.
SHAPES = {
    "-awq": {"qweight": ("I32", [256, 64]), "qzeros": ("I32", [2, 64]), "scales": ("F16", [2, 512])},
    "-gptq-int4": {
        "qweight": ("I32", [32, 512]), "qzeros": ("I32", [2, 64]), "scales": ("F16", [2, 512]), "g_idx": ("I32", [256]),
    },
    "-gptq-int8": {
        "qweight": ("I32", [64, 512]), "qzeros": ("I32", [2, 128]), "scales": ("F16", [2, 512]),
        "g_idx": ("I32", [256]),
    },
    "-quantized.w8a8": {"weight": ("I8", [512, 256]), "weight_scale": ("BF16", [512, 1])},
    "-quantized.w4a16": {
        "weight_packed": ("I32", [512, 32]), "weight_scale": ("BF16", [512, 2]), "weight_shape": ("I64", [2]),
    },
    "-fp8-dynamic": {"weight": ("F8_E4M3", [512, 256]), "weight_scale": ("BF16", [512, 1])},
    "-fp8": {"weight": ("F8_E4M3", [512, 256]), "weight_scale_inv": ("F32", [4, 2])},
}  # fmt: skip


def written(empty: Any, folder: Path, quantization: dict[str, Any], **more: Any) -> dict[str, tuple[str, list[int]]]:
    transformers = pytest.importorskip("transformers")
    from safetensors import safe_open

    config = transformers.AutoConfig.for_model(**LLAMA | more)
    empty.checkpoint.write(empty.checkpoint.model_of(config), str(folder), quantization=quantization)
    with safe_open(folder / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (one.get_dtype(), one.get_shape()) for name, one in slices.items()}


def of_layer(found: dict[str, tuple[str, list[int]]], layer: str) -> dict[str, tuple[str, list[int]]]:
    return {name.removeprefix(layer + "."): one for name, one in found.items() if name.startswith(layer + ".")}


@pytest.mark.parametrize("end", SHAPES)
def test_a_linear_layer_has_the_tensors_of_its_format(end: str, empty, tmp_path: Path) -> None:
    found = written(empty, tmp_path, empty.hub.model_names.QUANTIZED[end])
    assert of_layer(found, "model.layers.0.mlp.up_proj") == SHAPES[end]
    assert found["lm_head.weight"] == found["model.embed_tokens.weight"] == ("BF16", [512, 256])
    assert found["model.norm.weight"] == ("BF16", [256])


def test_every_named_format_has_known_shapes(empty) -> None:
    named = {end for end, config in empty.hub.model_names.QUANTIZED.items() if config is not None}
    assert named - SHAPES.keys() == {"-bnb-4bit"}  # by the library itself, below


@pytest.mark.parametrize("double", [True, False])
def test_4_bit_weights_are_those_that_bitsandbytes_saves_and_reads(double: bool, empty, tmp_path: Path) -> None:
    torch, bitsandbytes = pytest.importorskip("torch"), pytest.importorskip("bitsandbytes")
    from safetensors.torch import load_file

    config = {**empty.hub.model_names.QUANTIZED["-bnb-4bit"], "bnb_4bit_use_double_quant": double}
    written(empty, tmp_path, config)
    layer = "model.layers.0.mlp.up_proj."
    ours = {
        name.removeprefix(layer): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
        if name.startswith(layer)
    }
    linear = bitsandbytes.nn.Linear4bit(
        256, 512, bias=False, quant_type="nf4", compress_statistics=double, compute_dtype=torch.bfloat16
    )
    linear.weight = bitsandbytes.nn.Params4bit(
        torch.randn(512, 256, dtype=torch.bfloat16), requires_grad=False, quant_type="nf4", compress_statistics=double
    )
    theirs = linear.to("cpu").state_dict()
    said = "weight.quant_state.bitsandbytes__nf4"
    assert {name: (one.dtype, one.shape) for name, one in ours.items() if name != said} == {
        name: (one.dtype, one.shape) for name, one in theirs.items() if name != said
    }
    assert ours.keys() == theirs.keys()
    read = bitsandbytes.functional.QuantState.from_dict({k: v for k, v in ours.items() if k != "weight"}, device="cpu")
    assert (read.shape, read.dtype, read.blocksize) == (torch.Size([512, 256]), torch.bfloat16, 64)
    assert (read.state2 is not None) == double


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"},
         {"weight": ("F8_E4M3", [512, 256]), "weight_scale": ("F32", []), "input_scale": ("F32", [])}),
        ({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": GROUP}},
         {"weight": ("F8_E4M3", [512, 256]), "weight_scale": ("BF16", [1]), "input_scale": ("BF16", [1])}),
        (NVFP4, {"weight_packed": ("U8", [512, 128]), "weight_scale": ("F8_E4M3", [512, 16]),
                 "weight_global_scale": ("F32", [1]), "input_global_scale": ("F32", [1])}),
    ],
)  # fmt: skip
def test_what_a_config_of_another_publisher_says(quantization: dict, expected: dict, empty, tmp_path: Path) -> None:
    assert of_layer(written(empty, tmp_path, quantization), "model.layers.0.mlp.up_proj") == expected


def test_layers_that_a_config_leaves_out_stay_as_they_are(empty, tmp_path: Path) -> None:
    awq = empty.hub.model_names.QUANTIZED["-awq"]
    for number, skipped in enumerate(
        [{"modules_to_not_convert": ["q_proj"]}, {"ignore": ["re:.*self_attn.q_proj$"]},
         {"llm_int8_skip_modules": ["model.layers.0.self_attn.q_proj"]}]
    ):  # fmt: skip
        found = written(empty, tmp_path / str(number), {**awq, **skipped})
        assert of_layer(found, "model.layers.0.self_attn.q_proj") == {"weight": ("BF16", [256, 256])}
        assert "qweight" in of_layer(found, "model.layers.0.self_attn.k_proj")


def test_the_experts_of_gpt_oss_are_blocks_and_scales(empty, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        "gpt_oss", hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_local_experts=4, vocab_size=128,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, architectures=["GptOssForCausalLM"],
    )  # fmt: skip
    tensors = empty.checkpoint._saved(empty.checkpoint.model_of(config))
    found = empty.quantised.packed(tensors, {"quant_method": "mxfp4"}, "bfloat16")
    experts = {name.rpartition("experts.")[2]: list(one.shape) for name, one in found.items() if ".experts." in name}
    assert experts == {
        "gate_up_proj_blocks": [4, 192, 2, 16], "gate_up_proj_scales": [4, 192, 2], "gate_up_proj_bias": [4, 192],
        "down_proj_blocks": [4, 64, 3, 16], "down_proj_scales": [4, 64, 3], "down_proj_bias": [4, 64],
    }  # fmt: skip
    assert found["model.layers.0.self_attn.q_proj.weight"].dim() == 2


def test_a_name_that_says_its_quantisation_is_served_from_its_base_model(empty, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    home = tmp_path / "run"
    _, folder_of = repositories(empty, home, tmp_path / "cache")
    folder = Path(folder_of("Qwen/Qwen2.5-0.5B-Instruct-AWQ"))
    (config,) = folder.glob("snapshots/*/config.json")
    said = json.loads(config.read_text())
    assert (said["quantization_config"]["quant_method"], said["torch_dtype"]) == ("awq", "float16")
    by = {one["kind"]: one["by"] for one in replaced(home)}
    assert by["config"] == ("that of Qwen/Qwen2.5-0.5B in vramprobe's catalog, quantised as its name says: assumed")
    assert (
        by["weights"]
        == "empty files of Qwen2ForCausalLM, 0.49 billion parameters as awq, what is not quantized in float16"
    )


def test_a_quantized_name_without_a_layout_is_refused_with_the_model_that_it_was_made_of(
    empty, tmp_path: Path, capsys
) -> None:
    _, folder_of = repositories(empty, tmp_path, tmp_path / "cache")
    folder_of("mlx-community/Qwen2.5-0.5B-Instruct-4bit")
    (said,) = capsys.readouterr().err.splitlines()
    assert "4bit does not tell the layout" in said
    assert "Qwen/Qwen2.5-0.5B" in said


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "quip"}, "quip"),
        ({}, "quantised"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes in 8 bits"),
        ({**NVFP4, "format": "mixed-precision"}, "compressed-tensors, format 'mixed-precision' in 1 groups"),
    ],
)
def test_a_format_without_shapes_is_named(quantization: dict[str, Any], expected: str, empty) -> None:
    assert empty.quantised.why_not(quantization) == expected


def test_a_checkpoint_that_is_published_quantized_alone_is_so_by_its_id(empty, tmp_path: Path) -> None:
    found, _ = repositories(empty, tmp_path, tmp_path)
    config = found._entry("openai/gpt-oss-20b")[0]["quantised"]
    assert (config["dtype"], config["quantization_config"]["quant_method"]) == ("bfloat16", "mxfp4")
    assert not found._entry("unsloth/gpt-oss-20b-BF16")[0]["quantised"]  # of the same shape
