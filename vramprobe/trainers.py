"""Trainers: what a micro-batch of each holds, in one row that specs, rules, arithmetic, workload and the page read.

In: nothing. Out: frozen rows by name. What its loss does is arithmetic's (terms/models/preference.py) and TRL's own
code (workload/trainer.py). Imports neither.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """One trainer of TRL, or plain training with the model's own loss."""

    name: str
    trl: str = ""  # TRL's class; empty: the model's own forward and loss
    rows: int = 1  # sequences of a micro-batch for each of its examples
    inputs: tuple[str, ...] = ("input_ids", "labels")  # int64, one number for each token
    has_reference: bool = False  # a frozen model beside the trained one: a second one, or adapters switched off


_ROWS = (
    Trainer(name="sft"),
    Trainer(
        name="dpo",
        trl="DPOTrainer",
        rows=2,  # chosen and rejected
        inputs=("input_ids", "attention_mask", "completion_mask"),
        has_reference=True,
    ),
)
TRAINERS = {row.name: row for row in _ROWS}
