"""An inference engine by arithmetic: known answers by hand, published logs, and what is refused."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import vramprobe

from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.catalog import find_model
from vramprobe.catalog.names import QUANTIZED
from vramprobe.errors import SpecError, UnknownName
from vramprobe.predict import serving_memory
from vramprobe.predict.serve import serve
from vramprobe.predict.serve_spec import ServeSpec
from vramprobe.predict.serving_experts import Workspace
from vramprobe.predict.serving_memory import NAMED, QUANTIZATIONS
from vramprobe.units import GIB, MIB

ROOT = Path(__file__).parents[2]
H100 = {"gpu": "H100-SXM", "gpu_memory_utilization": 0.95, "max_model_len": 8192}
SPEC = ServeSpec(max_model_len=8192, max_num_batched_tokens=8192, max_num_seqs=1024)


def test_a_kv_cache_of_chunks_is_refused() -> None:
    with pytest.raises(UnsupportedArchitecture, match="whose layers attend within chunks"):
        serve(model="llama-4-scout", gpu="B300")


def test_weights_of_a_tiny_llama_by_hand() -> None:
    config = {
        "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }  # fmt: skip
    layer = (64 + 2 * 32) * 64 + 64 * 64 + 3 * 64 * 128
    norms = 2 * 64 * 2 + 64
    embeddings, rotary = 2 * 128 * 64, 512 * 16  # the vocabulary in whole multiples of 64
    arch = architecture(config)
    assert serving_memory.weight_bytes(arch, config, SPEC) == 2 * (2 * layer + norms + embeddings + rotary)
    fp8 = ServeSpec(max_model_len=8, max_num_batched_tokens=8, max_num_seqs=8, quantization="fp8")
    assert serving_memory.weight_bytes(arch, config, fp8) == 2 * layer + 2 * (norms + embeddings + rotary)
    halves = ServeSpec(max_model_len=8, max_num_batched_tokens=8, max_num_seqs=8, tensor_parallel_size=2)
    assert serving_memory.weight_bytes(arch, config, halves) == 2 * layer + embeddings + 2 * (norms + rotary)


def test_a_large_block_keeps_what_the_allocator_does_not_split() -> None:
    assert serving_memory._allocated(259 * MIB) == 260 * MIB  # 1 MiB is left of its segment: too little to be split off
    assert serving_memory._allocated(49 * MIB // 2) == 49 * MIB // 2  # 1.5 MiB are left: another block's
    assert serving_memory._allocated(8 * MIB) == 8 * MIB


@pytest.mark.parametrize(
    ("model", "page_bytes", "layers", "windows", "num_blocks"),
    [
        ("llama-3.1-8b", 2 * 16 * 8 * 128 * 2, 32, (None,), 512),
        ("gemma-2-9b", 2 * 16 * 8 * 256 * 2, 21, (4096, None), 512 + 513),
        ("gpt-oss-20b", 2 * 16 * 8 * 64 * 2, 12, (128, None), 512 + 513),
        ("deepseek-v2-lite", 16 * (512 + 64) * 2, 27, (None,), 512),
    ],
)
def test_pages_of_full_sliding_and_latent_attention(model, page_bytes, layers, windows, num_blocks) -> None:
    config = find_model(model).config
    found = serving_memory.pages(architecture(config), config, SPEC)
    assert found == (page_bytes, layers, windows, 16)
    assert found.num_blocks_of(8192, 8192) == num_blocks


@pytest.mark.parametrize(
    ("model", "cache", "block_tokens", "padding"),
    [
        ("qwen3.5-0.8b", "auto", 544, 2.64),
        ("qwen3.5-9b", "auto", 528, None),
        ("qwen3.5-9b", "fp8", 1056, None),
        ("qwen3.5-27b", "auto", 784, 0.13),
        ("qwen3.5-35b-a3b", "auto", 1056, 0.76),
        ("qwen3.5-35b-a3b", "fp8", 2096, None),
        ("lfm2-1.2b", "auto", 16, 300.0),
    ],
)
def test_blocks_of_a_hybrid_hold_a_state_as_published_logs_have_them(model, cache, block_tokens, padding) -> None:
    """Lines of vLLM's logs that people published: attention's block size, and by how much a state is padded."""
    config = find_model(model).config
    spec = ServeSpec(max_model_len=8192, max_num_batched_tokens=8192, max_num_seqs=1024, kv_cache_dtype=cache)
    found = serving_memory.pages(architecture(config), config, spec)
    state = serving_memory.state_bytes(architecture(config), config, spec)
    assert found.block_tokens == block_tokens
    assert padding is None or round(100 * (found.page_bytes / state - 1), 2) == padding


def test_a_hybrids_request_takes_a_block_for_each_group_of_states() -> None:
    """Published of LFM2.5-1.2B: 217,264 tokens, and 313.37 requests of 2,048 at once."""
    config = find_model("lfm2-1.2b").config
    found = serving_memory.pages(architecture(config), config, SPEC)
    assert (found.layers_per_group, found.windows) == (6, (0, 0, None))
    blocks = next(number for number in range(40_000, 41_000) if number // 3 * 16 == 217_264)
    concurrency = {round(blocks + rest, 2) / found.num_blocks_of(2048, 2048) for rest in range(3)}
    assert 313.37 in {round(one, 2) for one in concurrency}


def test_a_hybrids_checkpoint_is_served_with_its_tower_and_never_surely_fits() -> None:
    found = serve(model="qwen3.5-9b", gpu="RTX-4090", max_model_len=16_384)
    assert (
        found.weights_bytes > 2 * 9_409_813_744
    )  # of the checkpoint with its tower, by transformers on the meta device
    assert (found.verdict, len(found.left_out)) == ("may fit", 2)
    assert found.kv_cache_tokens % 528 == 0
    short = serve(model="qwen3.5-9b", gpu="RTX-4090", max_model_len=100)
    assert short.kv_cache_tokens == short.kv_cache_blocks // 4 * 100


def test_the_sampler_takes_fourteen_bytes_per_logit() -> None:
    """As an emulated run of vLLM 0.19 has them: 296.75, three times 593.5 and 76.51 MiB of 151,936 tokens."""
    arch = architecture(find_model("qwen2.5-0.5b").config)
    found = serving_memory.activation_bytes(
        arch, SPEC, experts=Workspace(), num_sms=132, compiles=True, blas_workspace_bytes=32 * MIB
    )
    hidden = (8192 + 2 * 1024) * 896 * 2
    assert found - hidden - 32 * MIB == (1024 * 14 + 132 * 4) * 151936
    assert (found - hidden - 32 * MIB) / MIB == pytest.approx(296.75 + 3 * 593.5 + 76.51, abs=0.01)


def test_a_first_start_tries_the_embedding_on_a_table_of_its_own() -> None:
    """Published by vLLM 0.19 for Llama-3.1-8B in float32: 2.21 GiB, and 1.72 are the sampler's."""
    found = [
        serve(model="llama-3.1-8b", gpu="H100-SXM", max_model_len=8192, dtype="fp32", enforce_eager=eager)
        for eager in (False, True)
    ]
    table, states = 128256 * 4096 * 4, 8192 * 4096 * 4
    assert found[0].activation_bytes == table + 2 * states
    assert [round(one.activation_bytes / GIB, 2) for one in found] == [2.21, 1.72]


