"""Experts as vLLM's kernels hold them, by formulas: gpt-oss's MXFP4 matrices in padded layouts, and workspaces.

In: an Architecture, its config and a ServeSpec. Out: bytes per GPU. Read in vLLM 0.19.0 and 0.32.0, below
vllm/model_executor/layers/; each name says the file. Never imports torch or vLLM.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from vramprobe.architecture import Architecture, Parameter
from vramprobe.predict.serve_spec import ServeSpec

GROUP_SIZE = 32  # values that share a scale of 8 bits
_SCALE_ROWS, _SCALE_COLUMNS = 256, 2  # multiples of Triton's scales (tensor_details/layout_details/hopper_scale.py)


class Kernel(NamedTuple):
    """A kernel of MXFP4 experts: the multiples that it wants of the matrices' sizes
    (fused_moe/oracle/mxfp4.py: mxfp4_round_up_hidden_size_and_intermediate_size)."""

    intermediate_multiple: int
    hidden_multiple: int
    #: Multiples of rows and of bytes of values in Triton's layout (third_party/triton_kernels/tensor_details/
    #: layout_details/hopper_value.py); none: the matrices lie as they were loaded.
    layout: tuple[int, int] | None = None
    keeps_loaded_scales: bool = False  # quantization/mxfp4.py: _setup_kernel; 0.32 drops them
    has_known_workspace: bool = True


_MARLIN = Kernel(128, 256)
#: The kernel of gpt-oss by release and major compute capability (fused_moe/oracle/mxfp4.py: the order of backends):
#: Triton's on Hopper, FlashInfer's on data center Blackwells; any other GPU has Marlin's.
_KERNELS = {
    ("0.19", 9): Kernel(64, 1, layout=(64, 64), keeps_loaded_scales=True),
    ("0.32", 9): Kernel(64, 1, layout=(16, 32)),
    ("0.19", 10): Kernel(256, 256, has_known_workspace=False),
    ("0.32", 10): Kernel(128, 256, has_known_workspace=False),
}


class Workspace(NamedTuple):
    """Bytes beside the experts: ``held`` from their first run on, ``passing`` while they run."""

    held_bytes: int = 0
    passing_bytes: int = 0


def up_to(size: float, multiple: int) -> int:
    """Return the least multiple that is not below ``size``."""
    return math.ceil(size / multiple) * multiple


def pads_experts(arch: Architecture, spec: ServeSpec) -> bool:
    """Return True for a model whose MXFP4 experts are counted as vLLM's kernels have them: gpt-oss."""
    return spec.quantization == "mxfp4" and arch.model_type == "gpt_oss"


def _kernel(spec: ServeSpec) -> Kernel:
    return _KERNELS.get((spec.release, spec.capability), _MARLIN)


def mxfp4_bytes(one: Parameter, spec: ServeSpec) -> float:
    """An expert tensor on one GPU, padded, or its bias, which Triton's kernels take in 32 bits
    (quantization/mxfp4.py: create_weights)."""
    kernel = _kernel(spec)
    num_experts, *sides = one.shape
    is_down, is_bias = "down_proj" in one.name, len(sides) == 1
    intermediate, hidden = (sides[0], sides[-1]) if is_down else (sides[-1] // 2, sides[0])
    inner = up_to(intermediate / spec.tensor_parallel_size, kernel.intermediate_multiple)
    outer = up_to(hidden, kernel.hidden_multiple)
    rows, columns = (outer, inner) if is_down else (2 * inner, outer)
    if is_bias:
        return num_experts * rows * (4 if kernel.layout else spec.item_bytes)
    values, scales = columns // 2, columns // GROUP_SIZE
    if kernel.layout is None:
        return num_experts * rows * (values + scales)
    loaded = rows * scales if kernel.keeps_loaded_scales else 0
    padded = up_to(rows, kernel.layout[0]) * up_to(values, kernel.layout[1])
    return num_experts * (padded + up_to(rows, _SCALE_ROWS) * up_to(scales, _SCALE_COLUMNS) + loaded)


def experts_workspace(arch: Architecture, config: Mapping[str, Any], spec: ServeSpec) -> Workspace | None:
    """Return the workspace of a model's experts; None where other kernels run, whose workspaces are not known.

    Triton's and Marlin's keep what goes into and comes out of the activation, of every expert that a token takes, in
    one buffer (fused_moe/fused_moe.py, fused_marlin_moe.py: workspace_shapes; modular_kernel.py: _allocate_buffers).
    Triton's of MXFP4 holds the second half and a matrix of outputs while it runs (gpt_oss_triton_kernels_moe.py).
    """
    gate_up = next((one for one in arch.parameters if one.role == "experts" and "gate_up" in one.name), None)
    if gate_up is None:
        return Workspace()
    hidden = int(config["hidden_size"])
    inner = gate_up.numel // (gate_up.shape[0] * hidden * 2) / spec.tensor_parallel_size
    rows = spec.max_num_batched_tokens * int(config["num_experts_per_tok"])
    if pads_experts(arch, spec):
        kernel = _kernel(spec)
        if not kernel.has_known_workspace:
            return None
        inner, hidden = up_to(inner, kernel.intermediate_multiple), up_to(hidden, kernel.hidden_multiple)
        if kernel.layout is not None:
            return Workspace(passing_bytes=rows * (inner + hidden) * spec.item_bytes)
    elif not _runs_triton_or_marlin(spec):
        return None
    inner = int(inner)
    held = rows * (max(inner, hidden) + max(2 * inner, hidden)) * spec.item_bytes
    return Workspace(held, rows * inner if spec.quantization == "fp8" else 0)


def _runs_triton_or_marlin(spec: ServeSpec) -> bool:
    """Return True where 16-bit or FP8 experts have no other kernel (fused_moe/oracle/unquantized.py, fp8.py): FP8 in
    blocks has Triton's on Hopper, any FP8 has Triton's on Ada and Marlin's before."""
    if spec.quantization == "none":
        return spec.release == "0.19" or spec.capability < 10  # then FlashInfer's
    return spec.quantization == "fp8" and (spec.capability < 9 or (spec.capability == 9 and spec.has_scale_blocks))
