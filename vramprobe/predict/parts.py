"""Parts of a prediction in words: their bytes as products of this run's numbers, and what does not reduce the largest.

In: a cell, its Prediction. Out: text; empty where nothing is known of the part. Never computes a term.
"""

from __future__ import annotations

from typing import Any

from vramprobe.catalog import text_config
from vramprobe.log.meanings import MEANINGS
from vramprobe.predict.prediction import Prediction
from vramprobe.spec import CellSpec
from vramprobe.units import KIB, format_bytes

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


def largest_part(spec: CellSpec, found: Prediction) -> str:
    """Name the largest part of the peak, with its formula on one GPU."""
    if not found.terms:
        return ""
    name, size = max(found.terms.items(), key=lambda part: part[1])
    formula = _formula(spec, name, size) if spec.num_gpus == 1 else ""
    said = f"{name}, {format_bytes(size)}{f' = {formula}' if formula else ''}"
    return f"{said}; no help: {_NO_HELP[name]}" if name in _NO_HELP else said


def parts(spec: CellSpec, found: Prediction) -> dict[str, str]:
    """Return each part of the peak, the largest first: its formula on one GPU where there is one, and what it is."""
    said = {}
    for name, size in sorted(found.shown_terms.items(), key=lambda part: -part[1]):
        formula = _formula(spec, name, size) if spec.num_gpus == 1 else ""
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
    from vramprobe.architecture import UnsupportedArchitecture, architecture

    try:
        num_params = architecture(spec.architecture).num_params
    except UnsupportedArchitecture:
        return ""
    return f"{num_params / 1e9:,.3f} billion parameters × {size / num_params:.2f} bytes"