def test_a_cache_too_small_for_one_request_does_not_fit() -> None:
    found = serve(model="qwen2.5-72b", gpu="H100-SXM", tensor_parallel_size=2, gpu_memory_utilization=0.95)
    assert found.verdict == "does not fit"  # 32,768 tokens or more in 3 GiB
    assert 0 < found.longest_request_tokens < 32768
    again = serve(model="qwen2.5-72b", gpu="H100-SXM", tensor_parallel_size=2, gpu_memory_utilization=0.95,
                  max_model_len=found.longest_request_tokens)  # fmt: skip
    assert again.verdict == "fits"
    assert serve(model="llama-3.3-70b", gpu="RTX-4090").kv_cache_tokens == 0


def test_parts_add_up_and_defaults_are_the_servers() -> None:
    found = serve(model="llama-3.1-8b", **H100)
    parts = found.weights_bytes + found.activation_bytes + found.non_torch_bytes + found.kv_cache_bytes
    assert parts == found.requested_bytes
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (8192, 1024)
    small = serve(model="llama-3.1-8b", gpu="RTX-4090")
    assert (small.max_num_batched_tokens, small.max_num_seqs) == (2048, 256)
    assert any("assumed" in note for note in small.notes)
    assert serve(model="llama-3.1-8b", enforce_eager=True, **H100).graph_bytes == 0
    assert serve(model="llama-3.1-8b", kv_cache_dtype="fp8", **H100).kv_cache_bytes_per_token == 32 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization 1.5"),
        ({"quantization": "int3"}, "none, fp8"),
        ({"quantization": "bitsandbytes", "vllm_release": "0.32"}, "no longer has it"),
        ({"dtype": "fp8"}, "bf16, fp16"),
        ({"kv_cache_dtype": "int8"}, "auto"),
        ({"tensor_parallel_size": 3}, "divisor"),
        ({"gpu": "MI300X"}, "NVIDIA"),
    ],
)
def test_what_vllm_would_refuse_is_refused(given, said) -> None:
    with pytest.raises((SpecError, UnknownName), match=said):
        serve(**{"model": "llama-3.1-8b", "gpu": "H100-SXM"} | given)


