"""Rules of thumb: so many bytes per parameter. Right for one recipe each, quoted for all of them.

In: Facts. Out: Estimates. The guides are the rows of ``claims.csv`` with the topic formula, cited by id.
"""

from __future__ import annotations

from collections.abc import Callable

from vramprobe.literature.formulas.facts import Estimate, Facts, Formula, estimate, why_not_full_adamw
from vramprobe.terms.tape.graph import ITEMSIZE_BYTES

_STATES = ("weights", "gradients", "optimizer_state")


def per_parameter(weights: float, gradients: float, optimizer: float, copies: float = 0) -> Callable[..., Estimate]:
    """Bytes per parameter of full fine-tuning with AdamW, by cause; ``copies`` are 16-bit ones of fp32 weights."""

    def apply(facts: Facts) -> Estimate | str:
        if reason := why_not_full_adamw(facts):
            return reason
        n = facts.num_params
        constants = {"weights": weights, "gradients": gradients, "optimizer_state": optimizer}
        return estimate(
            constants | ({"cast_copies": copies} if copies else {}),
            weights=weights * n,
            gradients=gradients * n,
            optimizer_state=optimizer * n,
            cast_copies=copies * n,
        )

    return apply


def frozen_and_trained(weights: float, gradients: float, optimizer: float) -> Callable[[Facts], Estimate | str]:
    """A frozen base at 2 bytes per parameter, or 0.5 in 4 bits, and per trained parameter its own three terms."""

    def apply(facts: Facts) -> Estimate | str:
        if facts.optimizer != "adamw":
            return f"for AdamW with 32-bit state, not {facts.spec.optim}"
        trained, n = facts.num_trained, facts.num_params
        constants = {"gradients": gradients, "optimizer_state": optimizer}
        match facts.spec.quant:
            case "int8":
                return "has no figure for 8 bits"
            case "none":
                constants["weights"] = weights
                base = weights * n
            case _:
                constants["quantised_weights"] = 0.5
                base = 0.5 * n
        adapters = 0.0
        if facts.spec.method != "full":
            constants["adapter_weights"] = weights
            adapters = weights * trained
        return estimate(
            constants, weights=base + adapters, gradients=gradients * trained, optimizer_state=optimizer * trained
        )

    return apply


def _times_the_weights(factor: int) -> Callable[[Facts], Estimate | str]:
    """So many times the bytes of the weights as loaded; weights and gradients have one share each."""

    def apply(facts: Facts) -> Estimate | str:
        if reason := why_not_full_adamw(facts):
            return reason
        size = ITEMSIZE_BYTES[facts.spec.dtype]
        constants = {"weights": size, "gradients": size, "optimizer_state": (factor - 2) * size}
        n = facts.num_params
        return estimate(constants, weights=size * n, gradients=size * n, optimizer_state=(factor - 2) * size * n)

    return apply


def _huggingface(facts: Facts) -> Estimate | str:
    """weights 4, or 4 + 2 mixed; gradients 4; AdamW 8, or 2 in 8 bits."""
    if facts.spec.method != "full":
        return "for full fine-tuning only"
    if facts.optimizer not in ("adamw", "adamw-8bit"):
        return f"has no figure for {facts.spec.optim}"
    n, state = facts.num_params, 8 if facts.optimizer == "adamw" else 2
    copies = 2 if facts.is_mixed or facts.has_16_bit_weights else 0
    constants = {"weights": 4, "gradients": 4, "optimizer_state": state} | ({"cast_copies": 2} if copies else {})
    return estimate(constants, weights=4 * n, cast_copies=copies * n, gradients=4 * n, optimizer_state=state * n)


