"""TRL's reward model on the tape: one number for each row, from a head of one output, and the chosen rows' lead.

In: a Model, whose rows are the chosen ones and the rejected ones, and its last hidden states. Out: the loss. As in trl
1.16.0's ``RewardTrainer.compute_loss`` (trainer/reward_trainer.py), with its defaults, and transformers'
``GenericForSequenceClassification.forward`` (modeling_layers.py). Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable

from vramprobe.terms.models import operators as op
from vramprobe.terms.models.modules import Model
from vramprobe.terms.tape.graph import Value

Hidden = Callable[[Model, str], Value]


def reward(model: Model, last_hidden: Hidden) -> Value:
    """The loss of chosen and rejected rows."""
    tape, num_rows = model.tape, model.setup.batch_size
    tape.at("forward", "embedding")
    hidden = last_hidden(model, "")
    with tape.cause("logits", saved="logits"):
        rewards = _of_last_tokens(model, model.logits(hidden))
        del hidden
        model.leave_autocast()
        if model.setup.autocast != "none" and not tape.casts_weights:  # accelerate hands out fp32
            rewards = op.cast(rewards, "fp32")
        dtype = rewards.dtype
        lead = tape.new(num_rows, dtype)
        tape.record([rewards], [lead], [lead], lambda grads: [tape.new(num_rows, dtype)])
        loss = tape.new(1, dtype)
        tape.record([lead], [loss], [], lambda grads: [tape.new(num_rows, dtype)])
    return loss


def _of_last_tokens(model: Model, logits: Value) -> Value:
    """``logits[rows, last_non_pad_token]``: where that is, is looked up in each row's tokens."""
    tape, num_rows, numel, dtype = model.tape, model.setup.batch_size, logits.numel, logits.dtype
    are_tokens = [tape.new(numel, kind) for kind in ("bool", "int32", "int32")]  # no padding, as int32, by their number
    rows, last = (tape.new(num_rows, "int64") for _ in range(2))
    are_tokens.clear()
    picked = tape.new(num_rows, dtype)
    tape.record([logits], [picked], [rows, last], lambda grads: [tape.new(numel, dtype)])
    return picked
