"""Activations that are written out in Python on the tape: each step takes the place of the one before.

In: a Value. Out: a Value of the same size. Never imports torch.
"""

from __future__ import annotations

from vramprobe.terms.models.operators import add, cast, copied, elementwise, mul, power, scaled
from vramprobe.terms.tape.graph import Value


def gelu_new(value: Value, *, fp32_power: bool) -> Value:
    """transformers' NewGELUActivation, term by term: ``0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³)))``.

    CUDA's autocast computes powers in fp32 (autocast_mode.h), and the rest follows by promotion; the CPU's does not.
    """
    half = scaled(value)
    inner = scaled(add(value, scaled(power(cast(value, "fp32") if fp32_power else value))))
    inner = elementwise(inner, saves="output")
    inner = copied(inner)
    return mul(half, inner)
