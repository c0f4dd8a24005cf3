"""Fine-tunes Whisper as Hugging Face's blog post does (blog/fine-tune-whisper), without its metric: NAME, a batch."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Audio, load_dataset
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    WhisperForConditionalGeneration,
    WhisperProcessor,
)

NAME, BATCH = sys.argv[1], int(sys.argv[2])
rows = load_dataset("mozilla-foundation/common_voice_11_0", "hi", split="train")
rows = rows.select_columns(["audio", "sentence"]).cast_column("audio", Audio(sampling_rate=16000))
processor = WhisperProcessor.from_pretrained(NAME, language="Hindi", task="transcribe")
model = WhisperForConditionalGeneration.from_pretrained(NAME, dtype=torch.float32)  # autocast has fp16
model.generation_config.language, model.generation_config.task = "hindi", "transcribe"


def prepare_dataset(batch):
    audio = batch["audio"]
    batch["input_features"] = processor.feature_extractor(
        audio["array"], sampling_rate=audio["sampling_rate"]
    ).input_features[0]
    batch["labels"] = processor.tokenizer(batch["sentence"]).input_ids
    return batch


@dataclass
class Collator:
    processor: Any
    start: int

    def __call__(self, features):
        batch = self.processor.feature_extractor.pad(
            [{"input_features": one["input_features"]} for one in features], return_tensors="pt"
        )
        labels = self.processor.tokenizer.pad([{"input_ids": one["labels"]} for one in features], return_tensors="pt")
        ids = labels["input_ids"].masked_fill(labels.attention_mask.ne(1), -100)
        if (ids[:, 0] == self.start).all():
            ids = ids[:, 1:]
        batch["labels"] = ids
        return batch


rows = rows.select(range(2 * BATCH)).map(prepare_dataset, remove_columns=rows.column_names)
args = Seq2SeqTrainingArguments(
    output_dir="out",
    per_device_train_batch_size=BATCH,
    learning_rate=1e-5,
    max_steps=4000,
    gradient_checkpointing=True,
    fp16=True,
    save_strategy="no",
    report_to=[],
)
trainer = Seq2SeqTrainer(
    args=args,
    model=model,
    train_dataset=rows,
    data_collator=Collator(processor, model.config.decoder_start_token_id),
    processing_class=processor.feature_extractor,
)
trainer.train()
