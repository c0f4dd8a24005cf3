"""Trainer over several cards as a user writes it: ``users_training.py MODEL METHOD SHARING``, with nothing of ours.

SHARING is cards (a device map), parts (tensor parallelism) or sequences (context parallelism). Each rank leaves what
the tensors of its cards asked for at most in each step, and the map, in ``seen-RANK.json``.
"""

import json
import os
import sys
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

folder, method, sharing = sys.argv[1:]
words: dict[str, Any] = {}
if sharing == "parts":
    from transformers.distributed import DistributedConfig

    words["distributed_config"] = DistributedConfig(tp_plan="auto")
elif sharing == "cards":
    words["device_map"] = "auto"
if method == "qlora":
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    words["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, **nf4)
if sharing == "sequences":
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
else:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **words)
seen = {"map": getattr(model, "hf_device_map", None), "steps": []}
if method != "full":
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if method == "qlora":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    targets = "all-linear" if sharing == "cards" else ["q_proj", "v_proj"]
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"))


def cards() -> list[int]:
    return [0, 1] if sharing == "cards" else [torch.cuda.current_device()]


class Peaks(TrainerCallback):
    def on_step_begin(self, *args: Any, **words: Any) -> None:
        for card in cards():
            torch.cuda.reset_peak_memory_stats(card)

    def on_step_end(self, *args: Any, **words: Any) -> None:
        seen["steps"].append([torch.cuda.memory_stats(card)["requested_bytes.all.peak"] for card in cards()])


options: dict[str, Any] = {}
if sharing == "sequences":
    from accelerate import ParallelismConfig

    wrap = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    options = {"parallelism_config": ParallelismConfig(cp_size=2), "fsdp": True, "fsdp_config": wrap}
    options["gradient_checkpointing"] = method == "lora"
options |= {"per_device_train_batch_size": 2, "max_steps": 3, "bf16": True, "optim": "adamw_torch_fused"}
options |= {"report_to": [], "max_grad_norm": 0.0, "save_strategy": "no", "disable_tqdm": True}
tokens = torch.arange(1024 if sharing == "sequences" else 32) % 256
rows: Any = [{"input_ids": tokens, "labels": tokens}] * 64
Trainer(model=model, args=TrainingArguments("out", **options), train_dataset=rows, callbacks=[Peaks()]).train()
with open(f"seen-{os.environ.get('RANK', 0)}.json", "w") as file:
    json.dump(seen, file)
