"""What is run under every set of libraries: train.py FOLDER full|lora|qlora trainer|trl

A script as users write them, by transformers' Trainer with what PEFT's documentation says, or by TRL's SFTTrainer. What
is not given is each release's own default, and what releases name differently is asked for by their own name. Nothing
in it knows of vramprobe.
"""

import sys

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

BATCH_SIZE, SEQ_LEN = 4, 1024
COMMON = {
    "output_dir": "out", "per_device_train_batch_size": BATCH_SIZE, "max_steps": 6, "save_strategy": "no",
    "report_to": "none",
}  # fmt: skip


def load(folder, method):
    """In bfloat16, or 4 bits with what is left in bfloat16, on the card."""
    release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    how = {"dtype" if release >= (4, 56) else "torch_dtype": torch.bfloat16}
    if method == "qlora":
        how["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(folder, device_map={"": 0}, **how)


def by_trainer(model, adapter, method, rows, tokenizer):
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    if method == "qlora":
        model = prepare_model_for_kbit_training(model)
    if adapter is not None:
        model = get_peft_model(model, adapter)
    rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=SEQ_LEN), remove_columns=["text"])
    return Trainer(
        model=model, args=TrainingArguments(bf16=True, **COMMON), train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )  # fmt: skip


def by_trl(model, adapter, rows):
    """1024 tokens are SFTTrainer's own default."""
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(dataset_text_field="text", **COMMON)
    return SFTTrainer(model=model, args=args, train_dataset=rows, peft_config=adapter)


def main(folder, method, trainer):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = Dataset.from_dict({"text": [" ".join(["a"] * 2 * SEQ_LEN)] * 64})
    model = load(folder, method)
    adapter = None
    if method != "full":
        adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    if trainer == "trl":
        by_trl(model, adapter, rows).train()
    else:
        by_trainer(model, adapter, method, rows, tokenizer).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
