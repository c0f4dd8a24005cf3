"""A GRPO script that knows nothing of vramprobe: TRL with vLLM in the trainer's process, on prompts of a few words."""

import json
import sys

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer


def reward(completions, **columns):
    return [float(len(one) % 7) for one in completions]


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    prompts = [f"What is {one} plus {one}? Think step by step." for one in range(64)]
    arguments = GRPOConfig(
        output_dir="out/grpo",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=told["utilization"],
        vllm_enable_sleep_mode=told["sleep"],
        vllm_max_model_length=told["completion"] + 512,
        num_generations=8,
        per_device_train_batch_size=8,
        max_completion_length=told["completion"],
        beta=told.get("beta", 0.0),
        max_steps=3,
        bf16=True,
        gradient_checkpointing=True,
        save_strategy="no",
        report_to="none",
        model_init_kwargs={"dtype": "bfloat16"},
    )
    GRPOTrainer(
        model=told["model"],
        args=arguments,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        peft_config=LoraConfig(r=16, target_modules="all-linear") if told["lora"] else None,
    ).train()