def test_published_logs_of_one_h100_are_repeated() -> None:
    """Weights within 0.05 GiB, KV tokens within 0.1 %, of what vLLM 0.19.0 printed (rows 53, 7, 19; held out)."""
    for model, options, weights_gib, tokens in (
        ("qwen3-8b", {}, 15.27, 418_688),
        ("gemma-2-2b", {}, 4.90, 670_160),
        ("llama-3.1-8b", {"quantization": "fp8"}, 8.49, 529_248),
    ):
        found = serve(model=model, **H100, **options)
        assert found.weights_bytes / GIB == pytest.approx(weights_gib, abs=0.05)
        assert found.kv_cache_tokens == pytest.approx(tokens, rel=1e-3)


def test_the_command_line() -> None:
    engine = ("serve", "--model", "llama-3.1-8b", "--gpu", "H100-SXM")
    done = vramprobe(*engine, "--max-model-len", "8192", "--json")
    assert json.loads(done.stdout)["max_model_len"] == 8192
    wrong = vramprobe(*engine, "--method", "lora")
    assert (wrong.returncode, "serve has no option --method" in wrong.stderr) == (2, True)
    cell = ("--model", "llama-3.1-8b", "--method", "lora", "--batch-size", "1", "--seq-len", "64")
    other = vramprobe("predict", *cell, "--quantization", "fp8")
    assert (other.returncode, "has no option --quantization" in other.stderr) == (2, True)


#: A cell whose recipe ships: another would be recorded.
SHIPPED = ("--model", "llama-3.2-1b", "--method", "lora", "--batch-size", "2", "--seq-len", "1024")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("serve", "--model", "llama-3.1-8b", "--gpu", "T4"), 3),
        (("serve", "--model", "gpt-oss-120b", "--gpu", "B200", "--max-model-len", "4096"), 4),
        (("serve", "--model", "llama-3.1-8b", "--gpu", "H100-SXM", "--max-model-len", "8192"), 0),
        (("grpo", "--model", "llama-3.1-8b", "--method", "lora", "--gradient-checkpointing", "--gpu", "L4"), 3),
        (("predict", *SHIPPED, "--gpu", "RTX-3080"), 3),
        (("predict", *SHIPPED, "--gpu", "RTX-4090"), 0),
        (("predict", *SHIPPED), 0),
    ],
    ids=lambda value: value if isinstance(value, int) else value[0],
)
def test_the_exit_code_is_the_verdict(words: tuple[str, ...], code: int) -> None:
    assert vramprobe(*words).returncode == code
    if code:
        assert vramprobe(*words, "--exit-zero").returncode == 0


