"""Reasons: why a prediction is as large as it is, where a reader would not expect it, and what makes it smaller; its
parts in words: their bytes as products of this run's numbers, and what does not reduce the largest.

In: a spec, its Prediction, or the terms at its peak. Out: sentences, none for most cells. Never computes a term.
"""

from collections.abc import Mapping
from typing import Any

from vramprobe.architecture import Architecture, UnsupportedArchitecture, architecture
from vramprobe.bounds.tensors import DOUBLE_QUANTISED, quantised_bytes, tensors
from vramprobe.catalog import Gpu, text_config
from vramprobe.catalog.models import shipped_model
from vramprobe.catalog.names import split_quantized
from vramprobe.log.meanings import MEANINGS
from vramprobe.predict.prediction import Prediction
from vramprobe.rules.cell import NO_SDPA
from vramprobe.spec import CellSpec
from vramprobe.units import KIB, format_bytes

#: Below this share of the peak nothing is explained.
_LEAST_SHARE = 0.02
#: Compute capabilities whose flash attention has no backward for heads from 192 to 224, with dropout to 256 (torch's
#: transformers/cuda/sdp_utils.cpp, check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120).
_NARROW_HEADS = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))

_STATES = "a smaller batch, shorter sequences or gradient checkpointing"
_PER_TOKEN = "quantization, a smaller LoRA rank or another optimizer"
#: What does not reduce a part, by its name.
_NO_HELP = {
    "weights": _STATES,
    "gradients": _STATES,
    "optimizer_state": _STATES,
    "saved_activations": _PER_TOKEN,
    "checkpoint_store": _PER_TOKEN,
    "logits": f"gradient checkpointing, {_PER_TOKEN}",
}


def reasons(spec: CellSpec, terms: Mapping[str, int]) -> list[str]:
    """Explain the bytes that a cell holds for a reason that its options do not show."""
    arch, least = architecture(spec.architecture), _LEAST_SHARE * sum(terms.values())
    said = [*_dequantized(spec), *_eager(spec, arch, least), *_positions(spec)]
    if spec.is_sharded:
        return said  # the others are of a whole model
    return [*_double_quantization(spec, arch, least), *_kept_inputs(spec, terms, least), *_experts(spec, arch), *said]


def without_flash(spec: CellSpec, gpu: Gpu | None) -> list[str]:
    """Return a note if ``gpu`` runs another attention kernel than most; raises UnsupportedArchitecture."""
    if gpu is None or gpu.capability is None or spec.attn != "sdpa" or spec.device != "cuda":
        return []
    if gpu.capability < (8, 0):
        return [
            f"{gpu.name} has no flash attention: sdpa takes the memory-efficient kernel, and where that does not run "
            "(bf16, or query heads that share keys) holds the scores whole; a batch with a mask repeats the keys "
            + ("first, as here" if spec.padding else "first: --padding asks for one")
        ]
    head_size = architecture(spec.architecture).head_size
    widest = 256 if text_config(spec.architecture).get("attention_dropout") else 224
    if gpu.capability in _NARROW_HEADS and 192 < head_size <= widest:
        return [
            f"{gpu.name} has no backward of flash attention for heads of {head_size}: sdpa takes the "
            "memory-efficient kernel, and where query heads share keys holds the scores whole"
        ]
    return []


def _double_quantization(spec: CellSpec, arch: Architecture, least: float) -> list[str]:
    if spec.quant not in DOUBLE_QUANTISED:
        return []
    quantised = [one for one in tensors(spec, arch) if one.quantised]
    more = sum(
        one.num_copies * (quantised_bytes(one, f"{spec.quant}-single") - quantised_bytes(one, spec.quant))
        for one in quantised
    )
    if more < least:
        return []
    return [
        f"{spec.quant} quantizes its scales again (double quantization, as QLoRA's paper, Axolotl and Unsloth); "
        f"TRL does not by default: --quant {spec.quant}-single, {format_bytes(more)} more"
    ]


def _kept_inputs(spec: CellSpec, terms: Mapping[str, int], least: float) -> list[str]:
    """bitsandbytes' MatMul8bitLt keeps its input as an attribute, which no checkpoint frees."""
    kept = terms.get("checkpoint_store", 0)
    if spec.quant != "int8" or not spec.gradient_checkpointing or kept < least:
        return []
    return [
        f"int8 layers keep their inputs, which gradient checkpointing cannot drop: most of {format_bytes(kept)} of "
        "checkpoint_store; --quant nf4 keeps none"
    ]


