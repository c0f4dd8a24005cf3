"""A plain loop of LoRA or QLoRA that reads torch's own counters, as the source of t4_published.csv describes its runs.

``python t4_train.py MODEL eager|sdpa none|nf4 RANK ROWS LENGTH FILE``: one warm-up step, one step for the peaks, one
step whose peak is reset between its phases; writes bytes as JSON. A step is a function, which keeps its outputs until
it returns.
"""

import json
import sys
from contextlib import nullcontext

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

name, attention, quant, rank, rows, length, path = sys.argv[1:]
torch.manual_seed(0)
torch.cuda.init()

options = {"dtype": torch.float16, "attn_implementation": attention}
if quant == "nf4":
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16)
    options |= {"quantization_config": four_bit, "device_map": {"": 0}}
model = AutoModelForCausalLM.from_pretrained(name, **options)
if quant == "none":
    model = model.cuda()
model.config.use_cache = False
if quant == "nf4":
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=True)
targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
adapter = LoraConfig(
    r=int(rank), lora_alpha=2 * int(rank), lora_dropout=0.0, bias="none", task_type="CAUSAL_LM", target_modules=targets
)
model = get_peft_model(model, adapter)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.enable_input_require_grads()
model.train()
torch.cuda.synchronize()
after_load = torch.cuda.memory_allocated()

trained = [one for one in model.parameters() if one.requires_grad]
for one in trained:
    one.data = one.data.float()
optimizer = torch.optim.AdamW(trained, lr=1e-4)
batch = torch.randint(0, model.config.vocab_size, (int(rows), int(length)), device="cuda")

if attention == "sdpa":  # a T4's memory-efficient kernel takes no grouped heads: the source repeats keys and values
    attend = functional.scaled_dot_product_attention

    def repeated(query, key, value, *args, **more):
        groups = query.size(-3) // key.size(-3)
        if groups > 1:
            key, value = (one.repeat_interleave(groups, dim=-3) for one in (key, value))
            more.pop("enable_gqa", None)
        return attend(query, key, value, *args, **more)

    functional.scaled_dot_product_attention = repeated


def step():
    optimizer.zero_grad(set_to_none=True)
    out = model(input_ids=batch, labels=batch)
    out.loss.backward()
    optimizer.step()


def peak():
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) if attention == "sdpa" else nullcontext():
    step()
    peak()
    step()
    torch.cuda.synchronize()
    found = {"reserved": torch.cuda.max_memory_reserved(), "allocated": peak(), "after_load": after_load}
    optimizer.zero_grad(set_to_none=True)
    peak()
    out = model(input_ids=batch, labels=batch)
    found["forward"] = peak()
    out.loss.backward()
    found["backward"] = peak()
    optimizer.step()
    found["optimizer"] = peak()
free, total = torch.cuda.mem_get_info()
found |= {"device": total - free, "context": total - free - torch.cuda.memory_reserved()}
with open(path, "w") as file:
    json.dump(found, file)
