"""A script as sentence-transformers' documentation has it: its Trainer over pairs, with in-batch negatives.

    embedding.py MODEL DATA

Nothing in it knows of vramprobe.
"""

import sys

from datasets import load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss


def main(path, data):
    model = SentenceTransformer(path)
    arguments = SentenceTransformerTrainingArguments(
        output_dir="out/embedding",
        max_steps=6,
        per_device_train_batch_size=4,
        bf16=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=load_dataset(data, split="train"),
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    model.save_pretrained("out/embedding/final")


if __name__ == "__main__":
    main(*sys.argv[1:])
