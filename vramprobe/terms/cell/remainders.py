"""Remainders: what CUDA's caching allocator counts beyond the tensors that stand between steps.

In: a spec and its tensors. Out: bytes. A block is rounded up to 512 bytes, and one of 10 MiB or more comes from a
segment of its own, in multiples of 2 MiB, of which up to 1 MiB is not split off (c10/cuda/CUDACachingAllocator.cpp,
``round_size``, ``get_allocation_size``, ``should_split``). Of weights, state and gradients that is known from the model
alone; of what a step makes it depends on all that ran before, and stays in the interval. Never imports an allocator.
"""

from __future__ import annotations

from collections.abc import Sequence

from vramprobe.bounds import states
from vramprobe.bounds import tensors as parameters
from vramprobe.bounds.tensors import Tensor
from vramprobe.spec import CellSpec
from vramprobe.units import MIB

_ROUNDED_TO = 512
_LEAST_OF_ITS_OWN = 10 * MIB
_SEGMENT_ROUNDED_TO = 2 * MIB
_MOST_KEPT = MIB


def remainder(size_bytes: int) -> int:
    """Of one block: what is counted as allocated beyond the bytes that were asked for."""
    rounded = -size_bytes % _ROUNDED_TO
    if size_bytes < _LEAST_OF_ITS_OWN:
        return rounded
    rest = -size_bytes % _SEGMENT_ROUNDED_TO
    return rest if rest - rounded <= _MOST_KEPT else rounded


def of_what_stands(spec: CellSpec, tensors: Sequence[Tensor]) -> int:
    """Of weights and the optimizer's state."""
    total = 0
    for tensor in tensors:
        parts = parameters.quantised_parts(tensor, spec.quant) if tensor.quantised else [tensor.num_bytes]
        state = states.allocated_state_parts(spec, tensor) if tensor.trained else []
        total += tensor.num_copies * sum(remainder(part) for part in (*parts, *state))
    return total


def of_gradients(trained: Sequence[Tensor]) -> int:
    """Of all gradients together."""
    return sum(tensor.num_copies * remainder(tensor.num_bytes) for tensor in trained)


def share_of(gradient_remainders: int, gradient_bytes: int, all_bytes: int) -> int:
    """Of those of all gradients, as many as there are gradients."""
    return gradient_remainders * gradient_bytes // max(all_bytes, 1)
