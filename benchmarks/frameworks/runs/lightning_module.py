"""A script as Lightning's users write them: a LightningModule around a causal language model, and a Trainer.

lightning_module.py MODEL_FOLDER DATA_FOLDER
"""

import sys

import lightning
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer


class Module(lightning.LightningModule):
    def __init__(self, folder):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.model.train()

    def training_step(self, batch, _):
        return self.model(**batch, labels=batch["input_ids"]).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=True)


def main(folder, data):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = load_dataset(data, split="train")

    def collate(batch):
        return dict(tokenizer([row["text"] for row in batch], return_tensors="pt", return_token_type_ids=False))

    loader = torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=collate, num_workers=2)
    trainer = lightning.Trainer(
        max_steps=12, precision="bf16-true", accelerator="gpu", devices=1, logger=False, enable_checkpointing=False
    )
    trainer.fit(Module(folder), loader)


if __name__ == "__main__":
    main(*sys.argv[1:])
