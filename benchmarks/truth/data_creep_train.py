"""A training on rows of real lengths, run by data_creep.py: ``python … NUM_ROWS BATCH_SIZE MAX_LENGTH NUM_STEPS LOG
EMPTY_EACH``.

SmolLM2-135M, fully trained by transformers' Trainer. LOG gets one line a step: rows, length, reserved bytes.
After each EMPTY_EACH steps, the first so many left out, the cache is emptied (0: never).
"""

import json
import sys

import torch
from data_lengths_train import collate, rows
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

SHAPES = []


def noted(batch):
    """The batch as collate makes it, its shape kept."""
    made = collate(batch)
    SHAPES.append(tuple(made["input_ids"].shape))
    return made


class Log(TrainerCallback):
    """A line at each step's end; batches are made in the order of the steps."""

    def __init__(self, file, empty_each):
        self.file, self.empty_each = file, empty_each

    def on_step_end(self, arguments, state, control, **others):
        if self.empty_each and state.global_step > self.empty_each and state.global_step % self.empty_each == 0:
            torch.cuda.empty_cache()
        print(*SHAPES[state.global_step - 1], torch.cuda.memory_reserved(), file=self.file, flush=True)


def model():
    """On the GPU at once."""
    with open("vramprobe/data/models/smollm2-135m.json", encoding="utf-8") as file:
        config = LlamaConfig(**json.load(file))
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        made = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return made


if __name__ == "__main__":
    num_rows, batch_size, max_length, num_steps = map(int, sys.argv[1:5])
    arguments = TrainingArguments(
        "out/data_creep",
        per_device_train_batch_size=batch_size,
        max_steps=num_steps,
        bf16=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=10_000,
    )
    with open(sys.argv[5], "w", encoding="utf-8") as log:
        Trainer(model(), arguments, noted, rows(num_rows, max_length), callbacks=[Log(log, int(sys.argv[6]))]).train()
