"""Operators on the tape: what each one allocates, saves for backward and allocates again in backward.

In: Values. Out: Values. One function per operator that the models use, with the rules of ``derivatives.yaml`` and of
the kernels behind it; norms.py has those that are made of several, layout.py what computes nothing. Where the CPU's and
CUDA's kernels differ, the function asks ``device`` and says so. Never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vramprobe.terms.tape.graph import Value
from vramprobe.terms.tape.layout import as_view, concatenate, part
from vramprobe.terms.tape.tape import Tape
from vramprobe.units import ITEMSIZE_BYTES

if TYPE_CHECKING:
    from vramprobe.kernels.attention import Workspaces


def wider(first: str, second: str) -> str:
    """torch's type promotion between float dtypes."""
    return "fp32" if first != second else first


def cast(value: Value, dtype: str) -> Value:
    """``value.to(dtype)``: itself where nothing changes, else a copy; its backward copies the gradient back."""
    if value.dtype == dtype:
        return value
    out = value.tape.new_like(value, dtype)
    before = value.dtype
    value.tape.record([value], [out], [], lambda grads: [grads[0].tape.new_like(grads[0], before)])
    return out


def add(left: Value, right: Value) -> Value:
    """``left + right``: saves nothing; backward hands the same gradient to both, cast to each one's dtype."""
    tape = left.tape
    big = left if left.numel >= right.numel else right
    out = tape.new_like(big, wider(left.dtype, right.dtype))
    wanted = [(left.numel, left.dtype, left.needs_grad), (right.numel, right.dtype, right.needs_grad)]

    def backward(grads: list[Value]) -> list[Value | None]:
        return [_reduced(grads[0], numel, dtype) if needed else None for numel, dtype, needed in wanted]

    tape.record([left, right], [out], [], backward)
    return out


def _reduced(grad: Value, numel: int, dtype: str) -> Value:
    """The gradient for an input of ``numel`` elements: summed over what was broadcast, in the input's dtype."""
    if numel < grad.numel:
        grad = summed(grad, numel)
    if grad.dtype != dtype:
        return cast(grad, dtype)
    same = grad.tape.view(grad)
    same.is_view = grad.is_view
    return same


