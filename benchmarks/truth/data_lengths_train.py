"""A training on rows of real lengths, run by data_lengths.py: ``python … MODEL NUM_ROWS BATCH_SIZE MAX_LENGTH``.

MODEL: small (a Llama of two layers, full fine-tuning) or 8b (LoRA of an 8B, gradient checkpointing).
Lengths are drawn from the histogram that ships and truncated; each batch is padded to its longest row.
"""

import csv
import random
import sys

import numpy
import pyarrow
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def rows(num_rows, max_length):
    """As many rows, their lengths drawn with replacement."""
    with open("vramprobe/data/lengths_azure_chat.csv", encoding="utf-8") as file:
        table = [(int(row["length"]), int(row["count"])) for row in csv.DictReader(file)]
    drawn = random.Random(0).choices([one[0] for one in table], [one[1] for one in table], k=num_rows)
    ends = numpy.cumsum([0, *(min(length, max_length) for length in drawn)])
    tokens = pyarrow.array(numpy.zeros(ends[-1], dtype=numpy.int16))
    column = pyarrow.LargeListArray.from_arrays(pyarrow.array(ends, pyarrow.int64()), tokens)
    return Dataset(pyarrow.table({"input_ids": column}))


def collate(batch):
    """Padded to the longest row."""
    width = max(len(row["input_ids"]) for row in batch)
    tokens = torch.zeros(len(batch), width, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens.clone()}


def model_of(name):
    """On the GPU at once."""
    small = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    large = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8}  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        if name == "small":
            return LlamaForCausalLM(LlamaConfig(vocab_size=512, **small))
        from peft import LoraConfig, get_peft_model

        model = LlamaForCausalLM(LlamaConfig(vocab_size=128256, **large))
        return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))


if __name__ == "__main__":
    name, num_rows, batch_size, max_length = sys.argv[1], *map(int, sys.argv[2:])
    arguments = TrainingArguments(
        "out/data_lengths",
        per_device_train_batch_size=batch_size,
        num_train_epochs=1,
        gradient_checkpointing=name == "8b",
        bf16=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=10_000,
    )
    Trainer(model_of(name), arguments, collate, rows(num_rows, max_length)).train()
