"""Interop: what users of transformers, TRL and peft hold → a cell's options, and back into their Trainer.

In: a model, a config, TrainingArguments, a LoraConfig, an Axolotl or LLaMA-Factory file; read by their ``to_dict()``.
Out: options of spec.py and notes on what they do not cover. Never imports torch, transformers, TRL or peft.
"""

from typing import Any, NamedTuple


class Words(NamedTuple):
    """A cell's options, and what they do not say."""

    options: dict[str, Any]
    notes: tuple[str, ...] = ()
