"""An inference engine alone on a GPU, by formulas: what is left for the KV cache, in tokens and requests.

In: a model, a GPU and vLLM's options. Out: a Served. What torch allocates is counted (serving_memory.py); what the
driver takes besides is learnt from published logs (data/serving_charges.csv), and said to be.
"""

import math
from typing import Any, Literal

from vramprobe.architecture import Architecture, UnsupportedArchitecture, architecture, families
from vramprobe.architecture.images import has_images
from vramprobe.catalog import find_model, text_config
from vramprobe.catalog.models import ModelEntry, as_served
from vramprobe.catalog.names import split_quantized
from vramprobe.catalog.shipped import csv_rows
from vramprobe.choices import meant
from vramprobe.emulate.cards import CardProperties, card_properties
from vramprobe.errors import SpecError
from vramprobe.predict import serving_memory
from vramprobe.predict.bisection import bisected
from vramprobe.predict.serve_spec import ServeSpec
from vramprobe.predict.serving_experts import Workspace, experts_workspace, pads_experts
from vramprobe.records.frozen import FrozenModel
from vramprobe.units import GIB, MIB

#: Releases whose formulas these are → (the engine, gpu_memory_utilization by default).
RELEASES = {"0.19": ("vllm 0.17 to 0.19", 0.9), "0.32": ("vllm 0.32", 0.92)}
#: What 0.32 takes off the cache and is not known of every setting.
PADDING = "the padding of MXFP4 experts"
GRAPHS = "what CUDA graphs take off the cache with these settings"
_LARGE_GPU_BYTES = 70 * GIB
_ALL_GRAPHS_SEQS = 256  # vllm/config/vllm.py: sizes up to min(2 × max_num_seqs, 512)
_DTYPES = ("bf16", "fp16", "fp32")


class Served(FrozenModel):
    """Bytes on each GPU; ``kv_cache_bytes`` below 0 or too few blocks for one request: the engine does not start."""

    engine: str
    model: str
    gpu: str
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    gpu_memory_utilization: float
    tensor_parallel_size: int
    requested_bytes: int  # utilization × the GPU's memory
    weights_bytes: int
    buffer_bytes: int = 0  # tables per request and cuBLAS's workspace, where the release holds them beside the weights
    activation_bytes: int
    non_torch_bytes: int  # learnt
    kv_cache_bytes: int
    kv_cache_bytes_per_token: float  # of a long request
    kv_cache_tokens: int
    kv_cache_blocks: int
    max_concurrency: float  # requests of max_model_len tokens at once
    longest_request_tokens: int  # whose cache fits, whatever the model's positions
    graph_bytes: int | None  # learnt; 0.32 takes them off the cache, 0.19 does not; null: not known
    quantization: str = "none"
    left_out: tuple[str, ...] = ()  # parts that are not counted: with any of them the cache is at most so large
    verdict: Literal["fits", "may fit", "does not fit"]  # may fit: only because of what is left out
    notes: tuple[str, ...] = ()


