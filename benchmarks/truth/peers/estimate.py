"""Verdicts of another estimator on cells; run by the python that has it (published.py, published_verdicts.py).

In: the tool's name, and on stdin a JSON list of ``{"architecture", "num_params", "spec", "gpu_bytes", "gpu"}`` (a
CellSpec's fields, its card). Out: one line of JSON, the last of stdout: the tool's version and for each cell its
verdict in our words, its total and its tensors in bytes, or why it has none. Every option of the tool that says
something about a condition of the cell is set; nothing of a tool is patched. The total holds what a tool adds for the
CUDA context, fragmentation and safety; the tensors do not, and are what an allocated peak may be compared with.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
from collections.abc import Callable
from typing import Any

MIB, GIB = 2**20, 2**30
_ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def as_llama(shape: dict[str, Any]) -> dict[str, Any]:
    """A config.json under Llama's names, where GPT-2 and Falcon have their own."""
    hidden = shape.get("hidden_size") or shape["n_embd"]
    heads = shape.get("num_attention_heads") or shape["n_head"]
    return {
        "hidden_size": hidden,
        "num_hidden_layers": shape.get("n_layer"),
        "num_attention_heads": heads,
        "num_key_value_heads": 1 if shape.get("multi_query") else shape.get("num_kv_heads") or heads,
        "intermediate_size": shape.get("ffn_hidden_size") or 4 * hidden,
        "tie_word_embeddings": True,
    } | shape


def fitcheck(cell: dict[str, Any]) -> dict[str, Any]:
    """fitcheck-llm. Cannot be told: k-bit preparation, autocast, LoRA's alpha and dropout, foreach or fused AdamW.

    AdamW's state is fp32 or bf16, and full fine-tuning in 16 bit always has fp32 master weights.
    """
    from fitcheck import ModelConfig, TrainingConfig, estimate, get_gpu

    spec, shape = cell["spec"], as_llama(cell["architecture"])
    model = ModelConfig(
        name=spec["model"],
        num_params=cell["num_params"],
        hidden_size=shape["hidden_size"],
        num_layers=shape["num_hidden_layers"],
        num_attention_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        intermediate_size=shape["intermediate_size"],
        vocab_size=shape["vocab_size"],
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        tie_word_embeddings=shape["tie_word_embeddings"],
    )
    lora = {"lora_rank": None}
    if spec["method"] != "full":
        targets = _ALL_LINEAR if spec["lora_targets"] == "all-linear" else list(spec["lora_targets"])
        lora = {"lora_rank": spec["lora_r"], "lora_targets": targets}
    trained_in_16_bit = spec["method"] == "full" and spec["dtype"] != "fp32"
    report = estimate(
        model,
        TrainingConfig(
            precision=spec["dtype"],
            quantization="nf4" if spec["quant"].startswith("nf4") else spec["quant"],
            double_quant=spec["quant"] == "nf4",
            optimizer={"adamw_torch": "adamw", "adamw_torch_fused": "adamw"}.get(spec["optim"], spec["optim"]),
            optimizer_dtype="bf16" if trained_in_16_bit else "fp32",
            batch_size=spec["batch_size"],
            seq_len=spec["seq_len"],
            grad_checkpoint=spec["gradient_checkpointing"],
            flash_attn=spec["attn"] == "flash_attention_2",
            grad_accum_steps=spec["grad_accum"],
            **lora,
        ),
        get_gpu("t4") if cell["gpu"] == "T4" else get_gpu(vram_mib=cell["gpu_bytes"] // MIB),
    )
    return {
        "verdict": {"safe": "fits", "uncertain": "tight", "does_not_fit": "does not fit"}[report.verdict],
        "total_bytes": round(report.total_mib * MIB),
        "tensors_bytes": round((report.total_mib - report.overhead_mib) * MIB),
    }


def canifinetune(cell: dict[str, Any]) -> dict[str, Any]:
    """canifinetune. Cannot be told: k-bit preparation (it takes peft's), autocast, targets but by scope."""
    from canifinetune.estimator import EstimateRequest, estimate

    spec, shape = cell["spec"], as_llama(cell["architecture"])
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    scope = "attention" if spec["lora_targets"] and set(spec["lora_targets"]) == attention else "all_linear"
    lora: dict[str, Any] = {}
    if spec["method"] != "full":
        lora = {
            "lora_rank": spec["lora_r"],
            "lora_alpha": int(spec["lora_alpha"]),
            "lora_dropout": spec["lora_dropout"],
            "lora_target_scope": scope,
        }
    quantization = {"none": "none", "nf4": "nf4_double_quant", "nf4-single": "nf4"}.get(spec["quant"], spec["quant"])
    keys = [
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
        "vocab_size", "tie_word_embeddings",
    ]  # fmt: skip
    found = estimate(
        EstimateRequest(
            model_id=spec["model"],
            override={key: shape[key] for key in keys}
            | {"family": shape["model_type"], "total_params": cell["num_params"]},
            use_network=False,
            gpu_vram_gb=cell["gpu_bytes"] / GIB,
            method=spec["method"],
            base_dtype=spec["dtype"],
            quantization=quantization,
            seq_len=spec["seq_len"],
            micro_batch_size=spec["batch_size"],
            gradient_accumulation_steps=spec["grad_accum"],
            optimizer=spec["optim"],
            gradient_checkpointing=spec["gradient_checkpointing"],
            attention_implementation=spec["attn"],
            **lora,
        )
    )
    memory = found.memory
    return {
        "verdict": {"yes": "fits", "marginal": "tight", "no": "does not fit"}[found.feasible],
        "total_bytes": round(memory.total_estimated_gb * GIB),
        "tensors_bytes": round((memory.total_estimated_gb - memory.cuda_overhead_gb - memory.safety_margin_gb) * GIB),
    }


def vramcalc(cell: dict[str, Any]) -> dict[str, Any]:
    """vramcalc. Cannot be told: quantization, LoRA's targets, optimizers beside AdamW and SGD."""
    import vramcalc as tool

    spec = cell["spec"]
    if spec["quant"] != "none":
        raise ValueError("vramcalc knows no quantization")
    found = tool.estimate(
        cell["architecture"],
        mode="train",
        dtype=spec["dtype"],
        batch=spec["batch_size"],
        seq_len=spec["seq_len"],
        lora_rank=None if spec["method"] == "full" else spec["lora_r"],
        grad_checkpoint=spec["gradient_checkpointing"],
        optimizer="sgd" if spec["optim"] == "sgd" else "adamw",
        precision="pure" if spec["autocast"] == "none" else "amp",
        attn_impl={"flash_attention_2": "flash"}.get(spec["attn"], spec["attn"]),
    )
    fits = found.fits(cell["gpu_bytes"] / 1e9).ok
    return {
        "verdict": "fits" if fits else "does not fit",
        "total_bytes": found.total + found.overhead,
        "tensors_bytes": found.total,
    }


TOOLS: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "fitcheck": ("fitcheck-llm", fitcheck),
    "canifinetune": ("canifinetune", canifinetune),
    "vramcalc": ("vramcalc", vramcalc),
}


def main() -> None:
    package, run = TOOLS[sys.argv[1]]
    estimates = []
    with contextlib.redirect_stdout(sys.stderr):
        for cell in json.load(sys.stdin):
            try:
                estimates.append(run(cell))
            except Exception as error:  # another's: whatever it raises is its answer
                estimates.append({"why": f"{type(error).__name__}: {error}"})
    print(json.dumps({"version": importlib.metadata.version(package), "estimates": estimates}))


if __name__ == "__main__":
    main()