RULES = (
    Formula(
        name="8-bytes", apply=per_parameter(2, 2, 4), counts=_STATES,
        source="github:hiyouga/LLaMA-Factory README.md, Hardware Requirement, row pure_bf16 (8x GB)",
        says="8 B/param: everything in 16 bits, 2 + 2 + 4",
        recipe="weights, gradients and AdamW moments in bf16, no master weights (transformers with --dtype bf16)",
    ),
    Formula(
        name="12-bytes", apply=per_parameter(2, 2, 8), counts=_STATES,
        source="claims.csv O5-01, O5-25 (Spheron's guide, \"2+2+8 B/param\")",
        says="12 B/param: 2 + 2 + 8",
        recipe="16-bit weights and gradients, fp32 moments, no master weights (bitsandbytes' 32-bit AdamW)",
    ),
    Formula(
        name="16-bytes", apply=per_parameter(2, 2, 12), counts=_STATES,
        source="Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054 §3.1, K = 12; claims.csv L1-01 to L1-05, L2-01",
        says="16 B/param: 2 + 2 + 12, of which 4 are fp32 master weights",
        recipe="16-bit weights and gradients under an engine with fp32 master weights and moments (DeepSpeed)",
    ),
    Formula(
        name="16-bytes-fp32", apply=per_parameter(4, 4, 8), counts=_STATES,
        source="github:huggingface/transformers docs/source/en/model_memory_anatomy.md (fp32: 4 + 4 + 8)",
        says="16 B/param: 4 + 4 + 8, everything in fp32",
        recipe="fp32 weights, gradients and moments; under bf16 autocast the casts of weights come on top",
    ),
    Formula(
        name="18-bytes", apply=per_parameter(4, 4, 8, copies=2), counts=(*_STATES, "cast_copies"),
        source="github:huggingface/transformers docs/source/en/model_memory_anatomy.md; claims.csv L3-01",
        says="18 B/param: weights in fp32 and in 16 bits 6, gradients 4, moments 8",
        recipe="fp32 weights under autocast, if every 16-bit copy were alive at once and through the peak",
    ),
    Formula(
        name="18-bytes-megatron", apply=per_parameter(2, 4, 12), counts=_STATES,
        source="github:NVIDIA/Megatron-LM megatron/training/theoretical_memory_usage.py (num_bytes_per_parameter)",
        says="18 B/param: 2 + 4 + 12",
        recipe="16-bit weights, fp32 gradients, fp32 master weights and moments (Megatron-LM)",
    ),
    Formula(
        name="4x-weights", apply=_times_the_weights(4), counts=_STATES,
        source="github:huggingface/accelerate docs/source/usage_guides/model_size_estimator.md (Training using Adam)",
        says="4 × the weights as loaded: weights, gradients, two moments",
        recipe="one dtype for all four: all-bf16 (8 B/param) or all-fp32 (16 B/param)",
    ),
    Formula(
        name="weights-plus-4x", apply=_times_the_weights(5), counts=_STATES,
        source="claims.csv G4-01 (optimizer and gradients are 4 × the 16-bit weights), G4-02, G4-03",
        says="5 × the weights as loaded: themselves, and 4 × for gradients and optimizer",
        recipe="none that we know",
    ),
    Formula(
        name="huggingface-anatomy", apply=_huggingface, counts=(*_STATES, "cast_copies"),
        source="github:huggingface/transformers docs/source/en/model_memory_anatomy.md, Anatomy of Model's Memory",
        says="weights 4 (mixed 6), gradients 4, AdamW 8 (8-bit 2) B/param",
        recipe="fp32 weights, with or without autocast",
    ),
    Formula(
        name="guide-lyceum", apply=frozen_and_trained(2, 2, 12), counts=_STATES,
        source="claims.csv L1-01 to L1-06 (Lyceum); for adapters our reading: frozen 2 or 0.5, trained 2 + 2 + 12",
        says="frozen 2 B/param (4 bits: 0.5), trained 2 + 2 + 12",
        recipe="16-bit adapters with fp32 master weights",
    ),
    Formula(
        name="guide-spheron", apply=frozen_and_trained(2, 2, 8), counts=_STATES,
        source="claims.csv O5-16 to O5-18, O5-20 to O5-23, O5-25, O5-26 (Spheron)",
        says="frozen 2 B/param (4 bits: 0.5), trained 2 + 2 + 8",
        recipe="16-bit adapters with fp32 moments (bitsandbytes' 32-bit AdamW)",
    ),
)  # fmt: skip
