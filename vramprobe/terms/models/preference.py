"""TRL's preference trainers on the tape: rows that are scored by the trained model, and by a reference without a graph.

In: a Model, whose rows are all that a micro-batch has. Out: the loss. As in trl 1.16.0, with its defaults:
``DPOTrainer._compute_loss`` (trainer/dpo_trainer.py): the trained model, then the reference, while the trained model's
graph stands. ``KTOTrainer._compute_loss`` (trainer/kto_trainer.py): before both, each scores other completions, for
their KL divergence. Every token but a row's first is scored. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vramprobe.terms.cell.setup import Setup
from vramprobe.terms.models.chunked_nll import scored
from vramprobe.terms.models.modules import Model
from vramprobe.terms.tape.graph import Value
from vramprobe.terms.tape.tape import BEFORE, REFERENCE, REFERENCE_KL

#: The last hidden states of a model; what the names of their places begin with.
Hidden = Callable[[Model, str], Value]
#: The dtypes of what is computed beside each log-probability, for the trainer's metrics.
_METRICS = {"dpo": ("fp32", "fp32", "bool"), "kto": ("fp32", "fp32")}


def loss(model: Model, last_hidden: Hidden) -> Value:
    """The loss of a micro-batch."""
    tape, trainer = model.tape, model.setup.trainer
    others: list[Value] = []
    if trainer == "kto":
        others.append(_beside(model, last_hidden, BEFORE))
    tape.at("forward", "embedding")
    labels = tape.new(model.num_tokens, "int64", "logits")
    logs, metrics = _scored(model, last_hidden(model, ""), _METRICS[trainer])
    if trainer == "kto":
        others.append(_beside(model, last_hidden, REFERENCE_KL))
    others.append(_beside(model, last_hidden, REFERENCE))
    tape.at("forward", "loss")
    numel = logs.numel
    with tape.cause("logits"):
        found = tape.new(1, "fp32")
        tape.record([logs], [found], [], lambda grads: [tape.new(numel, "fp32")])
    del labels, logs, metrics, others
    return found


def _beside(model: Model, last_hidden: Hidden, of: str) -> Value:
    """Log-probabilities without a graph, by the reference but before the trained model's own forward."""
    tape, setup = model.tape, replace(model.setup, gradient_checkpointing=False, accumulates=False)
    if of != BEFORE:
        setup = _of_reference(setup)
    other = Model(tape, setup, model.layers)
    with tape.no_grad():
        hidden = last_hidden(other, of)
        return _scored(other, hidden, ())[0]


def _of_reference(setup: Setup) -> Setup:
    """Of a model without adapters."""
    return replace(setup, tensors=tuple([tensor for tensor in setup.tensors if tensor.role != "adapter"]))


def _scored(model: Model, hidden: Value, metrics: Sequence[str]) -> tuple[Value, list[Value]]:
    """What a model's forward returns, each under an autocast of its own."""
    with model.tape.cause("logits", saved="logits"):
        found = scored(model, hidden, metrics)
    model.leave_autocast()
    return found
