"""The calculators' formulas: DeepSpeed, accelerate, EleutherAI, Megatron-LM, gpu_poor, vram-calculator, Ultrascale.

In: Facts. Out: Estimates, as the tool's own code has them for one GPU, in bytes and without its rounding to MB. Options
that a cell decides (mixed precision, checkpointing, gated MLP, key-value heads) are set as its user would set them.
Long because each calculator's arithmetic stands whole.
"""

from __future__ import annotations

import math

from vramprobe.literature.formulas.facts import Estimate, Facts, Formula, estimate, why_not_full_adamw
from vramprobe.literature.formulas.papers import korthikanti_bytes
from vramprobe.units import MIB

_STATES = ("weights", "gradients", "optimizer_state")
_SAVED = ("saved_activations", "checkpoint_store")


# -- DeepSpeed ------------------------------------------------------------------------------------------------------


def deepspeed_zero2_bytes(num_params: int, num_gpus: int = 1) -> dict[str, int]:
    """``estimate_zero2_model_states_mem_needs`` per GPU without offload: 2P + 18P/N by cause.

    18 = 2 and 4 for gradients in 16 and 32 bits, 4 for master weights, 8 for moments. Before 2023 it was 4P + 16P/N.
    """
    return {
        "weights": 2 * num_params,
        "gradients": 6 * num_params // num_gpus,
        "optimizer_state": 12 * num_params // num_gpus,
    }


def deepspeed_zero3_bytes(num_params: int, largest_module_params: int, num_gpus: int = 1) -> dict[str, int]:
    """``estimate_zero3_model_states_mem_needs`` per GPU without offload: 18P/N, and 4 × the largest module gathered.

    The split of 18 into causes is ours, after ZeRO-2's comment.
    """
    return {
        "weights": 2 * num_params // num_gpus,
        "gradients": 4 * num_params // num_gpus,
        "optimizer_state": 12 * num_params // num_gpus,
        "temporaries": 4 * largest_module_params,
    }


def _deepspeed_zero2(facts: Facts) -> Estimate | str:
    if reason := why_not_full_adamw(facts):
        return reason
    constants = {"weights": 2, "gradients": 6, "optimizer_state": 12}
    return estimate(constants, **deepspeed_zero2_bytes(facts.num_params))


def _deepspeed_zero3(facts: Facts) -> Estimate | str:
    if reason := why_not_full_adamw(facts):
        return reason
    constants = {"weights": 2, "gradients": 4, "optimizer_state": 12}
    return estimate(constants, **deepspeed_zero3_bytes(facts.num_params, facts.largest_module_params))


# -- accelerate -----------------------------------------------------------------------------------------------------


