"""Cut Cross-Entropy on the tape: the loss from the last hidden states and the head's weight, and no logits at all.

In: the last hidden states. Out: the loss. Its kernels make each block of logits in a multiprocessor's own memory; what
they allocate is a number for each token and for each word, and in backward both gradients. Every line below is one of
Axolotl's fork (5f0c7a7, ``cce.py``, ``cce_lse_forward.py``, ``indexed_dot.py``, ``cce_backward.py``) with
``cce_patch``'s defaults. Each row's last token, which has no label, is counted with the others. Never imports torch.
"""

from __future__ import annotations

from vramprobe.terms.models import operators as op
from vramprobe.terms.models.modules import Model
from vramprobe.terms.tape.graph import Value

#: Tokens and words for each of a gradient's locks, which stand for so many elements of its width, too.
_PER_LOCK, _WIDTH_PER_LOCK = 128, 64


def cut_cross_entropy(model: Model, hidden: Value) -> Value:
    """The loss of the hidden states, by ``apply_lce``."""
    tape, setup, weight = model.tape, model.setup, model.weight(model.head)
    num_tokens, num_words = setup.num_tokens, model.arch.vocab_size
    if hidden.dtype != weight.dtype:
        hidden = op.cast(hidden, weight.dtype)
    valids = _valids(model)
    logs = tape.new(num_tokens, "fp32")
    averages = tape.new(num_words, "fp32")
    targets = tape.new(num_tokens, "fp32")
    if model.arch.caps_logits:
        capped = [tape.new(num_tokens, "fp32")]
        capped.clear()
    loss = tape.new(1, "fp32")
    numels, dtype, trained = (hidden.numel, weight.numel), hidden.dtype, weight.needs_grad

    def backward(grads: list[Value]) -> list[Value | None]:
        order = _order(model)
        made = tape.new(numels[0], dtype)
        of_weight = tape.new(numels[1], dtype) if trained else None
        locks = [_locks(model, num_tokens)] + ([_locks(model, num_words)] if trained else [])
        del order
        locks.clear()
        return [made, of_weight]

    tape.record([hidden, weight], [loss], [hidden, logs, valids, averages], backward)
    del targets
    return loss


def _valids(model: Model) -> Value:
    """``_build_flat_valids``: where there are labels, by row and place, then as one number."""
    tape, num_tokens = model.tape, model.setup.num_tokens
    found = tape.new(num_tokens, "bool")
    places = tape.new(2 * num_tokens, "int64")
    del found
    narrow = tape.new(2 * num_tokens, "int32")
    del places
    valids = tape.new(num_tokens, "int64")
    del narrow
    return valids


def _order(model: Model) -> Value:
    """``sort_logit_avg``: the words by their average logit."""
    tape, num_words = model.tape, model.arch.vocab_size
    places = tape.new(num_words, "int64")
    values = tape.new(num_words, "fp32")
    del values
    order = tape.new(num_words, "int32")
    del places
    return order


def _locks(model: Model, count: int) -> Value:
    return model.tape.new(count // _PER_LOCK * (model.arch.head_width // _WIDTH_PER_LOCK), "int32")
