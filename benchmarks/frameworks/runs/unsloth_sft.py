"""A script as Unsloth's notebooks have it: FastLanguageModel in 4 bits, LoRA on all linear layers, TRL's SFTTrainer.

unsloth_sft.py MODEL_FOLDER DATA_FOLDER
"""

import sys

from unsloth import FastLanguageModel

# isort: split
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer


def main(folder, data):
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=folder, max_seq_length=2048, dtype=None, load_in_4bit=True
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=16,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing="unsloth",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        random_state=3407,
    )
    SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=load_dataset(data, split="train"),
        args=SFTConfig(
            dataset_text_field="text",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            max_steps=6,
            learning_rate=2e-4,
            logging_steps=1,
            optim="adamw_8bit",
            weight_decay=0.01,
            output_dir="out/unsloth",
            report_to="none",
        ),
    ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
