"""Trainers and loops: what a micro-batch of each holds, and what is kept from one step to the next, a row each.

In: nothing. Out: frozen rows by name, which specs, rules, bounds, workload and the page read; bytes of a model's
outputs. What a trainer's loss does is TRL's own code (workload/trainer.py); the loops themselves are
examples/loops.py. Imports neither.
"""

from typing import Any, Literal, NamedTuple

from vramprobe.units import format_bytes


class Trainer(NamedTuple):
    """One trainer of TRL, or plain training with the model's own loss."""

    name: str
    trl: str = ""  # TRL's class, below its package; empty: the model's own forward and loss
    rows: int = 1  # sequences of a micro-batch for each of its examples
    inputs: tuple[str, ...] = ("input_ids", "labels")  # int64, one number for each token
    fuses_head: bool = False  # log-probabilities from tiles of the logits, by TRL's Triton kernels
    scores_rows: bool = False  # by a head of one output in place of the vocabulary's
    scores_first: bool = False  # each batch once without gradients before its forward
    has_reference: bool = False  # a frozen model beside the trained one: a second one, or adapters switched off


_MASKED = ("input_ids", "attention_mask", "completion_mask")
_ROWS = (
    Trainer(name="sft"),
    Trainer(
        name="dpo",
        trl="DPOTrainer",
        rows=2,  # chosen and rejected
        fuses_head=True,
        inputs=_MASKED,
        has_reference=True,
    ),
    Trainer(
        name="kto",
        trl="KTOTrainer",
        inputs=(*_MASKED, *(f"KL_{name}" for name in _MASKED)),  # and each prompt with another one's completion
        has_reference=True,
        fuses_head=True,
    ),
    Trainer(
        name="orpo",
        trl="experimental.orpo.ORPOTrainer",
        rows=2,  # chosen and rejected
        inputs=("input_ids", "attention_mask", "labels"),
    ),
    Trainer(
        name="reward",
        trl="RewardTrainer",
        rows=2,  # chosen and rejected
        inputs=("input_ids", "attention_mask"),
        scores_rows=True,
    ),
    Trainer(
        name="grpo",
        trl="GRPOTrainer",  # completions that are there: what generates them is beside it (predict/grpo.py)
        fuses_head=True,
        scores_first=True,
        inputs=_MASKED,
    ),
)
TRAINERS = {row.name: row for row in _ROWS}


class Loop(NamedTuple):
    """A training loop; those whose peaks are the same share a row (docs/loops.md)."""

    name: str
    outputs_until: Literal["", "step", "forward"] = ""  # the end of the step, or the next forward's; empty: its own
    raises_outputs: bool = False  # to fp32, where there is autocast: accelerate's prepared model
    frees_gradients_late: bool = False  # not before the next forward has returned


_LOOPS = (
    Loop(name="trainer"),
    Loop(name="keeps-outputs", outputs_until="forward"),
    Loop(name="step-function", outputs_until="step"),
    Loop(name="accelerate", outputs_until="forward", raises_outputs=True),
    Loop(name="late-zero-grad", frees_gradients_late=True),
)
LOOPS = {row.name: row for row in _LOOPS}
#: The loop of a cell that names none.
USUAL_LOOP = "trainer"
#: A word for :data:`USUAL_LOOP` with TRL's head and loss.
TRL = "trl"
#: The loop that is named where none was said, as the commonest one that needs more.
COMMONEST_OTHER = "keeps-outputs"
_LEAST_SHARE = 0.01


def config_for(trainer: str, config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the model that a trainer builds: one that scores rows has a single label."""
    row = TRAINERS.get(str(trainer))
    return config if row is None or not row.scores_rows else {**config, "num_labels": 1}


def outputs_bytes(spec: Any, loop: Loop, vocab_size: int) -> int:
    """Bytes of the logits that ``loop`` keeps when a forward has returned; 0 where it keeps none or there are none."""
    if not loop.outputs_until or spec.other_head != "" or spec.fused_linear_cross_entropy:
        return 0
    head = "fp32" if spec.kbit_prep == "peft" else spec.dtype
    dtype = head if spec.autocast == "none" else spec.autocast
    is_fp32 = dtype == "fp32" or (loop.raises_outputs and spec.autocast != "none")
    return spec.num_tokens * vocab_size * (4 if is_fp32 else 2)


def other_loop(spec: Any, peak_bytes: int, kept_bytes: int) -> list[str]:
    """Name the loop that a peak assumes, and the peak of the commonest other one, which keeps ``kept_bytes`` more.

    Nothing where that hardly differs.
    """
    if spec.is_sharded or kept_bytes < _LEAST_SHARE * peak_bytes:
        return []
    needed = format_bytes(peak_bytes + kept_bytes)
    return [f"{needed} allocated if your loop keeps its outputs (--loop {COMMONEST_OTHER}); a Trainer's is assumed"]
