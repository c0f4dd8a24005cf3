"""A script that knows nothing of vramprobe: GRPO, RLOO or online DPO by TRL beside vLLM, on prompts of a few words."""

import json
import os
import subprocess
import sys
from pathlib import Path

if "server" in sys.argv[1]:  # the trainer has the first GPU, the server the second
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

TRAINERS = {
    "grpo": (GRPOConfig, GRPOTrainer),
    "rloo": (RLOOConfig, RLOOTrainer),
    "online_dpo": (OnlineDPOConfig, OnlineDPOTrainer),
}


def reward(completions, **columns):
    return [float(len(one) % 7) for one in completions]


def lengths(told):
    """8 completions: a group by GRPO and RLOO, two for each of 4 prompts by online DPO."""
    if told.get("trainer") == "online_dpo":
        return {
            "per_device_train_batch_size": 4,
            "max_new_tokens": told["completion"],
            "max_length": told["completion"] + 512,
        }
    return {
        "per_device_train_batch_size": 8,
        "num_generations": 8,
        "max_completion_length": told["completion"],
        "vllm_max_model_length": told["completion"] + 512,
    }


def four_bits():
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def served(told):
    """vLLM's server on the second GPU, as TRL starts it."""
    words = ["vllm-serve", "--model", told["model"], "--gpu_memory_utilization", str(told["utilization"])]
    words += ["--max_model_len", str(told["completion"] + 512)]
    return subprocess.Popen(
        [Path(sys.executable).with_name("trl"), *words], env=os.environ | {"CUDA_VISIBLE_DEVICES": "1"}
    )


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    server = served(told) if told.get("mode") == "server" else None
    prompts = [f"What is {one} plus {one}? Think step by step." for one in range(64)]
    config, trainer = TRAINERS[told.get("trainer", "grpo")]
    arguments = config(
        output_dir="out/grpo",
        use_vllm=True,
        vllm_mode=told.get("mode", "colocate"),
        vllm_server_timeout=1800,
        vllm_gpu_memory_utilization=told["utilization"],
        vllm_enable_sleep_mode=told["sleep"],
        max_steps=3,
        bf16=True,
        gradient_checkpointing=True,
        save_strategy="no",
        report_to="none",
        model_init_kwargs={"dtype": "bfloat16"} | ({"quantization_config": four_bits()} if told.get("4bit") else {}),
        **({"beta": told.get("beta", 0.0)} if "trainer" not in told else {}),
        **lengths(told),
    )
    run = trainer(
        model=told["model"],
        args=arguments,
        reward_funcs=reward,
        processing_class=AutoTokenizer.from_pretrained(told["model"]) if trainer is OnlineDPOTrainer else None,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        peft_config=LoraConfig(r=16, target_modules="all-linear") if told["lora"] else None,
    )
    run.train()
    if server:
        server.terminate()
