"""The floor: bytes that a cell allocates at least, at the higher of two moments of a steady step.

In: a CellSpec. Out: bytes; 0 where nothing is certain. As the optimizer steps, weights, gradients and state stand;
as the loss is computed, weights, state and the logits. Each is a tensor's own bytes, without what is rounded up.
"""

from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.bounds.states import allocated_state_bytes
from vramprobe.bounds.tensors import less_as_linears_bytes, tensors, weights_bytes
from vramprobe.errors import VramprobeError
from vramprobe.spec import CellSpec
from vramprobe.units import ITEMSIZE_BYTES, format_bytes


class BelowFloor(VramprobeError):
    """An answer below what its tensors take: a fault of vramprobe's."""


def floor_bytes(spec: CellSpec, num_params: int | None = None) -> int:
    """Return what ``spec`` allocates at least in its steady steps.

    Of a rank of several GPUs, and of an architecture whose tensors are not known, its share of the weights by
    ``num_params``, 0 without that; 0 with offload.
    """
    if spec.device != "cuda" or spec.offload != "none":
        return 0
    of_weights = least_weight_bytes(spec, num_params or 0)
    if spec.num_gpus > 1:
        return of_weights
    try:
        arch = architecture(spec.architecture)
    except UnsupportedArchitecture:
        return of_weights
    own = tensors(spec, arch)
    trained = [one for one in own if one.trained]
    less = less_as_linears_bytes(spec, arch) if spec.quant != "none" else 0  # of a recording with older libraries
    stands = weights_bytes(own, spec.quant) - less + allocated_state_bytes(spec, trained)
    gradients = sum(one.num_bytes * one.num_copies for one in trained)
    return stands + max(gradients, _logits_bytes(spec, arch.vocab_size))


def _logits_bytes(spec: CellSpec, vocab_size: int) -> int:
    """The logits of a model's own loss, in the narrowest dtype; 0 where none are there as a whole."""
    if spec.other_head != "" or spec.fused_linear_cross_entropy or spec.trainer != "sft":
        return 0
    return spec.num_tokens * vocab_size * ITEMSIZE_BYTES["bf16"]


def require_above_floor(spec: CellSpec, peak_bytes: int, num_params: int | None = None) -> None:
    """Raise BelowFloor for a peak that the cell's own tensors exceed."""
    if peak_bytes < (least := floor_bytes(spec, num_params)):
        raise BelowFloor(
            f"{spec.cell_id}: {format_bytes(peak_bytes)} is less than its own tensors take, {format_bytes(least)}: "
            "a fault of vramprobe's; report it"
        )


def least_weight_bytes(spec: CellSpec, num_params: int) -> int:
    """Bytes that one GPU's share of the weights takes at least, with their gradients where all are trained."""
    whole = {"none": 4.0 if spec.dtype == "fp32" else 2.0, "int8": 1.0}
    each = whole.get(spec.quant, 0.5)  # every other format has 4 bits
    return int(num_params * each * (2 if spec.method == "full" else 1)) // spec.num_gpus
