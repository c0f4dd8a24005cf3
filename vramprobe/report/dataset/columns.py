"""What each column of the data set holds: its type by its name, and its meaning in words.

In: a column's name. Out: a type, a sentence. A test holds the names against real rows, so that none is unexplained.
"""

from __future__ import annotations

from typing import Literal

#: The column with the whole record.
RECORD = "record_json"

Type = Literal["integer", "number", "flag", "text"]

_FLAGS = {
    "trust_remote_code", "dora", "gradient_checkpointing", "padding", "torch_compile",
    "fused_linear_cross_entropy", "dirty", "held_out",
}  # fmt: skip
_INTEGERS = {
    "num_layers",
    "lora_r",
    "batch_size",
    "seq_len",
    "grad_accum",
    "steps",
    "timing_steps",
    "seed",
    "peak_step",
    "shard_size",
    "cp_size",
    "only_rank",
}
_NUMBERS = {"lora_alpha", "lora_dropout"}

_MEANINGS = {
    "cell_id": "readable name of the configuration",
    "fingerprint": "of everything resolved: equal for the same configuration",
    "attempt_id": "unique per row",
    "started_at": "ISO 8601, UTC",
    "instrument": "how it was observed: cuda and cpu measure; emulated: CUDA software on no GPU; simulated predicts",
    "model": "slug, path or hub id as given",
    "num_layers": "where the architecture was cut to its first layers; null is the model's own depth",
    "weights": "random or pretrained; memory does not depend on the values",
    "trust_remote_code": "whether the checkpoint's own code ran",
    "padding": "whether an eighth of each sequence was padding, so that the model was passed a mask",
    "torch_compile": "whether the model was compiled",
    "fused_linear_cross_entropy": "whether Liger's head and loss in one took their place",
    "method": "full, lora or qlora",
    "quant": "of the frozen base: none, nf4, fp4 or int8",
    "kbit_prep": "how a quantised model was prepared: none, peft or trl",
    "dtype": "of the weights as loaded",
    "autocast": "dtype of autocast, or none",
    "lora_r": "rank of the adapters",
    "lora_alpha": "scale of the adapters",
    "lora_dropout": "in front of the adapters",
    "lora_targets": "modules with adapters",
    "lora_dtype": "of the adapters",
    "dora": "whether adapters are weight-decomposed",
    "optim": "optimizer, by transformers' name",
    "batch_size": "sequences per micro-batch",
    "seq_len": "tokens per sequence",
    "grad_accum": "micro-batches per optimizer step",
    "gradient_checkpointing": "whether layers are recomputed in backward",
    "attn": "attention implementation asked for",
    "num_gpus": "ranks that trained together, one on each GPU",
    "sharding": "what they shared out, by the framework's name (ddp, fsdp, zero3, …); null on one GPU",
    "shard_size": "ranks of a group that shared one model, where several groups each had one; else null",
    "cp_size": "ranks that shared each sequence, by context parallelism; 1 where each rank had its own",
    "cp_rotation": "how those brought keys and values together: allgather or alltoall",
    "offload": "what the ranks kept in host memory: none, optimizer (state, stepped weights, gradients) or params, too",
    "only_rank": "the one rank that ran, its peers' messages made up; null where all ran",
    "device": "cuda or cpu",
    "alloc_conf": "PYTORCH_ALLOC_CONF of the process",
    "limit_vram": "the rest of the card was held, as if it had only this much",
    "steps": "traced steps",
    "timing_steps": "further steps, timed and not traced",
    "seed": "of weights and tokens",
    "model_label": "the model's name without folders or organisation",
    "model_type": "transformers' family",
    "num_tokens": "batch_size × seq_len",
    "num_params": "of the base model, seen on it; tied ones once, a 4-bit weight as its elements",
    "num_trainable_params": "seen on the live model",
    "num_quantised_params": "seen on the live model",
    "quantised_weights_bytes": "packed weights and their quantisation state",
    "residual_dtype": "of the hidden states between layers, as seen",
    "attention_kernels": "fused kernels that ran, as seen",
    "outcome": "ok, oom, oom_host, timeout, error, interrupted, skipped, invalid or contaminated",
    "outcome_detail": "what went wrong, with its amounts; empty where nothing did",
    "peak_phase": "forward, backward, optimizer_step or zero_grad: where the peak was",
    "peak_step": "1-based",
    "peak_allocated_bytes": "highest of the training steps, allocated by tensors",
    "peak_reserved_bytes": "highest of the caching allocator's segments; null on a CPU",
    "peak_device_bytes": "highest that NVML saw, less what was there before; null without NVML",
    "load_allocated_bytes": "peak while loading and preparing",
    "weights_bytes": "parameters, buffers and quantisation state, each storage once",
    "gradients_bytes": "at the end of backward",
    "optimizer_state_bytes": "after the first step",
    "batch_bytes": "tokens and masks",
    "saved_activations_bytes": "allocated at the end of forward less at its start",
    "unaccounted_bytes": "idle allocated memory that no tensor of the above explains",
    "context_bytes": "device less reserved after a full step: CUDA context and what sits behind torch",
    "num_alloc_retries": "times that the caching allocator freed its cache to go on",
    "step_seconds": "median of the timed steps; null where none was timed",
    "total_seconds": "wall time of the cell, its process's start apart",
    "device_name": "GPU's or CPU's marketing name; where instrument is emulated, of the GPU that was not there",
    "device_total_bytes": "of the GPU as torch reports it, or of the host",
    "commit": "of vramprobe",
    "dirty": "whether that checkout had changes",
    "sweep": "the sweep's name; null for a single measurement",
    "held_out": "the sweep keeps this cell out of fits, to test predictions on it",
    RECORD: "the whole record as one line of JSON; vramprobe reads it back (vramprobe.records.record.record_from_json)",
}


def type_of(name: str) -> Type:
    """By the unit that ends the name, or by the name."""
    if name in _FLAGS:
        return "flag"
    if name.endswith("_bytes") or name.startswith("num_") or name in _INTEGERS:
        return "integer"
    return "number" if name.endswith("_seconds") or name in _NUMBERS else "text"


def meaning_of(name: str) -> str:
    """One line. Raises KeyError for a column that nobody has explained."""
    if name.startswith("version_"):
        return f"installed release of {name.removeprefix('version_')}"
    if name.startswith("at_peak_"):
        cause = name.removeprefix("at_peak_").removesuffix("_bytes").replace("_", " ")
        return f"alive at the peak: {cause} (requested bytes on cuda); null where it was not traced"
    return _MEANINGS[name]
