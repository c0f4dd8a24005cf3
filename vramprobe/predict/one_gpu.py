"""One GPU: a cell -> the moments of its step, and the notes that go with its prediction.

In: a spec, the GPU or none. Out: Counted, which ranks.py and device_map.py make of several GPUs.
"""

from __future__ import annotations

from typing import NamedTuple

from vramprobe.architecture import architecture
from vramprobe.bounds.tensors import less_as_linears_bytes
from vramprobe.kernels.attention import flash_trains
from vramprobe.kernels.chip import A100, chip_like
from vramprobe.predict.prediction import HasKernels
from vramprobe.rules.cell import not_quantized
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment, moments
from vramprobe.units import format_bytes


class Counted(NamedTuple):
    """The moments of a step, and what to know of them."""

    moments: list[Moment]
    notes: list[str]


def count_one(spec: CellSpec, gpu: HasKernels | None) -> Counted:
    """On one GPU. Raises UnsupportedArchitecture for what the formula engine has no arithmetic for."""
    return Counted(moments(spec, chip_like(gpu)), [*_not_quantized(spec), *without_flash(spec, gpu)])


def without_flash(spec: CellSpec, gpu: HasKernels | None) -> list[str]:
    """Return a note if ``gpu`` runs another attention kernel than most."""
    if gpu is None or spec.attn != "sdpa" or spec.device != "cuda":
        return []
    chip, arch = chip_like(gpu), architecture(spec.architecture)
    if chip.capability < (8, 0):
        return [
            f"{gpu.name} has no flash attention: sdpa takes the memory-efficient kernel, and where that does not run "
            "(bf16, or query heads that share keys) holds the scores whole"
        ]
    heads = arch.head_size, arch.attention_dropout
    if flash_trains(A100, *heads) and not flash_trains(chip, *heads):
        return [
            f"{gpu.name} has no backward of flash attention for heads of {arch.head_size}: sdpa takes the "
            "memory-efficient kernel, and where query heads share keys holds the scores whole"
        ]
    return []


def _not_quantized(spec: CellSpec) -> list[str]:
    """Return notes if quantization reaches less than half of the parameters, as of a mixture of experts."""
    if spec.quant == "none":
        return []
    arch = architecture(spec.architecture)
    reached = sum(p.numel * arch.num_copies(p) for p in arch.parameters if p.role == "linear")
    said = not_quantized(spec.quant, spec.kbit_prep, spec.dtype, reached, arch.num_params)
    less = less_as_linears_bytes(spec, arch) if said else 0
    if less:
        said.append(
            "so under transformers 5; transformers 4 has these experts as linear layers, which are quantized: "
            f"{format_bytes(less)} less of weights there (--python records with it: docs/versions.md)"
        )
    return said