def _experts(spec: CellSpec, arch: Architecture) -> list[str]:
    """PEFT's adapters of experts in one tensor: as many as experts, and a copy of the stack with its adapter in it."""
    wrapped = [one.name for one in arch.wrapped]
    parts = tensors(spec, arch)
    adapters = [one for one in parts if one.role == "adapter" and one.name.rpartition(".")[0] in wrapped]
    if not adapters:
        return []
    num_bytes = sum(one.num_bytes * one.num_copies for one in adapters)
    copy = max(one.num_bytes for one in parts if one.name in wrapped)
    return [
        f"LoRA on experts: adapters of every expert take {format_bytes(num_bytes)} of the weights, their gradients as "
        f"much and AdamW's state twice as much; PEFT copies a layer's stack of experts with its adapter in it, "
        f"{format_bytes(copy)} each; --lora-targets q_v leaves experts out"
    ]


def _eager(spec: CellSpec, arch: Architecture, least: float) -> list[str]:
    scores = 2 * spec.batch_size * arch.num_heads * spec.seq_len**2
    if spec.attn != "eager" or scores < least:
        return []
    by_default = f" (transformers has no sdpa for {spec.model_type})" if spec.model_type in NO_SDPA else ""
    return [
        f"attn eager{by_default} holds each layer's attention scores whole, {format_bytes(scores)} a copy in 16 bits, "
        "several copies at once; they grow with the square of --seq-len, and flash attention holds none"
    ]


def _dequantized(spec: CellSpec) -> list[str]:
    """A checkpoint that is quantized already, as gpt-oss's."""
    entry = shipped_model(spec.model)
    if entry is None or entry.quantization is None or split_quantized(spec.model)[1]:
        return []
    return [
        f"the checkpoint of {spec.model_label} is {entry.quantization}: counted are its weights dequantized to "
        f"{spec.dtype}, as they are trained"
    ]


def _positions(spec: CellSpec) -> list[str]:
    config = text_config(spec.architecture)
    positions = config.get("max_position_embeddings") or 0
    if not 0 < positions < spec.seq_len:
        return []
    return [
        f"seq_len {spec.seq_len:,} is beyond the {positions:,} positions of {spec.model_label}: memory is as said, and "
        "the model has not learnt them without RoPE scaling"
    ]


def largest_part(spec: CellSpec, found: Prediction) -> str:
    """Name the largest part of the peak, with its formula on one GPU."""
    if not found.terms:
        return ""
    name, size = max(found.terms.items(), key=lambda part: part[1])
    formula = _formula(spec, name, size) if not spec.is_sharded else ""
    said = f"{name}, {format_bytes(size)}{f' = {formula}' if formula else ''}"
    return f"{said}; not reduced by {_NO_HELP[name]}" if name in _NO_HELP else said


def parts(spec: CellSpec, found: Prediction) -> dict[str, str]:
    """Return each part of the peak, the largest first: its formula on one GPU where there is one, and what it is."""
    said = {}
    for name, size in sorted(found.shown_terms.items(), key=lambda part: -part[1]):
        formula = _formula(spec, name, size) if not spec.is_sharded else ""
        said[name] = "; ".join(filter(None, [formula, MEANINGS.get(name, "")]))
    return said


def _formula(spec: CellSpec, name: str, size: int) -> str:
    """The part's bytes as a product; empty where a factor is not known."""
    text: dict[str, Any] = text_config(spec.architecture)
    tokens = f"{spec.num_tokens:,} tokens"
    layers, vocabulary = text.get("num_hidden_layers") or text.get("n_layer"), text.get("vocab_size")
    if name in ("saved_activations", "checkpoint_store") and layers:
        return f"{tokens} × {layers} layers × {size / spec.num_tokens / layers / KIB:,.1f} KiB"
    if name == "logits" and vocabulary:
        return f"{tokens} × a vocabulary of {vocabulary:,} × {size / spec.num_tokens / vocabulary:.1f} bytes"
    if name == "weights" or (name in _NO_HELP and spec.method == "full"):
        return _per_parameter(spec, size)
    return ""


def _per_parameter(spec: CellSpec, size: int) -> str:
    try:
        num_params = architecture(spec.architecture).num_params
    except UnsupportedArchitecture:
        return ""
    return f"{num_params / 1e9:,.3f} billion parameters × {size / num_params:.2f} bytes"
