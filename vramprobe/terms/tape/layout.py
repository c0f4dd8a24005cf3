"""What shares, moves or repeats a tensor's elements and computes nothing: views, slices, heads, copies.

In: Values. Out: Values on the same storage where torch makes a view, else on a new one. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from vramprobe.terms.tape.graph import Value


def heads(value: Value) -> Value:
    """``view(b, s, heads, d).transpose(1, 2)``: shares the storage; backward copies a gradient laid out by heads."""

    def backward(grads: list[Value]) -> list[Value | None]:
        grad = grads[0]
        return [grad.tape.view(grad) if grad.contiguous else grad.tape.new(grad.numel, grad.dtype)]

    out = value.tape.view(value)
    value.tape.record([value], [out], [], backward)
    return out


def part(value: Value, numel: int) -> Value:
    """``value[..., :n]`` of heads: shares the storage; ``slice_backward`` makes zeros of the full size."""
    full = value.numel

    def backward(grads: list[Value]) -> list[Value | None]:
        grad = grads[0].tape.new(full, grads[0].dtype)
        grad.contiguous = False
        return [grad]

    out = value.tape.view(value, numel)
    value.tape.record([value], [out], [], backward)
    return out


def whole(value: Value) -> Value:
    """``value[..., :n]`` of all that there is: an alias."""
    out = value.tape.view(value)
    value.tape.record([value], [out], [], lambda grads: [grads[0].tape.view(grads[0])])
    return out


def reshaped(value: Value) -> Value:
    """``value.view(...)`` in another shape: shares the storage; so does what backward hands on."""
    out = value.tape.view(value)
    value.tape.record([value], [out], [], _passed_on)
    return out


def split(value: Value, num_parts: int) -> list[Value]:
    """``value.split(...)`` into parts of one size: views; backward concatenates the parts' gradients."""
    return parts(value, [value.numel // num_parts for _ in range(num_parts)], by_heads=False)


def parts(value: Value, sizes: Sequence[int], *, by_heads: bool) -> list[Value]:
    """``torch.split`` of the last dimension: views; backward concatenates their gradients."""
    tape, numel = value.tape, value.numel

    def backward(grads: list[Value | None]) -> list[Value | None]:
        grad = tape.new(numel, next(grad.dtype for grad in grads if grad is not None))
        grad.contiguous = not by_heads
        return [grad]

    outs = [tape.view(value, size) for size in sizes]
    tape.record([value], outs, [], backward)
    return outs


def concatenate(left: Value, right: Value) -> Value:
    """``torch.cat``: copies both; backward hands each its slice of the gradient."""
    tape = left.tape
    out = tape.new(left.numel + right.numel, left.dtype)
    out.contiguous = False  # of two parts of heads: cat writes the logical order, batch × heads × length × size
    sizes = (left.numel, right.numel)

    def backward(grads: list[Value]) -> list[Value | None]:
        return [as_view(tape.view(grads[0], size)) for size in sizes]

    tape.record([left, right], [out], [], backward)
    return out


def contiguous(value: Value) -> Value:
    """``value.contiguous()``: a copy where the layout asks for one; backward passes the gradient on."""
    if value.contiguous:
        return value
    out = value.tape.new(value.numel, value.dtype)
    value.tape.record([value], [out], [], lambda grads: [grads[0].tape.view(grads[0])])
    return out


def by_heads(value: Value, batch_size: int) -> Value:
    """What ``matmul`` hands to ``bmm``: itself where the memory is laid out by heads, else a copy that is; of a single
    row the reshape is a view."""
    if not value.contiguous:
        return value
    out = value.tape.new(value.numel, value.dtype) if batch_size > 1 else value.tape.view(value)
    out.contiguous = False
    value.tape.record([value], [out], [], _passed_on)
    return out


def _passed_on(grads: list[Value]) -> list[Value | None]:
    """The same gradient, seen through a view."""
    return [as_view(grads[0].tape.view(grads[0]))]


def repeated(value: Value, numel: int, *, as_view: bool = False) -> Value:
    """``repeat_kv``: key and value heads copied to the number of query heads; backward adds them up again."""
    out = value.tape.view(value, numel) if as_view else value.tape.new(numel, value.dtype)
    before = value.numel
    out.contiguous = False

    def backward(grads: list[Value]) -> list[Value | None]:
        grad = grads[0].tape.new(before, grads[0].dtype)
        grad.contiguous = as_view  # of several heads it is laid out by them
        return [grad]

    value.tape.record([value], [out], [], backward)
    return out


def as_view(grad: Value) -> Value:
    """The same gradient, which the engine cannot add to in place."""
    grad.is_view = True  # mm's results come back through .t() and .view()
    return grad