def summed(value: Value, numel: int) -> Value:
    """A value of rows, summed over all of them."""
    tape = value.tape
    out = tape.new(numel, value.dtype)
    if numel:  # of fewer tokens than experts, an expert's share is none
        tape.scratch_of_sum(value.numel // numel, numel, ITEMSIZE_BYTES[value.dtype])
    return out


def mul(left: Value, right: Value, *, by_row: bool = False) -> Value:
    """``left * right``: each side is saved, before it runs, if the other needs a gradient.

    ``by_row``: a smaller side has a number for each row of the other; else a row for all of its rows.
    """
    tape = left.tape
    big = left if left.numel >= right.numel else right
    wanted = [(left.numel, left.dtype, left.needs_grad), (right.numel, right.dtype, right.needs_grad)]
    saved = ([right] if left.needs_grad else []) + ([left] if right.needs_grad else [])

    def backward(grads: list[Value]) -> list[Value | None]:
        made = [grads[0].tape.new_like(grads[0]) if needed else None for _, _, needed in reversed(wanted)]
        return made[::-1]  # the right one's first (derivatives.yaml's, by name)

    def finish(full: list[Value | None]) -> list[Value | None]:
        return [_summed(full, side, *wanted[side][:2], by_row) for side in (0, 1)]

    edge = tape.record([left, right], [], saved, backward, finish=finish)
    out = tape.new_like(big, wider(left.dtype, right.dtype))
    out.edge = edge
    return out


def _summed(full: list[Value | None], side: int, numel: int, dtype: str, by_row: bool) -> Value | None:
    value, full[side] = full[side], None
    if value is not None and numel < value.numel:
        # The full one goes before the sum is cast.
        value = value.tape.new(numel, value.dtype) if by_row else summed(value, numel)
    return None if value is None else _reduced(value, numel, dtype)


def divided(value: Value, by: Value) -> Value:
    """``value / by`` of a constant: saves that."""
    out = value.tape.new_like(value, wider(value.dtype, by.dtype))
    before = value.dtype
    value.tape.record([value], [out], [by], lambda grads: [cast(value_like(grads[0]), before)])
    return out


def elementwise(value: Value, saves: str = "", dtype: str | None = None) -> Value:
    """A function of each element. ``saves`` is "input" (silu, gelu), "output" (relu, tanh) or nothing (+ a number)."""
    out = value.tape.new_like(value, dtype)
    saved = {"input": [value], "output": [out], "": []}[saves]
    value.tape.record([value], [out], saved, lambda grads: [grads[0].tape.new_like(grads[0])])
    return out


def copied(value: Value) -> Value:
    """``value.clone()``, ``value + number``: saves nothing, and backward passes the gradient on."""
    out = value.tape.new_like(value)
    value.tape.record([value], [out], [], lambda grads: [grads[0].tape.view(grads[0])])
    return out


def softmax(value: Value, device: str) -> Value:
    """Saves its output. On CUDA its backward takes the gradient times that beside its result (SoftMax.cu)."""
    out = value_like(value)

    def backward(grads: list[Value]) -> list[Value | None]:
        result = value_like(grads[0])
        taken = value_like(grads[0]) if device == "cuda" else None
        del taken
        return [result]

    value.tape.record([value], [out], [out], backward)
    return out


def softmax_in_fp32(value: Value, device: str) -> Value:
    """``softmax(value, dtype=torch.float32)``: of fp16 on CUDA one kernel, without the copy in fp32 that others take
    (``half_to_float``: ATen/native/SoftMax.cpp)."""
    if value.dtype != "fp16" or device != "cuda":
        return softmax(cast(value, "fp32"), device)
    out = value.tape.new_like(value, "fp32")

    def backward(grads: list[Value]) -> list[Value | None]:
        result = grads[0].tape.new_like(grads[0], "fp16")
        taken = value_like(grads[0])
        del taken
        return [result]

    value.tape.record([value], [out], [out], backward)
    return out


def scaled(value: Value) -> Value:
    """``value * number``: the number is wrapped in an 8-byte tensor of the host's, and multiplication saves that."""
    out = value_like(value)
    number = [value.tape.new(1, "int64")] if value.tape.device == "cpu" else []

    def backward(grads: list[Value]) -> list[Value | None]:
        return [value_like(grads[0])]

    # Saved-tensor hooks do not see wrapped numbers (saved_variable.cpp), so a checkpoint keeps them.
    value.tape.record([value], [out], number, backward, recomputable=False)
    return out


def power(value: Value) -> Value:
    """``value.pow(n)``: saves its input; its backward computes grad * (n * value.pow(n - 1)) in three full steps."""

    def backward(grads: list[Value]) -> list[Value | None]:
        lowered = value_like(grads[0])
        scaled = value_like(grads[0])
        result = value_like(grads[0])
        del lowered, scaled
        return [result]

    out = value.tape.new_like(value)
    value.tape.record([value], [out], [value], backward)
    return out


def value_like(value: Value) -> Value:
    """A new value of the same size and dtype."""
    return value.tape.new_like(value)


def mean_of_rows(value: Value, num_rows: int) -> Value:
    """``value.mean(-1, keepdim=True)``: saves nothing; backward spreads the gradient over the full width."""
    out = value.tape.new(num_rows, value.dtype)
    numel = value.numel
    value.tape.record([value], [out], [], lambda grads: [grads[0].tape.new(numel, grads[0].dtype)])
    return out


def linear(value: Value, weight: Value, bias: Value | None, num_out: int, saves_input: bool = False) -> Value:
    """``x @ W.T + b``: saves the input if the weight is trained, and the weight if the input needs a gradient.

    ``saves_input``: in any case.
    """
    tape = value.tape
    num_in = weight.numel // num_out
    numel, needs, trained, weight_numel = value.numel, value.needs_grad, weight.needs_grad, weight.numel
    has_bias, trains_bias = bias is not None, bias is not None and bias.needs_grad
    saved = ([value] if trained or saves_input else []) + ([weight] if needs else [])

    def backward(grads: list[Value]) -> list[Value | None]:
        """By derivatives.yaml's names: of ``addmm`` mat1, mat2 and self, which is the bias; of ``mm`` mat2 and self."""
        dtype = grads[0].dtype
        made: dict[int, Value] = {}
        for side in (0, 1) if has_bias else (1, 0):
            if (needs, trained)[side]:
                made[side] = as_view(tape.new((numel, weight_numel)[side], dtype))
                tape.multiplied()
        return [made.get(0), made.get(1), *([tape.view(grads[0]) if trains_bias else None] if has_bias else [])]

    def finish(made: list[Value | None]) -> list[Value | None]:
        if trains_bias:
            made[2] = summed(made[2], num_out)
        return made

    # What it saves is saved before it runs: the last product of a recomputed layer is never made again.
    edge = tape.record(
        [value, weight, *([bias] if bias is not None else [])], [], saved, backward, finish=finish if has_bias else None
    )
    out = tape.new(value.numel // num_in * num_out, value.dtype)
    tape.multiplied()
    out.edge = edge
    return out


def embedding(num_ids: int, weight: Value, width: int, ids: Value | None = None, num_sorted: int = 0) -> Value:
    """A table's rows: saves only the ids (those of the batch are counted there); backward makes a dense gradient.

    ``num_sorted``: as many ids as are told apart where they are sorted to be summed, as CUDA does with many: copies of
    all, and sums in fp32 of each id's rows by ten (EmbeddingBackwardKernel.cu).
    """
    tape, table = weight.tape, weight.numel
    out = tape.new(num_ids * width, weight.dtype)
    saved = [ids] if ids is not None else []

    def backward(grads: list[Value]) -> list[Value | None]:
        made = tape.new(table, grads[0].dtype)
        if num_sorted:
            taken = tape.new(4 * num_ids, "int64"), tape.new(4 * width * num_sorted + 4 * width // 10 * num_ids, "int8")
            del taken
        return [made]

    tape.record([weight], [out], saved, backward)
    return out


def rotate_half(value: Value, width: int) -> Value:
    """``cat((-x2, x1))`` of the two halves of each row of ``width`` elements."""
    first = part(value, value.numel // width * (width // 2))
    second = part(value, value.numel - first.numel)
    return concatenate(elementwise(second), first)


def rotary(value: Value, cos: Value, sin: Value, width: int) -> Value:
    """``x * cos + rotate_half(x) * sin``: saves only the shared cos and sin, since they need no gradient."""
    return add(mul(value, cos), mul(rotate_half(value, width), sin))


def dropout(value: Value, rate: float, device: str) -> Value:
    """``nn.Dropout`` in training. CUDA saves a mask of one byte per element; the CPU a noise in the input's dtype."""
    if rate == 0:
        return value
    tape = value.tape
    if device == "cuda":
        mask, out = tape.new(value.numel, "bool"), tape.new_like(value)
        tape.record([value], [out], [mask], lambda grads: [value_like(grads[0])])
        return out
    return mul(value, tape.new_like(value))


def fused_attention(
    query: Value,
    key: Value,
    value: Value,
    num_out: int,
    num_stats: int,
    device: str,
    bias: Value | None = None,
    scratch: Workspaces | None = None,
) -> Value:
    """Flash or memory-efficient attention: saves q, k, v, its output, ``num_stats`` fp32 log-sum-exps, and a mask.

    ``scratch``: what the kernel takes for itself; without it, on CUDA, the query's gradient in fp32 and a number for
    each row. Flash's backward makes the gradients of grouped heads as wide as the query's before it sums them.
    """
    tape = query.tape
    out = tape.new(num_out, query.dtype)
    # Flash: empty_like(query), in the query's layout. The memory-efficient kernel, which takes values of another size,
    # lays its output out by tokens.
    out.contiguous = query.contiguous or num_out != query.numel
    stats = tape.new(num_stats, "fp32")
    sizes = (query.numel, key.numel, value.numel)
    seeds: list[Value] = []
    if scratch is not None:
        tape.scratch(scratch.forward)
        seeds = [tape.new(numel, "int64") for numel in scratch.num_seeds]

    def backward(grads: list[Value]) -> list[Value | None]:
        made = [tape.new(size, grads[0].dtype) for size in sizes]
        if scratch is not None:
            wide = [size for size in sizes[1:] if scratch.widens_heads and size != sizes[0]]
            tape.scratch([*scratch.backward, *(sizes[0] * ITEMSIZE_BYTES[grads[0].dtype] for _ in wide)])
        elif device == "cuda":
            tape.scratch([4 * (sizes[0] + num_stats)])
        return made

    masks = [bias] if bias is not None else []
    tape.record([query, key, value], [out], [query, key, value, out, stats, *masks, *seeds], backward)
    return out


def batched_product(left: Value, right: Value, numel: int) -> Value:
    """``torch.bmm``: saves each side if the other needs a gradient."""
    tape = left.tape
    out = tape.new(numel, left.dtype)
    out.contiguous = False
    sizes, needs = (left.numel, right.numel), (left.needs_grad, right.needs_grad)
    saved = ([right] if left.needs_grad else []) + ([left] if right.needs_grad else [])

    def backward(grads: list[Value]) -> list[Value | None]:
        made: dict[int, Value] = {}
        for side in (1, 0):
            if not needs[side]:
                continue
            made[side] = tape.new(sizes[side], grads[0].dtype)
            made[side].contiguous = False
        return [made.get(0), made.get(1)]

    tape.record([left, right], [out], saved, backward)
    return out


def shifted_labels(tape: Tape, batch_size: int, seq_len: int) -> list[Value]:
    """Labels padded by one, and of several rows a contiguous copy of the shifted ones; a single row's are a view."""
    padded = tape.new(batch_size * (seq_len + 1), "int64")
    return [padded, tape.new(batch_size * seq_len, "int64")] if batch_size > 1 else [padded]


def cross_entropy(logits: Value, batch_size: int, seq_len: int) -> Value:
    """transformers' ForCausalLMLoss: fp32 logits, shifted labels, log-softmax (saved), mean over the tokens."""
    tape = logits.tape
    logits = cast(logits, "fp32")
    labels = shifted_labels(tape, batch_size, seq_len)[-1:]
    logs = tape.new_like(logits)
    tape.record([logits], [logs], [logs], lambda grads: [value_like(grads[0])])
    loss, weight = tape.new(1, "fp32"), tape.new(1, "fp32")
    numel = logs.numel
    tape.record([logs], [loss], [*labels, weight], lambda grads: [tape.new(numel, "fp32")])
    return loss
