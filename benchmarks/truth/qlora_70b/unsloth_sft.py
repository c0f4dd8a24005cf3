"""A script as Unsloth's notebook of Llama 3.3 70B has it: unsloth_sft.py MODEL RANK BATCH_SIZE SEQ_LEN"""

import sys

from unsloth import FastLanguageModel

# isort: split
from datasets import Dataset
from trl import SFTConfig, SFTTrainer


def main(folder, rank, batch_size, seq_len):
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=folder, max_seq_length=seq_len, dtype=None, load_in_4bit=True
    )
    model = FastLanguageModel.get_peft_model(
        model, r=rank, lora_alpha=rank, lora_dropout=0, bias="none", use_gradient_checkpointing="unsloth",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], random_state=3407,
    )  # fmt: skip
    SFTTrainer(
        model=model, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"text": [" ".join(["a"] * 2 * seq_len)] * 64}),
        args=SFTConfig(
            dataset_text_field="text", max_length=seq_len, per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=4, max_steps=6, learning_rate=2e-4, logging_steps=1, optim="adamw_8bit",
            weight_decay=0.01, output_dir="out", report_to="none",
        ),
    ).train()  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
