"""TRL's fused head on the tape: log-probabilities of the labels, from tiles of the logits that none outlives.

In: the last hidden states. Out: the loss. Backward makes each tile anew, and both gradients in fp32. Every line below
is one of trl 1.16.0: ``add_fused_lm_head`` (trainer/utils.py) and ``ChunkedLogProbFunction``
(kernels/chunked_logprob.py) where Triton runs. Each row's last token, which has no label, is counted with the others.
Never imports torch.
"""

from __future__ import annotations

from vramprobe.terms.models import operators as op
from vramprobe.terms.models.modules import Model
from vramprobe.terms.tape.graph import Value

#: Words of the vocabulary of one tile (_CHUNKED_LOGPROB_CHUNK_SIZE); its tokens are setup.py's.
WORDS = 32768
#: Statistics that each token has while its tiles are folded, in fp32.
_NUM_STATISTICS = 7


def chunked_nll(model: Model, hidden: Value) -> Value:
    """The loss of the hidden states, by SFTTrainer."""
    tape, num_tokens = model.tape, model.setup.num_tokens
    logs, metrics = _scored(model, hidden)
    loss = tape.new(1, "fp32")
    tape.record([logs], [loss], [], lambda grads: [tape.new(num_tokens, "fp32")])
    del metrics
    return loss


def _scored(model: Model, hidden: Value) -> tuple[Value, list[Value]]:
    """(the log-probability of each label, what is computed beside it for the trainer's metrics)."""
    tape, num_tokens = model.tape, model.setup.num_tokens
    mask = tape.new(num_tokens, "bool")
    picked = _picked(model, hidden)
    logs = _scattered(model, _log_probs(model, picked), mask)
    beside = [tape.new(num_tokens, dtype) for dtype in ("fp32", "bool")]
    del picked
    return logs, beside


def _picked(model: Model, hidden: Value) -> Value:
    """``hidden[mask]``: a copy of all rows that have a label, and where they are."""
    tape, num_tokens, dtype, numel = model.tape, model.setup.num_tokens, hidden.dtype, hidden.numel
    where = tape.new(2 * num_tokens, "int64")
    out = tape.new(numel, dtype)

    def backward(grads: list[Value]) -> list[Value | None]:
        """Rows are sorted by where they are added to; then those without their last token are put among all."""
        made = tape.new(numel, dtype)
        taken = [tape.new(num_tokens, "int64") for _ in range(4)]
        taken.clear()
        whole = tape.new(numel, dtype)
        del made
        return [whole]

    tape.record([hidden], [out], [where], backward)
    return out


def _scattered(model: Model, logs: Value, mask: Value) -> Value:
    """``zeros.masked_scatter(mask, logs)``."""
    tape, num_tokens = model.tape, model.setup.num_tokens
    zeros = tape.new(num_tokens, "fp32")
    out = tape.new(num_tokens, "fp32")
    places = tape.new(num_tokens, "int64")
    del zeros, places
    tape.record([logs], [out], [mask], lambda grads: [tape.new(num_tokens, "fp32")])
    return out


def _log_probs(model: Model, hidden: Value) -> Value:
    """``ChunkedLogProbFunction``."""
    tape, setup, weight = model.tape, model.setup, model.weight(model.head)
    num_tokens = setup.num_tokens
    labels = tape.new(num_tokens, "int64")
    dtype = hidden.dtype if setup.autocast == "none" else setup.autocast
    statistics = [tape.new(num_tokens, "fp32") for _ in range(_NUM_STATISTICS)]
    tile = _tile(model, dtype)
    for _ in range(_num_chunks(model)):
        rows = _cast(model, hidden.dtype, _num_rows(model), dtype)
        for numel in _tiles(model):
            words = _cast(model, weight.dtype, numel, dtype)
            del words
            tape.multiplied()
    del rows
    log_z, log_probs = tape.new(num_tokens, "fp32"), tape.new(num_tokens, "fp32")
    entropy = tape.new(num_tokens, "fp32")
    numels, dtypes, trained = (hidden.numel, weight.numel), (hidden.dtype, weight.dtype), weight.needs_grad

    def backward(grads: list[Value]) -> list[Value | None]:
        wide = [tape.new(numels[0], "fp32")] + ([tape.new(numels[1], "fp32")] if trained else [])
        again = _tile(model, dtype)
        rows = words = None
        for _ in range(_num_chunks(model)):
            rows = _cast(model, dtypes[0], _num_rows(model), dtype)
            for numel in _tiles(model):  # each is cast while the one before it stands
                words = _cast(model, dtypes[1], numel, dtype)
                tape.multiplied()
        made = [op.cast(one, dtypes[side]) for side, one in enumerate(wide)]
        del again, rows, words
        return made if trained else [made[0], None]

    tape.record([hidden, weight], [log_probs], [hidden, labels, log_z, entropy], backward)
    statistics.clear()
    del tile
    return log_probs


def _num_chunks(model: Model) -> int:
    """Of tokens; no later one is higher than the second."""
    return 1 if model.setup.loss_chunk is None else 2


def _num_rows(model: Model) -> int:
    """Elements of a chunk of hidden states."""
    return (model.setup.loss_chunk or model.setup.num_tokens) * model.arch.head_width


def _tiles(model: Model) -> list[int]:
    """Elements of the head's weight that each tile is made with."""
    vocab_size = model.arch.vocab_size
    return [min(WORDS, vocab_size - start) * model.arch.head_width for start in range(0, vocab_size, WORDS)]


def _tile(model: Model, dtype: str) -> Value:
    with model.tape.cause("logits"):
        return model.tape.new((model.setup.loss_chunk or model.setup.num_tokens) * WORDS, dtype)


def _cast(model: Model, before: str, numel: int, dtype: str) -> Value | None:
    """So many elements in another dtype, outside the graph; null where they have that."""
    if before == dtype:
        return None
    with model.tape.cause("cast_copies"):
        return model.tape.new(numel, dtype)