def serve(
    *,
    model: str,
    gpu: str,
    max_model_len: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
    gpu_memory_utilization: float | None = None,
    tensor_parallel_size: int = 1,
    dtype: str = "bf16",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    enforce_eager: bool = False,
    vllm_release: str = "0.19",
    finds_caches: bool = False,
) -> Served:
    """Predict the parts of vLLM's memory on each GPU; defaults are those of ``vllm serve`` (vllm/engine/arg_utils.py).

    ``quantization``: null is the checkpoint's own. ``finds_caches``: torch.compile finds what it compiled at an earlier
    start.

    Raises VramprobeError for a model whose tensors are not known, an unknown GPU, and options that vLLM does not have.
    """
    if vllm_release not in RELEASES:
        raise SpecError(f"vllm_release {vllm_release!r}: one of {', '.join(RELEASES)}")
    engine, default_utilization = RELEASES[vllm_release]
    utilization = default_utilization if gpu_memory_utilization is None else gpu_memory_utilization
    card, entry = card_properties(gpu), find_model(model)
    arch, config = _counted(entry), text_config(entry.config)
    if arch.model_type == "llama4_text":
        raise UnsupportedArchitecture(
            "there is no formula for vLLM's KV cache of Llama 4, whose layers attend within chunks"
        )
    positions = int(config.get("max_position_embeddings") or config.get("n_positions") or 0)
    is_large = card.total_bytes >= _LARGE_GPU_BYTES and "A100" not in card.name
    spec = ServeSpec(
        max_model_len=(positions or 2048) if max_model_len is None else max_model_len,
        max_num_batched_tokens=(8192 if is_large else 2048)
        if max_num_batched_tokens is None
        else max_num_batched_tokens,
        max_num_seqs=(1024 if is_large else 256) if max_num_seqs is None else max_num_seqs,
        tensor_parallel_size=tensor_parallel_size,
        dtype=meant("dtype", dtype),
        quantization=_quantization(entry) if quantization is None else quantization,
        has_scale_blocks=entry.has_scale_blocks,
        kv_cache_dtype=kv_cache_dtype,
        capability=card.compute_capability[0],
        release=vllm_release,
    )
    _check(spec, arch, utilization)
    if vllm_release == "0.32" and spec.quantization == "bitsandbytes":
        raise SpecError("quantization 'bitsandbytes': vLLM 0.32 no longer has it; choose vllm_release 0.19, or awq")
    non_torch, notes = _non_torch(card, tensor_parallel_size)
    workspace = experts_workspace(arch, config, spec)
    left_out, experts = _left_out(entry, arch, spec, workspace), workspace or Workspace()
    weights = serving_memory.weight_bytes(arch, config, spec)
    graphs = 0 if enforce_eager else _graphs(arch.num_layers, spec)
    blas, buffers, inside = card.gpu.blas_workspace_bytes, 0, 0
    compiles = not enforce_eager and not finds_caches
    if vllm_release == "0.19":
        activation = serving_memory.activation_bytes(
            arch,
            spec,
            experts=experts,
            num_sms=card.sm_count,
            compiles=compiles,
            blas_workspace_bytes=blas,
        )
    else:
        buffers = serving_memory.buffer_bytes_0_32(arch, spec, blas_workspace_bytes=blas)
        activation = serving_memory.activation_bytes_0_32(
            arch, spec, experts=experts, compiles=compiles, blas_workspace_bytes=blas
        )
        inside = graphs or 0
        if graphs is None:
            left_out.append(GRAPHS)
    requested = math.ceil(card.total_bytes * utilization)
    cache = requested - weights - buffers - activation - non_torch - inside
    pages = serving_memory.pages(arch, config, spec)
    blocks = max(cache // pages.page_bytes // pages.layers_per_group, 0)

    def needed(length: int) -> int:
        return pages.num_blocks_of(length, spec.max_num_batched_tokens)

    holds_one = "may fit" if left_out else "fits"
    longest = bisected(lambda length: needed(length) <= blocks, blocks * pages.block_tokens, least=1)
    return Served(
        engine=engine,
        model=entry.name,
        gpu=card.gpu.short_name,
        max_model_len=spec.max_model_len,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_num_seqs=spec.max_num_seqs,
        gpu_memory_utilization=utilization,
        tensor_parallel_size=tensor_parallel_size,
        requested_bytes=requested,
        weights_bytes=weights,
        buffer_bytes=buffers,
        activation_bytes=activation,
        non_torch_bytes=non_torch,
        kv_cache_bytes=cache,
        kv_cache_bytes_per_token=pages.block_bytes * pages.windows.count(None) / pages.block_tokens,
        kv_cache_tokens=blocks // len(pages.windows) * min(pages.block_tokens, spec.max_model_len),
        kv_cache_blocks=blocks,
        max_concurrency=blocks / needed(spec.max_model_len),
        longest_request_tokens=longest or 0,
        graph_bytes=graphs,
        quantization=spec.quantization,
        left_out=tuple(left_out),
        verdict=holds_one if blocks >= needed(spec.max_model_len) else "does not fit",
        notes=tuple(notes),
    )


def _counted(entry: ModelEntry) -> Architecture:
    """Return the architecture with its vision tower, where that is counted. Raises UnsupportedArchitecture."""
    served = as_served(entry)
    return architecture(served.config if served.config.get("model_type") in families() else entry.config)


def _quantization(entry: ModelEntry) -> str:
    """The checkpoint's own, by its configuration or its name. Raises SpecError for one that is not counted."""
    _, end = split_quantized(entry.name)
    if entry.name.lower().endswith(("-bf16", "-fp16")):  # a copy without its original's
        return "none"
    own = serving_memory.NAMED.get(end, end[1:]) or entry.quantization or "none"
    if own not in serving_memory.QUANTIZATIONS:
        raise SpecError(
            f"the checkpoint {entry.name} is quantized by {own}, which is not counted; give the nearest as "
            f"quantization: {', '.join(serving_memory.QUANTIZATIONS)}"
        )
    return own


def _left_out(entry: ModelEntry, arch: Architecture, spec: ServeSpec, workspace: Workspace | None) -> list[str]:
    """Parts of this engine that are not counted."""
    parts = []
    if workspace is None:
        parts.append("the experts' workspaces")
    if spec.quantization == "mxfp4" and arch.has_experts and not pads_experts(arch, spec):
        parts.append(f"{PADDING} (6 to 9 % of the weights in published logs of gpt-oss)")
    if has_images(as_served(entry).config):
        parts.append("the vision tower's activations and cache")
    if arch.mixers:
        parts.append("what layers that do not attend take while they run")
    return parts


def _check(spec: ServeSpec, arch: Any, utilization: float) -> None:
    """Raises SpecError for what vLLM would refuse."""
    for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "tensor_parallel_size"):
        if getattr(spec, name) < 1:
            raise SpecError(f"{name} {getattr(spec, name)}: a whole number of 1 or more")
    if not 0 < utilization <= 1:
        raise SpecError(f"gpu_memory_utilization {utilization}: a share of the GPU's memory, above 0 and at most 1")
    if spec.quantization not in serving_memory.QUANTIZATIONS:
        raise SpecError(f"quantization {spec.quantization!r}: one of {', '.join(serving_memory.QUANTIZATIONS)}")
    if spec.dtype not in _DTYPES:
        raise SpecError(f"dtype {spec.dtype!r}: one of {', '.join(_DTYPES)}")
    if spec.kv_cache_dtype not in ("auto", "fp8"):
        raise SpecError(f"kv_cache_dtype {spec.kv_cache_dtype!r}: auto (the model's dtype) or fp8")
    if arch.num_heads % spec.tensor_parallel_size:
        raise SpecError(
            f"tensor_parallel_size {spec.tensor_parallel_size}: vLLM divides the {arch.num_heads} attention heads "
            "evenly; give a divisor of them"
        )


