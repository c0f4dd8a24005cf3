"""Operators of a mixture of experts on the tape: choosing, gathering by expert, the experts' products, putting back.

In: Values. Out: Values, with the rules of operators.py. All sizes follow from how many pairs of token and expert there
are (tokens × experts per token), never from which expert a token chose: the grouped product (``torch._grouped_mm``,
which transformers takes by default) works on all pairs at once, so balanced and unbalanced routing allocate the same.
Never imports torch.
"""

from __future__ import annotations

from vramprobe.terms.models.operators import value_like
from vramprobe.terms.tape.graph import Value
from vramprobe.terms.tape.layout import as_view


def top_k(value: Value, num_chosen: int) -> tuple[Value, Value]:
    """``torch.topk``: (values, indices); saves the indices, and backward scatters into zeros of the full size."""
    tape, full = value.tape, value.numel
    values, indices = tape.new(num_chosen, value.dtype), tape.new(num_chosen, "int64")
    tape.record([value], [values], [indices], lambda grads: [tape.new(full, grads[0].dtype)])
    return values, indices


def divided_by_row_sums(value: Value, num_rows: int) -> Value:
    """``value /= value.sum(-1, keepdim=True)``: in place, so that what division saves of it is a copy."""
    tape = value.tape
    total = tape.new(num_rows, value.dtype)
    before = value_like(value)

    def backward(grads: list[Value]) -> list[Value | None]:
        # For the sums: -grad * ((value / sums) / sums), four full steps of which one is left; then grad / sums.
        steps = [value_like(grads[0]) for _ in range(4)]
        del steps[1:]
        made = value_like(grads[0])
        del steps
        summed = tape.new(num_rows, made.dtype)
        del summed  # added to the other in place, spread over the rows
        return [made]

    out = tape.view(value)
    tape.record([value], [out], [before, total], backward)
    return out


def gathered(value: Value, indices: Value, numel: int) -> Value:
    """``value[indices]``: rows, ``numel`` elements; saves the indices; backward adds into zeros of the full size."""
    tape, full = value.tape, value.numel
    # Saved before it runs: a layer that is recomputed stops here where it saves nothing later.
    edge = tape.record([value], [], [indices], lambda grads: [tape.new(full, grads[0].dtype)])
    out = tape.new(numel, value.dtype)
    out.edge = edge
    return out


def grouped_product(value: Value, weight: Value, offsets: Value, num_in: int, num_out: int) -> Value:
    """``torch._grouped_mm``: each row by the matrix of its expert; saves as a linear layer does, and the offsets."""
    tape, numel = value.tape, value.numel
    needs, trained, weight_numel = value.needs_grad, weight.needs_grad, weight.numel
    saved = [*([value] if trained else []), *([weight] if needs else []), offsets]

    def backward(grads: list[Value]) -> list[Value | None]:
        dtype = grads[0].dtype
        grad_weight = as_view(tape.new(weight_numel, dtype)) if trained else None  # through .transpose()
        return [tape.new(numel, dtype) if needs else None, grad_weight]

    edge = tape.record([value, weight], [], saved, backward)
    out = tape.new(numel // num_in * num_out, value.dtype)
    out.edge = edge
    return out


def summed_groups(value: Value, numel: int, dtype: str) -> Value:
    """``value.view(tokens, k, width).sum(dim=1)``; backward spreads the gradient and copies it into rows again."""
    tape, full = value.tape, value.numel
    out = tape.new(numel, dtype)
    before = value.dtype

    def backward(grads: list[Value]) -> list[Value | None]:
        grad = grads[0] if grads[0].dtype == before else tape.new(numel, before)
        return [tape.view(grad) if numel == full else tape.new(full, before)]

    tape.record([value], [out], [], backward)
    return out


def stacked(value: Value) -> Value:
    """An adapter's B as one matrix per expert: a permuted view, whose gradient is copied back into B's own order."""
    out = value.tape.view(value)
    value.tape.record([value], [out], [], lambda grads: [value_like(grads[0])])
    return out


def stack_like(weight: Value, left: Value) -> Value:
    """What the product with ``left`` is added to. cuBLAS takes no matrix that has gaps both ways, as the view of B has,
    and CUDA's kernel copies it (cuda/Blas.cpp, ``prepare_batch_matrix_for_cublas``).
    """
    out = weight.tape.new(weight.numel, weight.dtype)
    weight.tape.scratch([left.num_bytes])
    return out


def folded(weight: Value, left: Value, right: Value, *, scaled: bool) -> Value:
    """``torch.baddbmm(weight, left, right, alpha=scaling)``: a copy of the whole stack with its adapter in it."""
    tape, sizes, left_bytes = weight.tape, (left.numel, right.numel), left.num_bytes
    out = stack_like(weight, left)

    def backward(grads: list[Value]) -> list[Value | None]:
        made = []
        for side, size in enumerate(sizes):
            product = tape.new(size, grads[0].dtype)
            if side == 1:
                tape.scratch([left_bytes])
            made.append(value_like(product) if scaled else product)
            del product
        return [None, *made]

    tape.record([weight, left, right], [out], [left, right], backward)
    return out
