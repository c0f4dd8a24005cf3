"""ORPO on the tape: the chosen rows' loss and the odds of all rows, from all logits in fp32.

In: a Model, whose rows are the chosen ones and the rejected ones, and its last hidden states. Out: the loss. As in trl
1.16.0's ``ORPOTrainer.get_batch_loss_metrics`` (experimental/orpo/orpo_trainer.py), whose model accelerate has return
its logits in fp32. Each row's last token, which has no label, is counted with the others. Never imports torch.
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
    """Cross-entropy of the chosen rows, of a copy of their logits without the last token's."""
    tape, numel, chosen = model.tape, logits.numel, logits.numel // 2
    copy = tape.new(chosen, "fp32")
    logs = tape.new(chosen, "fp32")
    del copy
    loss = tape.new(1, "fp32")

    def backward(grads: list[Value]) -> list[Value | None]:
        """The loss's, the log-softmax's, then zeros around it for each of two slices."""
        of_loss = tape.new(chosen, "fp32")
        of_logs = tape.new(chosen, "fp32")
        del of_loss
        inner = tape.new(chosen, "fp32")
        del of_logs
        whole = tape.new(numel, "fp32")
        del inner
        return [whole]

    tape.record([logits], [loss], [logs], backward)
    return loss


def _log_probs(model: Model, logits: Value) -> Value:
    """``selective_log_softmax``: each label's logit, less the row's logsumexp, made row by row."""
    tape, numel, num_tokens = model.tape, logits.numel, model.num_tokens
    row = model.setup.seq_len * model.arch.vocab_size
    shifted = tape.view(logits)
    tape.record([logits], [shifted], [], lambda grads: [tape.new(numel, "fp32")])
    index = tape.new(num_tokens, "int64")
    picked, sums = tape.new(num_tokens, "fp32"), tape.new(num_tokens, "fp32")
    exponentials = tape.new(row, "fp32")
    del exponentials
    out = tape.new(num_tokens, "fp32")

    def backward(grads: list[Value]) -> list[Value | None]:
        """Each row's gradient stands until all are stacked; then the labels' own is added to them."""
        rows = tape.new(numel - row, "fp32")
        last = [tape.new(row, "fp32") for _ in range(3)]
        last = last[2:]
        stacked = tape.new(numel, "fp32")
        del rows, last
        scattered = tape.new(numel, "fp32")
        del scattered
        return [stacked]

    tape.record([shifted], [out], [shifted, index, sums], backward)
    del picked
    return out
