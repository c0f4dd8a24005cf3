"""Fine-tunes Qwen2-Audio with LoRA, by Trainer and the model's own processor, a sound and its text a row: NAME, a
batch."""

import sys

import torch
from datasets import Audio, load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration, Trainer, TrainingArguments

NAME, BATCH = sys.argv[1], int(sys.argv[2])
processor = AutoProcessor.from_pretrained(NAME)
model = Qwen2AudioForConditionalGeneration.from_pretrained(NAME, dtype=torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
model.enable_input_require_grads()
rows = load_dataset("openslr/librispeech_asr", "clean", split="train.100")
rows = rows.cast_column("audio", Audio(sampling_rate=16000)).select(range(64))


def collate(batch):
    texts = [
        processor.apply_chat_template(
            [
                {"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "Transcribe."}]},
                {"role": "assistant", "content": one["text"]},
            ],
            tokenize=False,
        )
        for one in batch
    ]
    sounds = [one["audio"]["array"] for one in batch]
    made = processor(text=texts, audio=sounds, sampling_rate=16000, return_tensors="pt", padding=True)
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
