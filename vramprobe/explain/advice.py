"""Map facts about a failure to changes, the most effective first. One table.

In: the keys of a failure, the narrowest first: a detail of its phase, its phase. Out: at most three Changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_CHANGES = 3

_SMALLER = "halve the per-device batch size and double gradient_accumulation_steps"
_CHECKPOINT = "gradient checkpointing, if it is off"
_SHORTER = "a shorter max_length"
_CHUNKED = "a chunked or fused loss that never holds all logits (use_liger_kernel; TRL: loss_type='chunked_nll')"
_KERNEL = (
    "attention that holds no score matrix: attn_implementation='sdpa' or 'flash_attention_2', a mask that allows it"
)
_PIXELS = (
    "fewer pixels per image (max_pixels, a smaller image_size, fewer frames or tiles): max_length does not cut images"
)
_SHARD = "shard parameters and optimizer state (FSDP, ZeRO-3) or use LoRA"
_HELD = "see what else holds the GPU (nvidia-smi, rocm-smi, xpu-smi): another process, or one that did not end"

#: By a phase, "phase: detail", or what is known beside them.
ADVICE: dict[str, tuple[str, ...]] = {
    "larger than the GPU": (
        "check the sizes first: such a tensor is often a wrong shape, a row far longer than meant, or a large image",
        _KERNEL,
        "a shorter max_length, or fewer pixels per image",
    ),
    "larger than the GPU: the loss": (
        _CHUNKED,
        "check the rows' length: so many logits are of far more tokens than meant",
        _SMALLER,
    ),
    "larger than the GPU: attention": (_KERNEL, _SHORTER, _SMALLER),
    "larger than the GPU: the vision tower": (_PIXELS, _KERNEL, "fewer images per batch"),
    "larger than the GPU: load": (
        "load quantized (load_in_4bit), or shard while loading (ZeRO-3, FSDP, device_map)",
        "load in bf16 (dtype=torch.bfloat16)",
        "a smaller model",
    ),
    "bug": (
        "look at the sizes at this line: print the shapes and counts that it is given",
        "update the library whose frame this is, and report it there with the traceback",
    ),
    "forward": (_CHECKPOINT, _SMALLER, _SHORTER),
    "forward: the loss": (_CHUNKED, _SMALLER, _SHORTER),
    "forward: log probabilities and entropy": (
        "chunked or fused log probabilities (TRL: use_liger_kernel; verl: use_fused_kernels, "
        "entropy_from_logits_with_chunking)",
        "a smaller micro-batch (TRL: per_device_train_batch_size; OpenRLHF: micro_train_batch_size; verl: "
        "ppo_micro_batch_size_per_gpu, log_prob_micro_batch_size_per_gpu)",
        "shorter completions (max_completion_length, response_length)",
    ),
    "forward: attention": (_KERNEL, _SMALLER, _SHORTER),
    "forward: the vision tower": (
        _PIXELS,
        "fewer images or rows per batch",
        "freeze the vision tower: its activations are not kept then",
    ),
    "forward: gathering sharded parameters": (
        "wrap each decoder layer (FSDP's auto_wrap_policy), and reshard_after_forward=True",
        "gather less ahead: FSDP's limit_all_gathers; ZeRO-3's stage3_prefetch_bucket_size, stage3_max_live_parameters",
        _SMALLER,
    ),
    "backward": (_CHECKPOINT, _SMALLER, _CHUNKED),
    "backward: a compiled graph": (_CHUNKED, _SMALLER, _CHECKPOINT),
    "backward: logits": (_CHUNKED, _SMALLER, _SHORTER),
    "backward: embedding or head": (
        "train neither embeddings nor head (LoRA without modules_to_save, or requires_grad_(False)): each has a "
        "gradient and optimizer states of this size",
        "16-bit weights and with them gradients (dtype=torch.bfloat16), and an 8-bit optimizer",
        "shard gradients over more GPUs (ZeRO-2, FSDP)",
    ),
    "backward: recomputing a checkpointed layer": (_SMALLER, _SHORTER, _SHARD),
    "backward: gathering sharded parameters": (
        "reshard_after_forward=True, and wrap each decoder layer (FSDP's auto_wrap_policy)",
        "gather less ahead: FSDP's backward_prefetch=BACKWARD_POST; ZeRO-3's stage3_prefetch_bucket_size",
        _SMALLER,
    ),
    "backward: reducing gradients": (
        _SHARD,
        "wrap each decoder layer: one layer's gradients are reduced at a time",
        _SMALLER,
    ),
    "optimizer_step": (
        "an 8-bit or paged optimizer (optim=adamw_bnb_8bit, paged_adamw_8bit)",
        "shard the optimizer state (ZeRO, FSDP) over more GPUs, or offload it",
        "train fewer parameters (LoRA)",
    ),
    "optimizer_step: temporaries of the foreach implementation": (
        "optim=adamw_torch_fused, which needs no temporaries",
        "an 8-bit or paged optimizer (optim=adamw_bnb_8bit, paged_adamw_8bit)",
        "shard the optimizer state (ZeRO, FSDP) over more GPUs, or offload it",
    ),
    "evaluation": (
        "per_device_eval_batch_size=1 (its default is 8)",
        "prediction_loss_only=True, or eval_accumulation_steps=1",
    ),
    "evaluation: gathering its logits": (
        "eval_accumulation_steps=1 or prediction_loss_only=True: logits leave the GPU",
        "per_device_eval_batch_size=1",
    ),
    "evaluation: the vision tower": ("per_device_eval_batch_size=1 (its default is 8)", _PIXELS),
    "save": (
        "save shards: FSDP SHARDED_STATE_DICT, DeepSpeed stage3_gather_16bit_weights_on_model_save=false",
        "gather the full state dict on the CPU (offload_to_cpu, rank 0 only)",
        "free gradients and cached memory before the save (zero_grad, torch.cuda.empty_cache)",
    ),
    "merge": ("merge on the CPU, in a process of its own, after training",),
    "load_best": ("load_best_model_at_end=False; load the checkpoint in a new process",),
    "resume": ("load the checkpoint on the CPU first (map_location='cpu')", "the same sharding as the saved run"),
    "generation": (
        "fewer or shorter prompts and completions at a time",
        "a KV cache in fewer bits (cache_implementation='quantized') or on the host ('offloaded')",
        "quantized weights",
    ),
    "generation: vLLM": (
        "a lower gpu_memory_utilization: what it leaves is for activations, CUDA graphs, and a trainer on this GPU",
        "a lower max_num_seqs or max_num_batched_tokens",
        "a shorter max_model_len, or tensor_parallel_size over more GPUs",
    ),
    "generation: the vision tower": (
        _PIXELS,
        "fewer images per prompt (vLLM: limit_mm_per_prompt)",
        "a lower gpu_memory_utilization or --mem-fraction-static: the tower runs in what they leave",
    ),
    "generation: SGLang": (
        "a lower --mem-fraction-static: activations and CUDA graphs need what it leaves",
        "a lower --chunked-prefill-size or --cuda-graph-max-bs",
        "a larger --tp-size",
    ),
    "generation: ComfyUI": (
        "start it with --lowvram, or --novram if that is not enough",
        "a smaller image, fewer frames, or tiled VAE decoding",
        "weights in 8 bits or quantized (fp8, GGUF)",
    ),
    "generation: a diffusion pipeline": (
        "pipe.enable_model_cpu_offload()",
        "pipe.vae.enable_tiling(), a smaller image or fewer frames",
        "load in bf16 or quantized",
    ),
    "load": (
        "load in bf16 (dtype=torch.bfloat16) or quantized (load_in_4bit)",
        "shard while loading: ZeRO-3, FSDP or device_map",
        "a smaller model",
    ),
    "load: partitioning parameters (zero.Init)": (
        "more GPUs, or offload_param: zero.Init keeps one shard of all parameters on each GPU",
        "load in bf16: zero.Init keeps the dtype that it is given",
        "end what else is on this GPU",
    ),
    "prepare": (
        "shard the model and its optimizer state over more GPUs (ZeRO-3, FSDP)",
        "load in bf16 or quantized",
        "CPU offload",
    ),
    "prepare: raising frozen weights to fp32": (
        "instead of prepare_model_for_kbit_training call model.gradient_checkpointing_enable() and "
        "model.enable_input_require_grads()",
        "quantize what is still in 16 bits: the head, embeddings and experts are what it raises",
        "shard while loading: device_map",
    ),
    "prepare: adding the adapter": (
        "a lower rank or fewer target_modules; modules_to_save copies whole embeddings and heads",
        "autocast_adapter_dtype=False: PEFT else keeps adapters in fp32",
        "load quantized (load_in_4bit)",
    ),
    "prepare: gradient buffers": (
        "a distributed optimizer (--use-distributed-optimizer) with gradients in bf16",
        "more tensor or pipeline parallel ranks",
        "CPU offload of the optimizer",
    ),
    "to_device": (
        "load in bf16 or quantized",
        "load to several GPUs (device_map), or shard (ZeRO-3, FSDP)",
        "CPU offload",
    ),
    "data": ("move batches to the GPU one at a time, in the training loop", _SMALLER),
    "unknown": (_SMALLER, _CHECKPOINT, _SHORTER),
    "host": (
        "load the checkpoint on one rank only, or with low_cpu_mem_usage: each rank may hold a whole copy",
        "fewer dataloader workers and less pinned memory; no CPU offload of optimizer or parameters",
        "more host memory for the job or container (Slurm --mem, resources.limits.memory)",
    ),
    "pinned memory": (
        "pin less: dataloader_pin_memory=False, and no pinned buffers for offload (pin_memory: false)",
        "on WSL, raise memory= in .wslconfig: it pins at most about half of that",
        "raise the limit for locked pages (ulimit -l)",
    ),
    "driver": (
        _HELD,
        "leave memory to the driver and libraries: a smaller batch, or set_per_process_memory_fraction(0.95)",
    ),
    "driver: load": (
        _HELD,
        "if the GPU is free: quantized weights (load_in_4bit) or device_map over more GPUs",
        "on WSL, raise memory= in .wslconfig: loading pins host memory, which it limits",
    ),
    "MPS": (
        _SMALLER,
        _SHORTER,
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 removes the limit; macOS may then swap or stop responding",
    ),
    "MPS: outside": (
        "restart Python: an earlier model, a notebook or another library keeps Metal memory that PyTorch does not see",
        "torch.mps.empty_cache() between models",
        "a smaller batch, image or model",
    ),
}


@dataclass(frozen=True)
class Advice:
    """Something to do; ``num_bytes``: what it frees at most, where the input says so."""

    text: str
    num_bytes: int | None = None


def advice(keys: Iterable[str]) -> list[Advice]:
    """The changes of the first of ``keys`` that the table has."""
    return [Advice(text) for text in next((ADVICE[key] for key in keys if key in ADVICE), ADVICE["unknown"])]
