"""Bytes that vLLM puts on each GPU, by formulas: weights by quantization, the activation peak, KV cache per block.

In: an Architecture, its config and a ServeSpec. Out: bytes per GPU. The formulas are those of vLLM 0.19.0 (V1 engine)
and, where a name says so, of 0.32 (its second model runner); each function names the file. Never imports torch or vLLM.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from vramprobe.architecture import Architecture, Parameter
from vramprobe.predict.serve_spec import ServeSpec
from vramprobe.predict.serving_experts import GROUP_SIZE, Workspace, mxfp4_bytes, pads_experts, up_to
from vramprobe.units import MIB

VOCAB_MULTIPLE = 64  # vllm/model_executor/layers/vocab_parallel_embedding.py: DEFAULT_VOCAB_PADDING_SIZE
BLOCK_TOKENS = 16  # vllm/config/cache.py: the block size of every attention backend that was seen


#: Projections that vLLM keeps in one tensor (QKVParallelLinear, MergedColumnParallelLinear).
_FUSED_AS = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_FUSED_AS |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
_FUSED = re.compile("|".join(rf"\b{name}\b" for name in _FUSED_AS))


class Format(NamedTuple):
    """A quantized weight: bits per element, and bits of scales (and zeros) per group of elements."""

    bits: int
    group_bits: int = 0
    group_size: int = 1
    roles: tuple[str, ...] = ("linear", "experts")


#: vLLM's ``--quantization``, or the checkpoint's own → how its linear weights lie on the GPU
#: (vllm/model_executor/layers/quantization/). Scales per tensor or per output channel are below 0.1 % and not counted.
QUANTIZATIONS = {
    "none": Format(0),
    "fp8": Format(8),
    "w8a8": Format(8),
    "awq": Format(4, 16 + 4, 128),
    "gptq": Format(4, 16 + 4, 128),
    "bitsandbytes": Format(4, 32, 64),
    "mxfp4": Format(4, 8, GROUP_SIZE, ("experts",)),
}

#: What the end of a repository's name (catalog/names.py) says → that of them that vLLM then loads.
NAMED = {
    "-awq": "awq",
    "-gptq-int4": "gptq",
    "-quantized.w4a16": "gptq",
    "-quantized.w8a8": "w8a8",
    "-fp8-dynamic": "fp8",
    "-fp8": "fp8",
    "-bnb-4bit": "bitsandbytes",
}


class Pages(NamedTuple):
    """Division of the KV cache: ``num_groups`` groups of ``layers_per_group`` layers share blocks."""

    page_bytes: int  # of a block in one layer
    layers_per_group: int
    windows: tuple[int | None, ...]  # of each group; None: full attention; 0: a state, one block a request
    block_tokens: int = BLOCK_TOKENS

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all the layers that it serves."""
        return self.page_bytes * self.layers_per_group

    def num_blocks_of(self, length: int, max_num_batched_tokens: int) -> int:
        """Blocks of one request of ``length`` tokens (vllm/v1/kv_cache_interface.py: max_memory_usage_bytes)."""
        total = 0
        for window in self.windows:
            if window is None:
                total += math.ceil(length / self.block_tokens)
            elif window == 0:
                total += 1
            else:
                total += math.ceil(min(window - 1 + max_num_batched_tokens, length) / self.block_tokens) + 1
        return total


def weight_bytes(arch: Architecture, config: Mapping[str, Any], spec: ServeSpec) -> int:
    """Weights on each GPU as torch's allocator counts them, with the table of rotary angles (RotaryEmbeddingBase)."""
    tensors: dict[tuple[str, int], float] = {}  # by name and number of copies
    for one in arch.parameters:
        at = _FUSED.sub(lambda found: _FUSED_AS[found[0]], one.name), arch.num_copies(one)
        tensors[at] = tensors.get(at, 0) + _parameter_bytes(one, arch, spec)
    positions = int(config.get("max_position_embeddings") or 0) if arch.rotary_size else 0
    tables = positions * arch.rotary_size * spec.item_bytes * arch.num_rotary_tables
    return sum(_allocated(round(size)) * copies for (_, copies), size in tensors.items()) + tables


