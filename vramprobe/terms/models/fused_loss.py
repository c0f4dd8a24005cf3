"""Liger's fused linear cross entropy on the tape: head and loss in one, a chunk of tokens at a time.

In: the last hidden states. Out: the loss. Both gradients are made in forward, chunk by chunk, and wait for backward in
place of the logits. Every line below is one of ``ops/fused_linear_cross_entropy.py`` of liger-kernel 0.8.5; GPUs before
Ampere, which take the CPU's way to the weight's gradient, are left out. Never imports torch.
"""

from __future__ import annotations

from vramprobe.terms.models import operators as op
from vramprobe.terms.models.modules import Model
from vramprobe.terms.tape.graph import TEMPORARY, Value


def fused_linear_cross_entropy(model: Model, hidden: Value) -> Value:
    """The loss of the hidden states, by ``LigerForCausalLMLoss``."""
    tape, setup, weight = model.tape, model.setup, model.weight(model.head)
    labels = op.shifted_labels(tape, setup.batch_size, setup.seq_len)
    grad_input = tape.new(hidden.numel, hidden.dtype, "saved_activations")
    grad_weight = tape.new(weight.numel, weight.dtype, "gradients") if weight.needs_grad else None
    losses, mask = tape.new(setup.num_tokens, "fp32"), tape.new(setup.num_tokens, "bool")
    for _ in range(1 if setup.loss_chunk is None else 2):  # no later one is higher than the second, taken as full
        _chunk(model, hidden, weight, grad_weight)
    loss = tape.new(1, "fp32")
    waiting = [grad_weight, grad_input]

    def backward(grads: list[Value]) -> list[Value | None]:
        made = [waiting.pop(), waiting.pop()]
        one = tape.new(1, "fp32")  # which the loss's own gradient is held against
        del one
        return made

    tape.record([hidden, weight], [loss], [], backward)
    del labels, losses, mask
    return loss


def _chunk(model: Model, hidden: Value, weight: Value, grad_weight: Value | None) -> None:
    """Logits, in whose place their gradient is made, and the two products of that."""
    tape, setup = model.tape, model.setup
    num_tokens = setup.num_tokens if setup.loss_chunk is None else setup.loss_chunk
    width = model.arch.head_width
    dtype = hidden.dtype if setup.autocast == "none" else setup.autocast
    chunk = tape.view(hidden, num_tokens * width)
    writes_in_place = model.device == "cuda" and hidden.dtype == weight.dtype == dtype
    operands = [_uncached(chunk, dtype), _uncached(weight, dtype)]
    logits = tape.new(num_tokens * model.arch.vocab_size, dtype)
    operands.clear()
    model.autocasted(weight)  # for the product with their gradient: autocast keeps a trained weight's copy
    if not writes_in_place:
        product = tape.new(chunk.numel, dtype)
        del product
    if grad_weight is not None:
        with tape.cause(TEMPORARY):
            _add_to(grad_weight, logits, chunk, model.device)


def _add_to(grad_weight: Value, logits: Value, chunk: Value, device: str) -> None:
    """``grad_weight += logits.T @ chunk``: CUDA's ``addmm`` adds up 16 bits in place, else the product is whole."""
    operand = _uncached(chunk, logits.dtype)
    if device == "cuda" and logits.dtype != "fp32":
        return
    product = grad_weight.tape.new(grad_weight.numel, logits.dtype)
    del operand
    product = op.cast(product, "fp32")
    if device == "cpu" and grad_weight.dtype != "fp32":  # TensorIterator widens what it adds to, and narrows the sum
        wide = [op.value_like(product) for _ in range(2)]
        wide.clear()


def _uncached(value: Value, dtype: str) -> Value | None:
    """A copy in another dtype, outside the graph; null where it has that dtype."""
    return None if value.dtype == dtype else value.tape.new(value.numel, dtype)
