"""Fine-tunes a vision-language model with LoRA, by Trainer and the model's own processor, a video and its text a row:
NAME, a batch."""

import sys

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText, AutoProcessor, Trainer, TrainingArguments

NAME, BATCH = sys.argv[1], int(sys.argv[2])
processor = AutoProcessor.from_pretrained(NAME)
model = AutoModelForImageTextToText.from_pretrained(NAME, dtype=torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
model.enable_input_require_grads()
rows = load_dataset("my/video-captions", split="train").select(range(64))


def collate(batch):
    texts = [
        processor.apply_chat_template(
            [
                {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "Describe it."}]},
                {"role": "assistant", "content": [{"type": "text", "text": one["text"]}]},
            ],
            tokenize=False,
        )
        for one in batch
    ]
    made = processor(text=texts, videos=[one["video"] for one in batch], return_tensors="pt", padding=True)
    made["labels"] = made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)
    return made


args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=BATCH,
    bf16=True,
    gradient_checkpointing=True,
    max_steps=100,
    remove_unused_columns=False,
    save_strategy="no",
    report_to=[],
)
Trainer(model=model, args=args, train_dataset=rows, data_collator=collate).train()
