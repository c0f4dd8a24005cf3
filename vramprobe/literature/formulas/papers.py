"""The papers' formulas: activations after Korthikanti et al., model states and activations after ZeRO, QLoRA's bits.

In: Facts. Out: Estimates. Symbols: s length, b batch, h hidden size, a heads, L layers, P parameters, N GPUs.
"""

from __future__ import annotations

from vramprobe.literature.formulas.facts import Estimate, Facts, Formula, estimate, why_not_full_adamw

_KORTHIKANTI = "Korthikanti et al. 2022, arXiv:2205.05198"
_ZERO = "Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054"
_STATES = ("weights", "gradients", "optimizer_state")


def korthikanti_bytes(facts: Facts, *, scores: bool) -> int:
    """L · s·b·h·(34 + 5·a·s/h), or without the scores of attention L · s·b·h·34; 16-bit values, dropout masks."""
    return 34 * facts.token_layer_widths + (5 * facts.num_scores if scores else 0)


def _korthikanti(facts: Facts) -> Estimate | str:
    if facts.spec.gradient_checkpointing:
        return "for training without recomputation"
    constants = {"layer_activations": 34, "attention_scores": 5}
    return estimate(constants, saved_activations=korthikanti_bytes(facts, scores=True))


def _korthikanti_selective(facts: Facts) -> Estimate | str:
    if facts.spec.gradient_checkpointing:
        return "for recomputation of attention only"
    return estimate({"layer_activations": 34}, saved_activations=korthikanti_bytes(facts, scores=False))


def _korthikanti_full(facts: Facts) -> Estimate | str:
    if not facts.spec.gradient_checkpointing:
        return "for recomputation of whole layers"
    return estimate({"checkpoint_store": 2}, checkpoint_store=2 * facts.token_layer_widths)


def zero_bytes(num_params: int, stage: int, num_gpus: int = 1) -> dict[str, float]:
    """Model states of one rank by cause: 2P, 2P and 12P; each stage from 1 to 3 shards one more of them over N ranks.

    Figure 1 and §5: P_os = 4P + 12P/N, P_os+g = 2P + 14P/N, P_os+g+p = 16P/N.
    """
    if stage not in (0, 1, 2, 3) or num_gpus < 1:
        raise ValueError(f"stage {stage} on {num_gpus} GPUs; stages are 0 to 3, on 1 GPU or more")
    return {
        "weights": 2 * num_params / (num_gpus if stage >= 3 else 1),
        "gradients": 2 * num_params / (num_gpus if stage >= 2 else 1),
        "optimizer_state": 12 * num_params / (num_gpus if stage >= 1 else 1),
    }


def _zero(facts: Facts) -> Estimate | str:
    if reason := why_not_full_adamw(facts):
        return reason
    constants = {"weights": 2, "gradients": 2, "optimizer_state": 12}
    return estimate(constants, **zero_bytes(facts.num_params, stage=0))


def _zero_activations(facts: Facts) -> Estimate | str:
    if facts.spec.gradient_checkpointing:
        return "for training without recomputation"
    return estimate({"layer_activations": 24}, saved_activations=24 * facts.token_layer_widths)


def _qlora(facts: Facts) -> Estimate | str:
    """4 bits, and 8/64 + 32/(64·256) bits of doubly quantised constants, or 32/64 without double quantisation."""
    match facts.spec.quant:
        case "nf4":
            bits = 4 + 8 / 64 + 32 / (64 * 256)
        case "nf4-single" | "fp4":
            bits = 4 + 32 / 64
        case _:
            return "for 4-bit weights"
    return estimate({"quantised_weights": bits / 8}, weights=bits / 8 * facts.num_params)


PAPERS = (
    Formula(
        name="korthikanti", apply=_korthikanti, counts=("saved_activations",), predicts="saved",
        source=f"{_KORTHIKANTI}, eq. 1",
        says="activations s·b·h·L·(34 + 5·a·s/h)",
        recipe="GPT with a 4h MLP, dropout and stored attention scores, 16-bit activations, no recomputation",
    ),
    Formula(
        name="korthikanti-selective", apply=_korthikanti_selective, counts=("saved_activations",), predicts="saved",
        source=f"{_KORTHIKANTI}, eq. 6 and Table 2 with t = 1",
        says="activations 34·s·b·h·L",
        recipe="the same with attention recomputed, as fused kernels do",
    ),
    Formula(
        name="korthikanti-full", apply=_korthikanti_full, counts=("checkpoint_store",), predicts="saved",
        source=f"{_KORTHIKANTI}, Table 2, full recomputation",
        says="activations 2·s·b·h·L",
        recipe="every layer recomputed, a 16-bit residual stream",
    ),
    Formula(
        name="zero-paper", apply=_zero, counts=_STATES,
        source=f"{_ZERO}, §3.1 and Figure 1, stage 0; zero_bytes has stages 1 to 3 on N GPUs",
        says="model states 2P + 2P + 12P; each ZeRO stage divides one more of them by N",
        recipe="16-bit weights and gradients, fp32 master weights and moments",
    ),
    Formula(
        name="zero-paper-activations", apply=_zero_activations, counts=("saved_activations",), predicts="saved",
        source=f"{_ZERO}, §3.2: 12 × hidden × batch × length × layers elements, 60 GB for GPT-2 1.5B, so 2 B each",
        says="activations 24·s·b·h·L",
        recipe="GPT-2, 16-bit activations",
    ),
    Formula(
        name="qlora-paper", apply=_qlora, counts=("weights",),
        source="Dettmers et al. 2023 (QLoRA), arXiv:2305.14314 §3, Double Quantization",
        says="weights of 4.127 bits/param, 4.5 without double quantisation",
        recipe="if embeddings, head and norms were quantised, too",
    ),
)  # fmt: skip