def _allocated(num_bytes: int) -> int:
    """A block above 10 MiB has a segment of its own, whole 2 MiB, and keeps a rest of up to 1 MiB
    (c10/cuda/CUDACachingAllocator.cpp: get_allocation_size, should_split)."""
    rest = -num_bytes % (2 * MIB)
    return num_bytes + rest if num_bytes >= 10 * MIB and rest <= MIB else num_bytes


def _parameter_bytes(one: Parameter, arch: Architecture, spec: ServeSpec) -> float:
    form = QUANTIZATIONS[spec.quantization]
    shares = 1 if one.role in ("norm", "router") else spec.tensor_parallel_size
    if one.module in ("k_proj", "v_proj"):
        shares = min(shares, arch.num_kv_heads)  # a head is not divided, but repeated
    numel: float = one.numel
    if one.role in ("embedding", "head") and one.shape[0] == arch.vocab_size:
        numel = padded_vocab(arch) * math.prod(one.shape[1:])
    if pads_experts(arch, spec) and one.role == "experts":
        return mxfp4_bytes(one, spec)
    bits: float = 8 * spec.item_bytes
    if form.bits and one.role in form.roles and len(one.shape) > 1:
        bits = form.bits + form.group_bits / form.group_size
        if one.module == "kv_b_proj":  # attention/mla_attention.py: process_weights_after_loading keeps a copy
            bits += 8 * spec.item_bytes
    return numel * bits / 8 / shares


def padded_vocab(arch: Architecture) -> int:
    """Rows of embedding and head."""
    return up_to(arch.vocab_size, VOCAB_MULTIPLE)


def activation_bytes(
    arch: Architecture, spec: ServeSpec, *, experts: Workspace, num_sms: int, compiles: bool, blas_workspace_bytes: int
) -> int:
    """Torch's peak above the weights in ``profile_run``: the sampler on ``max_num_seqs`` rows, a layer's MLP, or, on a
    first start, torch.compile's trial (:func:`_trial_bytes`).

    vllm/v1/worker/gpu_model_runner.py (_dummy_sampler_run), vllm/v1/sample/sampler.py and ops/: logits in the model's
    dtype and in fp32, probabilities, exponential noise, and one row per SM for Triton's top-k and top-p (0.17 on).
    Releases before sort instead and take more. ``experts``: their workspace.
    """
    rows = min(spec.max_num_seqs, spec.max_num_batched_tokens)
    hidden, vocab, item = arch.head_width, arch.vocab_size, spec.item_bytes
    copies_logits = 4 if spec.dtype != "fp32" else 0  # else they are fp32 already
    sampler = rows * padded_vocab(arch) * item + rows * vocab * (copies_logits + 4 + 4)
    programs = min(num_sms, rows)
    sampler += min(1 << (programs - 1).bit_length(), num_sms) * vocab * 4
    sampler += 2 * rows * hidden * item  # the hidden states of those rows, and random ones in their place
    trial = _trial_bytes(arch, spec) - blas_workspace_bytes if compiles else 0
    states = spec.max_num_batched_tokens * hidden * item
    return (
        max(experts.held_bytes + max(sampler, _mlp_bytes(arch, spec), experts.passing_bytes), trial)
        + states
        + blas_workspace_bytes
    )


#: Bytes per request of 0.32's tables of logit biases, allowed, stop and bad tokens (vllm/v1/worker/gpu/sample/).
_TABLES_BYTES_0_32 = 17_932
_GUMBEL_BLOCK = 1024  # words that one program of gumbel_sample looks at; it leaves 8 B


def buffer_bytes_0_32(arch: Architecture, spec: ServeSpec, *, blas_workspace_bytes: int) -> int:
    """Bytes that 0.32 holds beside the weights once it has profiled itself: per request the counts of all words and two
    masks (sample/penalties.py, structured_outputs.py), tables, and cuBLAS's workspace."""
    words = 4 * arch.vocab_size + 2 * 4 * math.ceil(arch.vocab_size / 32)
    return spec.max_num_seqs * (words + _TABLES_BYTES_0_32) + blas_workspace_bytes


