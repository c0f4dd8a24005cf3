"""ORPO as TRL's experimental ORPOTrainer runs it, which TRL has no command for: ``orpo.py --model_name_or_path …``.

The arguments of ``trl dpo``: TRL's own of model, quantization, adapter and training. Nothing in it knows of vramprobe.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import ModelConfig, get_peft_config, get_quantization_config
from trl.experimental.orpo import ORPOConfig, ORPOTrainer


@dataclass
class Data:
    """Data of the training: pairs of a chosen and a rejected answer."""

    dataset_name: str


def main() -> None:
    """Train as the arguments say."""
    data, training, of = HfArgumentParser((Data, ORPOConfig, ModelConfig)).parse_args_into_dataclasses()
    quantization = get_quantization_config(of)
    options = {"quantization_config": quantization, "device_map": {"": 0}} if quantization else {}
    ORPOTrainer(
        AutoModelForCausalLM.from_pretrained(of.model_name_or_path, dtype=of.dtype, **options),
        training,
        train_dataset=load_dataset(data.dataset_name, split="train"),
        processing_class=AutoTokenizer.from_pretrained(of.model_name_or_path),
        peft_config=get_peft_config(of),
    ).train()


if __name__ == "__main__":
    sys.exit(main())
