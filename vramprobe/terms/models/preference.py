"""TRL's preference trainers on the tape: a loss of several rows for each example, with a reference model beside it.

In: a Model, whose rows are all that an example has. Out: the loss. DPO is trl 1.16.0's ``DPOTrainer._compute_loss``
(trainer/dpo_trainer.py) with its defaults: log-probabilities of the trained model, then those of the reference without
a graph, while the trained model's graph stands. Every token but a row's first is scored. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vramprobe.terms.cell.setup import Setup
from vramprobe.terms.models.chunked_nll import scored
from vramprobe.terms.models.modules import Model
from vramprobe.terms.tape.graph import Value

#: The last hidden states of a model; whether a graph is made of it.
Hidden = Callable[[Model], Value]


def dpo(model: Model, last_hidden: Hidden, reference_hidden: Hidden) -> Value:
    """The loss of chosen and rejected rows."""
    tape = model.tape
    tape.at("forward", "embedding")
    labels = tape.new(model.num_tokens, "int64", "logits")
    logs, metrics = _scored(model, last_hidden(model), num_metrics=2)
    reference = Model(tape, _of_reference(model.setup), model.layers)
    with tape.no_grad():
        others = _scored(reference, reference_hidden(reference), num_metrics=0)
    tape.at("forward", "loss")
    numel = logs.numel
    with tape.cause("logits"):
        loss = tape.new(1, "fp32")
        tape.record([logs], [loss], [], lambda grads: [tape.new(numel, "fp32")])
    del labels, logs, metrics, others
    return loss


def _scored(model: Model, hidden: Value, *, num_metrics: int) -> tuple[Value, list[Value]]:
    """What a model's forward returns, each under an autocast of its own."""
    with model.tape.cause("logits", saved="logits"):
        found = scored(model, hidden, num_metrics=num_metrics)
    model.leave_autocast()
    return found


def _of_reference(setup: Setup) -> Setup:
    """Of a model without adapters; it keeps nothing, and so recomputes nothing."""
    base = tuple([tensor for tensor in setup.tensors if tensor.role != "adapter"])
    return replace(setup, tensors=base, gradient_checkpointing=False, accumulates=False)
