"""Name the causes of a recorded cell more finely: logits, stored checkpoints, what is recomputed, casts, workspaces.

In: a Log whose layers are marked, and the cell that was run. Out: the same events with the causes of ALL_CAUSES
(log.py). It looks at where a block was made, and at its size where the place is not enough: by rules that hold at every
batch shape alike, since a recipe's causes must.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from vramprobe.catalog import text_config
from vramprobe.log.log import ALL_CAUSES, OUTSIDE, Log, PhaseMark
from vramprobe.spec import CellSpec
from vramprobe.trainers import TRAINERS

_SAVED, _TEMPORARY = ALL_CAUSES.index("saved_activations"), ALL_CAUSES.index("temporaries")


def refined(log: Log, spec: CellSpec) -> Log:
    """Return ``log``, a run of ``spec``, with saved activations and temporaries named by where they were made."""
    made, sizes = log.size_bytes > 0, log.size_bytes
    inside, entered = _inside_layers(log)
    causes = log.causes.copy()
    is_saved, is_temporary = (made & (log.causes == cause) for cause in (_SAVED, _TEMPORARY))

    def name(cause: str, which: np.ndarray) -> None:
        causes[which & (is_saved | is_temporary)] = ALL_CAUSES.index(cause)

    forward, backward, optimizer = (_within(log, name) for name in ("forward", "backward", "optimizer_step"))
    before_layers = _within(log, "backward", lambda mark: entered[entered >= mark.events.start][:1])
    of_head, casts = _head_bytes(spec), spec.autocast != "none" and "fp32" in (spec.dtype, _head_dtype(spec))
    if spec.gradient_checkpointing:
        is_input = np.isin(sizes, _hidden_bytes(spec)) | (not casts)
        name("checkpoint_store", inside & is_saved & is_input)
        name("cast_copies", inside & is_saved & ~is_input)
        name("recomputed_layer", inside & backward & is_temporary & ~np.isin(sizes, (of_head, 2 * of_head)))
    name("optimizer_temporaries", optimizer & is_temporary)
    name("logits", ~inside & (forward | before_layers) & np.isin(sizes, _logits_bytes(spec)))
    # A product of as many tokens as the model is wide has a head's size: what comes first, or last, is the head's.
    if casts:
        name("cast_copies", _one_per_phase(log, "forward", ~inside & (sizes == of_head), 0))
    if spec.method == "full" and text_config(spec.architecture).get("tie_word_embeddings", True):
        of_gradient = before_layers & ~inside & np.isin(sizes, (of_head, 2 * of_head))
        name("gradients", _one_per_phase(log, "backward", of_gradient, -1))
    name("workspaces", _stays(log) & (forward | backward))
    by_block = np.zeros(int(log.blocks.max(initial=0)) + 1, dtype=causes.dtype)
    by_block[log.blocks[made]] = causes[made]
    return replace(log, causes=np.where(sizes == 0, causes, by_block[log.blocks]))


def _inside_layers(log: Log) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each event, if a layer ran forward or backward; and where layers' backwards begin, in order."""
    layers = [OUTSIDE, *log.layers]
    inside = np.array([mark.stack >= 0 and mark.visit != "after" for mark in layers])
    at = np.searchsorted([mark.position for mark in layers], np.arange(len(log)), side="right") - 1
    return inside[at], np.array([mark.position for mark in layers if mark.visit == "backward"], dtype=np.int64)


def _within(log: Log, phase: str, end: Callable[[PhaseMark], np.ndarray] | None = None) -> np.ndarray:
    """Return True for each event of the phases of this name, of each up to its ``end`` if that gives a position."""
    found = np.zeros(len(log), dtype=bool)
    for mark in log.marks:
        if mark.name == phase:
            found[mark.events.start : min([mark.events.stop, *(end(mark) if end else ())])] = True
    return found


def _one_per_phase(log: Log, phase: str, which: np.ndarray, position: int) -> np.ndarray:
    """Return True for the first (``position`` 0) or the last (-1) event of ``which`` in each phase of this name."""
    found = np.zeros(len(log), dtype=bool)
    for mark in log.marks:
        events = mark.events.start + np.flatnonzero(which[mark.events.start : mark.events.stop])
        if mark.name == phase and len(events):
            found[events[position]] = True
    return found


def _stays(log: Log) -> np.ndarray:
    """Return True for each event of a block that the first step makes and no event frees."""
    freed = log.blocks[log.size_bytes < 0]
    first = min((mark.step for mark in log.marks if mark.step is not None), default=None)
    stop = max((mark.events.stop for mark in log.marks if mark.step == first), default=0)
    return ~np.isin(log.blocks, freed) & (np.arange(len(log)) < stop)


def _head_dtype(spec: CellSpec) -> str:
    """Return fp32 where the preparation of a quantized model leaves the head so."""
    return "fp32" if spec.kbit_prep == "peft" else spec.dtype


def _logits_bytes(spec: CellSpec) -> list[int]:
    """Bytes of a batch's scores in 16 and 32 bits, of pairs of rows too, with or without the last token; none of a
    fused head, whose gradient has as many where a batch has as many tokens as the model is wide."""
    if TRAINERS[spec.trainer].fuses_head:
        return []
    words = text_config(spec.architecture).get("vocab_size") or 0
    rows = [spec.batch_size, 2 * spec.batch_size]
    return [n * length * words * size for n in rows for length in (spec.seq_len, spec.seq_len - 1) for size in (2, 4)]


def _hidden_bytes(spec: CellSpec) -> list[int]:
    """Bytes of a batch's hidden states in 16 and 32 bits, of pairs of rows too."""
    return [rows * spec.num_tokens * _width(spec) * size for rows in (1, 2) for size in (2, 4)]


def _head_bytes(spec: CellSpec) -> int:
    """Bytes of an output head in 16 bits."""
    return 2 * _width(spec) * (text_config(spec.architecture).get("vocab_size") or 0)


def _width(spec: CellSpec) -> int:
    """Elements of a hidden state; 0 where the configuration does not say."""
    text = text_config(spec.architecture)
    return next((text[name] for name in ("hidden_size", "n_embd", "d_model") if text.get(name)), 0)
