"""What a published run did that our workload does not: named differences, each a formula in bytes with its source.

In: a PublishedRow and its cell. Out: the differences that apply, by library version and trainer, and simulated peaks
with them added. None is fitted or made for a row: each was read in the code of the version that ran. A peak is the
largest of four moments, and a difference names the moments it raises, so what hides under a higher one costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

import numpy as np

from vramprobe.architecture import Architecture, architecture
from vramprobe.architecture.releases import LABELS_PADDED, LOSS_APART, SHARED_ROTARY
from vramprobe.literature.published import PublishedRow, Version
from vramprobe.log.log import Log
from vramprobe.rules.cell import lora_target_names
from vramprobe.spec import CellSpec

Moment = Literal["forward", "loss", "layers", "optimizer_step"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
#: The first transformers that leaves repeating key and value heads to flash attention; llama always did.
_NO_REPEATED_HEADS = {"mistral": 4048, "qwen2": 4048, "mixtral": 4048}
#: Width of an input → the products of a layer that take it.
_INPUTS = {
    "hidden_size": ("q_proj", "k_proj", "v_proj"),
    "hidden_size_of_mlp": ("gate_proj", "up_proj"),
    "intermediate_size": ("down_proj",),
}


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Highest allocated bytes of a steady step at each moment; with checkpointing, the forward's is its loss.

    ``loss``: the backward up to where the logits' gradient is freed. ``layers``: the rest of it.
    """

    forward: int
    loss: int
    layers: int
    optimizer_step: int

    @property
    def peak_bytes(self) -> int:
        """The highest of them."""
        return max(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing the published run did otherwise. ``num_bytes`` is 0 where it was read and raises no moment."""

    name: str
    why: str
    source: str
    moments: tuple[Moment, ...]
    applies: Callable[[PublishedRow, CellSpec], bool]
    num_bytes: Callable[[CellSpec], int]


def moments_of(history: Log, spec: CellSpec) -> Moments:
    """The moments of step 2 of a simulation with ``depth="full"``; logits are told by their exact size, 2 or 4 B."""
    logits = spec.num_tokens * spec.architecture["vocab_size"]
    alive = np.cumsum(history.size_bytes)
    peaks = dict.fromkeys(MOMENTS, 0)
    for mark in history.marks:
        part, sizes = (values[mark.events.start : mark.events.stop] for values in (alive, history.size_bytes))
        if mark.step != 2 or not len(part):
            continue
        cuts = {"forward": len(part), "optimizer_step": len(part)}
        if mark.name == "backward":
            freed = np.flatnonzero(np.isin(sizes, (-2 * logits, -4 * logits)))
            cut = int(freed[-1]) + 1 if len(freed) else 0
            peaks["loss"] = max(peaks["loss"], int(part[:cut].max(initial=0)))
            peaks["layers"] = max(peaks["layers"], int(part[cut:].max(initial=0)))
        elif mark.name in cuts:
            peaks[mark.name] = max(peaks[mark.name], int(part.max()))
    return Moments(**peaks)


def differences_of(row: PublishedRow, spec: CellSpec) -> list[Difference]:
    """Those of :data:`DIFFERENCES` that apply to a row and its cell."""
    return [difference for difference in DIFFERENCES if difference.applies(row, spec)]


def with_differences(moments: Moments, spec: CellSpec, differences: list[Difference]) -> Moments:
    """The moments, each raised by the differences that name it."""
    raised = {
        name: getattr(moments, name) + sum(one.num_bytes(spec) for one in differences if name in one.moments)
        for name in MOMENTS
    }
    return replace(moments, **raised)


def _is_older(row: PublishedRow, library: str, than: Version | None) -> bool:
    version = row.versions.get(library)
    return version is not None and than is not None and version < than


def _is_before(row: PublishedRow, release: int | None) -> bool:
    """Whether its transformers is older than a release as architecture/releases.py has it."""
    version = row.versions.get("transformers")
    return version is not None and release is not None and 1000 * version[0] + version[1] < release


def _by_trl(row: PublishedRow) -> bool:
    """Run by trl's SFTTrainer, a transformers Trainer: what fms-acceleration's benchmark launches."""
    return row.source.startswith("fms-acceleration")


def _shape(spec: CellSpec) -> Architecture:
    return architecture(spec.architecture)


def _residual_bytes(spec: CellSpec) -> int:
    """Bytes of an element of the hidden states: a k-bit preparation leaves fp32 norms, and those an fp32 residual."""
    return 4 if spec.kbit_prep != "none" else _BYTES[spec.dtype]


def _logits_are_16_bit(spec: CellSpec) -> bool:
    return spec.autocast != "none" or spec.dtype != "fp32"


def _rotary_tables(spec: CellSpec) -> int:
    arch, positions = _shape(spec), spec.architecture["max_position_embeddings"]
    return arch.num_layers * 2 * positions * arch.head_size * _BYTES[spec.dtype]


def _shifted_logits(spec: CellSpec) -> int:
    """fp32 logits, their shifted copy and the log-softmax: 4 + 4 + 4, where ours holds 2 + 4 + 4."""
    vocab = spec.architecture["vocab_size"]
    return 2 * spec.num_tokens * vocab - 8 * spec.batch_size * vocab


def _shifted_and_16_bit_logits(spec: CellSpec) -> int:
    """16-bit logits, fp32 logits, their shifted copy and the log-softmax: 2 + 4 + 4 + 4, where ours holds 2 + 4 + 4."""
    vocab = spec.architecture["vocab_size"]
    return 4 * spec.num_tokens * vocab - 8 * spec.batch_size * vocab


def _layer_output(spec: CellSpec) -> int:
    return spec.num_tokens * spec.architecture["hidden_size"] * _residual_bytes(spec)


def _repeated_heads(spec: CellSpec) -> int:
    arch = _shape(spec)
    return 2 * spec.num_tokens * (arch.num_heads - arch.num_kv_heads) * arch.head_size * 2


def _kept_inputs(spec: CellSpec) -> int:
    """16-bit inputs of one layer's products, where nothing else keeps them; flash attention keeps o's.

    From an fp32 residual each product casts its own copy. In 16 bit products share their input, and an adapter without
    dropout keeps it too.
    """
    adapted = lora_target_names(spec)
    num_bytes = 0
    for width_key, names in _INPUTS.items():
        width = spec.architecture[width_key.removesuffix("_of_mlp")]
        has_adapter = adapted is None or not set(names).isdisjoint(adapted)
        if _residual_bytes(spec) == 4:
            num_bytes += len(names) * width
        elif spec.lora_dropout or not has_adapter:
            num_bytes += width
    return 2 * spec.num_tokens * num_bytes


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        name="rotary tables in every layer",
        why="each layer keeps cosines and sines of every position it could meet, in the dtype the model is loaded in",
        source="transformers 4.41.2 modeling_mistral.py:107-115, 4.47.1 modeling_mixtral.py:193-201 "
        "(_set_cos_sin_cache, register_buffer); llama until 4.40, mistral 4.41, qwen2 4.44, mixtral 4.47",
        moments=MOMENTS,
        applies=lambda row, spec: _is_before(row, SHARED_ROTARY.get(spec.model_type)),
        num_bytes=_rotary_tables,
    ),
    Difference(
        name="attention mask in the batch",
        why="the collator's padding adds an int64 mask to ids and labels",
        source="trl 0.11.3 sft_trainer.py:344 (DataCollatorForLanguageModeling), transformers data_collator.py "
        "(tokenizer.pad)",
        moments=MOMENTS,
        applies=lambda row, spec: _by_trl(row),
        num_bytes=lambda spec: 8 * spec.num_tokens,
    ),
    Difference(
        name="shifted copy of the logits",
        why="the loss cuts the last token off by a copy; the 16-bit logits are gone by then",
        source="transformers 4.41.2 modeling_mistral.py:1153-1158, 4.45.2 modeling_mistral.py:1064-1066; in mistral "
        "and granite until 4.47, in llama, qwen2 and mixtral until 4.45",
        moments=("forward",),
        applies=lambda row, spec: _is_before(row, LOSS_APART.get(spec.model_type)) and _logits_are_16_bit(spec),
        num_bytes=_shifted_logits,
    ),
    Difference(
        name="shifted copy of the logits, 16-bit logits kept",
        why="the loss moved to a function, whose caller still holds the 16-bit logits",
        source="transformers 4.48.1 loss/loss_utils.py:36-39 (ForCausalLMLoss); 4.49 pads the labels instead",
        moments=("forward",),
        applies=lambda row, spec: (
            spec.model_type in LOSS_APART
            and _is_before(row, LABELS_PADDED)
            and not _is_before(row, LOSS_APART[spec.model_type])
            and _logits_are_16_bit(spec)
        ),
        num_bytes=_shifted_and_16_bit_logits,
    ),
    Difference(
        name="reentrant checkpointing",
        why="the recomputed layer's output lives through its backward; our non-reentrant one stops before it is made",
        source="transformers 4.45.2 modeling_utils.py:2404 (use_reentrant True by default); torch utils/checkpoint.py "
        "(CheckpointFunction.backward)",
        moments=("layers",),
        applies=lambda row, spec: _by_trl(row) and spec.gradient_checkpointing,
        num_bytes=_layer_output,
    ),
    Difference(
        name="key and value heads repeated for flash attention",
        why="every query head gets its own keys and values, which flash attention keeps for backward",
        source="transformers 4.47.1 modeling_mistral.py:329-330 (repeat_kv); gone in 4.48",
        moments=("layers",),
        applies=lambda row, spec: (
            spec.attn == "flash_attention_2" and _is_before(row, _NO_REPEATED_HEADS.get(spec.model_type))
        ),
        num_bytes=_repeated_heads,
    ),
    Difference(
        name="inputs of 4-bit products kept",
        why="bitsandbytes kept every 4-bit layer's input for a gradient that a frozen weight never has",
        source="bitsandbytes 0.43.1 autograd/_functions.py:516 (ctx.tensors = (A, B)); 0.43.2 keeps (None, B), see its "
        "CHANGELOG",
        moments=("layers",),
        applies=lambda row, spec: (
            _is_older(row, "bitsandbytes", (0, 43, 2)) and spec.method == "qlora" and spec.quant != "int8"
        ),
        num_bytes=_kept_inputs,
    ),
    Difference(
        name="outputs converted to fp32",
        why="accelerate copies 16-bit logits to fp32 when the forward returns: 4 B + the 4 B kept for backward + 2 B, "
        "below the loss's own moment",
        source="accelerate 1.0.1 accelerator.py:1419 (convert_outputs_to_fp32)",
        moments=("forward",),
        applies=lambda row, spec: _by_trl(row) and spec.autocast != "none",
        num_bytes=lambda spec: 0,
    ),
    Difference(
        name="gradient clipping",
        why="max_grad_norm 1.0 scales the gradients in place; its norms are one number a tensor",
        source="transformers 4.45.2 training_args.py:894; torch nn/utils/clip_grad.py (_foreach_norm, _foreach_mul_)",
        moments=("optimizer_step",),
        applies=lambda row, spec: _by_trl(row),
        num_bytes=lambda spec: 0,
    ),
)