def activation_bytes_0_32(
    arch: Architecture, spec: ServeSpec, *, experts: Workspace, compiles: bool, blas_workspace_bytes: int
) -> int:
    """Torch's peak above weights and buffers in 0.32's ``profile_run``: logits of ``max_num_seqs`` rows, which it
    samples without a copy, a layer's MLP, or, on a first start, torch.compile's trial; ``experts`` as above."""
    rows, hidden, item = min(spec.max_num_seqs, spec.max_num_batched_tokens), arch.head_width, spec.item_bytes
    states = spec.max_num_batched_tokens * hidden * item
    sampler = rows * (padded_vocab(arch) * item + hidden * item + 8 * math.ceil(arch.vocab_size / _GUMBEL_BLOCK))
    trial = _trial_bytes(arch, spec) - blas_workspace_bytes if compiles else 0
    return max(experts.held_bytes + max(sampler, _mlp_bytes(arch, spec), experts.passing_bytes), trial) + states


def _trial_bytes(arch: Architecture, spec: ServeSpec) -> int:
    """Bytes that torch.compile takes to time the kernel that looks up the embedding (``benchmark_combo_kernel``),
    before it has a workspace: a table of its own and the states. A start that finds its caches does not."""
    table = padded_vocab(arch) // spec.tensor_parallel_size
    return (table + spec.max_num_batched_tokens) * arch.head_width * spec.item_bytes


#: Ends of the names of an MLP's first matrices.
_INNER = ("gate_proj", "up_proj", "gate_up_proj", ".w1", ".w3", ".input_linear")


def _mlp_bytes(arch: Architecture, spec: ServeSpec) -> int:
    """Bytes that gate and up projections leave, and their product; 0 beside experts, which have a workspace."""
    widths = [one.num_out for one in arch.linears if one.name.endswith(_INNER)]
    if not widths or arch.has_experts:
        return 0
    inner = sum(widths) // spec.tensor_parallel_size
    return spec.max_num_batched_tokens * (inner + inner // 2) * spec.item_bytes


def pages(arch: Architecture, config: Mapping[str, Any], spec: ServeSpec) -> Pages:
    """Return how the cache is divided (vllm/v1/core/kv_cache_utils.py: get_kv_cache_groups)."""
    item = 1 if spec.kv_cache_dtype.startswith("fp8") else spec.item_bytes
    if latent := config.get("kv_lora_rank"):  # MLA: one latent and one rotary key per token, on every GPU
        elements = int(latent) + arch.rotary_size
    else:
        heads = max(arch.num_kv_heads // spec.tensor_parallel_size, 1)
        elements = heads * (arch.head_size + (arch.value_size or arch.head_size))
    # What an attention layer takes is in blocks large enough for a state (models/config.py: HybridAttentionMamba…).
    num_states = sum(kind != "full_attention" for kind in arch.mixers)
    least = math.ceil(state_bytes(arch, config, spec) / (BLOCK_TOKENS * elements * item)) if num_states else 1
    block_tokens = BLOCK_TOKENS * least
    window = arch.sliding_window or config.get("sliding_window")
    sliding = sum(arch.slides(layer) for layer in range(arch.num_layers)) if window else 0
    kinds = [(num_states, 0), (sliding, window), (arch.num_layers - sliding - num_states, None)]
    kinds = [(count, kind) for count, kind in kinds if count]
    least, most = min(count for count, _ in kinds), max(count for count, _ in kinds)
    size = most if most < 1.5 * least else least  # _get_kv_cache_groups_uniform_page_size
    groups = tuple(kind for count, kind in kinds for _ in range(math.ceil(count / size)))
    return Pages(block_tokens * elements * item, size, groups, block_tokens)


def state_bytes(arch: Architecture, config: Mapping[str, Any], spec: ServeSpec) -> int:
    """Bytes that a hybrid's layer which does not attend keeps of one request on each GPU; its recurrence in the dtype
    that the config names (vllm/model_executor/layers/mamba/mamba_utils.py, models/config.py). Groups of Mamba that
    several GPUs repeat are not counted."""
    own = {"float32": 4, "bfloat16": 2, "float16": 2}.get(str(config.get("mamba_ssm_dtype")), spec.item_bytes)
    return (arch.convolved_size * spec.item_bytes + arch.recurrent_size * own) // spec.tensor_parallel_size
