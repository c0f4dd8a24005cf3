"""A training loop as accelerate's users write it, for a recommended setting on several cards.

    torchrun --nproc-per-node N recommended_rank.py --model ID --method lora --sharding fsdp --batch-size 2 …

Nothing in it knows of vramprobe. The model goes straight to the card, without a copy in the machine's memory.
"""

import argparse
import os

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def build(given):
    """The model on its card: 16-bit weights, or NF4 stored as bf16, which FSDP divides."""
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        given.model,
        dtype=getattr(torch, given.dtype),
        device_map={"": int(os.environ["LOCAL_RANK"])},
        attn_implementation="sdpa",
        quantization_config=quantised if given.method == "qlora" else None,
    )
    model.config.use_cache = False
    if given.method == "qlora" and given.kbit_prep == "peft":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if given.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if given.method != "full":
        adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapters)
    return model


def main():
    parser = argparse.ArgumentParser()
    for name in ("--model", "--method", "--sharding"):
        parser.add_argument(name, required=True)
    for name in ("--batch-size", "--grad-accum", "--seq-len"):
        parser.add_argument(name, type=int, default=1)
    parser.add_argument("--kbit-prep", default="peft", choices=("peft", "none"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    given = parser.parse_args()
    plugin = (
        FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            reshard_after_forward=True,
            cpu_ram_efficient_loading=False,
        )
        if given.sharding == "fsdp"
        else None
    )
    all_bf16 = given.method == "full" and given.dtype == "bfloat16"
    accelerator = Accelerator(mixed_precision="no" if all_bf16 else "bf16", fsdp_plugin=plugin)
    model = build(given)
    model.train()
    if plugin is None:
        model = accelerator.prepare(model)
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], fused=True)
    else:
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], fused=True)
        model, optimizer = accelerator.prepare(model, optimizer)
    vocabulary = accelerator.unwrap_model(model).config.vocab_size
    for _ in range(3):
        for _ in range(given.grad_accum):
            rows = torch.randint(0, vocabulary, (given.batch_size, given.seq_len), device=accelerator.device)
            accelerator.backward(model(input_ids=rows, labels=rows).loss / given.grad_accum)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
