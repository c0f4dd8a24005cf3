"""Activations that are written out in Python on the tape: each step takes the place of the one before.

In: a Value. Out: a Value of the same size. Never imports torch.
"""

from __future__ import annotations

from vramprobe.terms.models.operators import add, cast, copied, elementwise, mul, power, scaled, value_like
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


def bloom_gelu(value: Value) -> Value:
    """BLOOM's GeLUFunction, which saves its input: ``x * 0.5 * (1 + tanh(0.797 * x * (1 + 0.044715 * x * x)))``.

    Its backward is written out in Python too: ``(0.5 * x * ((1 - t * t) * (0.797 + 0.107 * x * x)) + 0.5 * (1 + t)) *
    grad``, where ``t`` is the tanh.
    """

    def tanh(x: Value) -> Value:
        outer, inner = value_like(x), value_like(x)
        inner = value_like(inner)  # each takes the place of the one before, which goes then
        inner = value_like(inner)
        inner = value_like(inner)
        del outer
        return value_like(inner)

    def backward(grads: list[Value]) -> list[Value | None]:
        t = tanh(grads[0])
        half, left = value_like(t), value_like(t)
        left = value_like(left)
        right = value_like(t)
        right = value_like(right)
        right = value_like(right)
        left = value_like(left)
        del right
        left = value_like(left)
        del half
        right = value_like(t)
        right = value_like(right)
        total = value_like(left)
        del left, right
        result = value_like(total)
        del total, t
        return [result]

    half = value_like(value)
    other = tanh(value)
    other = value_like(other)
    out = value_like(half)
    del half, other
    value.tape.record([value], [out], [value], backward)
    return out
