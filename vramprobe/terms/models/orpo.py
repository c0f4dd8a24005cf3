"""ORPO on the tape: the chosen rows' loss and the odds of all rows, from all logits.

In: a Model, whose rows are the chosen ones and the rejected ones, and its last hidden states. Out: the loss. As in trl
1.16.0's ``ORPOTrainer.get_batch_loss_metrics`` (experimental/orpo/orpo_trainer.py), with its defaults. Under
autocast accelerate makes the logits fp32. Each row's last token, which has no label, is counted with the others. Never
imports torch.
"""

from __future__ import annotations

from collections.abc import Callable

from vramprobe.terms.models import operators as op
from vramprobe.terms.models.modules import Model
from vramprobe.terms.tape.graph import Value

Hidden = Callable[[Model, str], Value]


def orpo(model: Model, last_hidden: Hidden) -> Value:
    """The loss of chosen and rejected rows."""
    tape, num_tokens = model.tape, model.num_tokens
    tape.at("forward", "embedding")
    joined = [tape.new(num_tokens, "int64", "logits") for _ in range(3)]  # both halves' ids, mask and labels
    hidden = last_hidden(model, "")
    with tape.cause("logits", saved="logits"):
        logits = model.logits(hidden)
        del hidden
        model.leave_autocast()
        if model.setup.autocast != "none" and not tape.casts_weights:
            logits = op.cast(logits, "fp32")
        labels = tape.new(num_tokens, "int64")
        likelihood = _likelihood(model, logits)
        log_probs = _log_probs(model, logits)
        loss = tape.new(1, "fp32")
        tape.record(
            [likelihood, log_probs], [loss], [], lambda grads: [tape.new(1, "fp32"), tape.new(num_tokens, "fp32")]
        )
    del joined, labels, logits, likelihood, log_probs
    return loss


def _likelihood(model: Model, logits: Value) -> Value:
    """Cross-entropy of the chosen rows, of their logits without the last token's, in one piece."""
    tape, dtype = model.tape, logits.dtype
    shifted = _part(_part(logits, logits.numel // 2), _num_scored(model, logits.numel // 2))
    numel = shifted.numel
    given = shifted
    if model.setup.batch_size > 2:  # a single row is in one piece
        given = tape.new(numel, dtype)
        tape.record([shifted], [given], [], lambda grads: [grads[0]])
    logs = tape.new(numel, dtype)
    tape.record([given], [logs], [logs], lambda grads: [tape.new(numel, dtype)])
    loss = tape.new(1, dtype)
    tape.record([logs], [loss], [], lambda grads: [tape.new(numel, dtype)])
    return loss


def _num_scored(model: Model, numel: int) -> int:
    """Of so many logits those of tokens that have a label, where sizes are known."""
    return numel if model.tape.asked is None else numel - numel // model.setup.seq_len


def _part(value: Value, numel: int) -> Value:
    """A slice, whose backward puts zeros around it."""
    tape, dtype, num_all = value.tape, value.dtype, value.numel
    part = tape.view(value, numel)
    tape.record([value], [part], [], lambda grads: [tape.new(num_all, dtype)])
    return part


def _log_probs(model: Model, logits: Value) -> Value:
    """``selective_log_softmax``, by TRL's Triton kernel (kernels/logprob_entropy.py)."""
    tape, num_tokens, dtype = model.tape, model.num_tokens, logits.dtype
    shifted = _part(logits, _num_scored(model, logits.numel))
    numel = shifted.numel
    index = tape.new(num_tokens, "int64")
    out, entropy = tape.new(num_tokens, "fp32"), tape.new(num_tokens, "fp32")
    log_z, mean = tape.new(num_tokens, "fp32"), tape.new(num_tokens, "fp32")
    tape.record([shifted], [out], [shifted, index, log_z, mean], lambda grads: [tape.new(numel, dtype)])
    del entropy
    return out
