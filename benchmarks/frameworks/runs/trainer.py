"""A script as transformers' users write them: Trainer over a folder of text, every argument its own.

    trainer.py --model_name_or_path FOLDER --data FOLDER [--lora_r 16] --output_dir FOLDER [TrainingArguments]

Nothing in it knows of vramprobe.
"""

from dataclasses import dataclass

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class Arguments:
    """Arguments of the training: a model, and data."""

    model_name_or_path: str
    data: str
    lora_r: int = 0
    dtype: str = "bfloat16"


def main():
    given, training = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(given.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(given.model_name_or_path, dtype=getattr(torch, given.dtype))
    if given.lora_r:
        model = get_peft_model(model, LoraConfig(r=given.lora_r, target_modules="all-linear", task_type="CAUSAL_LM"))
    rows = load_dataset(given.data, split="train")
    rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=1024), remove_columns=["text"])
    Trainer(
        model, training, train_dataset=rows, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)
    ).train()


if __name__ == "__main__":
    main()
