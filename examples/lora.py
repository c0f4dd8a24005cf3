"""LoRA on a Llama of 1.2 billion parameters, as a Trainer does it: nothing here knows of vramprobe.

vramprobe profile --emulate RTX-4090 -- python examples/lora.py
"""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LENGTH, BATCH = 1024, 4


class Rows(torch.utils.data.Dataset):
    """Tokens of no meaning: what a step allocates does not depend on them."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.arange(LENGTH) + index
        return {"input_ids": tokens, "labels": tokens}


config = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=True,
)
model = get_peft_model(
    LlamaForCausalLM(config).to(torch.bfloat16), LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
)
with tempfile.TemporaryDirectory() as out:
    arguments = TrainingArguments(
        output_dir=out, per_device_train_batch_size=BATCH, bf16=True, max_steps=16, report_to="none", save_strategy="no"
    )
    Trainer(model=model, args=arguments, train_dataset=Rows()).train()