def emulated_runs() -> list[dict[str, str]]:
    with open(ROOT / "benchmarks" / "rollouts" / "emulated_0.32.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("row", emulated_runs(), ids=lambda row: row["model"])
def test_release_0_32_is_as_emulated_runs_logged_it(row: dict[str, str]) -> None:
    """Weights and buffers together, and the activation peak, as vLLM rounds them; blocks leave gaps in segments."""
    found = serve(model=row["model"], gpu=row["gpu"], max_model_len=int(row["max_model_len"]), vllm_release="0.32")
    activation = float(row["non_kv_cache_gib"]) - float(row["consumed_gib"])
    assert found.activation_bytes / GIB == pytest.approx(activation, abs=0.011)
    assert (found.weights_bytes + found.buffer_bytes) / GIB == pytest.approx(float(row["consumed_gib"]), abs=0.07)
    assert found.gpu_memory_utilization == 0.92
    parts = found.weights_bytes + found.buffer_bytes + found.activation_bytes + found.non_torch_bytes
    assert found.graph_bytes is not None
    assert found.kv_cache_bytes == found.requested_bytes - parts - found.graph_bytes


def test_another_release_is_refused() -> None:
    with pytest.raises(SpecError, match=r"one of 0\.19, 0\.32"):
        serve(model="llama-3.1-8b", gpu="H100-SXM", vllm_release="0.25")


@pytest.mark.parametrize(
    ("model", "left_out"),
    [("Qwen/Qwen3-30B-A3B-FP8", ("the experts' workspaces",)), ("qwen3-vl-8b", ("the vision tower's",))],
)
def test_a_cache_that_is_only_bounded_from_above_never_fits(model: str, left_out: tuple[str, ...]) -> None:
    found = serve(model=model, gpu="B200", max_model_len=4096)
    assert found.verdict == "may fit"
    assert [one.startswith(part) for one, part in zip(found.left_out, left_out, strict=True)] == [True] * len(left_out)
    assert serve(model=model, gpu="T4", max_model_len=4096, quantization="none").verdict == "does not fit"
    assert "may fit" in vramprobe("serve", "--model", model, "--gpu", "B200", "--max-model-len", "4096").stdout


def test_a_quantized_latent_projection_has_a_16_bit_copy() -> None:
    """61 layers of 512 by 128 heads of 256."""
    spec = ServeSpec(max_model_len=8, max_num_batched_tokens=8, max_num_seqs=8, quantization="fp8")
    config = find_model("deepseek-v3").config
    (one,) = (one for one in architecture(config).parameters if one.module == "kv_b_proj")
    assert one.numel == 512 * 128 * 256
    assert serving_memory._parameter_bytes(one, architecture(config), spec) == 3 * one.numel


@pytest.mark.parametrize(
    ("model", "words", "activation_gib"),
    [
        ("qwen3-30b-a3b", {}, 2.68),
        ("deepseek-v2-lite", {}, 1.93),
        ("mixtral-8x7b", {"tensor_parallel_size": 2, "max_model_len": 8192}, 1.21),
    ],
)
def test_the_workspace_of_16_bit_experts_stays_beside_the_sampler(
    model: str, words: dict[str, Any], activation_gib: float
) -> None:
    """As vLLM's logs of an H100 have it."""
    found = serve(model=model, gpu="H100-SXM", **words)
    assert found.activation_bytes / GIB == pytest.approx(activation_gib, abs=0.01)
    assert (found.verdict, found.left_out) == ("fits", ())


def test_experts_by_other_kernels_than_tritons_are_named_as_not_counted() -> None:
    """0.32 runs those of FlashInfer on Blackwells."""
    words = {"model": "qwen3-30b-a3b", "vllm_release": "0.32", "max_model_len": 4096}
    assert "the experts' workspaces" not in serve(gpu="H100-SXM", **words).left_out
    assert "the experts' workspaces" in serve(gpu="B200", **words).left_out
    fp8 = {gpu: serve(model="Qwen/Qwen3-30B-A3B-FP8", gpu=gpu, max_model_len=4096).left_out for gpu in ("L40S", "H200")}
    assert fp8 == {"L40S": (), "H200": ("the experts' workspaces",)}  # in which blocks, its name does not say
    words = {"gpu": "H200", "tensor_parallel_size": 8, "max_model_len": 4096}
    assert serve(model="deepseek-v3", **words).left_out == ()
    assert serve(model="deepseek-v3", quantization="gptq", **words).left_out == ("the experts' workspaces",)


@pytest.mark.parametrize(
    ("model", "quantization"),
    [
        ("Qwen/Qwen3-32B-FP8", "fp8"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "awq"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "gptq"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "w8a8"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "bitsandbytes"),
        ("Qwen/Qwen3-32B", "none"),
        ("unsloth/gpt-oss-20b-BF16", "none"),
    ],
)
def test_a_name_tells_the_quantization_that_vllm_loads(model: str, quantization: str) -> None:
    assert serve(model=model, gpu="H200").quantization == quantization
    assert serve(model=model, gpu="H200", quantization="fp8").quantization == "fp8"


def test_a_quantization_by_name_that_is_not_counted_is_refused() -> None:
    with pytest.raises(SpecError, match="quantized by nvfp4, which is not counted; give the nearest"):
        serve(model="nvidia/Llama-3.1-8B-Instruct-NVFP4", gpu="B200")
    assert {*NAMED} <= {*QUANTIZED}
    assert {*NAMED.values()} <= {*QUANTIZATIONS}


#: Attention, embedding and head, in 16 bits.
OTHERS_OF_GPT_OSS_120B = 36 * (4 * 2880 * 4096 + 2 * 2880 * 1024) + 2 * 201088 * 2880 * 2


@pytest.mark.parametrize(
    ("gpu", "intermediate", "hidden"),
    [("A100-80GB-SXM", 2944, 3072), ("RTX-PRO-6000-WS", 2944, 3072), ("B200", 3072, 3072)],
)
def test_mxfp4_experts_are_padded_as_the_kernels_of_the_gpu_want(gpu: str, intermediate: int, hidden: int) -> None:
    """By hand for gpt-oss-120b: 36 layers of 128 experts of 2,880 by 2,880, three matrices in 17 bits of 32 elements
    and biases in 16 bits."""
    found = serve(model="gpt-oss-120b", gpu=gpu)
    experts = 36 * 128 * (3 * intermediate * hidden * 17 / 32 + 2 * (2 * intermediate + hidden))
    assert found.weights_bytes == pytest.approx(experts + OTHERS_OF_GPT_OSS_120B, rel=0.002)
    assert found.left_out == (("the experts' workspaces",) if gpu == "B200" else ())


def test_on_hopper_tritons_layouts_are_padded_and_the_loaded_scales_stay() -> None:
    """By hand: 1,440 bytes of values padded to 1,472; 5,760 and 2,880 scales by 90 padded to 5,888 and 3,072, beside
    those that were loaded; biases in 32 bits. Logs of gpt-oss-120b on an H100 have 64.4 to 66.0 GiB, by
    release, and no cache at the defaults."""
    found = serve(model="gpt-oss-120b", gpu="H100-SXM")
    assert found.verdict == "does not fit"
    values, scales, loaded = (5760 + 2880) * 1472, (5888 + 3072) * 90, (5760 + 2880) * 90
    experts = 36 * 128 * (values + scales + loaded + 4 * (5760 + 2880))
    assert found.weights_bytes == pytest.approx(experts + OTHERS_OF_GPT_OSS_120B, rel=0.002)
    assert 64.4 < found.weights_bytes / GIB < 66.0
    printed = vramprobe("serve", "--model", "gpt-oss-120b", "--gpu", "H100-SXM").stdout
    assert "at least" not in printed.split("weights")[1].splitlines()[0]
    newer = serve(model="gpt-oss-120b", gpu="H100-SXM", vllm_release="0.32")  # pads no values, drops loaded scales
    more = 36 * 128 * ((5760 + 2880) * (1472 - 1440) + loaded)
    assert found.weights_bytes - newer.weights_bytes == pytest.approx(more, rel=0.01)  # segments of 2 MiB


def test_an_expert_of_a_divided_engine_is_padded_on_each_gpu() -> None:
    """A published log has 7.01 GiB on each of two H100s."""
    found = serve(model="gpt-oss-20b", gpu="H100-SXM", tensor_parallel_size=2)
    assert found.weights_bytes / GIB == pytest.approx(7.01, rel=0.005)


def test_the_checkpoints_own_quantization_is_the_default(tmp_path: Path) -> None:
    own = serve(model="gpt-oss-20b", gpu="H100-SXM")
    assert own == serve(model="gpt-oss-20b", gpu="H100-SXM", quantization="mxfp4")
    assert (own.quantization, serve(model="llama-3.1-8b", gpu="H100-SXM").quantization) == ("mxfp4", "none")
    config = find_model("llama-3.2-1b").config
    for method, said in (("awq", ""), ("compressed-tensors", "quantized by compressed-tensors, which is not counted")):
        file = tmp_path / f"{method}.json"
        file.write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
        if said:
            with pytest.raises(SpecError, match=said):
                serve(model=str(file), gpu="H100-SXM")
        assert serve(model=str(file), gpu="H100-SXM", quantization="awq").quantization == "awq"


def test_a_vision_language_models_longest_request_is_its_text_configs() -> None:
    assert serve(model="qwen3-vl-8b", gpu="H100-SXM").max_model_len == 262_144
