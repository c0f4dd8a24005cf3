"""Trainers: what a micro-batch of each holds, in one row that specs, rules, arithmetic, workload and the page read.

In: nothing. Out: frozen rows by name. What its loss does is arithmetic's (terms/models/preference.py) and TRL's own
code (workload/trainer.py). Imports neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """One trainer of TRL, or plain training with the model's own loss."""

    name: str
    trl: str = ""  # TRL's class, below its package; empty: the model's own forward and loss
    rows: int = 1  # sequences of a micro-batch for each of its examples
    inputs: tuple[str, ...] = ("input_ids", "labels")  # int64, one number for each token
    num_forwards: int = 1  # of the layers, one of which has a backward
    fuses_head: bool = False  # log-probabilities from tiles of the logits, by TRL's Triton kernels
    scores_rows: bool = False  # by a head of one output in place of the vocabulary's
    has_reference: bool = False  # a frozen model beside the trained one: a second one, or adapters switched off


_MASKED = ("input_ids", "attention_mask", "completion_mask")
_ROWS = (
    Trainer(name="sft"),
    Trainer(
        name="dpo",
        trl="DPOTrainer",
        rows=2,  # chosen and rejected
        num_forwards=2,
        fuses_head=True,
        inputs=_MASKED,
        has_reference=True,
    ),
    Trainer(
        name="kto",
        trl="KTOTrainer",
        inputs=(*_MASKED, *(f"KL_{name}" for name in _MASKED)),  # and each prompt with another one's completion
        has_reference=True,
        num_forwards=4,
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
)
TRAINERS = {row.name: row for row in _ROWS}


def config_for(trainer: str, config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of the model that a trainer builds: one that scores rows has a single label."""
    row = TRAINERS.get(str(trainer))
    return config if row is None or not row.scores_rows else {**config, "num_labels": 1}
