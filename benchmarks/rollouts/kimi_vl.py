"""Make moonshotai/Kimi-VL-A3B-Instruct without its weights: a repository in a cache of the hub, which vLLM loads by id.

`--empty-weights` has no model whose code is its own (trust_remote_code). Sizes: the text model's as a public test has
them (stored file 61386913732), of 27 layers as Moonlight-16B-A3B (60862326903), a vocabulary of 163,840 (62530201892);
MoonViT's as its config is published (61105123417); the processor's limits as a public copy has them (68395533418).
Names and shapes of the weights are those that vLLM's own classes load; kimi_vl_processor.py stands in for Moonshot's
processor; kimi_vl.json has the configurations. Needs torch; then give the folder to the profile:

    python benchmarks/rollouts/kimi_vl.py /tmp/kimi
    HF_HOME=/tmp/kimi python benchmarks/rollouts/emulated.py --row 36 --python PATH/bin/python
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

from vramprobe.profile.empty import checkpoint, tokenizer

REPOSITORY = "models--moonshotai--Kimi-VL-A3B-Instruct"
PROCESSOR = Path(__file__).with_name("kimi_vl_processor.py")
CONFIG, IMAGES = json.loads(Path(__file__).with_suffix(".json").read_text()).values()
TEXT, VISION = CONFIG["text_config"], CONFIG["vision_config"]


def model() -> nn.Module:
    """Its tensors without memory, named as in its repository."""
    width, inner = VISION["hidden_size"], VISION["intermediate_size"]
    patch = VISION["patch_size"]
    whole = nn.Module()
    whole.language_model = _text()
    blocks = [
        nn.ModuleDict({
            "norm0": nn.LayerNorm(width), "norm1": nn.LayerNorm(width),
            "mlp": nn.ModuleDict({"fc0": nn.Linear(width, inner), "fc1": nn.Linear(inner, width)}),
            "wqkv": nn.Linear(width, 3 * width), "wo": nn.Linear(width, width),
        })
        for _ in range(VISION["num_hidden_layers"])
    ]  # fmt: skip
    places = nn.Module()
    places.weight = nn.Parameter(torch.empty(VISION["init_pos_emb_height"], VISION["init_pos_emb_width"], width))
    whole.vision_tower = nn.ModuleDict({
        "patch_embed": nn.ModuleDict({"proj": nn.Conv2d(3, width, patch, patch), "pos_emb": places}),
        "encoder": nn.ModuleDict({"blocks": nn.ModuleList(blocks), "final_layernorm": nn.LayerNorm(width)}),
    })  # fmt: skip
    merged = width * VISION["merge_kernel_size"][0] * VISION["merge_kernel_size"][1]
    whole.multi_modal_projector = nn.ModuleDict({
        "pre_norm": nn.LayerNorm(width), "linear_1": nn.Linear(merged, merged),
        "linear_2": nn.Linear(merged, TEXT["hidden_size"]),
    })  # fmt: skip
    return whole


def _text() -> nn.Module:
    """DeepseekV3ForCausalLM, with no bias and its experts one by one."""
    width, heads, rank = TEXT["hidden_size"], TEXT["num_attention_heads"], TEXT["kv_lora_rank"]
    plain, rotary, value = TEXT["qk_nope_head_dim"], TEXT["qk_rope_head_dim"], TEXT["v_head_dim"]

    def linear(inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=False)

    def mlp(inner: int) -> nn.ModuleDict:
        return nn.ModuleDict({
            "gate_proj": linear(width, inner), "up_proj": linear(width, inner), "down_proj": linear(inner, width)
        })  # fmt: skip

    def experts() -> nn.ModuleDict:
        inner, count = TEXT["moe_intermediate_size"], TEXT["n_routed_experts"]
        gate = linear(width, count)
        gate.e_score_correction_bias = nn.Parameter(torch.empty(count))
        return nn.ModuleDict({
            "gate": gate, "experts": nn.ModuleList(mlp(inner) for _ in range(count)),
            "shared_experts": mlp(TEXT["n_shared_experts"] * inner),
        })  # fmt: skip

    layers = [
        nn.ModuleDict({
            "self_attn": nn.ModuleDict({
                "q_proj": linear(width, heads * (plain + rotary)), "kv_a_proj_with_mqa": linear(width, rank + rotary),
                "kv_a_layernorm": nn.RMSNorm(rank), "kv_b_proj": linear(rank, heads * (plain + value)),
                "o_proj": linear(heads * value, width),
            }),
            "mlp": experts() if number >= TEXT["first_k_dense_replace"] else mlp(TEXT["intermediate_size"]),
            "input_layernorm": nn.RMSNorm(width), "post_attention_layernorm": nn.RMSNorm(width),
        })
        for number in range(TEXT["num_hidden_layers"])
    ]  # fmt: skip
    return nn.ModuleDict({
        "model": nn.ModuleDict({
            "embed_tokens": nn.Embedding(TEXT["vocab_size"], width), "layers": nn.ModuleList(layers),
            "norm": nn.RMSNorm(width),
        }),
        "lm_head": linear(width, TEXT["vocab_size"]),
    })  # fmt: skip


def main() -> None:
    """Write the repository into the cache of the folder that is named."""
    home = Path(sys.argv[1]) / "hub" / REPOSITORY
    folder = home / "snapshots" / "empty"
    folder.mkdir(parents=True, exist_ok=True)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / "main").write_text("empty")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).write_text(json.dumps(IMAGES))
    shutil.copy(PROCESSOR, folder)
    with torch.device("meta"):
        count = checkpoint.write(model(), str(folder))
    tokenizer.write(
        str(folder), TEXT["vocab_size"], max_length=TEXT["max_position_embeddings"],
        placed={CONFIG["media_placeholder_token_id"]: "<|media_pad|>"},
    )  # fmt: skip
    print(f"{count / 1e9:.2f} billion parameters in {folder}")


if __name__ == "__main__":
    main()
