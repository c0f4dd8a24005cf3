"""Attention on the tape: which kernel runs for a cell, and what it keeps.

In: query, key and value after the rotation. Out: the attention's output as the output projection takes it. The fused
kernels are linear in the sequence; the math and eager paths hold batch × heads × length² scores. Never imports torch.
"""

from __future__ import annotations

from vramprobe import operators as op
from vramprobe.architecture import Architecture
from vramprobe.spec import CellSpec
from vramprobe.tape import Value


def attend(spec: CellSpec, arch: Architecture, query: Value, key: Value, value: Value) -> Value:
    """The attention of one layer, without a padding mask."""
    if spec.autocast != "none":  # scaled_dot_product_attention is on autocast's list of 16-bit operators
        query, key, value = (op.cast(x, spec.autocast) for x in (query, key, value))
    num_scores = spec.num_tokens * arch.num_heads
    return op.contiguous(op.fused_attention(query, key, value, num_scores))
