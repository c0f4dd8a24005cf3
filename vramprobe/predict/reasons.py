"""Reasons: why a prediction is as large as it is, where a reader would not expect it, and what makes it smaller.

In: a spec, and the terms at its peak. Out: a sentence each, none for most cells. Never computes a term.
"""

from __future__ import annotations

from collections.abc import Mapping

from vramprobe.architecture import Architecture, architecture
from vramprobe.bounds.tensors import DOUBLE_QUANTISED, quantised_bytes, tensors
from vramprobe.catalog import text_config
from vramprobe.catalog.models import shipped_model
from vramprobe.catalog.names import split_quantized
from vramprobe.rules.cell import NO_SDPA
from vramprobe.spec import CellSpec
from vramprobe.units import format_bytes

#: Below this share of the peak nothing is explained.
_LEAST_SHARE = 0.02


def reasons(spec: CellSpec, terms: Mapping[str, int]) -> list[str]:
    """Explain the bytes that a cell holds for a reason that its options do not show."""
    arch, least = architecture(spec.architecture), _LEAST_SHARE * sum(terms.values())
    said = [*_dequantized(spec), *_eager(spec, arch, least), *_positions(spec)]
    if spec.num_gpus > 1:
        return said  # the others are of a whole model
    return [*_double_quantization(spec, arch, least), *_kept_inputs(spec, terms, least), *_experts(spec, arch), *said]


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
    """bitsandbytes' MatMul8bitLt keeps its input as an attribute (terms/models/quantized.py)."""
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
