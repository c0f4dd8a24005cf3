"""The options of a cell, a row each: what the command line, sweep files, records and tables say of it.

In: nothing. Out: OPTIONS, in the order of ``--help``. Defaults and types are spec.py's, which combinations can run is
said in rules/. Never imports pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from vramprobe.choices import (
    RECIPES,
    Attention,
    Autocast,
    CpRotation,
    Dtype,
    KbitPrep,
    LoopName,
    Loss,
    Method,
    Offload,
    Optim,
    Quant,
    Sharding,
    Trainer,
    Weights,
)


class CellOption(NamedTuple):
    """One option of a cell."""

    kind: type  # of its value on the command line
    help: str
    meaning: str | None  # of its column in records; null: it has none
    is_recipe: bool = False  # whether a recipe of training may change it, as tables of GPUs say
    title: str | None = None  # how tables name a method that has it, where they do


def as_typed(options: Mapping[str, Any]) -> list[str]:
    """Options of a cell as they are typed, ``["--batch-size", "4", "--no-dora"]``; those that are null are left out."""
    words = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif value is not None:
            words += [flag, ",".join(value) if isinstance(value, (list, tuple)) else str(value)]
    return words


def _words(kind: Any) -> str:
    return " | ".join(get_args(kind))


_HYBRID = [sharding for sharding in get_args(Sharding) if sharding.endswith("-hybrid")]
_ADAPTER = {
    "lora_r": CellOption(int, "LoRA rank (default 16).", "rank of the adapters", is_recipe=True),
    "lora_alpha": CellOption(float, "LoRA alpha (default 2 × rank).", "scale of the adapters"),
    "lora_dropout": CellOption(
        float, "LoRA dropout, in [0, 1) (default 0).", "dropout before the adapters", is_recipe=True
    ),
    "lora_targets": CellOption(
        str,
        "Modules with adapters: all-linear | q_v | names such as q_proj,v_proj (default all-linear).",
        "modules with adapters",
        is_recipe=True,
    ),
    "lora_dtype": CellOption(
        str,
        f"Dtype of the adapters: {_words(Dtype)} (default fp32; bf16 under kbit-prep trl).",
        "dtype of the adapters",
        is_recipe=True,
    ),
    "dora": CellOption(
        bool, "Weight-decomposed LoRA (DoRA).", "whether adapters are weight-decomposed", is_recipe=True, title="DoRA"
    ),
}
_RANK = {
    "num_gpus": CellOption(
        int,
        "Number of GPUs, one rank each, --batch-size per rank (default 1); under device-map, one process uses all.",
        "ranks that trained together, one per GPU",
    ),
    "sharding": CellOption(
        str,
        f"How the GPUs share the model: {_words(Sharding)}.",
        "what the ranks share, by the framework's name (ddp, fsdp, zero3, …); NA on one GPU",
    ),
    "shard_size": CellOption(
        int,
        f"GPUs per shard group under {' and '.join(_HYBRID)} (default 8: one machine).",
        "ranks per shard group under hybrid sharding; else NA",
    ),
    "cp_size": CellOption(
        int,
        "Context parallelism: ranks that share each sequence, under fsdp (default 1).",
        "ranks that share each sequence (context parallelism); 1 without",
    ),
    "cp_rotation": CellOption(
        str,
        f"How those ranks exchange keys and values: {_words(CpRotation)} (default allgather).",
        "how context parallelism exchanges keys and values: allgather or alltoall",
    ),
    "offload": CellOption(
        str,
        f"What the ranks offload to host memory: {_words(Offload)} (default none).",
        "kept in host memory: none, optimizer (state, stepped weights, gradients) or params (these too)",
    ),
    "only_rank": CellOption(
        int,
        "Emulated only: run this one rank of --num-gpus (counted from 0).",
        "the one rank that ran, with its peers' messages emulated; NA where all ran",
    ),
}
OPTIONS: dict[str, CellOption] = {
    "model": CellOption(
        str,
        "A slug of `vramprobe models`, a path to a config.json or checkpoint folder, or a hub id.",
        "catalog slug, path or hub id as given",
    ),
    "method": CellOption(str, _words(Method), "full, lora or qlora"),
    "batch_size": CellOption(int, "Sequences per micro-batch.", "sequences per micro-batch"),
    "seq_len": CellOption(
        int, "Tokens per sequence, without those of --images; 2k is 2,048.", "tokens per sequence, images apart"
    ),
    "images": CellOption(
        int,
        "Images per sequence of a vision-language model; their tokens come on top of --seq-len (default 0).",
        "images per sequence",
    ),
    "image_size": CellOption(
        str,
        "WIDTHxHEIGHT in pixels of each image of --images (default 640x480).",
        "width and height of each image in pixels; NA without images",
    ),
    "freeze_vision": CellOption(
        bool,
        "Train nothing, and put no adapter, in the vision tower and its projector.",
        "whether the vision tower and its projector were left as they are",
        is_recipe=True,
    ),
    "recipe": CellOption(str, f"Sets dtype and autocast together: {' | '.join(RECIPES)}.", None),
    "dtype": CellOption(
        str, f"Dtype of the weights as loaded: {_words(Dtype)} (default bf16).", "dtype of the weights as loaded"
    ),
    "autocast": CellOption(
        str,
        f"Autocast dtype: {_words(Autocast)} (default: none for full, fp16 with --dtype fp16, else bf16).",
        "dtype of autocast, or none",
    ),
    "quant": CellOption(
        str,
        f"Quantization of the weights: {_words(Quant)} (default for qlora: nf4, with double quantization as in QLoRA's "
        "paper, Axolotl and Unsloth; nf4-single: without, TRL's default).",
        "quantization of the frozen base: none, nf4 (its scales quantized again), nf4-single (not), fp4 or int8",
        is_recipe=True,
    ),
    "kbit_prep": CellOption(
        str,
        f"Who prepares a quantized model for training: {_words(KbitPrep)} (default for qlora: peft).",
        "preparation of a quantized model: none, peft or trl",
        is_recipe=True,
    ),
    "optim": CellOption(
        str,
        f"Optimizer: {_words(Optim)} (default adamw_torch_fused).",
        "optimizer, by its transformers name",
        is_recipe=True,
    ),
    "gradient_checkpointing": CellOption(
        bool,
        "Recompute each layer in backward instead of saving its activations.",
        "whether backward recomputes the layers",
    ),
    "grad_accum": CellOption(
        int, "Micro-batches per optimizer step (default 1).", "micro-batches per optimizer step", is_recipe=True
    ),
    "attn": CellOption(
        str,
        f"Attention implementation: {_words(Attention)} (default: sdpa where transformers has it).",
        "requested attention implementation",
        is_recipe=True,
    ),
    "padding": CellOption(
        bool,
        "Pad an eighth of each sequence, so that the model gets an attention mask.",
        "whether an eighth of each sequence was padding, with an attention mask",
        is_recipe=True,
    ),
    "torch_compile": CellOption(
        bool, "Compile the model with torch.compile.", "whether the model was compiled", is_recipe=True
    ),
    "fused_linear_cross_entropy": CellOption(
        bool,
        "Liger's fused head and loss: the full logits are never stored.",
        "whether Liger's fused linear and cross-entropy replaced head and loss",
        is_recipe=True,
    ),
    "loss": CellOption(
        str,
        f"Head and loss: {_words(Loss)}; TRL's tiles of the logits, or Cut Cross-Entropy's kernels (default nll: the "
        "model's own).",
        "how head and loss were computed: nll (the model's own forward), chunked_nll (TRL's, tiles of the logits), "
        "cut_cross_entropy (kernels without logits)",
        is_recipe=True,
    ),
    "trainer": CellOption(
        str,
        f"Trainer: {_words(Trainer)}, TRL's but for sft (default sft). A batch of dpo, orpo or reward is so many "
        "pairs. GRPO: vramprobe grpo.",
        "whose loss was computed, by its name in TRL: sft (next tokens), or of preferences: dpo, kto, orpo, reward",
        is_recipe=True,
    ),
    "loop": CellOption(
        str,
        f"What your loop keeps between steps: {_words(LoopName)} | trl (default trainer; plain is the same).",
        "what the training loop kept between steps: trainer (its loss at most), keeps-outputs (logits), step-function "
        "(logits, until the step ended), accelerate (logits in fp32), late-zero-grad (gradients)",
    ),
    **_ADAPTER,
    "num_layers": CellOption(
        int,
        "Keep only the first N layers; the record says so.",
        "layers kept where the model was truncated; NA for the full model",
    ),
    "weights": CellOption(
        str,
        f"{_words(Weights)} (default random: memory does not depend on the values).",
        "random or pretrained; memory does not depend on the values",
    ),
    "trust_remote_code": CellOption(
        bool, "Allow a pretrained checkpoint to run its own code.", "whether the checkpoint's own code ran"
    ),
    **_RANK,
    "device": CellOption(str, "auto | cuda | cpu (default auto; predict: cuda, or the fit's device).", "cuda or cpu"),
    "alloc_conf": CellOption(
        str,
        "PYTORCH_ALLOC_CONF for the cell's process, for example expandable_segments:True.",
        "PYTORCH_ALLOC_CONF of the process",
        is_recipe=True,
    ),
    "limit_vram": CellOption(
        str,
        "Limit the GPU's memory to a size such as 24GiB, or to that of a GPU such as RTX-4090.",
        "memory the card was limited to; the rest was held",
        is_recipe=True,
    ),
    "steps": CellOption(int, "Traced steps, at least 3 (default 3).", "traced steps"),
    "timing_steps": CellOption(
        int, "Additional steps that are timed and not traced (default 2).", "further steps, timed and not traced"
    ),
    "seed": CellOption(int, "Seed of weights and tokens (default 0).", "seed of weights and tokens"),
}
#: Those that only a cell with adapters takes.
ADAPTER_OPTIONS = tuple(_ADAPTER)
#: Those of several ranks.
RANK_OPTIONS = tuple(_RANK)