def non_torch_charge() -> int:
    """Bytes that an engine's driver takes outside torch on one GPU, as published logs have it."""
    return round(float(_non_torch_row(several=False)["mib"]) * MIB)


def _non_torch_row(*, several: bool) -> dict[str, str]:
    rows = [row for row in csv_rows("serving_charges.csv") if row["charge"] == "non_torch"]
    (row,) = [one for one in rows if (one["tensor_parallel"] != "1") == several]
    return row


def _non_torch(card: CardProperties, tensor_parallel_size: int) -> tuple[int, list[str]]:
    """(bytes outside torch, what is to be said of them): of this card, else of the only one that logs tell of."""
    several = tensor_parallel_size > 1
    row = _non_torch_row(several=several)
    said = f"memory outside torch is learnt from {row['num_rows']} published logs of an {row['gpu']}"
    if several:
        said += " ×2"
    if card.gpu.short_name != row["gpu"] or (several and tensor_parallel_size != 2):
        said += "; for these GPUs it is assumed to be the same"
    return round(float(row["mib"]) * MIB), [said]


def _graphs(num_layers: int, spec: ServeSpec) -> int | None:
    """CUDA graphs of vLLM's 51 batch sizes, bytes; None for fewer of them, or on several GPUs."""
    if spec.max_num_seqs < _ALL_GRAPHS_SEQS or spec.tensor_parallel_size > 1:
        return None
    row = next(row for row in csv_rows("serving_charges.csv") if row["charge"] == "graphs")
    return round((float(row["mib"]) + float(row["mib_per_layer"]) * num_layers) * MIB)