def _accelerate(facts: Facts) -> Estimate | str:
    """``estimate_training_usage``: the largest of four figures; float32 4 × the fp32 size, float16 2 × the fp32 size.

    The model is made by ``AutoModel``, which has no output head of its own.
    """
    if facts.spec.method != "full" or facts.optimizer != "adamw":
        return "for full fine-tuning with Adam only"
    size = 4 * (facts.num_params - facts.num_head_params)
    figures = {"model": size, "gradients": size, "optimizer": 2 * size, "step": 4 * size}
    if facts.has_16_bit_weights or facts.is_mixed:
        figures = {"model": size, "gradients": size + size // 2, "optimizer": 2 * size, "step": 2 * size}
    return estimate(in_all=max(figures.values()))


# -- EleutherAI -----------------------------------------------------------------------------------------------------


def _cookbook(facts: Facts) -> Estimate | str:
    """calc_transformer_mem.py: its own parameter count, 2 or 4 + 4 + 12 B each, and Korthikanti's activations."""
    if reason := why_not_full_adamw(facts):
        return reason
    h, layers = facts.hidden, facts.num_layers
    kv_size_ratio, num_mlp_linears = facts.num_kv_heads / facts.num_heads, 3 if facts.is_gated else 2
    n = (
        2 * facts.vocab * h
        + h * facts.spec.seq_len
        + 8 * h * layers
        + 2 * h
        + int(2 * (1 + kv_size_ratio) * layers * h * h)
        + num_mlp_linears * layers * h * facts.mlp
    )
    weights = 4 if facts.is_all_fp32 else 2
    saved = korthikanti_bytes(facts, scores=not facts.spec.gradient_checkpointing)
    constants = {"weights": weights, "gradients": 4, "optimizer_state": 12}
    if facts.spec.gradient_checkpointing:
        return estimate(
            constants | {"checkpoint_store": 34},
            weights=weights * n,
            gradients=4 * n,
            optimizer_state=12 * n,
            checkpoint_store=saved,
        )
    return estimate(
        constants | {"layer_activations": 34, "attention_scores": 5},
        weights=weights * n,
        gradients=4 * n,
        optimizer_state=12 * n,
        saved_activations=saved,
    )


def _transformer_math(facts: Facts, *, scores: bool) -> Estimate | str:
    """Model 2P (fp32 4P), AdamW 12P (8-bit 6P, fp32 8P by its parts), gradients as the model; activations by table."""
    if facts.spec.method != "full" or facts.optimizer not in ("adamw", "adamw-8bit"):
        return f"has no figure for {facts.spec.method} with {facts.spec.optim}"
    n, weights = facts.num_params, 4 if facts.is_all_fp32 else 2
    state = 12 if facts.optimizer == "adamw" else 6
    state -= 4 if facts.is_all_fp32 else 0  # no second copy of weights that are fp32 already
    constants = {"weights": weights, "gradients": weights, "optimizer_state": state}
    states = {"weights": weights * n, "gradients": weights * n, "optimizer_state": state * n}
    if facts.spec.gradient_checkpointing:
        return estimate(constants | {"checkpoint_store": 2}, **states, checkpoint_store=2 * facts.token_layer_widths)
    saved = korthikanti_bytes(facts, scores=scores)
    found = {"layer_activations": 34} | ({"attention_scores": 5} if scores else {})
    return estimate(constants | found, **states, saved_activations=saved)


# -- Megatron-LM ----------------------------------------------------------------------------------------------------


def _megatron_num_params(facts: Facts) -> float:
    """compute_weight_and_optimizer_memory's count: no biases, no positions, embeddings by whether they are tied."""
    h, norm_size = facts.hidden, 2 if facts.norms_have_bias else 1
    projection_ratio = facts.head_size * facts.num_heads / h
    attention = 2 * h * h * (1 + facts.num_kv_heads / facts.num_heads) * projection_ratio
    layer = 2 * h * (facts.mlp * (1.5 if facts.is_gated else 1) + norm_size) + attention
    embeddings = h * facts.vocab * (2 if facts.num_head_params else 1)
    return layer * facts.num_layers + norm_size * h + embeddings


def _megatron(facts: Facts, *, sequence_parallel: bool) -> Estimate | str:
    if reason := why_not_full_adamw(facts):
        return reason
    if facts.spec.gradient_checkpointing:
        return "its report knows no recomputation of whole layers"
    n, tokens, h = _megatron_num_params(facts), facts.num_tokens, facts.hidden
    embedding = 8 * tokens + tokens * h
    if sequence_parallel:
        per_width, factor = 18 + 4 * facts.mlp / h, 1.0
        logits = tokens * h * 4 * (1 + facts.vocab / h)
    else:
        per_width, factor = 34, 1.05
        logits = 2 * (tokens * facts.vocab + tokens * h)
    constants = {"weights": 2, "gradients": 4, "optimizer_state": 12, "layer_activations": per_width * factor}
    constants["logits"] = 4 if sequence_parallel else 2 * factor
    return estimate(
        constants,
        weights=2 * n,
        gradients=4 * n,
        optimizer_state=12 * n,
        saved_activations=factor * (per_width * facts.token_layer_widths + embedding),
        logits=factor * logits,
    )


# -- gpu_poor -------------------------------------------------------------------------------------------------------


def _gpu_poor(facts: Facts) -> Estimate | str:
    """getAllComputedData with train, its own parameter count, and 650 MB of overhead; rank 8 whatever the cell has.

    It has one figure for gradients and optimizer, a third of which are gradients under Adam.
    """
    spec, h = facts.spec, facts.hidden
    if facts.optimizer not in ("adamw", "sgd"):
        return f"has no figure for {spec.optim}"
    adam, adapter = facts.optimizer == "adamw", facts.num_layers * 8 * h * 4
    n = 2 * facts.vocab * h + facts.num_layers * (4 * h * h + 3 * facts.mlp * h)
    weights, states, extra, constants = 2 * n, 2 * n * (3 if adam else 1), 0.0, {"weights": 2.0}
    match spec.method, spec.quant:
        case "full", _:
            constants |= {"gradients": 2, "optimizer_state": 4 if adam else 0}
        case "lora", _:
            states = adapter * 2 * (6 if adam else 2)
        case _, "int8":
            weights, states = n + 0.06 * 2 * n, adapter * 2 * (3 if adam else 1)
            extra, constants = _gpu_poor_extra(facts, 0.75 * 1.25), {"quantised_weights": 1.12}
        case _:
            weights, states = 2 * n / 4 - 2 * n / 64 + 0.06 * 2 * n, adapter * 0.5 * (3 if adam else 1)
            extra, constants = _gpu_poor_extra(facts, 0.75), {"quantised_weights": 0.5 - 2 / 64 + 0.12}
    share = 1 / 3 if adam else 1
    activations = _gpu_poor_activations(facts)
    saved = {"saved_activations": activations}
    if spec.gradient_checkpointing:
        saved = {"checkpoint_store": 0.15 * activations}
    return estimate(
        constants,
        weights=weights,
        gradients=share * states,
        optimizer_state=(1 - share) * states,
        temporaries=extra,
        context=650 * MIB,
        **saved,
    )


def _gpu_poor_extra(facts: Facts, factor: float) -> float:
    """getExtraMemory, for bitsandbytes: grows with the root of the length above 50."""
    common = (15 * facts.hidden + 6 * facts.mlp) * facts.num_layers
    return factor * common * 50 * max(1.0, math.sqrt(facts.spec.seq_len / 50)) * facts.spec.batch_size


def _gpu_poor_activations(facts: Facts) -> int:
    """getActivationMemory with 2-byte floats."""
    length, h, mlp = facts.spec.seq_len, facts.hidden, facts.mlp
    attention = 2 * length * h * 8 + length * length * facts.num_heads * (2 + 4 + 2)
    feed_forward = 2 * length * h * 2 + 2 * length * mlp * 6
    norms = length * 4 * 2 + length * h * 2 * 6
    return (attention + feed_forward + norms) * facts.num_layers * facts.spec.batch_size


# -- vram-calculator and the Ultrascale Playbook --------------------------------------------------------------------


def _vram_calculator(facts: Facts) -> Estimate | str:
    """estimateResult: 6 or 4 + 4 + 8 B/param, outputs twice in fp32, 1000 MiB of kernels; no checkpointing."""
    if reason := why_not_full_adamw(facts):
        return reason
    if facts.spec.gradient_checkpointing:
        return "knows no recomputation"
    n, tokens, h = facts.num_params, facts.num_tokens, facts.hidden
    x = 4 if facts.is_all_fp32 else 2
    keys = 2 * facts.num_kv_heads * h // facts.num_heads
    attention = tokens * (x * (3 * h + keys) + h)
    feed_forward = tokens * (x * (h + 2 * facts.mlp) + h)
    layer = attention + feed_forward + 2 * x * tokens * h
    copies = 0 if facts.is_all_fp32 else 2
    return estimate(
        {"weights": 4, "gradients": 4, "optimizer_state": 8, "attention_scores": 2 * x + 1, "logits": 8}
        | ({"cast_copies": copies} if copies else {}),
        weights=4 * n,
        cast_copies=copies * n,
        gradients=4 * n,
        optimizer_state=8 * n,
        saved_activations=layer * facts.num_layers + (2 * x + 1) * facts.num_scores,
        logits=8 * tokens * facts.vocab,
        context=1000 * MIB,
    )


def _ultrascale(facts: Facts) -> Estimate | str:
    """memory.js with tp = dp = 1: a GPT's parameter count, 2 + 2 + 12 B (fp32 4 + 4 + 8), activations by operation."""
    if reason := why_not_full_adamw(facts):
        return reason
    h, layers, tokens, spec = facts.hidden, facts.num_layers, facts.num_tokens, facts.spec
    n = h * (facts.vocab + spec.seq_len) + layers * (12 * h * h + 13 * h) + 2 * h
    x = 4 if facts.is_all_fp32 else 2
    state = 8 if facts.is_all_fp32 else 12
    ends = tokens * h * (1 + 2 * x)
    constants = {"weights": x, "gradients": x, "optimizer_state": state, "logits": 4}
    states = {"weights": x * n, "gradients": x * n, "optimizer_state": state * n, "logits": 4 * tokens * facts.vocab}
    if spec.gradient_checkpointing:
        return estimate(
            constants | {"checkpoint_store": x}, **states, checkpoint_store=x * facts.token_layer_widths + ends
        )
    activation = 3 if facts.is_gated else 0 if _is_relu(facts) else 1  # widths of h_ff kept by the activation function
    layer = tokens * (h * (5 * x + 1) + h * x + facts.mlp * x * (1 + activation) + h + 2 * h * x)
    return estimate(
        constants | {"attention_scores": 2 * x + 1},
        **states,
        saved_activations=layer * layers + (2 * x + 1) * facts.num_scores + ends,
    )


def _is_relu(facts: Facts) -> bool:
    config = facts.spec.architecture
    return "relu" in str(config.get("activation_function", config.get("hidden_act", "")))


TOOLS = (
    Formula(
        name="deepspeed-zero2", apply=_deepspeed_zero2, counts=_STATES,
        source="github:deepspeedai/DeepSpeed deepspeed/runtime/zero/stage_1_and_2.py@02aa38c, "
               "estimate_zero2_model_states_mem_needs",
        says="2P + 18P/N without offload: 20 B/param on one GPU",
        recipe="DeepSpeed ZeRO-2 with fp32 gradients beside the 16-bit ones",
    ),
    Formula(
        name="deepspeed-zero3", apply=_deepspeed_zero3, counts=(*_STATES, "temporaries"),
        source="github:deepspeedai/DeepSpeed deepspeed/runtime/zero/stage3.py@007cca6, "
               "estimate_zero3_model_states_mem_needs",
        says="18P/N + 4 × the largest module, without offload",
        recipe="DeepSpeed ZeRO-3",
    ),
    Formula(
        name="accelerate", apply=_accelerate, counts=("in_all",),
        source="github:huggingface/accelerate src/accelerate/commands/estimate.py@00e4d26, estimate_training_usage",
        says="Training using Adam: 16 B/param in float32, 8 in float16, without an untied head",
        recipe="one dtype for weights, gradients and both moments",
    ),
    Formula(
        name="eleuther-cookbook", apply=_cookbook, counts=(*_STATES, *_SAVED),
        source="github:EleutherAI/cookbook calc/calc_transformer_mem.py@069ae2e, calc_mem",
        says="own count × (2 + 4 + 12), activations s·b·h·L·(34 + 5·a·s/h), with checkpointing 34·s·b·h·L",
        recipe="16-bit weights, fp32 gradients, master weights and moments (GPT-NeoX)",
    ),
    Formula(
        name="transformer-math", apply=lambda facts: _transformer_math(facts, scores=True), counts=(*_STATES, *_SAVED),
        source="https://blog.eleuther.ai/transformer-math/, Training, no recomputation",
        says="2P + 2P + 12P (8-bit 6P), activations s·b·h·L·(34 + 5·a·s/h); recomputed 2·s·b·h·L",
        recipe="16-bit weights and gradients, fp32 master weights and moments",
    ),
    Formula(
        name="transformer-math-selective", apply=lambda facts: _transformer_math(facts, scores=False),
        counts=(*_STATES, *_SAVED),
        source="https://blog.eleuther.ai/transformer-math/, Training, selective recomputation",
        says="2P + 2P + 12P (8-bit 6P), activations 34·s·b·h·L; recomputed 2·s·b·h·L",
        recipe="the same with fused attention",
    ),
    Formula(
        name="megatron", apply=lambda facts: _megatron(facts, sequence_parallel=False),
        counts=(*_STATES, "saved_activations", "logits"),
        source="github:NVIDIA/Megatron-LM megatron/training/theoretical_memory_usage.py@00caa53, "
               "compute_activation_memory_without_sp",
        says="own count × 18, activations 1.05·(34·s·b·h·L + s·b·(h + 8) + 2·s·b·(h + V))",
        recipe="Megatron-LM with fused attention",
    ),
    Formula(
        name="megatron-sp", apply=lambda facts: _megatron(facts, sequence_parallel=True),
        counts=(*_STATES, "saved_activations", "logits"),
        source="github:NVIDIA/Megatron-LM megatron/training/theoretical_memory_usage.py@00caa53, "
               "compute_activation_memory",
        says="own count × 18, activations s·b·h·L·(18 + 4·f/h) + s·b·(h + 8) + 4·s·b·(h + V)",
        recipe="Megatron-LM with sequence parallelism and selective recomputation",
    ),
    Formula(
        name="gpu_poor", apply=_gpu_poor, counts=(*_STATES, *_SAVED, "temporaries", "context"),
        source="github:RahulSChand/gpu_poor src/App.js@05d18ab, getAllComputedData (Train)",
        says="own count × 8 B (4-bit weights 0.59), rank-8 adapters, activations (checkpointed × 0.15), 650 MB",
        recipe="bf16 weights, gradients and moments; eager attention",
    ),
    Formula(
        name="vram-calculator", apply=_vram_calculator,
        counts=(*_STATES, "cast_copies", "saved_activations", "logits", "context"),
        source="github:furiousteabag/vram-calculator app/_lib/index.ts@b367569, estimateResult (vram.asmirnov.xyz)",
        says="18 B/param (fp32: 16), Korthikanti's activations by operation, logits 8 B, 1000 MiB for CUDA",
        recipe="fp32 weights, with or without autocast; eager attention",
    ),
    Formula(
        name="ultrascale", apply=_ultrascale, counts=(*_STATES, *_SAVED, "logits"),
        source="hf:spaces/nanotron/ultrascale-playbook src/memory.js, activationMemory and paramGradsOpt",
        says="a GPT's count × 16, Korthikanti's activations by operation, logits 4 B",
        recipe="16-bit weights and gradients, fp32 master weights and moments; eager attention",
    ),
)  # fmt: skip
